"""examples/ as a newcomer runs them, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.server import patience

SECOND = "How often does the ferry sail to the island?"
COUNTS = re.compile(r"(\d+) of (\d+) tokens reused")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def printed(example: str, *options: str) -> tuple[str, str]:
    """What an example prints of its first question, and of its second one."""
    command = [sys.executable, f"examples/{example}.py", *options]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(SECOND) == 1
    first, _, second = done.stdout.partition(SECOND)
    return first, second


def reuse_is_shown(first: str, second: str) -> None:
    """The second question reuses most of a prompt whose passages the first one computed, and each part is listed."""
    ((before, _), (reused, prompt_tokens)) = [map(int, found) for found in COUNTS.findall(first + second)]
    assert 10 * before < prompt_tokens < 2 * reused < 2 * prompt_tokens  # a server may have prepared its instructions
    parts = re.findall(r"^ +(\w+) +(\d+) reused +(\d+) recomputed +(\d+) computed", second, re.MULTILINE)
    assert [name for name, *_ in parts] == ["instructions", "ferry", "lighthouse", "harbour"]
    assert sum(int(count) for _, count, _, _ in parts) == reused
    assert sum(int(count) for _, _, count, _ in parts) > 0, "passages in another order"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "ccjax", "serve", "--model", "demo", "--port", "0", "--no-warmup"]
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(tmp_path))}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT | home, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield patience.final_line(process)[0]
        finally:
            process.terminate()


def test_library() -> None:
    reuse_is_shown(*printed("library", "--model", "demo"))


def test_openai_client(url: str) -> None:
    pytest.importorskip("openai")
    reuse_is_shown(*printed("openai_client", "--url", f"{url}/v1"))
    plain = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 1}
    answer = patience.post(f"{url}/v1/chat/completions", json=plain).json()
    assert answer["documents"] == [] and answer["usage"]["prompt_tokens"] < 20, "the prompt is the client's alone"
    assert "no documents" in patience.post(f"{url}/v1/chat/completions", json={**plain, "retrieval": True}).text


def test_functional() -> None:
    command = [sys.executable, "examples/functional.py", "--model", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.partition("The ferry sails")[2].split()) > 3
