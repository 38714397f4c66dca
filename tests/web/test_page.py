"""The page in a real browser, on the real server: what it shows is what the API says."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.polling import wait_until
from tests.store.servers import free_port
from tests.web.conftest import PHONE, OpenPage, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COUNTS = ("reused", "recomputed", "computed")
QUESTIONS = (
    "Which animal does Petra Dunn look after?",
    "Which animal does Petra Dunn's neighbour Viggo Ostler own?",
    "What prize did Petra Dunn win?",
)
Shoot = Callable[["Page", str], None]


def ask(page: Page, question: str, **more: Any) -> dict[str, Any]:
    """Asks by keyboard, with `more` put into the request's body; the last chunk of the answer, once all is shown."""
    with listening(page, **more) as told:
        page.fill("#question", question)
        page.press("#question", "Enter")
        page.locator("#answer-note", has_text="First token").wait_for()
    return told[-1]


@contextlib.contextmanager
def listening(page: Page, **more: Any) -> Iterator[list[dict[str, Any]]]:
    """The last chunk of each streamed answer meanwhile. The browser keeps no body that was read as a stream, so the
    answers come through here."""
    told: list[dict[str, Any]] = []

    def relay(route: Any) -> None:
        body = json.loads(route.request.post_data) | more
        response = route.fetch(post_data=json.dumps(body), timeout=120_000)
        lines = response.text().splitlines()
        told.extend([json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1:])
        route.fulfill(response=response)

    page.route("**/v1/chat/completions", relay)
    yield told
    page.unroute("**/v1/chat/completions")


def shown_marks(page: Page) -> list[Counter[str]]:
    """Of each segment, how many tokens have which mark."""
    classes = page.eval_on_selector_all(
        ".segment", "all => all.map(one => [...one.querySelectorAll('.text .t')].map(t => t.className.split(' ')[1]))"
    )
    return [Counter(one) for one in classes]


def check_shows(page: Page, told: dict[str, Any]) -> None:
    reuse, trace = told["reuse"], told["trace"]
    by_segment = shown_marks(page)
    assert len(by_segment) == len(trace["segments"]) == len(reuse["per_document"]) + 1
    for shown, segment in zip(by_segment, trace["segments"], strict=True):
        assert {name: shown[name] for name in COUNTS} == {name: segment[f"{name}_tokens"] for name in COUNTS}
    total = sum(by_segment, Counter())
    for name in COUNTS:
        assert total[name] == reuse[f"{name}_tokens"]
        assert page.inner_text(f"#sums .{name} dd").split()[0].replace(",", "") == str(reuse[f"{name}_tokens"])
    # In prompt order, each with its tier; a token's mark stands where the API says.
    titles = page.locator(".segment h3").all_inner_texts()
    assert titles[0] == "Instructions"
    for number, (title, document) in enumerate(zip(titles[1:], reuse["per_document"][1:], strict=False), 1):
        assert title == f"{number}. {document['title']}"
    for at, segment in enumerate(trace["segments"]):
        badges = page.locator(".segment").nth(at).locator(".badges").inner_text()
        names = {"device": "device memory", "host": "host memory", "disk": "disk"}
        assert segment["tier"] is None or f"from {names[segment['tier']]}" in badges
        causes = {"question": "always computed", "new": "new text", "mode": "not by this mode"}
        assert (segment["cause"] is None) == (segment["action"] == "reuse")
        assert segment["cause"] is None or causes[segment["cause"]] in badges
        if segment["cfo"] is not None:
            assert f"{segment['cfo']:.2f}" in page.locator(".segment").nth(at).locator(".facts").inner_text()
    offsets = page.eval_on_selector_all(
        ".segment",
        "all => all.map(one => [...one.querySelectorAll('.text .t')]"
        ".flatMap((t, at) => t.classList.contains('recomputed') ? [at] : []))",
    )
    assert offsets == [segment["recomputed_offsets"] for segment in trace["segments"]]


def seconds(page: Page, selector: str) -> list[float]:
    return [float(value) for value in page.eval_on_selector_all(selector, "all => all.map(one => one.dataset.seconds)")]


def test_a_question_is_answered_and_a_second_one_reuses(fresh_url: str, open_page: OpenPage, screenshot: Shoot) -> None:
    page = open_page(fresh_url)
    first = ask(page, QUESTIONS[0])
    assert page.inner_text("#answer") == "tortoise"
    check_shows(page, first)
    assert first["reuse"]["reused_tokens"] < first["reuse"]["computed_tokens"]

    second = ask(page, QUESTIONS[1])
    check_shows(page, second)
    assert min(second["reuse"][f"{name}_tokens"] for name in COUNTS) > 0, "of each kind, or the marks show little"
    again = ask(page, QUESTIONS[1])
    check_shows(page, again)
    assert (
        again["reuse"]["computed_tokens"] < second["reuse"]["computed_tokens"] and again["reuse"]["reused_tokens"] > 0
    )
    screenshot(page, "again")

    ask(page, QUESTIONS[2])
    phases = seconds(page, "#phase-table tbody [data-seconds]")
    (total,) = seconds(page, "#phase-table tfoot [data-seconds]")
    assert len(phases) == 5 and sum(phases) == pytest.approx(total, abs=1e-9) and min(phases) >= 0
    assert page.locator("#layers .layer").count() == 6
    assert page.locator("#layers .run").count() == 6 and page.locator("#layers .load").count() == 6
    screenshot(page, "light")


def test_sources_show_file_headings_and_score_and_open_their_text(
    browser: Browser, tmp_path: Path, open_page: OpenPage, screenshot: Shoot
) -> None:
    docs, home = tmp_path / "docs", tmp_path / "home"
    (docs / "pumps").mkdir(parents=True)
    (docs / "pumps" / "care.md").write_text(
        "# Pumps\n\n## Pump A\n\n### Limits\n\nPump A stands in the boathouse, and its highest pressure is 4 bar.\n"
    )
    (docs / "boat.png").write_bytes(b"\x89PNG")
    (docs / "oar.pdf").write_bytes(b"%PDF-1.4 <b>nothing</b> follows")
    (docs / "tea.txt").write_text("Tea is poured at four. Its pressure is of no concern to <b>anybody</b>.")
    with serving(home, "--docs", str(docs)) as url:
        page = open_page(url)
        told = ask(page, "What is the highest pressure of pump A?")
        sources = told["documents"]
        assert [(one["path"], one["title"], one["heading"]) for one in sources] == [
            ("pumps/care.md", "Pumps", "Pump A > Limits"),
            ("tea.txt", "Tea", None),
        ]
        shown = page.locator("#sources summary")
        wanted = (("pumps/care.md", "Pumps › Pump A › Limits"), ("tea.txt", "Tea"))
        for at, (source, parts) in enumerate(zip(sources, wanted, strict=True)):
            score = "< 0.01" if 0 < source["score"] < 0.005 else f"{source['score']:.2f}"
            assert shown.nth(at).locator("span").all_inner_texts() == [*parts, f"score {score}"]
        texts = page.locator("#sources .text")
        assert not texts.nth(0).is_visible()
        shown.nth(0).click()
        assert texts.nth(0).is_visible() and not texts.nth(1).is_visible()
        assert texts.nth(0).inner_text().endswith("its highest pressure is 4 bar.")
        shown.nth(1).press("Enter")
        assert "<b>anybody</b>" in texts.nth(1).inner_text()

        assert page.inner_text("#index-note") == "2 documents, 2 passages."
        assert page.inner_text("#problems-note") == "Skipped: 1 broken PDF, 1 unsupported file type"
        live = httpx.get(f"{url}/v1/live", timeout=60).json() | {"num_vectors_pending": 1}
        page.route("**/v1/live", lambda route: route.fulfill(json=live))
        page.get_by_text("2 documents, 2 passages, 1 of them found by words alone so far.", exact=True).wait_for()
        page.unroute("**/v1/live")
        page.click("#problems-note")
        problems = page.locator("#problem-list li")
        problems.nth(1).wait_for()
        assert problems.nth(0).inner_text().startswith(f"{docs / 'oar.pdf'}: broken PDF: ")
        assert problems.nth(1).inner_text() == "files of types that are not read: .png: 1"
        screenshot(page, "sources")
        page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]

        page.click(".options summary")
        page.fill("#own", "Anna is a diver.\n\nBruno bakes.")
        ask(page, "Who bakes?")
        assert shown.all_inner_texts() == ["Passage 1", "Passage 2"], "passages from the request have no file"
        shown.nth(1).click()
        assert texts.nth(1).inner_text().endswith("Bruno bakes.")
        page.close()


def test_compare_button_measures_a_real_full_prefill(server_url: str, open_page: OpenPage) -> None:
    page = open_page(server_url)
    told = ask(page, QUESTIONS[0])
    with listening(page) as answers, page.expect_request("**/v1/chat/completions") as asked:
        page.click("#compare")
        page.locator("#compare-note", has_text="Full prefill").wait_for()
    assert json.loads(asked.value.post_data or "")["reuse"] == "off"
    (measured,) = answers
    assert measured["reuse"]["computed_tokens"] == measured["reuse"]["prompt_tokens"] == told["reuse"]["prompt_tokens"]
    assert seconds(page, "#cost .bar") == [told["trace"]["ttft_s"], measured["trace"]["ttft_s"]]
    assert "measured" in page.inner_text("#cost") and "estimated" not in page.inner_text("#cost")


def test_live_view_updates_after_requests(server_url: str, open_page: OpenPage) -> None:
    page = open_page(server_url)
    page.locator("#live").wait_for()
    before = httpx.get(f"{server_url}/v1/live").json()["answered"]
    for _ in range(2):
        httpx.post(
            f"{server_url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": QUESTIONS[0]}]},
            timeout=120,
        )
    page.locator("#queue div", has_text="answered").locator("dd", has_text=f"{before + 2}").wait_for()
    assert page.locator("#tiers tbody tr").count() == 2 and page.locator("#hot tbody tr").count() >= 5
    assert "Petra Dunn" in page.inner_text("#hot")
    assert re.search(r"\d+ % reused", page.inner_text("#share-note"))


def test_an_answer_appears_while_it_is_generated(server_url: str, open_page: OpenPage) -> None:
    page = open_page(server_url)

    def long(route: Any) -> None:
        body = json.loads(route.request.post_data) | {"ignore_eos": True, "max_tokens": 400}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", long)
    page.fill("#question", QUESTIONS[0])
    page.press("#question", "Enter")
    lengths = set()

    def grown() -> bool:
        if page.get_attribute("#answer", "aria-busy") == "true":
            lengths.add(len(page.inner_text("#answer")))
        return len(lengths - {0}) >= 3

    # The page's policy forbids Playwright's own waits for functions, which evaluate texts.
    wait_until(grown)
    page.click("#stop")
    page.locator("#answer-note", has_text="Stopped").wait_for()
    assert page.is_enabled("#send") and page.is_hidden("#tokens-panel") and page.inner_text("#answer")


HOSTILE = (
    "<script>window.hurt = 1</script> <img src=x onerror='window.hurt = 2'> <svg onload='window.hurt = 3'> "
    "<a href='javascript:window.hurt = 4'>click</a> &lt;b&gt; {{7*7}}"
)


def test_hostile_documents_are_shown_as_plain_text(server_url: str, open_page: OpenPage, screenshot: Shoot) -> None:
    page = open_page(server_url)
    hostile = [{"id": HOSTILE, "title": HOSTILE, "text": f"The boat is lemon. {HOSTILE}"}]

    told = ask(page, HOSTILE, documents=hostile)
    check_shows(page, told)
    assert HOSTILE in page.locator(".segment .text").nth(1).inner_text()
    assert page.locator(".segment h3").nth(1).inner_text() == f"1. {HOSTILE}"
    assert page.inner_text("#asked") == HOSTILE
    for name in ("#segments", "#answer-panel"):
        assert page.locator(f"{name} :is(script, img, svg, a, b, iframe)").count() == 0
    assert page.evaluate("window.hurt") is None
    screenshot(page, "hostile")


def test_content_security_policy_blocks_injected_scripts(server_url: str, open_page: OpenPage) -> None:
    page = open_page(server_url, expected=("Content Security Policy", "TrustedHTML", "TrustedScript"))
    script = "const one = document.createElement('script'); one.textContent = 'window.hurt = 1'"
    inline = f"() => {{ {script}; document.body.append(one) }}"
    for attempt in (inline, "() => { document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(1)>') }"):
        try:
            page.evaluate(attempt)
        except Exception as error:  # Trusted Types raise
            assert "Trusted" in str(error)
    assert page.evaluate("window.hurt") is None and page.locator("img").count() == 0


def test_server_outage_is_shown_and_page_recovers(tmp_path: Path, open_page: OpenPage) -> None:
    port = free_port()
    with serving(tmp_path, port=port) as url:
        page = open_page(url, expected=("ERR_CONNECTION", "ERR_EMPTY", "Failed to load"))
        page.locator("#status[data-state=ok]").wait_for()
    page.locator("#status[data-state=down]").wait_for()
    assert "cannot be reached" in page.inner_text("#alert")
    page.fill("#question", "Anybody?")
    page.press("#question", "Enter")
    page.locator("#answer-note", has_text="The answer is incomplete").wait_for()
    assert page.is_enabled("#send")
    with serving(tmp_path, port=port):
        page.locator("#status[data-state=ok]").wait_for()
        assert page.is_hidden("#alert")
        assert "no documents" in page.inner_text("#documents-note")
        page.click(".options summary")
        assert page.is_hidden("#top-k-field") and page.is_hidden("#examples")
        answer = ask(page, "Anybody now?")
        assert answer["documents"] == []
        check_shows(page, answer)


def test_api_key_is_requested_and_kept_only_in_the_tab(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--api-key", "sesame") as url:
        page = open_page(url, expected=("401",))
        page.locator("#status[data-state=key]").wait_for()
        page.fill("#question", "May I?")
        page.press("#question", "Enter")
        page.locator("#key-dialog[open]").wait_for()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.locator("#status", has_text="not the server's").wait_for()
        page.click("#key-open")
        page.fill("#key", "sesame")
        page.press("#key", "Enter")
        page.locator("#status[data-state=ok]").wait_for()
        check_shows(page, ask(page, "May I now?"))
        kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]")
        assert "sesame" not in kept[0] + kept[1] and "sesame" in kept[2]
        assert "sesame" not in page.evaluate("document.documentElement.outerHTML")
        page.click("#key-open")
        page.click("#key-clear")
        assert page.evaluate("sessionStorage.length") == 0
        page.close()  # before the server is gone, which it would note as an error


def test_page_is_readable_on_a_phone(server_url: str, open_page: OpenPage, screenshot: Shoot) -> None:
    page = open_page(server_url, viewport=PHONE, has_touch=True, is_mobile=True)
    ask(page, QUESTIONS[1])
    page.click(".options summary")
    page.locator("#hot tbody tr").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    too_small = page.eval_on_selector_all(
        "p, dd, dt, td, th, li, h1, h2, h3, button, label, textarea, input, select",
        "all => all.filter(one => one.offsetParent && parseFloat(getComputedStyle(one).fontSize) < 12)"
        ".map(one => one.outerHTML.slice(0, 80))",
    )
    assert too_small == []
    wide = page.eval_on_selector_all(
        "main *",
        "all => all.filter(one => one.getBoundingClientRect().right > innerWidth + 0.5 && !one.closest('.scroll'))"
        ".map(one => one.outerHTML.slice(0, 80))",
    )
    assert wide == []
    screenshot(page, "phone")
