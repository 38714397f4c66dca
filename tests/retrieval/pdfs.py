"""Generates PDF files of the kinds that readers stumble over. Contains no assertions."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from pathlib import Path

import pypdf
import reportlab
from reportlab.lib.pagesizes import A4
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas

WIDTH, HEIGHT = A4
LEADING = 14
pdfmetrics.registerFont(TTFont("Vera", Path(reportlab.__file__).parent / "fonts" / "Vera.ttf"))

Line = tuple[float, float, str]
"""x and y of its beginning, from the lower left, in points; and the text."""


def pdf(pages: Sequence[Sequence[Line]], *, title: str = "", font: str = "Helvetica", rotation: int = 0) -> bytes:
    """A PDF whose pages have these lines, in this order."""
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=A4, invariant=1)
    canvas.setTitle(title)
    for page in pages:
        canvas.setFont(font, 11)
        if rotation:
            canvas.setPageRotation(rotation)
            canvas.rotate(rotation)
            canvas.translate(0, -WIDTH)
        for x, y, text in page:
            canvas.drawString(x, y, text)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def sized(lines: Sequence[tuple[float, str]]) -> bytes:
    """A PDF of one page with lines of these sizes."""
    out = io.BytesIO()
    canvas, y = Canvas(out, pagesize=A4, invariant=1), HEIGHT - 50
    for size, text in lines:
        y -= 1.3 * size
        canvas.setFont("Helvetica", size)
        canvas.drawString(72, y, text)
    canvas.save()
    return out.getvalue()


def block(lines: Sequence[str], x: float = 72, y: float = 720) -> list[Line]:
    """Lines below each other; an empty one leaves a gap."""
    return [(x, y - LEADING * number, line) for number, line in enumerate(lines) if line]


def encrypted(data: bytes, user_password: str, algorithm: str) -> bytes:
    """A copy that opens with a password."""
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(user_password, owner_password="owner", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def scanned(num_pages: int = 1) -> bytes:
    """Pages with a picture and no text."""
    from reportlab.lib.utils import ImageReader

    picture = io.BytesIO(b"P6 8 8 255 " + bytes(range(192)))
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=A4, invariant=1)
    for _ in range(num_pages):
        canvas.drawImage(ImageReader(picture), 72, 72, 400, 600)
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def framed(texts: Sequence[Sequence[str]], heads: Sequence[str], feet: Sequence[str]) -> list[list[Line]]:
    """Pages with a running head and a foot each."""
    return [
        [(72, 800, heads[number % len(heads)]), *block(lines), (280, 40, feet[number % len(feet)])]
        for number, lines in enumerate(texts)
    ]


def written(
    content: bytes, filters: str = "", *, parameters: str = "", font: str = "", forms: Sequence[bytes] = ()
) -> bytes:
    """A PDF of one page by hand, with an encoded content stream; `parameters` follow its filters, `font` is more
    of its font F, and `forms` are the contents of what it may draw as /X0, /X1 ..."""
    places = " ".join(f"/X{number} {10 + number} 0 R" for number in range(len(forms)))
    resources = f"/Resources << /Font << /F 5 0 R >> /XObject << {places} >> >>"
    form = f"/Type /XObject /Subtype /Form /BBox [0 0 600 800] {resources}"
    objects: dict[int, bytes] = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        3: f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R {resources} >>".encode(),
        4: _stream(content, f"/Filter [{filters}]{parameters}" if filters else ""),
        5: f"<< /Type /Font {font or '/Subtype /Type1 /BaseFont /Helvetica'} >>".encode(),
    } | {10 + number: _stream(data, form) for number, data in enumerate(forms)}
    parts = [b"%d 0 obj\n%s\nendobj\n" % (number, value) for number, value in objects.items()]
    return b"%PDF-1.7\n" + b"".join(parts) + b"trailer\n<< /Root 1 0 R >>\n%%EOF\n"


def _stream(data: bytes, more: str) -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more.encode(), data)


LEFT = [
    "The moon pulls the sea, and",
    "the sea rises twice a day in",
    "most harbours of the world.",
    "It sinks as often as that.",
]
RIGHT = [
    "Whales sing to each other",
    "over hundreds of miles. The",
    "songs change from year to",
    "year like the fashions.",
]
PAGES = [
    ["The first sentence is on the first page. The", "second one begins here and ends on the"],
    ["next page, as they do in books. A third one", "is whole. The fourth sentence is cut in any-"],
    ["where a word may be cut. The fifth is the", "last one of them."],
    ["A paragraph of its own is on the last page."],
]
FEET = [f"Page {number} of 4" for number in range(1, 5)]
NUMBERS = [str(number) for number in range(11, 15)]
FLOW = (
    "The second one begins here and ends on the next page, as they do in books.",
    "The fourth sentence is cut in anywhere a word may be cut.",
)
COLUMNS = (
    "and the sea rises twice a day in most harbours",
    "The songs change from year to year like",
    "It sinks as often as that.",
)
PLAIN = pdf(
    [block(["Chunks are cached once", "and reused any-", "where they appear.", "", "", "A second paragraph."])],
    title="On Reuse",
)

GOOD: dict[str, tuple[bytes, Sequence[str], Sequence[str]]] = {
    "plain": (PLAIN, ["Chunks are cached once and reused anywhere they appear."], []),
    "heads and feet": (pdf(framed(PAGES, ["The Book of Tides"], FEET)), FLOW, ["Book of Tides", "Page 2"]),
    "alternating heads": (
        pdf(framed(PAGES, ["The Book of Tides", "Second Chapter"], NUMBERS)),
        FLOW,
        ["Tides", "Second Ch", "12"],
    ),
    "numbered heads": (
        pdf(framed(PAGES, [f"Tides and Whales | {n}" for n in NUMBERS], ["(c) 2024 A. Rey"])),
        FLOW,
        ["Whales", "(c)", "13"],
    ),
    "roman numbers": (pdf(framed(PAGES, ["Preface"], ["i", "ii", "iii", "iv"])), FLOW, ["Preface", " ii "]),
    "hyphens": (
        pdf(
            [
                block(
                    [
                        "A well-",
                        "known self-",
                        "made state-of-the-",
                        "art COVID-",
                        "19 pump of the Anglo-",
                        "Saxon hyphen-",
                        "ation era.",
                    ]
                )
            ]
        ),
        ["A well-known self-made state-of-the-art COVID-19 pump of the Anglo-Saxon hyphenation era."],
        [],
    ),
    "hyphens known from elsewhere": (
        pdf([block(["The flow-meter and the database are new. The flow-", "meter fills the data-", "base."])]),
        ["The flow-meter fills the database."],
        [],
    ),
    "columns": (pdf([[*block(LEFT), *block(RIGHT, 320)]]), COLUMNS, ["and Whales"]),
    "columns row by row": (
        pdf([[line for pair in zip(block(LEFT), block(RIGHT, 320), strict=True) for line in pair]]),
        COLUMNS,
        ["and Whales"],
    ),
    "columns below a title": (
        pdf([[(150, 760, "A Title Across Both Of The Columns Of This Page"), *block(LEFT), *block(RIGHT, 320)]]),
        COLUMNS,
        [],
    ),
    "columns over pages": (
        pdf(
            [
                [*block(LEFT), *block([*RIGHT[:3], "year and from sea"], 320)],
                [*block(["to sea like the fashions.", "So it is."])],
            ]
        ),
        ["from year to year and from sea to sea like the fashions."],
        [],
    ),
    "ligatures": (
        pdf([block(["The \ufb01rst one \ufb02ows."])], font="Vera"),
        ["The first one flows."],
        ["\ufb01", "\ufb02"],
    ),
    "accents": (
        pdf([block(["Höhe über Ålesund, é à ô.", "Ça va."])], font="Vera"),
        ["Höhe über Ålesund, é à ô. Ça va."],
        [],
    ),
    "paragraphs": (
        pdf([block(["The first one", "is here.", "", "The second one", "is there."])]),
        ["The first one is here.\n\nThe second one is there."],
        [],
    ),
    "words apart": (
        pdf([[(72 + 60 * n, 720, word) for n, word in enumerate("Each word is placed alone.".split())]]),
        ["Each word is placed alone."],
        [],
    ),
    "rotated page": (pdf([block(LEFT)], rotation=90), COLUMNS[:1], []),
    "AES-128 without password": (encrypted(PLAIN, "", "AES-128"), ["reused anywhere"], []),
    "AES-256 without password": (encrypted(PLAIN, "", "AES-256"), ["reused anywhere"], []),
    "AES-256 of 2008 without password": (encrypted(PLAIN, "", "AES-256-R5"), ["reused anywhere"], []),
    "RC4 without password": (encrypted(PLAIN, "", "RC4-128"), ["reused anywhere"], []),
    "one page scanned": (pdf([block(["Only this page has text."]), [], []]), ["Only this page has text."], []),
}
"""Files, what their text contains, and what it does not contain."""
BAD: dict[str, tuple[bytes, str]] = {
    "password AES-256": (encrypted(PLAIN, "secret", "AES-256"), "protected by a password"),
    "password AES-256 of 2008": (encrypted(PLAIN, "secret", "AES-256-R5"), "protected by a password"),
    "password AES-128": (encrypted(PLAIN, "secret", "AES-128"), "protected by a password"),
    "password RC4": (encrypted(PLAIN, "secret", "RC4-128"), "protected by a password"),
    "password of other letters": (encrypted(PLAIN, "ключ", "AES-256"), "protected by a password"),
    "certificate": (
        encrypted(PLAIN, "", "RC4-128").replace(b"/Filter /Standard", b"/Filter /Adobe.PubSec"),
        "protected by other means than a password",
    ),
    "drawing without text": (written(b"0 0 m 90 90 l S"), "no text on any page"),
    "streams that cannot be unpacked": (written(b"\0" * 90, "/FlateDecode"), "no text on any page"),
    "scanned": (scanned(), "no text on any page (scanned pages need text recognition first)"),
    "scanned pages": (scanned(3), "no text on any page"),
    "empty page": (pdf([[]]), "no text on any page"),
    "cut off": (PLAIN[:200], "broken PDF"),
    "not a PDF": (b"not a pdf at all", "broken PDF"),
    "only a head": (b"%PDF-1.7\n", "broken PDF"),
}


def _deflated(num_bytes: int) -> bytes:
    """So many blanks."""
    deflater, piece = zlib.compressobj(9), b" " * (1 << 20)
    return b"".join(deflater.compress(piece) for _ in range(num_bytes >> 20)) + deflater.flush()


def _lzw(num_codes: int) -> bytes:
    """Blanks, in strings each of which is by one longer, until the table is full, and then in its longest ones."""
    codes, widths = [256, 32, *range(258, 4094)], []
    for number in range(len(codes)):
        widths.append(9 if number < 255 else 10 if number < 767 else 11 if number < 1791 else 12)
    codes += [4093] * num_codes
    widths += [12] * num_codes
    bits = "".join(f"{code:0{width}b}" for code, width in zip(codes, widths, strict=True))
    return int(bits + "0" * (-len(bits) % 8), 2).to_bytes(-(-len(bits) // 8))


_SHOWN = b"BT /F 9 Tf 50 700 Td (Here is a text.) Tj ET"
_WIDE = (
    "/Subtype /Type0 /Encoding /Identity-H "
    "/DescendantFonts [<< /Type /Font /Subtype /CIDFontType2 /W [0 2000000000 5] >>]"
)
_BLANKS = _deflated(256 << 20)
BOMBS: dict[str, bytes] = {
    "deflated": written(_BLANKS, "/FlateDecode"),
    "deflated twice": written(zlib.compress(_BLANKS, 9), "/FlateDecode /FlateDecode"),
    "deflated runs": written(zlib.compress(b"\x81 " * (4 << 20), 9), "/FlateDecode /RunLengthDecode"),
    "LZW": written(_lzw(80_000), "/LZWDecode"),
    "fax": written(b"\x00" * 50, "/CCITTFaxDecode", parameters="/DecodeParms [<< /K -1 /Columns 300000000 >>]"),
    "rows": written(zlib.compress(_SHOWN), "/FlateDecode").replace(
        b"/Filter", b"/DecodeParms [<< /Predictor 12 /Columns 4000000000 >>] /Filter"
    ),
    "characters": written(zlib.compress(b"BT /F 9 Tf " + b"(%s) Tj " % (b"a" * 1000) * 900 + b"ET", 9), "/FlateDecode"),
    "figures in figures": written(b"/X0 Do", forms=[b"/X%d Do " % (n + 1) * 10 for n in range(8)] + [b"q Q"]),
    "widths": written(_SHOWN, font=_WIDE),
}
"""Small files that would take over 300 MB, or three seconds."""
