"""Ids of a GGUF file's tokenizer are llama.cpp's, which record_llama_cpp_ids.py recorded, and its settings are kept."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from ccjax.loading.gguf import open_gguf, text_of
from ccjax.loading.gguf.pre_tokenizers import PRE_TOKENIZERS
from ccjax.text import PromptBuilder
from tests.loading.gguf_files import Shape, Words, byte_level_words, hugging_face_tensors, write_gguf

RECORDED = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text("utf-8"))
SHAPE = Shape(num_layers=1, d_model=32, num_heads=1, num_kv_heads=1, d_ff=32)
DIFFERENT = {
    # Letters with marks: llama.cpp's expressions leave the marks out that the models' own have.
    "tekken": {"ไทยไม่มีช่องว่าง", "e\u0301 é ñ n\u0303 Å ﬁ ŁÓDŹ Straße", "\uffffi\u0e35\u01c4$$xs"},
    "gpt-4o": {"ไทยไม่มีช่องว่าง", "e\u0301 é ñ n\u0303 Å ﬁ ŁÓDŹ Straße", "\uffffi\u0e35\u01c4$$xs"},
    # U+2003 is in the range of the fourth expression, where llama.cpp puts another blank in its place.
    "deepseek-coder": {"\u0141t T#t\u2003L\u2028$\u2003   "},
    # llama.cpp lets a text's letters grow together to <s>; and <unk> is a text here, not a control token.
    "llama": {"<s>[INST] x [/INST]</s>", "<unk><0x0A>▁▁a▁b"},
}
"""Texts whose ids are not llama.cpp's, and why."""


def words_of(name):
    raw = RECORDED["scored" if name == "llama" else "merged"]
    model = {"model": "llama", "pre": None} if name == "llama" else {"model": "gpt2", "pre": name}
    return Words(**{key: value if key == "extra" else tuple(value) for key, value in raw.items()}, **model)


def text(folder, words):
    path = folder / "model.gguf"
    write_gguf(path, SHAPE, hugging_face_tensors(SHAPE, len(words.tokens)), words)
    found = text_of(open_gguf(path))
    assert found is not None
    return found


def differing(tokenizer, name):
    return {
        text
        for kind, recorded in RECORDED["ids"][name].items()
        for text, ids in zip(RECORDED["texts"], recorded, strict=True)
        if tokenizer.encode(text, allow_special=kind == "trusted") != ids
    }


@pytest.mark.parametrize("name", [name for name in RECORDED["ids"] if name != "smollm2"])
def test_token_ids_match_llama_cpp(tmp_path, name):
    tokenizer, _ = text(tmp_path, words_of(name))
    assert differing(tokenizer, name) == DIFFERENT.get(name, set())


def test_token_ids_of_smollm2_match_llama_cpp(smollm2):
    tokenizer, _ = text_of(open_gguf(smollm2))
    assert differing(tokenizer, "smollm2") == set()


def test_recorded_texts_distinguish_all_pre_tokenizers(tmp_path):
    names = [name for name in RECORDED["ids"] if name not in ("smollm2", "llama", "llama-bpe")]
    for one, other in itertools.combinations(names, 2):
        assert RECORDED["ids"][one] != RECORDED["ids"][other], (one, other)
    patterns = {PRE_TOKENIZERS[name].patterns for name in names}
    assert patterns == {kind.patterns for kind in PRE_TOKENIZERS.values()}


@pytest.mark.parametrize("name", ["smollm", "llama"])
def test_untrusted_text_is_restored_by_decoding_and_has_no_control_token(tmp_path, name):
    tokenizer, _ = text(tmp_path, words_of(name))
    for content in RECORDED["texts"]:
        ids = tokenizer.encode(content, allow_special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        got = tokenizer.decode(ids, skip_special=False)
        assert got == (content.replace("▁", " ") if name == "llama" else content)


def test_whole_word_tokens_are_used_if_the_pre_tokenizer_ignores_merges(tmp_path):
    """ " the" is a token that no merges lead to."""
    words = byte_level_words(pre="llama-bpe")
    unmerged = Words(**{**vars(words), "merges": words.merges[:2]})
    whole = unmerged.tokens.index("Ġthe")
    assert text(tmp_path, unmerged)[0].encode(" the", allow_special=False) == [whole]
    pieces = text(tmp_path, Words(**{**vars(unmerged), "pre": "dbrx"}))[0].encode(" the", allow_special=False)
    assert len(pieces) == 2 and whole not in pieces


@pytest.mark.parametrize(
    ("pre", "extra", "bos_id"),
    [
        ("smollm", {}, None),
        ("smollm", {"add_bos_token": True}, 1),
        ("llama-bpe", {}, 1),
        ("llama-bpe", {"add_bos_token": False}, None),
    ],
)
def test_bos_id_follows_the_metadata_and_pre_tokenizer(tmp_path, pre, extra, bos_id):
    assert text(tmp_path, byte_level_words(pre=pre, **extra))[0].bos_id == bos_id


def test_sentencepiece_adds_bos_unless_disabled(tmp_path):
    words = words_of("llama")
    assert text(tmp_path, words)[0].bos_id == 1
    plain = Words(**{**vars(words), "extra": {"add_bos_token": False}})
    tokenizer, template = text(tmp_path, plain)
    assert tokenizer.bos_id is None and tokenizer.eos_ids == {2} and template.variables["bos_token"] == "<s>"


def test_prefix_space_is_added_unless_disabled(tmp_path):
    words = words_of("llama")
    spaced, _ = text(tmp_path, words)
    plain, _ = text(tmp_path, Words(**{**vars(words), "extra": {"add_space_prefix": False}}))
    assert spaced.encode("the", allow_special=False) == plain.encode(" the", allow_special=False)
    assert spaced.decode(spaced.encode("the", allow_special=False)) == "the"
    assert plain.decode(plain.encode(" the", allow_special=False)) == " the"


def test_eos_ids_include_metadata_ids_and_known_names(tmp_path):
    """Those that the metadata names, and those that llama.cpp knows by name."""
    letter = byte_level_words().tokens.index("x")
    words = byte_level_words(eos_token_id=1, eot_token_id=letter, eom_token_id=letter + 1)
    assert text(tmp_path, words)[0].eos_ids == {0, 1, 2, letter, letter + 1}


def test_add_eos_token_is_ignored_with_a_warning(tmp_path, caplog):
    tokenizer, template = text(
        tmp_path, byte_level_words(add_eos_token=True, chat_template="{{ messages[0].content }}")
    )
    assert "add_eos_token is not followed" in caplog.text
    parts = PromptBuilder(tokenizer, template, system_prompt="").build_completion("a")
    assert parts.token_ids == tuple(tokenizer.encode("a", allow_special=False))


def test_user_defined_tokens_are_recognized_in_trusted_text_only(tmp_path):
    words = byte_level_words()
    defined = Words(**{**vars(words), "tokens": (*words.tokens, "<tool>"), "types": (*words.types, 4)})
    tokenizer, _ = text(tmp_path, defined)
    assert tokenizer.encode("<tool>", allow_special=True) == [len(words.tokens)]
    assert len(tokenizer.encode("<tool>", allow_special=False)) == 6
    assert tokenizer.decode([len(words.tokens)]) == "<tool>"


def test_the_chat_template_gets_the_special_tokens(tmp_path):
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    _, template = text(tmp_path, byte_level_words(chat_template=source))
    assert template.render([{"role": "user", "content": "x"}]) == "<|im_start|>x<|im_end|>"


def test_missing_pre_tokenizer_name_falls_back_to_the_default(tmp_path, caplog):
    tokenizer, _ = text(tmp_path, Words(**{**vars(words_of("default")), "pre": None}))
    assert differing(tokenizer, "default") == set()
    assert "no tokenizer.ggml.pre" in caplog.text


def test_file_without_a_vocabulary_has_no_tokenizer(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, SHAPE, hugging_face_tensors(SHAPE, 32), None)
    assert text_of(open_gguf(path)) is None
