"""Base64, hex and minified code are left out; what people wrote stays as it is."""

from __future__ import annotations

import base64
import random
import textwrap
import zlib
from pathlib import Path

import pytest

from ccjax.retrieval.machine_text import without_machine_text

ROOT = Path(__file__).parents[2]
NOISE = random.Random(0).randbytes(3000)
BASE64 = base64.b64encode(NOISE).decode()
MINIFIED = (
    '!function(e,t){"object"==typeof exports?module.exports=t():e.q=t()}(this,function(){var n=[];'
    "for(var r=0;r<9;r++)n.push(function(a,b){return a*r+b});return n});"
) * 4
STYLE = ".a{color:#fff;margin:0 auto}.b>li{display:none;padding:4px}@media(max-width:9em){.c{top:0}}" * 8


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(BASE64, id="base64"),
        pytest.param(base64.b64encode(b"What the sea does, the moon knows. " * 20).decode(), id="base64 of text"),
        pytest.param(base64.urlsafe_b64encode(NOISE).decode(), id="base64 for URLs"),
        pytest.param("\n".join(textwrap.wrap(BASE64, 76)), id="base64 in lines"),
        pytest.param("\n".join(f'    "{line}"' for line in textwrap.wrap(BASE64, 60)), id="base64 in quoted lines"),
        pytest.param(NOISE.hex(), id="hex"),
        pytest.param(NOISE.hex().upper(), id="hex in capitals"),
        pytest.param("\n".join(textwrap.wrap(NOISE.hex(), 64)), id="hex in lines"),
        pytest.param(MINIFIED, id="JavaScript"),
        pytest.param(STYLE, id="CSS"),
    ],
)
def test_machine_generated_text_is_removed(junk: str) -> None:
    rest, num_left_out = without_machine_text(f"The picture:\n\n{junk}\n\nIt shows the tide.")
    assert rest.split() == "The picture: It shows the tide.".split()
    assert num_left_out >= len(junk) - 1


def test_inline_markdown_image_keeps_its_alt_text() -> None:
    rest, num_left_out = without_machine_text(f"![the tide](data:image/png;base64,{BASE64}) at noon")
    assert (rest, num_left_out) == ("![the tide](data:image/png;base64,) at noon", len(BASE64))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" ".join(["The moon pulls the sea."] * 100), id="prose in one line"),
        pytest.param(",".join(map(str, range(2000))), id="numbers in one line"),
        pytest.param(
            "\n".join(";".join(f"{n / 7:.3f}" for n in range(row, row + 99)) for row in range(9)), id="a table"
        ),
        pytest.param(";".join(["Name", "Street", "Postcode", "Town", "Country"] * 40), id="a table of words"),
        pytest.param(str(3**2000), id="digits"),
        pytest.param("ACGT" * 100 + "GATTACA" * 100, id="a sequence of bases"),
        pytest.param("abc/def0/Some-Name_x9/" * 30, id="a path"),
        pytest.param("https://example.org/" + "some-page/Part_7/" * 20, id="a URL"),
        pytest.param("https://example.org/a?signature=" + BASE64[:400], id="a signed URL"),
        pytest.param("\n".join(f"{zlib.crc32(bytes([n])):08x}" * 8 + "  file" for n in range(9)), id="sums of files"),
        pytest.param("someVeryLongIdentifierOfAGenerator" * 20, id="an identifier"),
        pytest.param("-" * 500 + "\n" + "=" * 500 + "\n" + "+" * 5000, id="rulers"),
        pytest.param("月は海を引く。" * 200, id="Japanese"),
        pytest.param("ดวงจันทร์ดึงทะเล" * 100, id="Thai"),
        pytest.param('{"a":1,"b":[true,null],"c":"x"},' * 60, id="JSON without blanks"),
    ],
)
def test_human_written_text_is_kept(text: str) -> None:
    assert without_machine_text(text) == (text, 0)


def test_documents_and_code_of_this_repository_are_kept() -> None:
    for path in [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("ccjax/**/*.py"),
        *ROOT.glob("scripts/**/*.py"),
        ROOT / "README.md",
    ]:
        text = path.read_text(encoding="utf-8")
        assert without_machine_text(text) == (text, 0), path
