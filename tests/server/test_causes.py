"""Why nothing was reused: every cause is produced through the socket, reported, counted and shown by tier."""

from __future__ import annotations

import pathlib
from typing import Any

import httpx
import pytest

from ccjax.types import ComputeCause
from tests.polling import wait_until
from tests.server import patience
from tests.server.conftest import Server, StartServer
from tests.server.test_traffic import metrics

ANNA = "Anna lives in Paris. She repairs violins in a small shop by the river, and plays in it on Sundays with Bob."
BOB = "Bob works in Rome. He paints houses, drives an old green van, and sings while he paints the doors of Anna."
LINES = "\n".join(f"- item {n}" for n in range(12))
"""Text that is no passage, since no part of it is long, and not short."""


@pytest.fixture(scope="module")
def own_server(start_server: StartServer):
    with start_server() as server:
        yield server


@pytest.fixture
def disk_server(start_server: StartServer, tmp_path: pathlib.Path):
    """A server whose KV is on disk only, and that directory."""
    with start_server(store=(tmp_path / "store").as_uri(), host_cache_bytes=1) as server:
        yield server, tmp_path / "store"


def ask(server: Server, documents: list[str], *, content: str = "Who?", system: str = "Be brief.", **more: Any) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    body = {"messages": messages, "documents": [{"text": text} for text in documents], "max_tokens": 1, **more}
    response: httpx.Response = patience.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def causes(answer: Any, role: str = "passage") -> list[ComputeCause | None]:
    parts = [part for part in answer["reuse"]["per_document"] if part["role"] == role]
    assert all((part["cause"] is None) == (part["computed_tokens"] == 0) for part in parts)
    return [part["cause"] for part in parts]


def computed(server: Server, cause: ComputeCause) -> float:
    return sum(value for name, value in metrics(server).items() if name[:2] == ("ccjax_computed_tokens_total", cause))


def test_new_text_and_modes(own_server: Server) -> None:
    before = computed(own_server, "new"), computed(own_server, "mode"), computed(own_server, "question")
    first = ask(own_server, [ANNA, BOB])
    assert causes(first) == ["new", "new"] and causes(first, "instructions") == ["new"]
    assert causes(ask(own_server, [ANNA, BOB])) == [None, None]
    assert causes(ask(own_server, [BOB, ANNA], reuse="off")) == ["mode", "mode"]
    assert causes(ask(own_server, [BOB, ANNA], reuse="exact")) == ["mode", "mode"]
    assert causes(ask(own_server, [BOB, ANNA])) == [None, None]
    after = computed(own_server, "new"), computed(own_server, "mode"), computed(own_server, "question")
    size = sum(part["num_tokens"] for part in first["reuse"]["per_document"])
    passages = sum(part["num_tokens"] for part in first["reuse"]["per_document"] if part["role"] == "passage")
    assert after[0] - before[0] == size and after[1] - before[1] == size + passages
    assert after[2] - before[2] == 5 * (first["usage"]["prompt_tokens"] - size)


def test_edited_text(own_server: Server) -> None:
    """A few words are changed within a passage, then its end; another passage behind it is new."""
    words = " ".join(f"word{n}" for n in range(50))

    def parts(text: str) -> list[ComputeCause | None]:
        answer = ask(own_server, [], system=f"Context:\n\n{text}\n\n{ANNA * 2}")
        return [part["cause"] for part in answer["reuse"]["per_document"]]

    assert "edited" not in parts(words)
    wait_until(lambda: own_server.service.backend.worker.is_idle)
    found = parts(words.replace("word35 word36", "a word of their own"))
    at = found.index("edited")
    assert found[at - 1] is found[at + 1] is None and found.count("edited") == 1
    found = parts(words[:200] + " ".join(f"end{n}" for n in range(20)))
    assert found[found.index("edited") - 1] is None
    assert "edited" not in parts(words + "\n\n" + " ".join(f"other{n}" for n in range(20)))
    assert computed(own_server, "edited") > 0


def test_text_between_passages(own_server: Server) -> None:
    def pasted(opening: str, middle: str) -> Any:
        return ask(own_server, [], system=f"{opening}\n\n{ANNA}\n\n{middle}\n\n{BOB}\n\n", reuse="exact")

    first = pasted("Today is Friday.", LINES)
    assert set(causes(first, "text")) == {"new", "short"}
    again = pasted("Today is Friday.", LINES)
    assert set(causes(again, "text")) == {None, "short"}
    assert set(causes(pasted("It is Saturday.", LINES), "text")) == {"short", "prefix"}


def test_loads_that_take_longer_than_computing(disk_server) -> None:
    server, _ = disk_server
    ask(server, [ANNA, BOB])
    for _ in range(2):
        ask(server, [ANNA, BOB], reuse="off")  # measured, now that it is compiled
    wait_until(lambda: server.engine.cache.usage()["disk"].num_variants == 3)
    fast = ask(server, [ANNA, BOB])
    assert causes(fast) == [None, None]
    tiers = fast["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    assert tiers == {"device": 0, "host": 0, "storage": fast["usage"]["prompt_tokens_details"]["cached_tokens"]}
    assert tiers["storage"] > 0
    for _ in range(32):
        server.engine.rates.tiers["disk"].add(1000, 1.0)
    assert causes(ask(server, [ANNA, BOB])) == ["load", "load"]


def test_damaged_kv(disk_server) -> None:
    server, directory = disk_server
    ask(server, [ANNA, BOB])
    wait_until(lambda: server.engine.cache.usage()["disk"].num_variants == 3)
    largest = max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    largest.write_bytes(damaged)
    found = causes(ask(server, [ANNA, BOB], reuse="exact"))
    assert sorted(map(str, found)) == ["None", "failed"]
    assert computed(server, "failed") > 0


def test_evicted_kv(start_server: StartServer) -> None:
    with start_server(max_variants=4, prepares=False) as server:
        first = ask(server, [ANNA])
        assert causes(first) == ["new"]
        hosted = ask(server, [ANNA])["usage"]["prompt_tokens_details"]
        assert hosted["cached_tokens_details"] == {"device": 0, "host": hosted["cached_tokens"], "storage": 0}
        texts = [f"{BOB} His number is {n}, and it is written on the door of house {n} in Rome." for n in range(6)]
        assert [causes(ask(server, [text])) for text in texts] == [["new"]] * 6
        assert causes(ask(server, texts[:1])) == ["evicted"]


def test_kv_that_found_no_space(start_server: StartServer) -> None:
    with start_server(host_cache_bytes=4096, prepares=False) as server:
        assert causes(ask(server, [ANNA, BOB])) == ["new", "new"]
        assert causes(ask(server, [ANNA, BOB])) == ["evicted", "evicted"]
