"""The bytes that tokens of a `tokenizer.json` stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _letters() -> dict[str, int]:
    """GPT-2's table: printable bytes are written as themselves, the others as letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


class TokenBytes:
    """Translates tokens, as a vocabulary writes them, to bytes, by the `decoder` of its tokenizer.json."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        steps = list(_steps(decoder))
        kinds = {step["type"] for step in steps}
        self._letters = _letters() if "ByteLevel" in kinds else None
        self._has_bytes = "ByteFallback" in kinds
        self._spaces = [space for step in steps if (space := _space(step))]

    def of(self, token: str) -> bytes:
        """The bytes of a token; a word without a space before it counts as in the middle of a text."""
        if self._letters is not None:
            if all(letter in self._letters for letter in token):
                return bytes(self._letters[letter] for letter in token)
            return token.encode()
        if self._has_bytes and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for space in self._spaces:
            token = token.replace(space, " ")
        return token.encode()


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is not None:
        yield decoder
        for step in decoder.get("decoders") or ():
            yield from _steps(step)


def _space(step: Mapping[str, Any]) -> str | None:
    """How a decoder's step writes a space; None if it does not replace any."""
    if step["type"] == "Metaspace":
        return step["replacement"]
    if step["type"] == "Replace" and step["content"] == " ":
        return step["pattern"].get("String")
    return None
