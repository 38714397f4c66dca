"""What a reader sees of a page, as Markdown."""

from __future__ import annotations

import time

import pytest

from ccjax.retrieval.chunking import split
from ccjax.retrieval.html import read_html

PAGE = """<!DOCTYPE html><html><head><title> Sea
 level </title><style>p {color: red}</style><script>alert("no")</script></head><body><!-- hidden -->
<header><a href="/">Home</a></header><nav><a href="/menu">Menu</a></nav>
<h1>Sea level</h1><p>It is <b>ris</b>ing,
   says <a href="https://x.org/r 1">a &lt;report&gt;</a>.<br>Fast.</p><ul><li>one</li>
<li>two<ol><li>in<li>side</ol></ul>
<h2>Table</h2><table><tr><th>year</th><th>mm</th></tr><tr><td>2024</td><td>4|6</td></tr></table>
<pre>keep
  this</pre><blockquote>said</blockquote><footer>(c)</footer></body></html>"""
TEXT = """It is rising, says [a <report>](https://x.org/r%201).
Fast.

- one
- two
  1. in
  2. side

## Table

| year | mm |
|---|---|
| 2024 | 4\\|6 |

```
keep
  this
```

> said"""


def test_page_becomes_markdown() -> None:
    assert read_html(PAGE) == ("Sea level", TEXT)


@pytest.mark.parametrize(
    ("source", "title", "text"),
    [
        ("<h1>Tides</h1><p>The moon.</p>", "Tides", "The moon."),
        ("<h1>A</h1><p>One.</p><h1>B</h1><p>Two.</p>", "", "# A\n\nOne.\n\n# B\n\nTwo."),
        ("<title>Sea</title><h1>Tides</h1><p>The moon.</p>", "Sea", "# Tides\n\nThe moon."),
        ("<p>The moon.", "", "The moon."),
        ("just words", "", "just words"),
        (
            '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body>The moon.</body></html>',
            "",
            "The moon.",
        ),
        ("<p>fine</p><![# ", "", "fine"),
        ("<pre>a ``` b</pre>", "", "````\na ``` b\n````"),
        ("<p># a</p><p><b>``` b</b> # c</p><p>#d</p><ul><li># e</ul>", "", "\\# a\n\n\\``` b # c\n\n#d\n\n- \\# e"),
        ("<svg><title>Icon</title></svg><p>a", "", "a"),
    ],
)
def test_title_and_text_are_found_despite_odd_markup(source: str, title: str, text: str) -> None:
    assert read_html(source) == (title, text)


@pytest.mark.parametrize(
    "unseen",
    [
        "<!-- x -->",
        "<p hidden>x</p>",
        "<div style='color: red; DISPLAY : none'><p>x</p></div>",
        "<span style=visibility:hidden>x</span>",
        "<div style='opacity:0'>x</div><div style='opacity: 0.0; color: red'>x</div><p style='font-size:0px'>x</p>",
        "<ruby><rt>x</rt></ruby>",
        "<div aria-hidden=true>x</div>",
        "<template>x</template><noscript>x</noscript><dialog>x</dialog>",
        "<nav><ul><li><a href=a>x</a></ul></nav>",
        "<div role=navigation>x</div>",
        "<ul class='main-menu'><li><a href=a>xxxx</a><li><a href=b>xxxx</a></ul>",
        "<div id=sidebar><a href=a>xxxx</a> <a href=b>xxxx</a></div>",
        "<footer>x</footer>",
        "<header>x</header>",
        "<select><option>x</select><button>x</button>",
        "<svg><text>x</text></svg>",
    ],
)
def test_what_a_reader_does_not_see_is_left_out(unseen: str) -> None:
    assert read_html(f"<body>{unseen}<p>The moon.</p>{unseen}")[1] == "The moon."


@pytest.mark.parametrize(
    "seen",
    [
        "<details><summary>x</summary></details>",
        "<dialog open>x</dialog>",
        "<div class=menu>Soup: x Euro, <a href=b>bread</a>, and much more of it</div>",
        "<article><header>x</header><footer>x</footer></article>",
        "<aside>x</aside>",
        "<div style='display: block'>x</div>",
        "<div style='opacity: 0.5'>x</div><p style='font-size: 0.9em'>x</p>",
    ],
)
def test_what_a_reader_sees_is_kept(seen: str) -> None:
    assert "x" in read_html(f"<p>The moon.</p>{seen}")[1]


def test_the_main_element_is_the_text() -> None:
    page = "<div>Advertisement</div><main><p>The moon.</p></main><div>More</div>"
    assert read_html(page)[1] == "The moon."
    assert read_html(page.replace("<p>The moon.</p>", ""))[1] == "Advertisement\n\nMore"


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            "<tr><th rowspan=2>Zone<th colspan=2>Euro<tr><th>day<th>night<tr><td>A<td>1<td>2",
            ["| Zone | Euro day | Euro night |", "| A | 1 | 2 |"],
        ),
        (
            "<thead><tr><th>Day<th>Open</thead><tr><td rowspan=2>Mo<td>9<tr><td>14<tr><td>Tu<td>8",
            ["| Day | Open |", "| Mo | 9 |", "| Mo | 14 |", "| Tu | 8 |"],
        ),
        ("<tr><td>a<td>b<tr><td colspan=2>both<tr><th>c<td>d", ["| a | b |", "| both | both |", "| c | d |"]),
        ("<tr><th>a<th>b<tr><td rowspan=0>x<td colspan=x>y<tr><td>1<td>2", ["| a | b |", "| x | y |", "| 1 | 2 |"]),
        ("<tr><th>a<th>b<tr><td>line<br>break<td>a|b", ["| a | b |", "| line break | a\\|b |"]),
    ],
)
def test_spanning_cells_are_repeated(rows: str, lines: list[str]) -> None:
    text = read_html(f"<table><caption>Prices</caption>{rows}</table>")[1].split("\n")
    assert text[:2] == ["Prices", ""] and [line for line in text[2:] if "---" not in line] == lines


def test_header_and_caption_of_a_long_table_are_in_each_passage() -> None:
    rows = "".join(f"<tr><td>Zone {n}<td>{n * 3} Euro" for n in range(60))
    page = f"<h1>Bus</h1><h2>Fares</h2><table><caption>Prices of 2024</caption><tr><th>Zone<th>Price{rows}</table>"
    title, text = read_html(page)
    passages = split(text, title=title, markdown=True, chunk_tokens=100, count_tokens=lambda text: len(text.split()))
    head = "Bus > Fares\nPrices of 2024\n\n| Zone | Price |\n|---|---|\n| Zone "
    assert len(passages) > 3 and all(passage.startswith(head) for passage in passages)


def test_tables_that_arrange_blocks_are_no_tables() -> None:
    page = "<table><tr><td><p>a</p><p>b</p><td>c<tr><td><table><tr><th>x<th>y<tr><td>1<td>2</table><td>d</table>"
    assert read_html(page)[1] == "a\n\nb\n\nc\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\nd"


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("<p>gate</p><p>ring</p>", "gate ring"),
        ("<ul><li>gate<li>ring<ul><li>seal</ul></ul>", "gate; ring; seal"),
        ("Both:<ol><li>gate<li>ring</ol>", "Both: 1. gate; 2. ring"),
        ("<div>gate</div><blockquote>ring</blockquote>", "gate ring"),
        ("&gt; 5 mg<br>- 3 kg<br>3. May", "> 5 mg - 3 kg 3. May"),
        (
            "- 40 C<blockquote><ul><li>&gt; 5<li><a href=x># of rings</a></ul></blockquote>",
            "- 40 C; > 5; [# of rings](x)",
        ),
    ],
)
def test_blocks_in_a_cell_are_joined(cell: str, shown: str) -> None:
    table = f"<table><tr><th>Pump<th>Parts<tr><td>A<td>{cell}</td><tr><td>B<td>axle</table>"
    assert read_html(table)[1] == f"| Pump | Parts |\n|---|---|\n| A | {shown} |\n| B | axle |"


@pytest.mark.parametrize("cell", ["<h2>a</h2>b", "<pre>a</pre>", f"<p>{'a ' * 999}</p><p>b</p>"])
def test_cells_with_parts_of_a_page_are_not_joined(cell: str) -> None:
    assert "| c |" not in read_html(f"<table><tr><td>{cell}<td>c<tr><td>d<td>e</table>")[1]
    assert read_html("<table role=presentation><tr><td>a<td>b<tr><td>c<td>d</table>")[1] == "a\n\nb\n\nc\n\nd"


@pytest.mark.parametrize(
    "empty", ["<title/>", "<script src='a>b.js' />", "<style/>", "<iframe\nsrc='x'/>", "<textarea/>", "<p hidden='x'/>"]
)
@pytest.mark.parametrize("head", ["<?xml version='1.0'?><html>", "<!DOCTYPE html>\n<html xmlns='http://a'>"])
def test_empty_elements_of_xml_end(head: str, empty: str) -> None:
    page = f"{head}<body><!-- <b/> --><div>{empty}<p>The<br/>moon.</p><p><![CDATA[a <b/>]]></p></div></body></html>"
    assert read_html(page) == ("", "The\nmoon.\n\na <b/>")


@pytest.mark.parametrize("unseen", ["<script>{}</script>", "<style>{}</style>", "<!--{}-->"])
def test_tags_that_are_no_elements_have_no_depth(unseen: str) -> None:
    page = unseen.format("'<div>'" * 600) + "<!--><ul><li>a<ul><li>b</ul></ul>"
    assert read_html(page)[1] == "- a\n  - b"


@pytest.mark.parametrize("tag", ["div", "ul><li", "blockquote", "pre", "search", "optgroup"])
def test_deeply_nested_elements_take_time_in_proportion(tag: str) -> None:
    start = time.process_time()
    assert "deep" in read_html(f"<{tag}>" * 40_000 + "deep")[1]
    assert time.process_time() - start < 2


def test_pages_made_to_exhaust_memory_are_read() -> None:
    cell = "<td rowspan=65534 colspan=1000>" + "x" * 50
    assert len(read_html(f"<table>{'<tr>' + cell * 3}{('<tr>' + cell) * 3000}</table>")[1]) < 5_000_000
    assert read_html("<ul><li>" * 3000 + "deep")[1].endswith("deep")
    assert "deep" in read_html("<blockquote>" * 3000 + "deep")[1]
