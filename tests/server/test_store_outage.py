"""A server whose bucket does not answer at its start, or changes its keys: real processes, S3's protocol."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from pathlib import Path

from tests.polling import wait_until
from tests.server import patience
from tests.server.test_startup import ONE_SEAT, environment, serving
from tests.store import servers
from tests.store.gate import Gate
from tests.store.places import KEYS, s3_bucket

__all__ = ["environment"]
PASSAGE = "Dino bakes bread number {} in Naples, every morning, and sells it at the harbour, where boats come in."


def ask(url: str, number: int) -> set[str | None]:
    """Asks about a passage; the tiers that its KV came from."""
    documents = [{"text": PASSAGE.format(number)}]
    body = {"messages": [{"role": "user", "content": "Who?"}], "documents": documents, "max_tokens": 2}
    answer = patience.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return {part["tier"] for part in answer.json()["reuse"]["per_document"]}


def on_disk(url: str) -> float:
    found = re.search(r'^ccjax_store_num_variants\{tier="disk"\} (\S+)$', patience.get(f"{url}/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_a_server_starts_without_its_store_and_uses_it_once_it_answers(
    tiny_model: Path, environment: dict[str, str]
) -> None:
    with servers.double("s3_double") as port, contextlib.ExitStack() as ending:
        gate = Gate(port)
        ending.callback(gate.shut)
        gate.shut()
        where = ["--model", str(tiny_model), *ONE_SEAT, "--store", s3_bucket("s3", gate.port, "kv").url]
        environment |= KEYS
        with serving(where, environment) as (url, _, process):
            numbers = itertools.count()
            ask(url, next(numbers))
            assert on_disk(url) == 0
            gate.open()

            def is_stored() -> bool:
                time.sleep(1.0)  # the server looks every ten seconds
                ask(url, next(numbers))
                return on_disk(url) > 0

            wait_until(is_stored, timeout_s=120)
            process.terminate()
            assert process.stderr is not None
            errors = process.stderr.read()
        assert len(re.findall("cannot open s3://", errors)) == 1, errors
        assert len(re.findall("succeeds again", errors)) == 1, errors
        with serving(where, environment) as (url, _, _):
            assert on_disk(url) > 0
