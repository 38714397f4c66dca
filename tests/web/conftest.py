"""The real server process with the demo model, and a real Chromium. Skips where there is no browser to drive.

CCJAX_CHROMIUM names another one than Debian's. Screenshots and compiled steps are kept in build/web.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import ROOT
from tests.server import patience

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OUTPUT = ROOT / "build" / "web"
PHONE = {"width": 375, "height": 812}
DESKTOP = {"width": 1280, "height": 900}
OpenPage = Callable[..., "Page"]


@contextlib.contextmanager
def serving(home: Path, *arguments: str, port: int = 0) -> Iterator[str]:
    """scripts/serve.py until it is ready; yields its URL, and kills it."""
    # The flags of the other tests (strict promotion, eight devices) are none that a user has.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_NUMPY", "XLA_FLAGS"))}
    environment |= {"XDG_CACHE_HOME": str(home), "HOME": str(home)}
    # Without warm-up: a size is compiled when it is first asked for, and then kept for the next run.
    quick = (
        "--no-warmup",
        "--no-repair",
        "--no-prepare",
        "--search",
        "lexical",
        "--compile-cache-dir",
        str(OUTPUT / "compiled"),
    )
    command = [
        sys.executable,
        str(ROOT / "scripts/serve.py"),
        "--model",
        "demo",
        "--port",
        str(port),
        "--frame",
        "none",
        *quick,
    ]
    with subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield patience.final_line(process)[0]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server_url(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that tests share; none is started where there is no browser."""
    store = tmp_path_factory.mktemp("store")
    with serving(tmp_path_factory.mktemp("home"), "--docs", "demo", "--store", f"file://{store}") as url:
        yield url


@pytest.fixture
def fresh_url(browser: Browser, tmp_path: Path) -> Iterator[str]:
    """A server that nobody asked anything."""
    with serving(tmp_path, "--docs", "demo") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of one file: its event loop runs on this thread, where other files' tests may want one of their own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[web]'")
    path = os.environ.get("CCJAX_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs Chromium: apt install chromium, or name one in CCJAX_CHROMIUM")
    with playwright.sync_playwright() as driver:
        # A container's user may not make sandboxes; what is opened is our own page.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(url, **context)` is a page in a context of its own. What it logs as an error fails the test, unless it
    has one of the `expected` texts in it."""
    contexts, errors = [], []

    def opened(url: str, *, expected: tuple[str, ...] = (), **context: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce"} | context))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)

        def note(kind: str, text: str) -> None:
            if kind == "error" and not any(part in text for part in expected):
                errors.append(text)

        page.on("console", lambda message: note(message.type, message.text))
        page.on("pageerror", lambda error: note("error", str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors


@pytest.fixture
def screenshot() -> Callable[[Page, str], None]:
    OUTPUT.mkdir(parents=True, exist_ok=True)

    def shoot(page: Page, name: str) -> None:
        page.screenshot(path=OUTPUT / f"{name}.png", full_page=True)

    return shoot
