"""The text of a PDF in reading order, its headings as those of Markdown, without running heads, page numbers and the
line ends of its pages."""

from __future__ import annotations

import collections
import io
import itertools
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from pdfminer.converter import PDFPageAggregator
from pdfminer.layout import LAParams, LTChar, LTFigure, LTTextBox, LTTextLine
from pdfminer.pdfdocument import PDFDocument, PDFEncryptionError, PDFPasswordIncorrect
from pdfminer.pdfinterp import PDFPageInterpreter, PDFResourceManager
from pdfminer.pdfpage import PDFPage
from pdfminer.pdfparser import PDFParser
from pdfminer.utils import decode_text

from ccjax.retrieval.apart import Apart
from ccjax.retrieval.pdf_tables import GAP, Line, Table, with_tables

_MOST_MEMORY = 2 << 30
_MOST_SECONDS = 30
"""Of the processor, for a file of up to 1 MB, and as many again for each further one."""
_LIGATURES = {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}
_PAGE = r"(?:page|seite|pagina|página|p|s)\b\.?\s*"
_COUNTED = re.compile(
    rf"(?:\b{_PAGE}|[|·•/\t]\s*|\s[–—-]\s|^)(\d{{1,5}})(?=\s*(?:$|[|·•/\t]|[–—-]\s|(?:of|von|de|di|sur)\b))",
    re.IGNORECASE,
)
"""What may count the pages in a line with other words."""
_ALONE = re.compile(
    r"[^\w$€£¥]*(?:(\d{1,5})|((?=[ivxlc])c{0,3}(?:x[cl]|l?x{0,3})(?:i[xv]|v?i{0,3})))[^\w$€£¥%°]*", re.I
)
_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
_NO_TITLE = re.compile(r"\(?(?:untitled|anonymous|unspecified)\)?\s*", re.IGNORECASE)
_CODE = re.compile(r"\(cid:\d+\)")
"""What pdfminer writes for a sign whose font does not say what it is: at the beginning of a line often a bullet."""
_LARGER, _MOST_HEADINGS, _LONGEST_HEADING = 1.08, 0.25, 200
"""Headings are so many times larger than most text, and at most that share of it."""
_MARGIN_LINES = 2
_MOST_LABELS = 3
"""Characters in drawings for each other one of a page."""
_MOST_REPEATS = 3
"""Pages on which a head or foot is at least; 2 in a file of up to 5 pages."""
_ITEM = re.compile(r"(?:[•▪‣◦·–*-]|\(?\d{1,2}[.)]|[a-z]\))\s")
_COMPOUND = re.compile(
    r"(?:\b(?:\w|well|self|non|ex|high|low|long|short|real|cross|half|all|ever|much|best|ill|fine|built|full|left|right|hard"
    r"|soft|open|large|small|wide|old|new|first|second|third|one|two|three|four|five|single|double|multi)-$|-\S*-$)",
    re.IGNORECASE,
)
_LEAST_SECOND = 4
"""Letters behind the hyphen of a compound: `long-`/`er` is `longer`."""
_read_apart = Apart(__name__, "read_here")


def read_pdf(data: bytes) -> tuple[str, str, str | None]:
    """The title, the text, and a note about pages without text, None if there is none.

    Paragraphs are separated by blank lines; larger lines are headings. Sentences and words that lines, columns or pages
    cut are joined; what repeats at the top or the bottom of pages is left out, and so are page numbers there.

    pdfminer believes every number in a file and unpacks streams whole, so each file is read in a process of its own,
    with limits on memory and time.

    Raises:
      ValueError: it is protected by a password, broken, too large when unpacked, or has no text.
    """
    seconds = _MOST_SECONDS * (1 + len(data) // 1_000_000)
    title, text, note = _read_apart(data, most_memory=_MOST_MEMORY, most_seconds=seconds)
    return title, text, note


def read_here(data: bytes) -> tuple[str, str, str | None]:
    """What `read_pdf` returns, in this process."""
    try:
        title, pages = _parsed(data)
    except PDFPasswordIncorrect:
        raise ValueError("protected by a password, and the empty one does not open it") from None
    except PDFEncryptionError as error:  # certificates, or a method that nobody knows
        raise ValueError(f"protected by other means than a password: {error}"[:200]) from None
    except MemoryError:
        raise
    except Exception as error:  # on damaged files many types: PDFSyntaxError, KeyError, RecursionError ...
        raise ValueError(f"broken PDF: {type(error).__name__}: {error}") from None
    if not pages:
        raise ValueError("broken PDF: it has no pages")
    if not (num_empty := pages.count([])) < len(pages):
        raise ValueError("no text on any page (scanned pages need text recognition first)")
    margins = _margins(pages)
    boxes = [box for page in pages for box in page]
    paragraphs: list[str] = []
    words = set(re.findall(r"\w[\w-]+\w", " ".join(line.text for box in boxes for line in box)))
    levels = _levels([line for box in boxes for line in box if id(line) not in margins])
    is_open, before = False, 0
    last: Table | None = None  # while nothing follows it
    runs = (
        itertools.groupby((one for one in box if id(one) not in margins), lambda o: levels[o.size]) for box in boxes
    )
    for level, lines in itertools.chain.from_iterable(runs):
        kept = list(lines)
        if (found := kept[0].table) is not None:
            if last is not None and found.continues(last):
                last.rows += found.rows[found.has_header :]
                paragraphs[-1] = last.markdown()
            else:
                paragraphs.append(found.markdown())
                last, before, is_open = found, 1, False
            continue
        if not (text := _joined([line.text.strip() for line in kept], words)):
            continue
        last = None
        if level:
            paragraphs.append(f"{'#' * level} {' '.join(text.split())}")
        elif paragraphs and not before and (is_open or _is_cut(paragraphs[-1])) and (text[0].islower() or is_open):
            paragraphs[-1] = _joined([paragraphs[-1], text], words)
        else:
            paragraphs.append(text)
        before = level
        right = max(line.x1 for line in kept)
        is_full = len(kept) > 2 and kept[-1].x1 > right - 0.1 * (right - min(line.x0 for line in kept))
        is_open = is_full and _is_cut(text)
    note = f"{num_empty} of {len(pages)} pages have no text (scanned pages need text recognition first)"
    return "" if _NO_TITLE.fullmatch(title) else title, "\n\n".join(paragraphs), note if num_empty else None


class _TextOnly(PDFPageAggregator):
    """Leaves out drawings, which may have very many lines, and their labels, unless most text of a page is in them.

    Attributes:
      turns: how many characters of the page that was read last need to be turned clockwise by so many degrees.
    """

    turns: collections.Counter[int]

    def paint_path(self, *arguments: object) -> None:
        pass

    def end_page(self, page: PDFPage) -> None:
        assert self.cur_item is not None
        inner = [char for figure in self.cur_item if isinstance(figure, LTFigure) for char in _chars(figure)]
        chars = [char for char in self.cur_item if isinstance(char, LTChar)]
        chars = inner + chars if len(inner) > _MOST_LABELS * len(chars) else chars
        self.turns = collections.Counter(map(_turn, chars))
        self.cur_item._objs = [char for char in chars if not _turn(char)]
        super().end_page(page)


def _chars(item: Any) -> Iterator[LTChar]:
    """The characters of a drawing and those in it."""
    waiting = [iter(item)]
    while waiting:
        if (inner := next(waiting[-1], None)) is None:
            waiting.pop()
        elif isinstance(inner, LTChar):
            yield inner
        elif isinstance(inner, LTFigure):
            waiting.append(iter(inner))


def _turn(char: LTChar) -> int:
    a, b, _, d, _, _ = char.matrix
    return (90 if b > 0 else 270) if abs(b) > abs(a) else 180 if a < 0 and d < 0 else 0


def _parsed(data: bytes) -> tuple[str, list[list[list[Line]]]]:
    """The title, and for each page its blocks of lines."""
    document = PDFDocument(PDFParser(io.BytesIO(data)))
    title = decode_text(raw) if document.info and isinstance(raw := document.info[0].get("Title"), bytes) else ""
    manager = PDFResourceManager()
    device = _TextOnly(manager, laparams=LAParams())
    interpreter = PDFPageInterpreter(manager, device)
    pages = []
    for page in PDFPage.create_pages(document):
        interpreter.process_page(page)
        found, turns, rotation = {0: _boxes(device)}, device.turns, page.rotate
        for turn in turns.keys() - {0}:
            page.rotate = (rotation + turn) % 360
            interpreter.process_page(page)
            found[turn] = _boxes(device)
        pages.append([box for turn in sorted(found, key=lambda turn: -turns[turn]) for box in found[turn]])
    return title, pages


def _boxes(device: _TextOnly) -> list[list[Line]]:
    boxes = [box for box in device.get_result() if isinstance(box, LTTextBox) and box.get_text().strip()]
    return with_tables([[_line(line) for line in box if isinstance(line, LTTextLine)] for box in boxes])


def _line(line: LTTextLine) -> Line:
    chars = [char for char in line if isinstance(char, LTChar)]
    sizes = collections.Counter(round(2 * char.size) / 2 for char in chars)
    fonts = collections.Counter(char.fontname for char in chars)
    size, font = (sizes.most_common(1)[0][0], fonts.most_common(1)[0][0]) if chars else (0.0, "")
    cells: list[tuple[float, float, str]] = []
    for char in line:
        if not isinstance(char, LTChar):
            cells = [*cells[:-1], (*cells[-1][:2], f"{cells[-1][2]} ")] if cells else []
        elif cells and char.x0 - cells[-1][1] < GAP * size:
            cells[-1] = (cells[-1][0], char.x1, cells[-1][2] + char.get_text())
        elif not char.get_text().isspace():
            cells.append((char.x0, char.x1, char.get_text()))
    cells = [(x0, x1, " ".join(_text_of(text).split())) for x0, x1, text in cells]
    return Line(_text_of(line.get_text()), size, font, line.x0, line.x1, line.y0, cells)


def _text_of(text: str) -> str:
    return _CODE.sub("", _CODE.sub("•", text, count=1) if _CODE.match(text) else text).translate(_LIGATURES)


def _levels(lines: list[Line]) -> dict[float, int]:
    """Sizes -> levels of headings, 0 for text: the larger, the higher."""
    counts, longest = collections.Counter[float](), collections.Counter[float]()
    for line in lines:
        counts[line.size] += len(line.text)
        longest[line.size] = max(longest[line.size], len(line.text))
    levels = dict.fromkeys(counts, 0)
    if not counts:
        return levels
    body = counts.most_common(1)[0][0]
    larger = [size for size in sorted(counts, reverse=True) if size >= _LARGER * body]
    if sum(counts[size] for size in larger) <= _MOST_HEADINGS * counts.total():
        levels |= {size: min(6, level) for level, size in enumerate(larger, 1) if longest[size] <= _LONGEST_HEADING}
    return levels


def _is_cut(text: str) -> bool:
    return re.search(r"[.!?:;…。！？]['\"”’»)\]]*$", text) is None


def _margins(pages: list[list[list[Line]]]) -> set[int]:
    """Ids of the lines at the top and bottom of pages that are on several ones, at least one of which has other lines,
    or count these."""
    lines = [[line for box in boxes for line in box if line.table or line.text.strip()] for boxes in pages]
    sizes = collections.Counter[float]()
    for line in itertools.chain.from_iterable(lines):
        sizes[line.size] += len(line.text)
    keys: dict[int, set[str]] = {}
    for index, own in enumerate(lines if len(pages) > 1 else ()):
        heights = sorted({round(line.y0) for line in own if line.table is None})
        for line in own:
            if line.table is None and round(line.y0) in {*heights[:_MARGIN_LINES], *heights[-_MARGIN_LINES:]}:
                is_heading = line.size > sizes.most_common(1)[0][0] or "bold" in line.font.lower()
                keys[id(line)] = _keys(line, index, is_heading)
    counts = collections.Counter(key for own in lines for key in set().union(*(keys.get(id(o), ()) for o in own)))
    least = 2 if len(pages) <= 5 else _MOST_REPEATS
    repeated = {key for key, count in counts.items() if count >= least}
    others = [own for own in lines if any(not keys.get(id(line), set()) & repeated for line in own)]
    repeated &= {key for own in others for line in own for key in keys.get(id(line), ())}
    return {line for line, own in keys.items() if own & repeated}


def _keys(line: Line, index: int, is_heading: bool) -> set[str]:
    """What a line has in common with those of other pages: a number alone its distance to the page's, other text itself
    and, with a number that may count the pages, that distance in its place."""
    text = line.text.strip()
    if (alone := _ALONE.fullmatch(text)) is not None:
        return {f"\0{(int(alone[1]) if alone[1] else _number_of(alone[2])) - index}"}
    parts = "\t".join(cell for *_, cell in line.cells) or text
    found = () if is_heading else _COUNTED.finditer(parts)
    return {text, *(f"{parts[: one.start(1)]}\0{int(one[1]) - index}\0{parts[one.end(1) :]}" for one in found)}


def _number_of(roman: str) -> int:
    values = [_ROMAN[letter] for letter in roman.lower()]
    return sum(-one if one < after else one for one, after in itertools.zip_longest(values, values[1:], fillvalue=0))


def _joined(lines: list[str], words: set[str]) -> str:
    """Lines as one; items of lists keep theirs."""
    text = ""
    for line in filter(None, (" ".join(line.split()) for line in lines)):
        if not text or not (cut := re.search(r"(\S*\w)[-\xad\u2010]$", text)):
            text += ("\n" if text and _ITEM.match(line) else " " if text else "") + line
            continue
        behind = re.match(r"[\w-]*", line)
        first, second = re.findall(r"\w+", cut[1])[-1], "" if behind is None else behind[0]
        is_word = f"{first}{second}" in words or text[-1] == "\xad"
        is_compound = (
            f"{cut[1]}-{second}" in words
            or not second[:1].islower()
            or (_COMPOUND.search(f"{cut[1]}-") is not None and len(second) >= _LEAST_SECOND or "-" in cut[1])
        )
        text = (text if is_compound and not is_word else text[:-1]) + line
    return text
