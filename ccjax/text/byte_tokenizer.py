"""A tokenizer whose tokens are bytes, for models without one of their own.

No model is trained on these ids, so answers are meaningless; prompts are several times as long as with a real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ccjax.text.template import LLAMA3_TEMPLATE, ChatTemplate
from ccjax.text.tokenizer import BaseTokenizer, Follows

_NUM_BYTES = 256
_CONTROL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_FIRST_SHOWN, _NUM_SHOWN = 0x21, 94
BYTE_TEMPLATE = ChatTemplate(LLAMA3_TEMPLATE, {"bos_token": _CONTROL[0], "eos_token": _CONTROL[-1]})
"""The control tokens of Llama 3."""


class ByteTokenizer(BaseTokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, followed by five control tokens.

    Higher ids, which a model with a larger vocabulary may generate, are each shown as a printable character, so that an
    answer streams as with a real tokenizer.
    """

    def __init__(self) -> None:
        self.special_names = {name: _NUM_BYTES + index for index, name in enumerate(_CONTROL)}
        super().__init__(self.special_names)
        self.special_ids = frozenset(self.special_names.values())
        self.bos_id: int | None = self.special_names["<|begin_of_text|>"]
        self.eos_ids = frozenset({self.special_names["<|end_of_text|>"], self.special_names["<|eot_id|>"]})
        self.vocab_size = _NUM_BYTES + len(_CONTROL)
        self.longest_token: int | None = 1
        self.fingerprint = hashlib.sha256("\0".join(("bytes-1", *_CONTROL)).encode()).hexdigest()

    def _encode_plain(self, text: str, follows: Follows) -> list[int]:
        return list(text.encode())

    def _token_starts(self, text: str, follows: Follows) -> list[int]:
        return [index for index, letter in enumerate(text) for _ in letter.encode()]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        content = bytearray()
        for token_id in ids:
            if token_id < _NUM_BYTES:
                content.append(token_id)
            elif token_id >= self.vocab_size:
                content.append(_FIRST_SHOWN + token_id % _NUM_SHOWN)
            elif not skip_special:
                content += _CONTROL[token_id - _NUM_BYTES].encode()
        return content.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < _NUM_BYTES:
            return bytes([token_id])
        return _CONTROL[token_id - _NUM_BYTES].encode() if token_id < self.vocab_size else b""
