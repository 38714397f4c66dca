"""The documentation names pages, headings, files and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

PAGES = [*sorted(ROOT.glob("docs/*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))]
FOLDERS = ("ccjax", "models", "pallas_kernels", "store", "scripts", "tests", "docs", "deploy", "examples")
FILE = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]+)`")
LINK = re.compile(r"\]\((?!\w+://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links of a page to nothing, and files that it names and that do not exist."""
    text = page.read_text("utf-8")
    found = [f"{target} #{anchor}" for target, anchor in LINK.findall(text) if not is_there(page, target, anchor)]
    return found + [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def is_there(page: Path, target: str, anchor: str) -> bool:
    """Whether the target of a link, and the anchor in it if there is one, exist."""
    file = page.parent / target if target else page
    return file.exists() and (not anchor or anchor in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    assert not broken(page)


def test_what_does_not_exist_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](#three) [c](gone.md) [d](https://x.org/y) `scripts/gone.py`\n")
    assert broken(page) == [" #three", "gone.md #", "scripts/gone.py"]


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = re.findall(r"[\w-]+\.md", str(navigation))
    assert sorted(listed) == sorted(page.name for page in ROOT.glob("docs/*.md"))
