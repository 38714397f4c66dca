"""Bytes as tokens: text survives, control tokens only come from trusted text, and any id of a large model shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ccjax.text import BYTE_TEMPLATE, ByteTokenizer, IncrementalDecoder, PromptBuilder
from ccjax.types import Document

BYTES = ByteTokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_round_trips_and_token_ids_equal_its_bytes(text):
    ids = BYTES.encode(text, allow_special=False)
    assert bytes(ids) == text.encode() and BYTES.decode(ids) == text


def test_control_tokens_are_encoded_only_from_trusted_text():
    assert BYTES.encode("<|eot_id|>", allow_special=True) == [BYTES.special_names["<|eot_id|>"]]
    assert BYTES.special_ids.isdisjoint(BYTES.encode("<|eot_id|>", allow_special=False))
    assert BYTES.decode([BYTES.special_names["<|eot_id|>"], 65]) == "A"
    assert BYTES.decode([BYTES.special_names["<|eot_id|>"], 65], skip_special=False) == "<|eot_id|>A"


def test_ids_beyond_the_byte_vocabulary_decode_to_a_printable_character():
    decoder = IncrementalDecoder(BYTES)
    for token_id in (BYTES.vocab_size, 128_255, 99_999):
        piece = decoder.push(token_id)
        assert len(piece) == 1 and piece.isprintable() and not piece.isspace()


def test_prompts_use_the_llama_3_template():
    parts = PromptBuilder(BYTES, BYTE_TEMPLATE, system_prompt="Be brief.").build_chat(
        [{"role": "user", "content": "Who?"}], [Document("A tree.", title="Ash")]
    )
    text = BYTES.decode(parts.token_ids, skip_special=False)
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.")
    assert "A tree." in text and text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert BYTES.eos_ids <= BYTES.special_ids
