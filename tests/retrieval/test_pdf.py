"""Generated PDFs of every kind: what is text, what is page, and why a file cannot be read."""

from __future__ import annotations

import io
import re
import zlib

import pytest
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Table

import ccjax.retrieval.pdf as reader
from ccjax.retrieval.chunking import split
from ccjax.retrieval.pdf import read_pdf
from tests.retrieval.pdfs import BAD, BOMBS, GOOD, LEFT, PAGES, block, framed, pdf, sized, written

STYLES = getSampleStyleSheet()
REPEATED = ("Costs", "Civil")


@pytest.mark.parametrize("name", sorted(GOOD))
def test_text_is_read_in_order_without_what_belongs_to_pages(name: str) -> None:
    data, contained, not_contained = GOOD[name]
    _, text, note = read_pdf(data)
    for part in contained:
        assert part in text
    assert not any(part in text for part in not_contained)
    assert (note is not None) == (name == "one page scanned")


@pytest.mark.parametrize("name", sorted(BAD))
def test_reason_why_a_file_cannot_be_read_is_told(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        read_pdf(data)


def test_title_is_that_of_the_file_unless_a_program_left_its_default() -> None:
    assert read_pdf(pdf([block(LEFT)], title="Über Wale"))[0] == "Über Wale"
    assert read_pdf(pdf([block(LEFT)]))[0] == "" == read_pdf(pdf([block(LEFT)], title="(anonymous)"))[0]


def test_lines_that_only_look_like_heads_are_kept() -> None:
    text = read_pdf(pdf([block(["The same line", "here."])]))[1]
    assert text == "The same line here."
    pages = [["Alpha one.", "Beta."], ["Gamma two.", "Delta."], ["Epsilon 12.", "Zeta."]]
    text = read_pdf(pdf(framed(pages, ["Head"], ["1", "2", "3"])))[1]
    assert text.split() == [word for page in pages for line in page for word in line.split()]


@pytest.mark.parametrize(
    "pages",
    [
        [[f"The limit is {bar} bar"] for bar in (52, 67, 71, 48)],
        [["Costs", f"{number}0 Euro", f"$ {number},000", f"{number} %", "Civil"] for number in (4, 7, 1)],
        [["The same text."], ["The same text."]],
        [["3"], ["5"]],
        *(
            [[line, f"Alpha{at} and", f"beta{at} of", f"gamma{at}."] for at, line in enumerate(lines)]
            for lines in (
                ("Patient 1", "Patient 2", "Patient 3"),
                ("Room 101: laboratory", "Room 102: office", "Room 103: kitchen"),
                ("3.1 Limits", "3.2 Limits"),
                ("Invoice 2024-1041", "Invoice 2024-1042"),
                ("It has 4 valves and runs.", "It has 5 valves and runs."),
                ("2019", "2023"),
                ("3/4", "1/2"),
                ("-5", "-7", "5 - 7"),
                ("I", "C"),
            )
        ),
    ],
)
def test_lines_with_numbers_that_do_not_count_pages_are_kept(pages: list[list[str]]) -> None:
    text = read_pdf(pdf([block(page) for page in pages]))[1]
    assert text.split() == [word for page in pages for line in page for word in line.split() if line not in REPEATED]


def test_heads_that_count_pages_are_left_out_and_headings_that_count_are_kept() -> None:
    feet = [f"Manual X of 2024 \u00b7 page {number} of 9" for number in range(3, 7)]
    only_head = [(72, 800, "The Book"), (280, 40, "Manual X of 2024 \u00b7 page 7 of 9")]
    text = read_pdf(pdf([*framed(PAGES, ["The Book"], feet), only_head]))[1]
    assert "Manual" not in text and "The Book" not in text
    for foot in ("{}", "- {} -", "Seite {}", "The Book | {}", "{} \u2013 The Book", "Page {} of 9", "p. {}"):
        text = read_pdf(pdf(framed(PAGES, ["Head"], [foot.format(number) for number in range(3, 7)])))[1]
        assert "Head" not in text and foot.format(4) not in text, foot
    text = read_pdf(pdf(framed(PAGES, ["Head"], ["iii", "iv", "v", "vi"])))[1]
    assert not {"iii", "iv", "v"} & set(text.split())
    sheets = [[Paragraph(f"Pump {n}", STYLES["Heading1"]), Paragraph("Blue." * n), PageBreak()] for n in (1, 2, 3)]
    out = io.BytesIO()
    SimpleDocTemplate(out, pagesize=A4).build([part for sheet in sheets for part in sheet])
    assert [f"Pump {n}" in read_pdf(out.getvalue())[1] for n in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_turned_text_is_read_along_its_lines(turn: int) -> None:
    lines = [f"The sideways line {number} of a page" for number in range(3)]
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=A4)
    canvas.drawString(72, 760, "Upright.")
    canvas.translate(300, 400)
    canvas.rotate(turn)
    for number, line in enumerate(lines):
        canvas.drawString(0, -14 * number, line)
    canvas.save()
    text = read_pdf(out.getvalue())[1]
    assert " ".join(lines) in text and "Upright." in text


@pytest.mark.parametrize(("beside", "is_read"), [("3", True), ("The text of the page.", False)])
def test_text_of_a_drawing_is_read_if_it_is_most_of_the_page(beside: str, is_read: bool) -> None:
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=A4)
    canvas.beginForm("form")
    canvas.drawString(72, 700, "Labels are here.")
    canvas.endForm()
    canvas.doForm("form")
    canvas.drawString(72, 500, beside)
    canvas.save()
    assert ("Labels are here." in read_pdf(out.getvalue())[1]) == is_read


def test_larger_lines_are_headings_of_their_passages() -> None:
    care = [(10, f"Clean it in week {week} of each year, and wait until it is dry.") for week in range(8)]
    lines = [(20, "The pumps of the harbour"), (20, "and their care"), (10, "All of them are blue.")]
    for name, bar in (("Pump A", 4), ("Pump B", 9), ("Pump C", 6)):
        lines += [(14, name), (12, "Care"), *care, (12, "Limits"), (10, f"The highest pressure is {bar} bar.")]
    _, text, _ = read_pdf(sized(lines))
    assert text.startswith(
        "# The pumps of the harbour and their care\n\nAll of them are blue.\n\n## Pump A\n\n### Care\n\n"
    )
    passages = split(text, count_tokens=lambda t: len(t.split()), chunk_tokens=80, title="Manual", markdown=True)
    for name, bar in (("Pump A", 4), ("Pump B", 9), ("Pump C", 6)):
        (passage,) = (passage for passage in passages if f"is {bar} bar" in passage)
        assert f"and their care > {name} > " in passage.split("\n")[0] and "Limits" in passage


@pytest.mark.parametrize(
    "lines",
    [
        [(24, "Blue pumps"), (24, "Red valves"), (12, "of the harbour"), (12, "and the town")],  # slides
        [(10, "A line."), (10.5, "Another line that is hardly larger."), (10, "And a third one, of the usual size.")],
        [(10, "A line of text. " * 5)] * 20 + [(14, "Large print that goes on and on. " * 7)],
    ],
)
def test_text_that_is_a_little_larger_or_much_is_no_heading(lines: list[tuple[float, str]]) -> None:
    assert "#" not in read_pdf(sized(lines))[1]


def test_signs_without_a_name_are_bullets_or_nothing() -> None:
    assert read_pdf(sized([(10, "• Clean it."), (10, "• Close• it.")]))[1] == "• Clean it.\n• Close it."


def test_items_of_a_list_keep_their_lines() -> None:
    text = read_pdf(pdf([block(["What to do:", "1. Clean the pump", "every week.", "2. Close it."])]))[1]
    assert text == "What to do:\n1. Clean the pump every week.\n2. Close it."


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_small_files_that_take_much_memory_or_time_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_MEMORY", 300 << 20)
    monkeypatch.setattr(reader, "_MOST_SECONDS", 3)
    assert len(BOMBS[name]) < 400_000
    with pytest.raises(ValueError, match="^too large: to read it takes over (3 s|300 MB)"):
        read_pdf(BOMBS[name])


@pytest.mark.parametrize("cut", [0, 4, 20])
def test_streams_with_a_wrong_checksum_or_without_their_end_are_read(cut: int) -> None:
    packed = zlib.compress(b"BT /F 9 Tf 50 700 Td (Here is a text.) Tj ET" + b" " * 5000 + bytes(range(200)))
    damaged = packed[:-4] + b"xxxx" if not cut else packed[:-cut]
    assert read_pdf(written(damaged, "/FlateDecode"))[1] == "Here is a text."


THE_END = "That is all that there is to say of what the trams of this town cost in this year."


def fares(num_rows: int, *, header: bool = True, repeats: int = 0, second: str = "{}") -> bytes:
    """A table with text around it, over as many pages as it needs."""
    out = io.BytesIO()
    rows = [["Zone", "Price", "Where it is"]] * header
    rows += [[f"Z{n}", second.format(n * 3), f"behind the {n}th bridge of it"] for n in range(num_rows)]
    before, after = (Paragraph(text, STYLES["Normal"]) for text in ("What a tram costs.", THE_END))
    SimpleDocTemplate(out, pagesize=A4).build([before, Table(rows, repeatRows=repeats), after])
    return out.getvalue()


@pytest.mark.parametrize("repeats", [0, 1])
@pytest.mark.parametrize("num_rows", [3, 60, 150])
def test_rows_of_tables_stay_rows_in_order_with_the_header_in_each_passage(num_rows: int, repeats: int) -> None:
    text = read_pdf(fares(num_rows, repeats=repeats))[1]
    rows = [f"| Z{n} | {n * 3} | behind the {n}th bridge of it |" for n in range(num_rows)]
    table = "\n".join(["| Zone | Price | Where it is |", "|---|---|---|", *rows])
    assert text == f"What a tram costs.\n\n{table}\n\n{THE_END}"
    passages = split(text, count_tokens=lambda text: len(text.split()), chunk_tokens=90, markdown=True)
    assert num_rows < 4 or len(passages) > 3
    assert all("| Zone | Price | Where it is |\n|---|---|---|\n| Z" in passage for passage in passages)


def test_a_row_without_a_sign_of_being_a_header_is_none() -> None:
    text = read_pdf(fares(4, header=False, second="{} pence"))[1]
    assert "|  |  |  |\n|---|---|---|\n| Z0 | 0 pence | behind the 0th bridge of it |\n| Z1 |" in text


def test_a_header_is_known_by_its_font_and_lines_of_a_cell_are_one() -> None:
    out = io.BytesIO()
    canvas = Canvas(out, pagesize=A4)
    rows = [("Pump", "Made in"), ("Alder", "Bergen"), ("Birch", "Turku"), ("Cedar", "Oslo")]
    for number, (name, town) in enumerate(rows):
        canvas.setFont("Helvetica" if number else "Helvetica-Bold", 11)
        canvas.drawString(72, 700 - 40 * number, name)
        canvas.drawString(200, 700 - 40 * number, town)
        canvas.drawString(200, 687 - 40 * number, "by hand" if number else "(town)")
    canvas.save()
    table = "\n".join(f"| {name} | {town} by hand |" for name, town in rows[1:])
    assert read_pdf(out.getvalue())[1] == f"| Pump | Made in (town) |\n|---|---|\n{table}"


def test_columns_of_prose_are_no_table() -> None:
    left = "The moon pulls the sea|and the sea rises twice|a day in most of the|harbours of this world".split("|")
    right = "while the sun pulls less|as it is so far from us|which is why its tides|are hardly ever seen".split("|")
    text = read_pdf(pdf([[*block(left), *block(right, 320)]]))[1]
    assert "|" not in text and " ".join(text.split()) == " ".join([*left, *right])
