"""Converts the `tokenizer.ggml.*` metadata of a GGUF file to tokenizer.json and its companion files.

Token ids equal llama.cpp's for plain text and for control tokens in trusted text.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType

from ccjax.loading.gguf.pre_tokenizers import PRE_TOKENIZERS
from ccjax.loading.gguf.reader import GgufFile
from ccjax.models.llama3.leaves import CheckpointError

logger = logging.getLogger(__name__)
_KEY = "tokenizer.ggml."
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_MOST_LETTERS = 1024
_IN_TEXT = (TokenType.NORMAL, TokenType.UNUSED)
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
)
"""Control tokens that end an answer in llama.cpp regardless of the metadata."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The vocabulary in Hugging Face's terms.

    Attributes:
      definition: content of tokenizer.json.
      settings: content of tokenizer_config.json, with the chat template.
      eos_ids: tokens that end an answer.
    """

    definition: Mapping[str, Any]
    settings: Mapping[str, Any]
    eos_ids: tuple[int, ...]


def vocabulary_of(file: GgufFile) -> Vocabulary | None:
    """The vocabulary of a model, or None if the file has none.

    Raises:
      CheckpointError: a key is missing, or its value is not supported; the message names file and key.
    """
    kind = file.find(f"{_KEY}model", str)
    if kind in (None, "no_vocab", "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{file.path}: {_KEY}model: wanted 'gpt2' or 'llama', got {kind!r}")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(_array(file, "tokens", str))]
    ids = {token: number for number, token in enumerate(tokens)}
    if not tokens or len(ids) < len(tokens):
        twice = next((token for number, token in enumerate(tokens) if ids[token] != number), None)
        raise CheckpointError(f"{file.path}: {_KEY}tokens: wanted tokens, each once, got {twice!r} twice")
    types = file.find_all(f"{_KEY}token_type", int)
    types = [int(TokenType.NORMAL)] * len(tokens) if types is None else types
    _same_length(file, "token_type", types, tokens)
    special = _special_ids(file, tokens, {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {})
    if kind == "gpt2":
        model, steps, add_bos = _byte_level(file, ids)
    else:
        model, steps, add_bos = _sentence_piece(file, tokens, ids, types, special.get("unknown"))
    ends = {special[name] for name in ("eos", "eot", "eom") if name in special}
    ends |= {ids[name] for name in _ENDS if name in ids}
    if file.get(f"{_KEY}add_eos_token", bool, False):
        logger.warning("%s: %sadd_eos_token is not followed: eos at its end would finish every prompt", file.path, _KEY)
    control = ends | {special[name] for name in ("bos",) if name in special}
    return Vocabulary(
        _definition(model, steps, _added(tokens, types, control)),
        _settings(file, tokens, special, add_bos),
        tuple(sorted(ends)),
    )


def _array(file: GgufFile, name: str, kind: type[Any]) -> list[Any]:
    values = file.find_all(_KEY + name, kind)
    if values is None:
        raise CheckpointError(f"{file.path}: {_KEY}{name}: wanted an array, got no such key")
    return values


def _same_length(file: GgufFile, name: str, values: Sequence[Any], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise CheckpointError(
            f"{file.path}: {_KEY}{name}: wanted one for each of {len(tokens)} tokens, got {len(values)}"
        )


def _special_ids(file: GgufFile, tokens: Sequence[str], defaults: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = file.find(f"{_KEY}{name}_token_id", int)
        number = defaults.get(name) if number is None else number
        if number is not None and not 0 <= number < len(tokens):
            raise CheckpointError(
                f"{file.path}: {_KEY}{name}_token_id: wanted one of {len(tokens)} tokens, got {number}"
            )
        if number is not None:
            found[name] = number
    return found


def _byte_level(file: GgufFile, ids: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """GPT-2's byte-level BPE: its model, its processing steps, and whether prompts start with bos by default."""
    name = file.get(f"{_KEY}pre", str, "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise CheckpointError(f"{file.path}: {_KEY}pre: wanted one of {', '.join(PRE_TOKENIZERS)}, got {name!r}")
    if f"{_KEY}pre" not in file.fields:
        logger.warning("%s: no %spre, so words are cut in llama.cpp's default way, as few models' are", file.path, _KEY)
    merges = []
    for number, merge in enumerate(_array(file, "merges", str)):
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"{file.path}: {_KEY}merges: wanted two tokens that make one, got {merge!r} at {number}"
            )
        merges.append((left, right))
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": level,
    }
    return _bpe(ids, merges) | {"ignore_merges": pre.ignore_merges}, steps, pre.add_bos


def _sentence_piece(
    file: GgufFile, tokens: Sequence[str], ids: Mapping[str, int], types: Sequence[int], unknown: int | None
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """SentencePiece's BPE, as `_byte_level`; merges follow from the scores, characters without a token become bytes."""
    scores = file.find_all(f"{_KEY}scores", float)
    scores = [0.0] * len(tokens) if scores is None else scores
    _same_length(file, "scores", scores, tokens)
    order = sorted((n for n in range(len(tokens)) if types[n] in _IN_TEXT), key=lambda n: (-scores[n], n))
    in_text = {tokens[number] for number in order}
    longest = max(map(len, tokens))
    if longest > _MOST_LETTERS:  # splitting a token in every place takes time quadratic in its length
        raise CheckpointError(f"{file.path}: {_KEY}tokens: wanted at most {_MOST_LETTERS} characters, got {longest}")
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[number] for number in order)
        for cut in range(1, len(token))
        if token[:cut] in in_text and token[cut:] in in_text
    ]
    prefixed = file.get(f"{_KEY}add_space_prefix", bool, True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    steps = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefixed else []), space],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }
    unk = {"unk_token": None if unknown is None else tokens[unknown], "fuse_unk": False, "byte_fallback": True}
    return _bpe(ids, merges) | unk, steps, True


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": [list(pair) for pair in merges],
    }


def _added(tokens: Sequence[str], types: Sequence[int], control: set[int]) -> list[dict[str, Any]]:
    """Tokens matched in trusted text before it is split into words; those in `control` always, whatever their type."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = []
    for number, token in enumerate(tokens):
        special = number in control or types[number] in (TokenType.CONTROL, TokenType.UNKNOWN)
        if special or types[number] == TokenType.USER_DEFINED:
            added.append({"id": number, "content": token, **plain, "special": special})
    return added


def _definition(model: dict[str, Any], steps: dict[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return head | steps | {"post_processor": None, "model": model}


def _settings(file: GgufFile, tokens: Sequence[str], special: Mapping[str, int], add_bos: bool) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings: dict[str, Any] = {key: tokens[special[name]] for name, key in names.items() if name in special}
    settings["add_bos_token"] = file.get(f"{_KEY}add_bos_token", bool, add_bos)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = file.find("tokenizer.chat_template", str)
    return settings if template is None else settings | {"chat_template": template}
