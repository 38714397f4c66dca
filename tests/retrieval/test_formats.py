"""Tables, notebooks, mail, books and office files, also those made to do harm."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from ccjax.retrieval import DocumentError, LoadedDocument
from ccjax.retrieval.chunking import split
from ccjax.retrieval.documents import parse_document

TYPES = '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
RELATIONS = '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def load(name: str, data: bytes | str) -> LoadedDocument:
    return parse_document(Path(name), data if isinstance(data, bytes) else data.encode())


def refused(name: str, data: bytes | str) -> str:
    with pytest.raises(DocumentError) as caught:
        load(name, data)
    return caught.value.reason


def archive(parts: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return out.getvalue()


def docx(body: str, **parts: str) -> bytes:
    paragraph = '<w:p><w:pPr><w:pStyle w:val="{}"/></w:pPr><w:r><w:t>{}</w:t></w:r></w:p>'
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="Heading{n}"><w:name w:val="heading {n}"/></w:style>' for n in (1, 2)
    )
    return archive(
        {
            "[Content_Types].xml": f'{TYPES}<Default Extension="xml" ContentType="application/xml"/></Types>',
            "_rels/.rels": f'{RELATIONS}<Relationship Id="r" Type="{OFFICE}" Target="word/document.xml"/>'
            "</Relationships>",
            "word/styles.xml": f"<w:styles {WORD}>{styles}</w:styles>",
            "word/document.xml": f"<w:document {WORD}><w:body>{paragraph.format('Heading1', 'Pumps')}"
            f"{paragraph.format('Heading2', 'Care')}{body}</w:body></w:document>",
            **parts,
        }
    )


CELLS = "".join(
    f"<w:tr>{''.join(f'<w:tc><w:p><w:r><w:t>{cell}</w:t></w:r></w:p></w:tc>' for cell in row)}</w:tr>"
    for row in (("Zone", "Price"), ("A", "3"))
)
DOCX = docx(f"<w:p><w:r><w:t>Clean it.</w:t></w:r></w:p><w:tbl>{CELLS}</w:tbl>")
CHAPTER = "<html><head><title>{0}</title></head><body><h1>{0}</h1><p>{1}</p></body></html>"


def epub(**parts: str) -> bytes:
    hrefs = {"b": "text/two.xhtml", "a": "text/one%20a.xhtml", "c": "../../../etc/passwd"}
    manifest = "".join(f'<item id="{name}" href="{href}"/>' for name, href in hrefs.items())
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>The Book</dc:title></metadata><manifest>{manifest}</manifest><spine>"
        '<itemref idref="a"/><itemref idref="b"/><itemref idref="c"/><itemref idref="none"/></spine></package>'
    )
    container = '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>'
    return archive(
        {
            "META-INF/container.xml": container,
            "OPS/book.opf": package,
            "OPS/text/one a.xhtml": CHAPTER.format("One", "The moon."),
            "OPS/text/two.xhtml": CHAPTER.format("Two", "The sea."),
            **parts,
        }
    )


def pptx() -> bytes:
    import pptx as library

    presentation = library.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "Tides"
    slide.placeholders[1].text_frame.text = "The moon pulls."
    inner = slide.placeholders[1].text_frame.add_paragraph()
    inner.text, inner.level = "Twice a day.", 1
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    table = presentation.slides.add_slide(presentation.slide_layouts[6]).shapes.add_table(2, 2, 0, 0, 99, 99).table
    for row, cells in enumerate((("Zone", "Price"), ("A", "3"))):
        for column, cell in enumerate(cells):
            table.cell(row, column).text = cell
    out = io.BytesIO()
    presentation.save(out)
    return out.getvalue()


def xlsx(num_rows: int = 1, above: str = "") -> bytes:
    import openpyxl

    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.title = "Fares"
    for row in (*([(above,)] if above else []), ("Zone", "Price"), *(("A|B", n * 3) for n in range(num_rows))):
        sheet.append(row)
    book.create_sheet("Empty")
    other = book.create_sheet("Notes")
    other["C3"] = "=1+1"
    other["A1"] = "Only one column."
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


NOTEBOOK = {
    "metadata": {"kernelspec": {"language": "python"}},
    "cells": [
        {"cell_type": "markdown", "source": ["# Tides\n", "\n", "The moon."]},
        {"cell_type": "code", "source": "x = 1\nx", "outputs": [{"data": {"text/plain": ["1"], "image/png": "AAAA"}}]},
        {"cell_type": "code", "source": "print(2)", "outputs": [{"name": "stdout", "text": ["2\n"]}]},
    ],
}
MAIL = """From: Ada <ada@example.org>
To: Bob <bob@example.org>
Subject: =?utf-8?q?The_pump_of_H=C3=B6he?=
Date: Mon, 6 May 2024 09:00:00 +0000
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="b"

--b
Content-Type: text/html; charset=iso-8859-1

<p>It leaks.</p><p hidden>no</p>
--b
Content-Type: application/pdf
Content-Disposition: attachment; filename="bill.pdf"

x
--b--
"""
FARES = "| Zone | Price |\n|---|---|\n| A | 3 |"
SLIDES = f"## Tides\n\n- The moon pulls.\n  - Twice a day.\n\nSay it slowly.\n\n## Slide 2\n\n{FARES}"


@pytest.mark.parametrize(
    ("name", "data", "title", "text"),
    [
        ("a.csv", "Zone;Price\nA;3\n\n", "A", FARES),
        ("a.csv", 'Zone,Price\n"A",3\n', "A", FARES),
        ("a.csv", 'Name,Said\nAda,"one\ntwo | three, ""four"""\nBob\n', "A", None),
        ("a.tsv", "Zone\tPrice\nA\t3", "A", FARES),
        ("a.csv", "one\ntwo", "A", "one\ntwo"),
        (
            "a.csv",
            "Straße;Höhe\nGäste;für drei".encode("cp1252"),
            "A",
            "| Straße | Höhe |\n|---|---|\n| Gäste | für drei |",
        ),
        (
            "a.rst",
            "=====\nTides\n=====\n\nThe moon.\n\nWhy\n---\n\nIt pulls.",
            "Tides",
            "The moon.\n\n## Why\n\nIt pulls.",
        ),
        ("a.log", "2024 INFO start\n2024 INFO stop", "A", "2024 INFO start\n2024 INFO stop"),
        ("README", "# Not Markdown", "README", "# Not Markdown"),
        ("a.markdown", "# Tides\nThe moon.", "Tides", "The moon."),
        ("a.ipynb", json.dumps(NOTEBOOK), "Tides", None),
        ("a.eml", MAIL, "The pump of Höhe", None),
        ("a.docx", DOCX, "Pumps", f"## Care\n\nClean it.\n\n{FARES}"),
        (
            "a.pptx",
            pptx(),
            "A",
            f"## Tides\n\n- The moon pulls.\n  - Twice a day.\n\nSay it slowly.\n\n## Slide 2\n\n{FARES}",
        ),
        ("a.xlsx", xlsx(), "A", None),
        ("a.epub", epub(), "The Book", "# One\n\nThe moon.\n\n# Two\n\nThe sea."),
    ],
)
def test_other_formats_become_markdown(name: str, data: bytes | str, title: str, text: str | None) -> None:
    loaded = load(name, data)
    assert loaded.title == title and (text is None or loaded.text == text)
    wanted = {
        "a.ipynb": "The moon.\n\n```python\nx = 1\nx\n```\n\n```\n1\n```\n\n```python\nprint(2)\n```\n\n```\n2\n```",
        "a.eml": "From: Ada <ada@example.org>\nTo: Bob <bob@example.org>\nDate: Mon, 06 May 2024 09:00:00 +0000\n"
        "Attached: bill.pdf\n\nIt leaks.",
        "a.xlsx": "## Fares\n\n| Zone | Price |\n|---|---|\n| A\\|B | 0 |\n\n## Notes\n\n",
    }
    if text is None and name in wanted:
        assert loaded.text.startswith(wanted[name].strip() if name != "a.xlsx" else wanted[name])
    if text is None and name == "a.csv":
        assert loaded.text == '| Name | Said |\n|---|---|\n| Ada | one two \\| three, "four" |\n| Bob |  |'


TEXT_PART = "Content-Type: text/plain; charset={}\nContent-Transfer-Encoding: 8bit\n\n{}"


@pytest.mark.parametrize(
    ("charset", "encoding"),
    [("", "utf-8"), ("us-ascii", "utf-8"), ("utf-8", "cp1252"), ("none", "utf-8"), ("iso-8859-1", "cp1252")],
)
def test_mail_in_another_encoding_than_it_declares_is_read(charset: str, encoding: str) -> None:
    text = "“Grüße” an José in Köln"
    mail = load("a.eml", f"Subject: Grüße\n{TEXT_PART.format(charset, text)}".encode(encoding))
    assert (mail.title, mail.text) == ("Grüße", text)


@pytest.mark.parametrize(
    ("charset", "text"),
    [
        ("iso-2022-kr", "안녕하세요"),
        ("hz-gb-2312", "你好"),
        *((charset, "Grüße") for charset in ("utf-7", "utf-16le", "cp437", "cp850", "macroman")),
    ],
)
def test_encodings_that_browsers_do_not_know_are_read(charset: str, text: str) -> None:
    body = base64.encodebytes(text.encode(charset)).decode()
    mail = f"Content-Type: text/plain; charset={charset}\nContent-Transfer-Encoding: base64\n\n{body}"
    assert load("a.eml", mail).text == text
    if charset != "utf-16le":
        assert load("a.html", f"<meta charset={charset}><p>".encode() + text.encode(charset)).text == text


@pytest.mark.parametrize("charset", ["idna", "punycode", "unicode_escape", "undefined", "hex", "replacement"])
def test_names_that_are_no_encoding_are_ignored(charset: str) -> None:
    assert load("a.eml", TEXT_PART.format(charset, "a-\\n ü")).text == "a-\\n ü"


def test_headers_of_a_mail_are_read_as_far_as_they_can_be() -> None:
    mail = load("a.eml", "Subject: =?utf-8?q?Gr=C3=BC=C3=9Fe?= an Jürgen\nFrom: <\nTo: a@[\n\nHi")
    assert (mail.title, mail.text) == ("Grüße an Jürgen", "From: <\nTo: a@[\n\nHi")


def mixed(boundary: str, *parts: str, kind: str = "mixed") -> str:
    body = "".join(f"--{boundary}\n{part}\n" for part in parts)
    return f"MIME-Version: 1.0\nContent-Type: multipart/{kind}; boundary={boundary}\n\n{body}--{boundary}--\n"


def test_what_a_mail_does_not_show_is_named() -> None:
    file = "Content-Type: {}\nContent-Disposition: {}; filename={}\n\nno"
    files = file.format("image/png", "inline", "a.png"), file.format("application/pdf", "attachment", "offer.pdf")
    related = mixed("b", TEXT_PART.format("utf-8", "See below."), *files, kind="related")
    assert load("a.eml", related).text == "Attached: offer.pdf\n\nSee below."
    deep = "Subject: deep\n\nno"
    for number in range(5):
        deep = f"Subject: {number}\nContent-Type: message/rfc822\n\n{deep}"
    assert load("a.eml", deep).text.split() == "## 3 ## 2 ## 1 ## 0 Attached: deep".split()


def test_all_texts_of_a_mail_and_the_mails_in_it_are_read() -> None:
    inner = "Subject: Pumps\nFrom: Ada\n" + TEXT_PART.format("utf-8", "It leaks.")
    html = "Content-Type: text/html\n\n<p>See below.</p>"
    file = "Content-Type: text/plain\nContent-Disposition: attachment; filename=n.txt\n\nno"
    both = mixed("c", TEXT_PART.format("utf-8", " "), html, kind="alternative")
    parts = (both, TEXT_PART.format("utf-8", "Bob"), file, f"Content-Type: message/rfc822\n\n{inner}")
    shown = "Attached: n.txt\n\nSee below.\n\nBob\n\n## Pumps\n\nFrom: Ada\n\nIt leaks."
    assert load("a.eml", mixed("b", *parts)).text == shown
    inner = base64.encodebytes(inner.encode()).decode()
    encoded = f"Content-Type: message/rfc822\nContent-Transfer-Encoding: base64\n\n{inner}"
    assert load("a.eml", mixed("b", *parts[:-1], encoded)).text == shown
    deep = "Content-Type: message/rfc822\n\n" * 60
    assert "deep" not in load("a.eml", f"Subject: a\n{deep}deep").text


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ("a,b\n" + "x" * 200_000 + ",2\n", ["x" * 200_000 + " | 2"]),
        ('a,b\n"Rey, A",1\n"x,y\nz,w\n' + "1,2\n" * 20, ["Rey, A | 1", '"x | y', "z | w", *["1 | 2"] * 20]),
        ('a,b\n1,"x\n2,y', ['1 | "x', "2 | y"]),
        ('a,b\n"3,4\n' + "1,2\n" * 20 + '"5,6\n7,8', ['"3 | 4', *["1 | 2"] * 20, '"5 | 6', "7 | 8"]),
        ('a,b\n1,"x, y\nz, w"\n', ["1 | x, y z, w"]),
        ('a,b\n1,"' + "x, y\n" * 12 + '"\n2,"z, w"\n', [f"1 | {' '.join(['x, y'] * 12)}", "2 | z, w"]),
        ('a,b\n1,"x\n2,y\n3,"z\nw"\n', ['1 | "x', "2 | y", "3 | z w"]),
        ("a,b\r1,2\r3,4", ["1 | 2", "3 | 4"]),
    ],
)
def test_rows_of_odd_tables_stay_rows(data: str, rows: list[str]) -> None:
    assert load("a.csv", data).text.split("\n") == ["| a | b |", "|---|---|", *(f"| {row} |" for row in rows)]


def test_notebook_with_nothing_in_some_fields_is_read() -> None:
    cells = [{"cell_type": "code", "source": "x", "outputs": [None]}, {"cell_type": "markdown", "source": None}, None]
    for metadata in (None, {"kernelspec": "python"}):
        assert load("a.ipynb", json.dumps({"metadata": metadata, "cells": cells})).text == "```\nx\n```"
    assert refused("a.ipynb", '{"cells": null, "worksheets": null}') == "no text"


def test_hidden_sheets_and_slides_are_left_out() -> None:
    import openpyxl
    import pptx as library

    book, out = openpyxl.load_workbook(io.BytesIO(xlsx())), io.BytesIO()
    book["Notes"].sheet_state = "hidden"
    book.save(out)
    assert "Notes" not in load("a.xlsx", out.getvalue()).text
    slides, out = library.Presentation(io.BytesIO(pptx())), io.BytesIO()
    slides.slides[0].element.set("show", "0")
    slides.save(out)
    assert load("a.pptx", out.getvalue()).text == f"## Slide 2\n\n{FARES}"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", "Zone,Price\n" + "".join(f"Zone {n},{n * 3} Euro\n" for n in range(60))),
        ("a.csv", "sep=;\nZone;Price\n" + "".join(f"Zone {n};{n},30 Euro\n" for n in range(60))),
        ("a.csv", 'Prices of 2024\n\n"in all zones, by ship"\nZone,Price\n' + "Zone 1,3 Euro\n" * 60),
        ("a.csv", "Prices of 2024,,\nZone,Price,\n" + "Zone 1,3 Euro,\n" * 60),
        ("a.csv", "Zone;Price\n" + '"Zone 1\nby day, by night, by ship";3 Euro\n' * 60),
        ("a.tsv", "Zone\tPrice\n" + "".join(f"Zone {n}\t{n * 3} Euro\n" for n in range(60))),
        ("a.xlsx", xlsx(60)),
        ("a.xlsx", xlsx(60, "Prices of 2024")),
    ],
)
def test_each_passage_of_a_table_has_its_header(name: str, data: bytes | str) -> None:
    loaded = load(name, data)
    passages = split(loaded.text, count_tokens=lambda t: len(t.split()), chunk_tokens=100, markdown=True)
    assert len(passages) > 2 and all(
        re.search(r"^\| Zone \| Price \|(?:  \|)?\n\|---\|---\|(?:---\|)?\n\| ", passage, re.M)
        for passage in passages
        if "|" in passage
    )


def test_rows_of_a_wide_table_name_their_columns() -> None:
    names = [f"a rather long name of column {n}" for n in range(12)]
    text = load("a.csv", ",".join(names) + "\n" + ",".join(map(str, range(12)))).text
    assert text.startswith("- a rather long name of column 0: 0; a rather long name of column 1: 1; ")


BOMB = {"word/media/x.xml": "0" * 210_000_000}
ENTITIES = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>'


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.docx", b"no archive", "broken archive"),
        ("a.docx", DOCX[:300], "broken archive"),
        ("a.docx", archive({"a": "b"}), "cannot be parsed: "),
        ("a.pptx", archive({"a": "b"}), "cannot be parsed: "),
        ("a.xlsx", archive({"a": "b"}), "cannot be parsed: "),
        ("a.epub", archive({"a": "b"}), "broken book: "),
        ("a.xlsx", b"\xd0\xcf\x11\xe0" + bytes(600), "protected by a password, or a file of an older format"),
        ("a.docx", archive(BOMB), "too large: wanted at most 200000000 bytes"),
        ("a.epub", archive(BOMB), "too large: wanted at most 200000000 bytes"),
        ("a.docx", docx("", **{"word/x.xml": ENTITIES}), "refused: word/x.xml defines XML entities"),
        ("a.docx", docx("", **{"word/document.xml": ENTITIES}), "refused: word/document.xml defines XML entities"),
        (
            "a.docx",
            archive({"word/document.xml": ENTITIES.encode("utf-16")}),
            "refused: word/document.xml defines XML entities",
        ),
        ("a.epub", epub(**{"OPS/book.opf": ENTITIES}), "refused: OPS/book.opf defines XML entities"),
        ("a.xlsx", archive({"xl/workbook.xml": ENTITIES}), "refused: xl/workbook.xml defines XML entities"),
        ("a.ipynb", "[1, 2]", "cannot be parsed: "),
        ("a.ipynb", "{", "not JSON: Expecting "),
        ("a.rtf", "x", "unsupported suffix '.rtf'"),
    ],
)
def test_harmful_and_broken_files_are_refused(name: str, data: bytes | str, reason: str, tmp_path: Path) -> None:
    if name == "a.rtf":
        from ccjax.retrieval import load_document

        with pytest.raises(DocumentError, match="unsupported suffix '.rtf', wanted one of .csv"):
            load_document(tmp_path / name)
    else:
        assert refused(name, data).startswith(reason)


def test_names_in_archives_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    slips = {"../../slip.txt": "x", "/abs.txt": "x", "..\\slip.txt": "x"}
    assert load("a.docx", docx("<w:p><w:r><w:t>Text.</w:t></w:r></w:p>", **slips)).title == "Pumps"
    assert "root" not in load("a.epub", epub(**slips)).text
    macro = {"word/vbaProject.bin": "Sub AutoOpen()"}
    assert "AutoOpen" not in load("a.docx", docx("<w:p><w:r><w:t>Text.</w:t></w:r></w:p>", **macro)).text
    assert list(tmp_path.iterdir()) == [] and not (tmp_path.parent / "slip.txt").exists()


def test_sheet_that_claims_billions_of_cells_is_read() -> None:
    with zipfile.ZipFile(io.BytesIO(xlsx())) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    name = "xl/worksheets/sheet1.xml"
    parts[name] = parts[name].replace(b'ref="A1:B2"', b'ref="A1:XFD1048576"')
    assert "| Zone | Price |" in load("a.xlsx", archive(parts)).text
    far = b"".join(b'<row r="%d"><c r="XFD%d"><v>1</v></c></row>' % (n, n) for n in range(1, 400))
    parts[name] = parts[name][: parts[name].index(b"<sheetData>") + 11] + far + b"</sheetData></worksheet>"
    assert refused("a.xlsx", archive(parts)) == "too large: wanted at most 2000000 cells"


@pytest.mark.parametrize(("suffix", "module"), [(".docx", "mammoth"), (".pptx", "pptx"), (".xlsx", "openpyxl")])
def test_missing_library_is_named_with_its_extra(suffix: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert refused(f"a{suffix}", DOCX) == f"reading {suffix} needs {module}: pip install 'ccjax[office]'"


def rst_table(kind: str, num_rows: int) -> str:
    """A table in each of the forms of reStructuredText, with the caption "Fares"."""
    head, row, foot = {
        "grid": ("+------+-------+\n| Zone | Price |\n+======+=======+\n", "| {:<4} | {:<5} |\n+------+-------+\n", ""),
        "simple": ("====  =====\nZone  Price\n====  =====\n", "{:<4}  {}\n", "====  =====\n"),
        "list-table": (":header-rows: 1\n\n* - Zone\n  - Price\n", "* - {}\n  - {}\n", ""),
        "csv-table": (":header: Zone,Price\n\n", '"{}",{}\n', ""),
    }[kind]
    body = head + "".join(row.format(f"Z{number}", number * 3) for number in range(num_rows)) + foot
    directive = kind if "-" in kind else "table"
    options = "" if "-" in kind else "\n"
    return f".. {directive}:: Fares\n{options}{textwrap.indent(body, '   ')}"


@pytest.mark.parametrize("kind", ["grid", "simple", "list-table", "csv-table"])
def test_tables_of_rst_keep_caption_and_header_in_each_passage(kind: str) -> None:
    loaded = load("a.rst", f"Trams\n=====\n\nWhat they cost.\n\n{rst_table(kind, 60)}\nThe end.\n")
    passages = split(loaded.text, count_tokens=lambda text: len(text.split()), chunk_tokens=80, markdown=True)
    rows = [[line for line in text.split("\n") if line.startswith("| Z") and line[3].isdigit()] for text in passages]
    assert [row for some in rows for row in some] == [f"| Z{number} | {number * 3} |" for number in range(60)]
    parts = [text for text, some in zip(passages, rows, strict=True) if some]
    assert len(parts) > 2
    for text in parts:
        assert "Fares\n\n| Zone | Price |\n|---|---|\n| Z" in text


def test_rst_that_docutils_does_not_know_is_text_and_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    text = (
        f".. include:: {tmp_path}/secret.txt\n\n.. csv-table::\n   :file: {tmp_path}/secret.txt\n\n"
        ".. raw:: html\n\n   <b>bold</b>\n\n.. function:: pump(bar)\n\n   Raises the *pressure*.\n\n"
        "=====  =====\nZone  Price\nbroken table\n\nSee :ref:`tides` |here|."
    )
    found = load("a.rst", text).text
    for part in ("pump(bar)", "Raises the", "broken table", "tides"):
        assert part in found
    assert "the secret" not in found


@pytest.mark.parametrize("underline", ["-----", "--------------"])
def test_a_heading_of_rst_with_too_short_a_line_is_told_once(underline: str) -> None:
    sections = (
        f"{name}\n{underline}\n\n{text}" for name, text in (("Engine Orion", "It is *old."), ("Engine Vega", "New."))
    )
    text = load("a.rst", "\n\n".join(["Engines\n=======\n\nAll are blue.", *sections])).text
    assert text.count("Engine Orion") == text.count("Engine Vega") == text.count("It is *old.") == 1
    assert "## Engine Orion" in text and "---" not in text and "New." in text


@pytest.mark.parametrize(
    "text", ["Pump A\n------\n\nRed.\n\nPump B\n------\n\nBlue.", "Only a sentence.", ".. note:: A note."]
)
def test_rst_without_a_title_has_the_name_of_its_file(text: str) -> None:
    assert load("Old_pumps.rst", text).title == load("Old_pumps.txt", text).title == "Old pumps"
