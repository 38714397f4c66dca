"""Who can use the page: by keyboard alone, in both themes, with a screen reader, as far as rules can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.web.conftest import DESKTOP, PHONE, OpenPage
from tests.web.test_page import QUESTIONS, ask

if TYPE_CHECKING:
    from playwright.sync_api import Page

Shoot = Callable[["Page", str], None]
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(246, 246, 243)", "rgb(20, 23, 26)"


def focused(page: Page) -> str:
    """Id, or text, of what has the focus; it must show that."""
    name, outline = page.evaluate(
        "() => { const one = document.activeElement; const style = getComputedStyle(one);"
        "return [one.id || one.textContent.trim(), `${style.outlineStyle} ${style.outlineWidth}`] }"
    )
    assert outline == "solid 3px", f"{name} has the focus and does not show it"
    return name


def test_page_is_fully_usable_by_keyboard(server_url: str, open_page: OpenPage) -> None:
    page = open_page(server_url)
    page.locator("#examples").wait_for()
    order = []
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(focused(page))
    assert order == ["Skip to the question", "key-open", "theme", "question"]
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type(QUESTIONS[0])
    assert page.input_value("#question") == f"First line\n{QUESTIONS[0]}"
    page.keyboard.press("Enter")
    page.locator("#answer-note", has_text="First token").wait_for()
    reached = [focused(page)]
    while reached[-1] != "compare":
        page.keyboard.press("Tab")
        reached.append(focused(page))
        assert len(reached) < 20, reached
    assert "Options" in reached and "send" in reached and any("score" in one for one in reached)
    page.keyboard.press("Enter")
    page.locator("#compare-note", has_text="Full prefill").wait_for()

    page.focus("#key-open")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert not page.locator("#key-dialog").evaluate("one => one.open") and focused(page) == "key-open"
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert focused(page) == "question"


@pytest.mark.parametrize("scheme, ground, other", [("light", LIGHT, DARK), ("dark", DARK, LIGHT)])
def test_theme_follows_the_system_until_one_is_chosen(
    server_url: str, open_page: OpenPage, screenshot: Shoot, scheme: str, ground: str, other: str
) -> None:
    page = open_page(server_url, color_scheme=scheme)
    assert page.evaluate(BACKGROUND) == ground
    for _ in range(2 if scheme == "light" else 1):  # system, light, dark
        page.click("#theme")
    assert page.evaluate(BACKGROUND) == other
    page.reload()
    assert page.evaluate(BACKGROUND) == other and scheme not in page.inner_text("#theme")
    page.evaluate("localStorage.clear()")
    page.reload()
    assert page.evaluate(BACKGROUND) == ground and "system" in page.inner_text("#theme")
    ask(page, QUESTIONS[1])
    screenshot(page, f"theme-{scheme}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_page_has_no_accessibility_violations(
    server_url: str, open_page: OpenPage, scheme: str, size: dict[str, int]
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = open_page(server_url, color_scheme=scheme, viewport=size)
    ask(page, QUESTIONS[2])
    page.click(".options summary")
    page.locator("#hot tbody tr").first.wait_for()
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    found = axe.Axe().run(page, options=rules).response
    told = [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found["violations"]]
    assert told == []
    assert len(found["passes"]) > 20, "the rules were looked at"
    page.click("#key-open")
    found = axe.Axe().run(page, options=rules).response
    assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []


def test_answer_is_announced_and_marks_differ_without_colour(server_url: str, open_page: OpenPage) -> None:
    page = open_page(server_url)
    ask(page, QUESTIONS[0])
    assert page.get_attribute("#answer", "aria-live") == "polite"
    assert page.get_attribute("#answer", "aria-busy") == "false"
    assert page.get_attribute("html", "lang") == "en"
    marks = page.evaluate(
        "['reused', 'recomputed', 'computed'].map(name => {"
        "const style = getComputedStyle(document.querySelector(`.legend .${name}`));"
        "return [style.textDecorationLine, style.textDecorationStyle].join(' ') })"
    )
    assert len(set(marks)) == 3, "the marks must differ without colours, too"
