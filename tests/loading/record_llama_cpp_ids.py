"""Records in llama_cpp_ids.json which ids llama.cpp gives hostile texts, with small vocabularies and with SmolLM2's.

`python -m tests.loading.record_llama_cpp_ids SMOLLM2.gguf` from the repository's root, in an environment with
xllamacpp, gguf, tokenizers and numpy, without anything of ours.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import xllamacpp  # pyright: ignore[reportMissingImports]

from tests.loading.gguf_files import Shape, Words, byte_characters, hugging_face_tensors, write_gguf

OUTPUT = Path(__file__).with_name("llama_cpp_ids.json")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
RESERVED = {*CONTROL, "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))}
KINDS = (
    *("default", "llama-bpe", "dbrx", "qwen2", "gpt-2", "smollm", "falcon", "deepseek-coder", "deepseek-v3"),
    *("tekken", "gpt-4o"),
)
"""One name for each way of cutting words."""
TEXTS = (
    *(
        "",
        " ",
        "  ",
        "   a",
        "a   ",
        "a  b   c    d",
        " leading",
        "trailing ",
        "\t",
        "\t\ttabs\tin\t\ttext",
        "\n",
        "\n\n\n",
    ),
    *(
        "\r\n",
        "mixed\r\nline\nends\rhere\n\r\n\n",
        " \n \n  x",
        "x\n ",
        "a\u00a0b\u2003c\u3000d\u200be",
        "\u2028\u2029\x85x",
    ),
    *(
        "Hello, world!",
        "don't DON'T you'll YOU'LL I'm we've they'd he's it'S 'tis rock'n'roll",
        "'s 're've",
        "’s won’t",
    ),
    *("0 1 12 123 1234 12345 1234567", "3.14159 1e-5 0xFF 1,000,000", "²³¹ ½ Ⅷ ٣٤٥ १२३", "v1.2.3-rc4+build.56"),
    *(
        "中文字符测试。你好，世界！",
        "日本語のテキストとカタカナ",
        "한국어 텍스트 시험",
        "中文abc中文123中文",
        "ไทยไม่มีช่องว่าง",
    ),
    *(
        "😀😃👍🏽",
        "👩‍👩‍👧‍👦 family 🇩🇪🇫🇷",
        "e\u0301 é ñ n\u0303 Å ﬁ ŁÓDŹ Straße",
        "Привет, мир! ПРИВЕТ",
        "שלום עולם مرحبا بالعالم",
    ),
    *("the the  the\nthe", "CamelCaseWord snake_case_word kebab-case", "if (a<=b) { return a[0]->b::c; } // $x += `y`"),
    *("!!!???...---***", "a.b,c;d:e", "(((nested)))[[x]]{{y}}", "$100 €50 ^caret^ ~tilde~ |pipe| <tag> =eq= +plus+"),
    *("https://example.org/path?q=1&r=2#frag", "user@example.com", "C:\\path\\file.txt /usr/bin"),
    *("<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "<|im_end|", "<| im_end |>", "<<|im_end|>>", "|im_end|>"),
    *(
        "<s>[INST] x [/INST]</s>",
        "<unk><0x0A>▁▁a▁b",
        "\ufeffbom",
        "\ufffd\uffff\U0010ffff",
        "\ue000private",
        "a\u0000b\u0001c",
    ),
    *(
        "a" * 70,
        " " * 40 + "x",
        "\n" * 9 + " x",
        "ab" * 30,
        "٠" * 5,
        "\u0300\u0301x",
        "ＦＵＬＬ　ｗｉｄｔｈ１２３",
        "ǅ ǆ Ǆ İi ſs 'ſ",
    ),
)
NUM_RANDOM = 40


def texts() -> list[str]:
    """The texts above, and random ones of their characters."""
    draw = random.Random(7)
    letters = sorted({letter for text in TEXTS for letter in text if letter != "\0"})
    parts = [*letters, *[" "] * 40, *"\n\n\n\r't's'lL", *["12", "the", "  ", "ab", "IM", *CONTROL]]
    return [*TEXTS, *("".join(draw.choices(parts, k=draw.randint(2, 16))) for _ in range(NUM_RANDOM))]


def merged_words(pre: str | None) -> Words:
    """A BPE whose merges run over every border that a pre-tokenizer may draw: trained on the texts uncut."""
    trained = _train(tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False), sorted(byte_characters()), 900)
    tokens = (*CONTROL, *trained["vocab"])
    types = (3,) * len(CONTROL) + (1,) * len(trained["vocab"])
    merges = tuple(" ".join(pair) for pair in trained["merges"])
    return Words(tokens, types, merges, pre=pre, extra={"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False})


def scored_words() -> Words:
    """SentencePiece's BPE: pieces that were made earlier have higher scores, letters the lowest."""
    steps = tokenizers.normalizers.Replace(" ", "▁")
    trained = _train(None, [], 900, steps)
    merged = list(dict.fromkeys("".join(pair) for pair in trained["merges"]))
    letters = [piece for piece in trained["vocab"] if piece not in set(merged)]
    kept = letters[::2] + [letter for letter in letters[1::2] if letter.isascii() or letter == "▁"]
    kept = [letter for letter in letters if letter in kept and letter != "\0"]  # it ends a token in llama.cpp
    pieces = [piece for piece in merged if all(letter in kept for letter in piece)] + kept
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * len(head) + [-float(rank) for rank in range(len(pieces))]
    types = (2, 3, 3, *(6,) * 256, *(1,) * len(pieces))
    tokens = (*head, *pieces)
    return Words(tokens, types, (), tuple(scores), "llama", None, {"bos_token_id": 1, "eos_token_id": 2})


def _train(pre: Any, alphabet: Sequence[str], size: int, normalizer: Any = None) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=list(alphabet), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    kept = [pair for pair in model["merges"] if "".join(pair) not in RESERVED]
    return {"vocab": [p for p in sorted(model["vocab"], key=model["vocab"].get) if p not in RESERVED], "merges": kept}


class LlamaCpp:
    """A server of llama.cpp for one file."""

    def __init__(self, path: Path):
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup, params.port = 256, 1, 0, False, 0
        self._server = xllamacpp.Server(params)

    def ids(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text on its own, control tokens in it as such or as text."""
        body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]


def recorded(path: Path) -> dict[str, list[list[int]]]:
    """The ids of all texts: as text alone, and with control tokens."""
    server = LlamaCpp(path)
    return {name: [server.ids(text, special=name == "trusted") for text in texts()] for name in ("plain", "trusted")}


def main(smollm2: Path) -> None:
    """Writes the file."""
    shape = Shape(num_layers=1, d_model=32, num_heads=1, num_kv_heads=1, d_ff=32)
    merged, scored = merged_words(None), scored_words()
    ids: dict[str, Any] = {"smollm2": recorded(smollm2)}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*KINDS, "llama"):
            words = scored if name == "llama" else merged_words(name)
            path = Path(folder) / f"{name}.gguf"
            write_gguf(path, shape, hugging_face_tensors(shape, len(words.tokens)), words)
            ids[name] = recorded(path)
    content = {
        "made_by": f"{Path(__file__).name} with xllamacpp {xllamacpp.__version__}",
        "texts": texts(),
        "merged": {"tokens": merged.tokens, "types": merged.types, "merges": merged.merges, "extra": merged.extra},
        "scored": {"tokens": scored.tokens, "types": scored.types, "scores": scored.scores, "extra": scored.extra},
        "ids": ids,
    }
    OUTPUT.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
