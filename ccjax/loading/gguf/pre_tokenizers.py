"""Pre-tokenizers, which split text into words before BPE, by the name in `tokenizer.ggml.pre`: GGUF has only the name.

The expressions are from the models' own tokenizer.json, or llama.cpp's for "default", which is used without a name.
"""

from __future__ import annotations

import dataclasses

_SUFFIXES = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX|DIGITS"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_TEKKEN = _CASED.replace("SUFFIX", "").replace("DIGITS", r"\p{N}")
_GPT4O = _CASED.replace("SUFFIX", f"(?:{_SUFFIXES})?").replace("DIGITS", r"\p{N}{1,3}")
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words and words are looked up.

    Attributes:
      patterns: applied in order; each splits the pieces so far into its matches and the text between them.
      ignore_merges: a word in the vocabulary becomes one token, whatever the merges.
      add_bos: whether prompts start with bos if the metadata does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_KINDS: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "pixtral",
    ),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    PreTokenizer((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"),
    PreTokenizer((_GPT2,)): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"),
    PreTokenizer((r"\p{N}", _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")): ("deepseek-coder",),
    PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)): ("deepseek-v3",),
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((_GPT4O,)): ("gpt-4o",),
}
PRE_TOKENIZERS = {name: kind for kind, names in _KINDS.items() for name in names}
"""By llama.cpp's names."""
