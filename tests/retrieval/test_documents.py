"""Every file type from real bytes, and every way in which a file can be unusable."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pypdf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ccjax.retrieval import DocumentError, LoadedDocument, load_document
from ccjax.retrieval.documents import parse_document
from tests.retrieval.files import pdf_bytes

PDF = pdf_bytes(
    [["Chunks are cached once", "and reused any-", "where they appear."], ["Second page."]], title="On Reuse"
)


def load(tmp_path: Path, name: str, data: bytes | str) -> LoadedDocument:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return load_document(path)


@pytest.mark.parametrize(
    ("source", "title", "text"),
    [
        ("# Tides\n\nThe moon pulls.\n", "Tides", "The moon pulls."),
        ("# Tides ##\r\n\r\nThe moon pulls.\r\nTwice.", "Tides", "The moon pulls.\nTwice."),
        ("# Why C#\nIt compiles.", "Why C#", "It compiles."),
        ("# ##\n# Tides\nThe moon.", "Tides", "# ##\nThe moon."),
        ("\ufeff# Tides\nThe moon.", "Tides", "The moon."),
        ("Tides of the sea\n====\n\nThe moon.", "Tides of the sea", "The moon."),
        ("badge\n\n# Tides\n\nThe moon.", "Tides", "badge\n\n\nThe moon."),
        ("```sh\n# not a title\n```\nText.", "My notes", "```sh\n# not a title\n```\nText."),
        ("~~~\n```\n# not\n~~~\n# Tides\nText.", "Tides", "~~~\n```\n# not\n~~~\nText."),
        ("## Only a section\n\nText.", "My notes", "## Only a section\n\nText."),
        ("#hashtag\nText.", "My notes", "#hashtag\nText."),
        ("two lines\nof prose\n===\nText.", "My notes", "two lines\nof prose\n===\nText."),
        ('---\ntitle: "Tides"\ntags:\n  - sea\n---\nThe moon.', "Tides", "The moon."),
        ("---\ntitle: Tides\n---\n# Tides\nThe moon.", "Tides", "The moon."),
        ("---\ntitle: Tides\n---\n# Moon\nText.", "Tides", "# Moon\nText."),
        ("---\n\nA thematic break.\n\n---\n\nMore.", "My notes", "---\n\nA thematic break.\n\n---\n\nMore."),
    ],
)
def test_markdown_title_text_and_metadata_are_loaded(tmp_path: Path, source: str, title: str, text: str) -> None:
    loaded = load(tmp_path, "my_notes.md", source)
    assert (loaded.title, loaded.text, loaded.markdown) == (title, text, True)
    assert loaded.metadata == ({"title": "Tides"} if source.startswith("---\ntitle") else {})


def test_front_matter_becomes_metadata(tmp_path: Path) -> None:
    front = """---
title: Tides
year: 2020
height: 1.5
draft: true
date: 2020-05-17
tags: [sea, moon]
author: {name: Ada}
none:
bad: .inf
---
"""
    expected = {"title": "Tides", "year": 2020, "height": 1.5, "draft": True, "date": "2020-05-17"}
    assert load(tmp_path, "a.md", front + "Text.").metadata == expected
    assert load(tmp_path, "a.md", front.replace("\n", "\r\n") + "Text.").metadata == expected
    assert load(tmp_path, "a.md", "---\ntitle: [Tides\n---\nText.").metadata == {}
    assert load(tmp_path, "a.md", "---\ndate: 2020-99-99\n---\nText.").metadata in ({}, {"date": "2020-99-99"})
    assert load(tmp_path, "a.txt", front + "Text.").metadata == {}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_plain_text_keeps_its_lines_and_uses_the_file_name_as_title(tmp_path: Path, encoding: str) -> None:
    document = load(tmp_path, "sea-level_2024.TXT", "\n# Höhe\r\n  indented\n".encode(encoding))
    assert document == LoadedDocument("Sea level 2024", "# Höhe\n  indented")


PAGE = """<!DOCTYPE html><html><head><title> Sea
 level </title><style>p {color: red}</style><script>alert("no")</script></head><body><!-- hidden -->
<h1>Sea level</h1><p>It is <b>ris</b>ing,
   says <a href="x">a &lt;report&gt;</a>.<br>Fast.</p><ul><li>one</li><li>two</li></ul>
<table><tr><th>year</th><th>mm</th></tr><tr><td>2024</td><td>4.6</td></tr></table>
<pre>keep
  this</pre></body></html>"""
PAGE_TEXT = "It is rising, says a <report>.\nFast.\n\none\n\ntwo\n\nyear mm\n\n2024 4.6\n\nkeep\n  this"


@pytest.mark.parametrize("suffix", [".html", ".htm"])
def test_html_title_and_text_are_loaded(tmp_path: Path, suffix: str) -> None:
    assert load(tmp_path, f"x{suffix}", PAGE) == LoadedDocument("Sea level", PAGE_TEXT)


@pytest.mark.parametrize(
    ("source", "title", "text"),
    [
        ("<h1>Tides</h1><p>The moon.</p>", "Tides", "The moon."),
        ("<title>Sea</title><h1>Tides</h1><p>The moon.</p>", "Sea", "Tides\n\nThe moon."),
        ("<p>The moon.", "Page", "The moon."),
        ("just words", "Page", "just words"),
        ('<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body>The moon.</body></html>', "Page", None),
    ],
)
def test_html_title_is_found_despite_odd_markup(tmp_path: Path, source: str, title: str, text: str | None) -> None:
    assert load(tmp_path, "page.html", source) == LoadedDocument(title, text or "The moon.")


@pytest.mark.parametrize(
    ("charset", "encoding"), [("utf-8", "utf-8"), ("shift_jis", "shift_jis"), ("iso-8859-1", "cp1252")]
)
def test_html_is_decoded_with_the_declared_charset(tmp_path: Path, charset: str, encoding: str) -> None:
    words = "月と海" if charset == "shift_jis" else "\u201cMünchen\u201d"
    source = f'<meta charset="{charset}"><p>{words}</p>'.encode(encoding)
    assert load(tmp_path, "page.html", source).text == words


def test_pdf_title_and_text_are_loaded(tmp_path: Path) -> None:
    text = "Chunks are cached once and reused anywhere they appear.\n\nSecond page."
    assert load(tmp_path, "x.pdf", PDF) == LoadedDocument("On Reuse", text)
    assert load(tmp_path, "old_report.pdf", pdf_bytes([["Text."]])) == LoadedDocument("Old report", "Text.")


def test_lone_surrogates_of_a_pdf_font_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda page: "E = m\ud835c\x02")
    assert load(tmp_path, "x.pdf", pdf_bytes([["any"]])).text == "E = mc"


def encrypted_pdf(user_password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(PDF))
    writer.encrypt(user_password, owner_password="owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_pdf_with_an_empty_user_password_opens(tmp_path: Path) -> None:
    assert load(tmp_path, "x.pdf", encrypted_pdf("")).title == "On Reuse"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"caf\xe9", "byte 3 is not utf-8: unexpected end of data"),
        ("a.md", b"ok \xff\xfe", "byte 3 is not utf-8: invalid start byte"),
        ("a.html", b"<p>caf\xe9s</p>", "byte 6 is not utf-8"),
        ("a.html", b'<meta charset="klingon"><p>x</p>', "unknown character encoding 'klingon'"),
        ("a.txt", b"PK\x03\x04\x00\x00", "contains NUL bytes, so it is not text"),
        ("a.txt", b"", "the file is empty"),
        ("a.md", b" \n\t\n", "the file is empty"),
        ("a.md", b"# Title alone\n", "no text besides a title"),
        ("a.html", b"<title>x</title><script>y</script>", "no text besides a title"),
        ("a.html", b"<div></div>", "no text"),
        ("a.html", b"<p>fine</p><![# ", "broken HTML: "),
        ("a.pdf", b"not a pdf at all", "broken PDF: "),
        ("a.pdf", PDF[:60], "broken PDF: "),
        ("a.pdf", pdf_bytes([[""]]), "no text on any page"),
        ("a.pdf", encrypted_pdf("secret"), "encrypted, and the empty password does not open it"),
        ("a.docx", b"x", "unsupported suffix '.docx', wanted one of .htm, .html, .md, .pdf, .txt"),
        ("README", b"x", "unsupported suffix ''"),
    ],
)
@pytest.mark.filterwarnings("default::UserWarning")
def test_error_names_the_unusable_file_and_the_reason(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load(tmp_path, name, data)
    assert caught.value.path == str(tmp_path / name)
    assert caught.value.reason.startswith(reason)
    assert str(caught.value) == f"{tmp_path / name}: {caught.value.reason}"


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * 101)
    assert load_document(path, max_file_bytes=101).text == "x" * 101
    with pytest.raises(DocumentError, match=r"long\.txt: 101 bytes, over the limit max_file_bytes=100"):
        load_document(path, max_file_bytes=100)


def test_unreadable_or_special_files_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "loop.md").symlink_to("loop.md")
    reasons = {"pipe.txt": "not a regular file", "folder.txt": "not a regular", "loop.md": "cannot be read: Too many"}
    for name, reason in {**reasons, "absent.md": "cannot be read: No such file"}.items():
        with pytest.raises(DocumentError, match=reason):
            load_document(tmp_path / name)


def assert_clean_or_refused(suffix: str, data: bytes) -> None:
    try:
        document = parse_document(Path(f"x{suffix}"), data)
    except DocumentError:
        return
    assert document.title.strip() and document.text.strip()
    (document.title + document.text).encode("utf-8")  # no lone surrogates
    assert "\x00" not in document.text and "\r" not in document.text
    assert parse_document(Path(f"x{suffix}"), data) == document


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([".md", ".txt", ".html"]), st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode))
)
def test_any_bytes_are_parsed_or_refused(suffix: str, data: bytes) -> None:
    assert_clean_or_refused(suffix, data)


FRAGMENTS = [
    "# ",
    "=\n",
    "---\n",
    "```\n",
    "title: ",
    "a",
    "\n",
    "<p>",
    "</p>",
    "<h1>",
    "<title>",
    "<",
    "&#0;",
    "<![",
    "-->",
]


@given(st.sampled_from([".md", ".html"]), st.lists(st.sampled_from(FRAGMENTS), max_size=20))
def test_any_markup_is_parsed_or_refused(suffix: str, parts: list[str]) -> None:
    assert_clean_or_refused(suffix, "".join(parts).encode())


@given(st.integers(0, len(PDF) - 1), st.integers(0, 40), st.binary(max_size=10))
@pytest.mark.filterwarnings("default")
def test_a_damaged_pdf_is_parsed_or_refused(at: int, cut: int, put: bytes) -> None:
    assert_clean_or_refused(".pdf", PDF[:at] + put + PDF[at + cut :])


def test_long_repetitive_documents_are_parsed_in_linear_time() -> None:
    # Each of these hung a version whose patterns could match a line in two ways.
    lists = "---\na: b\n" + "- x: y\n" * 20_000
    assert parse_document(Path("x.md"), lists.encode()).title == "X"
    spaces = "# " + "a" + " " * 200_000 + "b\ntext"
    assert parse_document(Path("x.md"), spaces.encode()).text == "text"
    pre = "<pre>a" + " " * 200_000 + "b</pre>" + "<div>" * 3000
    assert parse_document(Path("x.html"), pre.encode()).title == "X"


def test_html_parsing_avoids_quadratic_tag_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each would take the square of their number: 20,000 paragraphs took over a minute."""
    monkeypatch.setattr("bs4.element.Tag.index", None)
    table = "<table><tr><td>1</td><td>2</td></tr></table>"
    loaded = load(tmp_path, "a.html", "<h1>T</h1>" + "<p>a<br>b</p>" * 3 + table + "<pre>x  y</pre>")
    assert (loaded.title, loaded.text) == ("T", "a\nb\n\na\nb\n\na\nb\n\n1 2\n\nx  y")
