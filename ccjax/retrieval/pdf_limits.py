"""Bounds what pdfminer takes for one file: it decodes streams whole and believes every number in a file."""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import io
import types
import zlib
from collections.abc import Iterator
from typing import Any

import pdfminer.cmapdb as cmapdb
import pdfminer.pdffont as pdffont
import pdfminer.pdftypes as pdftypes
from pdfminer.converter import PDFPageAggregator
from pdfminer.lzw import LZWDecoder
from pdfminer.runlength import rldecode
from pdfminer.utils import apply_png_predictor, apply_tiff_predictor

MOST_BYTES = 128_000_000
"""Of all decoded streams of a file."""
_MOST_PAGE_CHARS, _MOST_FIGURES = 200_000, 100_000
_MOST_CODES = 0x110000
_RUN_LENGTH = 64
"""Times as long as its input a run-length encoded stream may be."""


class PdfLimitError(ValueError):
    """A file that is larger unpacked than it may be."""


class _Budget:
    def __init__(self) -> None:
        self.left = MOST_BYTES
        self.exceeded = ""

    def exceed(self, what: str) -> PdfLimitError:
        self.exceeded = f"too large: {what}"
        return PdfLimitError(self.exceeded)


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar("budget", default=None)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Within it a PDF is read within the limits; outside without limits.

    Raises:
      PdfLimitError: also where pdfminer swallowed it.
    """
    budget = _Budget()
    token = _budget.set(budget)
    try:
        yield
    except Exception:
        if not budget.exceeded:
            raise
    finally:
        _budget.reset(token)
    if budget.exceeded:
        raise PdfLimitError(budget.exceeded)


class LimitedPages(PDFPageAggregator):
    """Lays out pages whose characters and figures are not too many; drawings are left out."""

    _num_chars = _num_figures = 0

    def begin_page(self, *arguments: Any) -> None:
        self._num_chars = 0
        super().begin_page(*arguments)

    def render_char(self, *arguments: Any) -> float:
        self._num_chars += 1
        if self._num_chars > _MOST_PAGE_CHARS:
            raise _exceeded(f"a page has over {_MOST_PAGE_CHARS} characters")
        return super().render_char(*arguments)

    def begin_figure(self, *arguments: Any) -> None:
        self._num_figures += 1
        if self._num_figures > _MOST_FIGURES:
            raise _exceeded(f"it draws over {_MOST_FIGURES} figures")
        super().begin_figure(*arguments)

    def paint_path(self, *arguments: Any) -> None:
        pass


def _exceeded(what: str) -> PdfLimitError:
    budget = _budget.get()
    return PdfLimitError(what) if budget is None else budget.exceed(what)


def _taken(pieces: Iterator[bytes]) -> bytes:
    """All pieces, which count as decoded."""
    budget, out = _budget.get(), bytearray()
    for piece in pieces:
        out += piece
        if budget is not None and len(out) > budget.left:
            raise budget.exceed(f"its streams have over {MOST_BYTES} bytes when unpacked")
    if budget is not None:
        budget.left -= len(out)
    return bytes(out)


def _inflated(data: bytes) -> bytes:
    """Without its checksum, as damaged files are read, too."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)

    def pieces() -> Iterator[bytes]:
        rest = data[2:]
        while rest and not inflater.eof:
            yield inflater.decompress(rest, 1 << 20)
            rest = inflater.unconsumed_tail

    if (int.from_bytes(data[:2]) % 31 or data[:1] and data[0] & 15 != 8) or len(data) < 2:
        raise zlib.error("no zlib stream")
    return _taken(pieces())


def _not_recovered(data: bytes) -> bytes:
    raise zlib.error("damaged")  # `_inflated` has recovered what can be


def _runs(data: bytes) -> bytes:
    budget = _budget.get()
    if budget is not None and _RUN_LENGTH * len(data) > budget.left:
        raise budget.exceed(f"its streams may have over {MOST_BYTES} bytes when unpacked")
    return _taken(iter([rldecode(data)]))


def _predicted(apply: Any, *arguments: Any) -> bytes:
    numbers, data = arguments[:-1], arguments[-1]
    if numbers[-3] * numbers[-2] * numbers[-1] // 8 > MOST_BYTES:
        raise _exceeded(f"it has rows of over {MOST_BYTES} bytes")
    return apply(*numbers, data)


def _range(*arguments: int) -> range:
    """Of character codes."""
    found = builtins.range(*arguments)
    if _budget.get() is not None and found and max(abs(found[0] - found[-1]), len(found)) > _MOST_CODES:
        raise _exceeded(f"a font names over {_MOST_CODES} characters at once")
    return found


_LIMITED = {
    "zlib": types.SimpleNamespace(decompress=_inflated, error=zlib.error),
    "decompress_corrupted": _not_recovered,
    "lzwdecode": lambda data: _taken(LZWDecoder(io.BytesIO(data)).run()),
    "rldecode": _runs,
    "ccittfaxdecode": lambda data, params: b"",  # an image, never text; its width is not bounded
    "apply_png_predictor": lambda *arguments: _predicted(apply_png_predictor, *arguments),
    "apply_tiff_predictor": lambda *arguments: _predicted(apply_tiff_predictor, *arguments),
}
for _name, _value in _LIMITED.items():
    setattr(pdftypes, _name, _value)
for _module in (cmapdb, pdffont):
    _module.range = _range  # pyright: ignore
