"""Tokenizers from files: `tokenizer.json`, or Llama-3's `tokenizer.model`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers

from ccjax.text.token_bytes import TokenBytes
from ccjax.text.tokenizer import BaseTokenizer, Follows, Tokenizer

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Llama 3's regular expression for splitting text into words before BPE; it is in Meta's code, not in the tokenizer
file."""
_LLAMA3_SPECIAL_HEAD = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_LLAMA3_NUM_SPECIAL = 256
_LLAMA3_STOPS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_MAX_RUN_CHARS = 25_000
"""tiktoken's word splitter panics (stack overflow) on a million spaces in a row; Meta's code splits there too."""
_RUN = re.compile(rf"\S{{1,{_MAX_RUN_CHARS}}}|\s{{1,{_MAX_RUN_CHARS}}}")

_NO_PREFIX = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
"""Settings of `tokenizers` steps that put a space before the first word, switched off."""

_SHOWN = frozenset(("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>"))
"""Tokens that calls of tools begin with: text in an answer, even where a file says that they are special."""
_KEEPING = frozenset({"Sequence", "ByteLevel", "Metaspace", "Split", "Digits"})
"""Pre-tokenizers that keep every character."""
_MOST_COMPOSED = 4
"""Characters that NFC makes one of, at most."""


class TiktokenTokenizer(BaseTokenizer):
    """Llama 3's own format: base64 ranks in `tokenizer.model`; special tokens and word splitting as in Meta's code."""

    def __init__(self, path: Path, stop_ids: frozenset[int] = frozenset()):
        content = path.read_bytes()
        try:
            pairs = (line.split() for line in content.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            if not ranks:
                raise ValueError("an empty file")
        except ValueError as error:
            raise ValueError(
                f"{path}: wanted lines of 'base64 rank' (tiktoken), got {error}; a SentencePiece model needs a "
                "tokenizer.json beside it"
            ) from error
        names = list(_LLAMA3_SPECIAL_HEAD)
        names += [f"<|reserved_special_token_{i}|>" for i in range(2, 2 + _LLAMA3_NUM_SPECIAL - len(names))]
        self.special_names = {name: len(ranks) + i for i, name in enumerate(names)}
        super().__init__(self.special_names)
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=dict(self.special_names)
        )
        self.bos_id: int | None = self.special_names["<|begin_of_text|>"]
        # Always all three: the config.json of the first Llama 3 instruct models forgot <|eot_id|>.
        self.eos_ids = stop_ids | {self.special_names[name] for name in _LLAMA3_STOPS}
        self.special_ids = frozenset(self.special_names.values())
        self.vocab_size = len(ranks) + len(names)
        self.longest_token: int | None = max(map(len, ranks))
        self.fingerprint = hashlib.sha256(b"tiktoken-llama3\0" + content).hexdigest()

    def _encode_plain(self, text: str, follows: Follows) -> list[int]:
        if len(text) <= _MAX_RUN_CHARS:
            return self._encoding.encode_ordinary(text)
        ids: list[int] = []
        start = 0
        for run in _RUN.finditer(text):
            if run.end() - run.start() == _MAX_RUN_CHARS:
                ids += self._encoding.encode_ordinary(text[start : run.end()])
                start = run.end()
        return ids + self._encoding.encode_ordinary(text[start:])

    def _token_starts(self, text: str, follows: Follows) -> list[int]:
        return self._encoding.decode_with_offsets(self._encode_untrusted(text, follows))[1]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        # Embeddings are often padded beyond the vocabulary; such ids have no text.
        left_out = self.special_ids if skip_special else ()
        known = [token_id for token_id in ids if token_id < self.vocab_size and token_id not in left_out]
        return self._encoding.decode(known, errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token_id) if token_id < self.vocab_size else b""


class HuggingFaceTokenizer(BaseTokenizer):
    """`tokenizer.json`, any model type of the `tokenizers` library."""

    def __init__(self, raw: str, where: Path, stop_ids: frozenset[int] = frozenset()):
        """`raw` is the file's content, `where` its name in messages."""
        try:
            definition = json.loads(tokenizers.Tokenizer.from_str(raw).to_str())
            for token in definition["added_tokens"]:
                token["special"] = token["special"] and token["content"] not in _SHOWN
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{where}: wanted a tokenizer.json that `tokenizers` can read, got {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        unknown = definition["model"].get("unk_token")
        control = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip() and token.content != unknown
        }
        super().__init__(
            control,
            strip_before=frozenset(token.content for token in added.values() if token.lstrip),
            strip_behind=frozenset(token.content for token in added.values() if token.rstrip),
        )
        # Users' text is encoded by a tokenizer without control tokens; added runs of spaces are text and stay.
        definition["added_tokens"] = [token for token in definition["added_tokens"] if not token["content"].strip()]
        definition["post_processor"] = definition["truncation"] = definition["padding"] = None
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(definition))
        # After other text, SentencePiece-like tokenizers must not add the space before the first word again.
        steps = [*_steps(definition["normalizer"]), *_steps(definition["pre_tokenizer"])]
        self._space_after_control = all(step.get("prepend_scheme") != "first" for step in steps)
        changes = [{key: value for key, value in _NO_PREFIX.items() if step.get(key, value) != value} for step in steps]
        self._continuing = self._plain
        if any(changes):
            for step, change in zip(steps, changes, strict=True):
                step.update(change)
            self._continuing = tokenizers.Tokenizer.from_str(json.dumps(definition))
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes = TokenBytes(definition["decoder"])
        self.special_names = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_names.values())
        self.bos_id: int | None = None
        self.eos_ids = stop_ids
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        shrinking = _most_shrinking(definition)
        self.longest_token: int | None = None if shrinking is None else shrinking * max(map(len, vocabulary))
        self.fingerprint = hashlib.sha256(b"tokenizer.json\0" + raw.encode()).hexdigest()

    def _encode_plain(self, text: str, follows: Follows) -> list[int]:
        return self._encoded(text, follows).ids

    def _token_starts(self, text: str, follows: Follows) -> list[int]:
        return [start for start, _ in self._encoded(text, follows).offsets]

    def _encoded(self, text: str, follows: Follows) -> tokenizers.Encoding:
        spaced = follows == "start" or (follows == "control" and self._space_after_control)
        # A batch of one: unlike `encode`, it lets other threads run.
        return (self._plain if spaced else self._continuing).encode_batch([text], add_special_tokens=False)[0]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._bytes.of(token)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it has neither `tokenizer.json` nor `tokenizer.model`.

    The ids that end an answer come from generation_config.json, config.json and tokenizer_config.json together.

    Raises:
      ValueError: a file cannot be used; the message names it.
    """
    directory = Path(directory)
    json_path, model_path = directory / "tokenizer.json", directory / "tokenizer.model"
    if not json_path.exists() and not model_path.exists():
        return None
    settings = read_settings(directory)
    generation, config = (read_json(directory / name) for name in ("generation_config.json", "config.json"))
    stop_ids = frozenset(_ids(generation, "eos_token_id") + _ids(config, "eos_token_id"))
    if not json_path.exists():
        return TiktokenTokenizer(model_path, stop_ids)
    bos_ids = _ids(config, "bos_token_id") if "bos_token" not in settings else []
    raw = json_path.read_text(encoding="utf-8")
    return tokenizer_of(raw, settings, stop_ids, where=json_path, bos_id=next(iter(bos_ids), None))


def tokenizer_of(
    raw: str,
    settings: Mapping[str, Any],
    stop_ids: frozenset[int],
    *,
    where: Path,
    bos_id: int | None = None,
) -> Tokenizer:
    """Builds the tokenizer from a tokenizer.json.

    Args:
      raw: its content.
      settings: as returned by `read_settings`.
      stop_ids: ids that end an answer, besides the eos token of the settings.
      where: its name in messages.
      bos_id: used if the settings name no bos token.

    Raises:
      ValueError: it cannot be used.
    """
    tokenizer = HuggingFaceTokenizer(raw, where, stop_ids)
    names = tokenizer.special_names
    if settings.get("eos_token") in names:
        tokenizer.eos_ids |= {names[settings["eos_token"]]}
    if settings.get("add_bos_token") is not False:
        tokenizer.bos_id = names.get(settings.get("bos_token") or "", bos_id)
    return tokenizer


def read_settings(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with every `*_token` as a plain string or None; empty if the file is absent."""
    settings = read_json(directory / "tokenizer_config.json")
    for key, value in settings.items():
        if key.endswith("_token") and isinstance(value, dict):
            settings[key] = value.get("content")
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file.

    Raises:
      ValueError: the file has other content.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: wanted a JSON object, got {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: wanted a JSON object, got {type(value).__name__}")
    return value


def _ids(settings: Mapping[str, Any], key: str) -> list[int]:
    value = settings.get(key)
    return [token_id for token_id in (value if isinstance(value, list) else [value]) if isinstance(token_id, int)]


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a `tokenizers` normalizer or pre-tokenizer, sequences unrolled."""
    if step is None:
        return
    yield step
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _steps(inner)


def _most_shrinking(definition: dict[str, Any]) -> int | None:
    """Most characters of a text that become one of the characters which tokens consist of, in a tokenizer.json; None if
    it may drop any number of them."""
    model, before = definition["model"], [*_steps(definition["pre_tokenizer"])]
    is_complete = model.get("byte_fallback") or any(step["type"] == "ByteLevel" for step in before)
    if model.get("type") != "BPE" or not is_complete:  # one unknown token may stand for a long word
        return None
    for step in _steps(definition["normalizer"]):
        pattern = step.get("pattern", {}).get("String")
        keeps = pattern is not None and len(pattern) <= len(step["content"])
        if step["type"] not in ("Sequence", "Prepend", "NFC", "ByteLevel") and not keeps:
            return None
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in before):
        return None
    return _MOST_COMPOSED if any(step["type"] == "NFC" for step in _steps(definition["normalizer"])) else 1
