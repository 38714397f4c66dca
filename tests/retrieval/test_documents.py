"""Every file type from real bytes, and every way in which a file can be unusable."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

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
        ("# Tides\nThe moon.\n\n# Winds\nThe sun.", "My notes", "# Tides\nThe moon.\n\n# Winds\nThe sun."),
        ("# Tides\n\nThe moon.\n\nWinds\n===\n\nSun.", "My notes", "# Tides\n\nThe moon.\n\nWinds\n===\n\nSun."),
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
    expected = {"title": "Tides", **({"tags": ["sea"]} if "tags" in source else {})}
    assert loaded.metadata == (expected if source.startswith("---\ntitle") else {})


@pytest.mark.parametrize("title", ["", "''", "no", "yes", "' '", "[]"])
def test_a_title_without_text_is_none(tmp_path: Path, title: str) -> None:
    loaded = load(tmp_path, "a.md", f"---\ntitle: {title}\n---\n# Moon\nText.")
    assert (loaded.title, loaded.text) == ("Moon", "Text.")


@pytest.mark.parametrize(
    ("front", "title", "metadata"),
    [
        ("title: >-\n  A folded\n  title", "A folded title", {}),
        ("title: |\n  Two\n  lines", "Two lines", {"title": "Two\nlines"}),
        ("title: 'it''s'", "it's", {}),
        ('title: "\\u00dcbung: 1" # a comment', "Übung: 1", {}),
        ("title: 2024", "2024", {"title": 2024}),
        ("'title': T\nlast review: 2024-01-02\nSee also: x", "T", {"last review": "2024-01-02", "See also": "x"}),
        ("title: T\ntags: [sea, 3, [a]]\naliases:\n- One\n- Two", "T", {"tags": ["sea", 3], "aliases": ["One", "Two"]}),
        ("title: T\n...", "T", {}),
        ("Überschrift: Ü\ntitle: T", "T", {"Überschrift": "Ü"}),
    ],
)
def test_front_matter_is_what_yaml_says(tmp_path: Path, front: str, title: str, metadata: dict) -> None:
    end = "" if front.endswith("...") else "\n---"
    loaded = load(tmp_path, "a.md", f"---\n{front}{end}\nThe moon.")
    assert (loaded.title, loaded.text) == (title, "The moon.")
    assert loaded.metadata == {"title": title} | metadata


def test_a_title_that_is_no_text_is_no_title(tmp_path: Path) -> None:
    aliases = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(20))
    loaded = load(tmp_path, "a.md", f"---\n{aliases}\ntitle: *a19\n---\n# Tides\n\nThe moon.")
    assert (loaded.title, loaded.text) == ("Tides", "The moon.")


def test_colours_of_terminals_are_no_text(tmp_path: Path) -> None:
    text = "\x1b[31mERROR\x1b[0m a[0] failed \x1b[1;4m[twice]\x1b[m\x1b[2K"
    assert load(tmp_path, "a.log", text).text == "ERROR a[0] failed [twice]"


@pytest.mark.parametrize("comment", [".. a comment", ".. one\n   two\n   three", "..\n   below"])
def test_comments_of_rst_are_left_out(tmp_path: Path, comment: str) -> None:
    kept = ".. note:: Wet.\n\n.. _here:\n\n.. [1] A footnote.\n\nSee ..\n\nEnd."
    loaded = load(tmp_path, "a.rst", f"Tides\n=====\n\nThe moon.\n\n{comment}\n\n{kept}")
    assert loaded.title == "Tides"
    assert loaded.text.split() == "The moon. Note Wet. [1] A footnote. See .. End.".split()


def test_front_matter_may_be_toml(tmp_path: Path) -> None:
    front = '+++\ntitle = "Tides"\ndate = 2024-01-02\ntags = ["sea", "moon"]\n[menu]\nweight = 3\n+++\nThe moon.'
    loaded = load(tmp_path, "a.md", front)
    assert (loaded.title, loaded.text, loaded.notes) == ("Tides", "The moon.", ())
    assert loaded.metadata == {"title": "Tides", "date": "2024-01-02", "tags": ["sea", "moon"]}


@pytest.mark.parametrize("front", ["---\ntitle: Note: a colon\n---", "---\ntags: [a\n---", '+++\ntitle = "open\n+++'])
def test_broken_front_matter_is_left_out_and_told(tmp_path: Path, front: str) -> None:
    loaded = load(tmp_path, "a.md", f"{front}\nThe moon.")
    assert (loaded.text, loaded.metadata) == ("The moon.", {})
    assert len(loaded.notes) == 1 and "front matter that is left out: " in loaded.notes[0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<div hidden>Secret</div>\n\nText.", "Text."),
        ("Text.\n\n<script>\nlet x\n\n= 1\n</script>\n\nMore.", "Text.\n\nMore."),
        ("<details>\n<summary>More</summary>\n\nInside *it*.\n\n</details>", "More\n\nInside *it*."),
        ("<p align=center><img src=x> <b>Low</b> tide</p>\nText.", "Low tide\n\nText."),
        ("<table><tr><th>A<th>B</tr>\n\n<tr><td>1<td>2</tr>\n\n</table>", "| A | B |\n|---|---|\n| 1 | 2 |"),
        ("1. Item\n\n   <p>in a list</p>\n\n   more", "1. Item\n\n   in a list\n\n   more"),
        ("```html\n<p hidden>shown</p>\n```", "```html\n<p hidden>shown</p>\n```"),
        ("Text:\n\n    <p hidden>shown</p>", "Text:\n\n    <p hidden>shown</p>"),
        ("a < b and <b>c</b>", "a < b and <b>c</b>"),
    ],
)
def test_blocks_of_html_in_markdown_are_what_a_reader_sees(tmp_path: Path, source: str, text: str) -> None:
    assert re.sub(r"\n{3,}", "\n\n", load(tmp_path, "a.md", f"# T\n\n{source}").text) == text


def test_a_heading_in_html_is_the_title_of_markdown(tmp_path: Path) -> None:
    loaded = load(tmp_path, "README.md", "<h1 align=center>\n  Tides\n</h1>\n\nThe moon.\n\n## More\n\nText.")
    assert (loaded.title, loaded.text) == ("Tides", "The moon.\n\n## More\n\nText.")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("A %% hidden %% b.", "A  b."),
        ("Text.\n\n%%\nhidden\n\nstill\n%%\n\nMore.", "Text.\n\n\n\nMore."),
        ("100%% of it, 50%% of that, `%% a %%`", "100%% of it, 50%% of that, `%% a %%`"),
        ("```\n%%time\nx\n%% y %%\n```", "```\n%%time\nx\n%% y %%\n```"),
        ("A <!-- hidden\n\nstill --> b.", "A  b."),
        ("<!-- TODO -->\n\nText.", "Text."),
        ("Text.\n<!--\n## No heading\n```\n-->\nMore.", "Text.\n\nMore."),
        ("[//]: # (a note)\nText.\n\n[comment]: # 'x'", "Text."),
        ("`<!-- shown -->` and ``a ` <!-- b -->``", "`<!-- shown -->` and ``a ` <!-- b -->``"),
        ("```html\n<!-- shown -->\n```", "```html\n<!-- shown -->\n```"),
        ("Text:\n\n    <!-- shown -->\n\n<!-- not -->End", "Text:\n\n    <!-- shown -->\n\nEnd"),
    ],
)
def test_comments_of_markdown_are_left_out(tmp_path: Path, source: str, text: str) -> None:
    assert load(tmp_path, "a.md", f"# T\n{source}").text == text


@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.html"])
@pytest.mark.parametrize("words", ["Übung in Łódź", "Ångström", "Việt Nam", "가나다", "हिन्दी", "ภาษาไทย", "é à ô"])
def test_text_and_title_are_composed_characters(tmp_path: Path, name: str, words: str) -> None:
    apart = unicodedata.normalize("NFD", words)
    source = {"a.md": f"---\nkey: {apart}\n---\n# {apart}\n\n{apart}", "a.txt": apart}.get(
        name, f"<h1>{apart}</h1>{apart}"
    )
    loaded = load(tmp_path, name, source)
    assert loaded.text == words and loaded.title == ("A" if name == "a.txt" else words)
    assert load(tmp_path, f"{apart}.txt", "x").title == words[:1].upper() + words[1:]
    assert name != "a.md" or loaded.metadata == {"key": words}


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
    expected["tags"] = ["sea", "moon"]
    assert load(tmp_path, "a.md", front + "Text.").metadata == expected
    assert load(tmp_path, "a.md", front.replace("\n", "\r\n") + "Text.").metadata == expected
    assert load(tmp_path, "a.md", "---\ntitle: [Tides\n---\nText.").metadata == {}
    assert load(tmp_path, "a.md", "---\ndate: 2020-99-99\n---\nText.").metadata in ({}, {"date": "2020-99-99"})
    assert load(tmp_path, "a.txt", front + "Text.").metadata == {}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_plain_text_keeps_its_lines_and_uses_the_file_name_as_title(tmp_path: Path, encoding: str) -> None:
    document = load(tmp_path, "sea-level_2024.TXT", "\n# Höhe\r\n  indented\n".encode(encoding))
    assert document == LoadedDocument("Sea level 2024", "# Höhe\n  indented")


LEGACY = {
    "gb2312": "月亮牵引着海洋，潮汐每天涨落两次。",
    "big5": "月亮牽引著海洋，潮汐每天漲落兩次。",
    "euc-kr": "달은 바다를 끌어당긴다.",
    "shift_jis": "月は海を引く。これは日本語の文書です。",
    "euc-jp": "月は海を引く。これは日本語の文書です。",
    "koi8-r": "Луна притягивает море, и прилив поднимается.",
    "windows-1251": "Луна притягивает море, и прилив поднимается.",
    "windows-1252": "Die Höhe der Flut über München – „schön“ für Gäste.",
    "iso-8859-7": "Η σελήνη έλκει τη θάλασσα δύο φορές την ημέρα.",
}


@pytest.mark.parametrize("charset", sorted(LEGACY))
def test_old_encodings_are_read_as_declared_or_guessed_with_a_note(tmp_path: Path, charset: str) -> None:
    words, data = LEGACY[charset], LEGACY[charset].encode(charset)
    page = load(tmp_path, "page.html", f'<meta charset="{charset}"><p>'.encode() + data)
    assert (page.text, page.notes) == (words, ())
    equiv = f'<meta http-equiv="Content-Type" content="text/html; charset={charset}"><p>'.encode()
    assert load(tmp_path, "page.html", equiv + data).text == words
    assert load(tmp_path, "page.html", f'<?xml version="1.0" encoding="{charset}"?><p>'.encode() + data).text == words
    for name in ("page.html", "page.txt", "page.md"):
        guessed = load(tmp_path, name, b"<p>" * name.endswith("html") + data)
        assert guessed.text == words and "is a guess" in guessed.notes[0]


@pytest.mark.parametrize(
    ("data", "text", "note"),
    [
        (b'<meta charset="utf-16"><p>ASCII', "ASCII", None),
        (b'<meta charset="utf-16le"><p>\xc3\xbc', "ü", None),
        (b'<meta charset="klingon"><p>\xc3\xbc', "ü", None),
        (b'<meta charset="base64"><p>\xc3\xbc', "ü", None),
        (b'<meta charset="iso-8859-1"><p>\x93a\x94', "“a”", None),
        (b'<meta charset="latin1"><p>\x80', "€", None),
        (b'<meta charset="us-ascii"><p>caf\xc3\xa9 \x99', "cafÃ© ™", None),
        (b'<meta charset="utf-8"><p>' + "é".encode() * 99 + b"\xff", "é" * 99 + "\ufffd", "1 characters are not utf-8"),
        ("<p>Höhe".encode("utf-16"), "Höhe", None),
    ],
)
def test_pages_are_decoded_as_browsers_do(tmp_path: Path, data: bytes, text: str, note: str | None) -> None:
    loaded = load(tmp_path, "page.html", data)
    assert loaded.text == text and loaded.notes == (() if note is None else (note,))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_read_with_a_note(tmp_path: Path, encoding: str) -> None:
    for words in ("The moon pulls the sea. ", "Луна притягивает море. The sea. ", "Höhe der Flut. "):
        loaded = load(tmp_path, "a.txt", (words * 9).encode(encoding))
        assert loaded.text == (words * 9).rstrip() and "is a guess" in loaded.notes[0]


def test_pdf_title_and_text_are_loaded(tmp_path: Path) -> None:
    text = "Chunks are cached once and reused anywhere they appear.\n\nSecond page."
    assert load(tmp_path, "x.pdf", PDF) == LoadedDocument("On Reuse", text, True)
    assert load(tmp_path, "old_report.pdf", pdf_bytes([["Text."]])) == LoadedDocument("Old report", "Text.", True)


def test_lone_surrogates_of_a_pdf_font_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ccjax.retrieval.pdf.read_pdf", lambda data: ("", "E = m\ud835c\x02", None))
    assert load(tmp_path, "x.pdf", pdf_bytes([["any"]])).text == "E = mc"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"\xff\xfeabc", "not utf-16-le: byte 2, truncated data"),
        ("a.md", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9, "contains NUL bytes, so it is not text"),
        ("a.txt", b"PK\x03\x04\x00\x00", "contains NUL bytes, so it is not text"),
        ("a.txt", b"", "the file is empty"),
        ("a.md", b" \n\t\n", "the file is empty"),
        ("a.md", b"# Title alone\n", "no text besides a title"),
        ("a.html", b"<title>x</title><script>y</script>", "no text besides a title"),
        ("a.html", b"<div></div>", "no text"),
        ("a.pdf", PDF[:60], "broken PDF: "),
        ("a.doc", b"x", "unsupported suffix '.doc', wanted one of .csv, .docx, .eml, .epub, .htm, .html, "),
        ("Makefile", b"x", "unsupported suffix ''"),
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
    with pytest.raises(DocumentError, match=r"long\.txt: too large: 101 bytes, over the limit max_file_bytes=100"):
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
    for part in (
        "<p>a<br>b</p>",
        "<ul><li>",
        "<blockquote>",
        "<a href=x>",
        "<div class=menu>",
        "<!-- ",
        "`",
        "[a]: b\n",
    ):
        text = part * 2000 + "end"
        for suffix in (".html", ".md"):
            try:
                parse_document(Path(f"x{suffix}"), text.encode())
            except DocumentError:
                continue
