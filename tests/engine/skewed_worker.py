"""A process for the tests of clock skew: `python -m tests.engine.skewed_worker MODEL_DIR STORE INDEX`.

Prints one JSON line when it is warm, then one for each JSON line that it reads.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

if __name__ == "__main__":
    # libfaketime 0.9.10 breaks Python's sleep until an absolute time, but not waits with a timeout.
    time.sleep = lambda seconds: threading.Event().wait(seconds) and None  # type: ignore[assignment]

import ccjax.cache.load_plan  # noqa: E402
import ccjax.cache.shared.prefill  # noqa: E402
from ccjax.cache.shared.prefill import SharedPrefill  # noqa: E402
from ccjax.engine import Engine  # noqa: E402
from ccjax.runner.pack import Pack  # noqa: E402
from tests.engine.few_shapes import few_shapes  # noqa: E402

_RUN_LAYER, _LOOK = Pack.run_layer, SharedPrefill.is_wait_over
PATIENCE_S = 3600.0
CLAIM_S = 300.0
"""Longer than any answer takes here on a busy machine, and shorter than the clock skew."""

TEXTS = (
    "The garden of {} has an old well and four pear trees.",
    "The house of {} was painted blue in spring.",
)


class Worker:
    """Runs commands on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def clock(self) -> dict[str, Any]:
        return {"time": time.time(), "monotonic": time.monotonic()}

    def ask(
        self, documents: list[dict[str, str]], is_held: bool = False, tells: bool = False, claim_s: float = CLAIM_S
    ) -> dict[str, Any]:
        """Generates a short answer and returns what it reused.

        Args:
          is_held: print "computing" in the middle of the answer and pause until the next input line.
          tells: print "waiting" when it waits for another process.
        """
        Pack.run_layer = _held if is_held else _RUN_LAYER  # type: ignore[method-assign]
        SharedPrefill.is_wait_over = _told if tells else _LOOK  # type: ignore[method-assign]
        ccjax.cache.shared.prefill.claim_s = lambda *_: claim_s
        response = self._engine.generate("Who?", documents, max_new_tokens=4)
        self._engine.cache.flush()
        report = response.reuse
        counts = {name: getattr(report, f"{name}_tokens") for name in ("computed", "reused", "recomputed")}
        passages = [one.reused_tokens for one in report.per_document if one.role == "passage"]
        return counts | {"tokens": list(response.token_ids), "waited_s": report.load_wait_s, "passages": passages}

    def pin(self, name: str, ttl_s: float) -> dict[str, Any]:
        return {"until": self._engine.documents.pin(name, ttl_s=ttl_s).until}

    def erase(self, name: str) -> dict[str, Any]:
        return {"variants": self._engine.documents.erase(name).variants}

    def look(self) -> dict[str, Any]:
        """Applies changes of other processes and runs periodic work; document -> time until which it is pinned."""
        self._engine.cache.refresh()
        with self._engine._loop.exclusive():
            self._engine.documents._documents.tend()
        return {one.document_id: one.pinned_until for one in self._engine.documents.list()}

    def pin_notes(self) -> dict[str, Any]:
        """Names of the pin notes."""
        with self._engine._loop.exclusive():
            return {
                "names": sorted(
                    name for name in self._engine.documents._documents.registry._notes.items() if "pin-" in name
                )
            }

    def corrupt(self) -> dict[str, Any]:
        return {"number": self._engine.cache.usage()["disk"].corrupt}


def _held(pack: Pack) -> None:
    Pack.run_layer = _RUN_LAYER  # type: ignore[method-assign]
    _say({"computing": True})
    sys.stdin.readline()
    _RUN_LAYER(pack)


def _told(shared: SharedPrefill) -> bool:
    SharedPrefill.is_wait_over = _LOOK  # type: ignore[method-assign]
    _say({"waiting": True})
    return _LOOK(shared)


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main(model: str, store: str, index: str) -> None:
    # Waits do not time out: they end when the holder finishes or its lease expires.
    ccjax.cache.shared.prefill.longest_shared_wait_s = lambda *_: PATIENCE_S
    # Loads are never given up because a busy machine reads more slowly than this model computes.
    ccjax.cache.load_plan.loads_to_give_up = lambda *_: frozenset()
    settings = {"store": store, "share_computation": True, "max_model_len": 512, "strategy": "cachecraft"}
    with few_shapes(), Engine.from_pretrained(model, store_index=index, **settings) as engine:
        worker = Worker(engine)
        for number in range(2):  # the second one measures the time per token; as long as later ones
            name = f"warming {number} of {time.monotonic_ns()}"
            own = [{"text": text.format(name)} for text in TEXTS]
            worker.ask(own)
            worker.ask(own)
        _say(worker.clock())
        while line := sys.stdin.readline():
            order = json.loads(line)
            _say(getattr(worker, order.pop("do"))(**order))


if __name__ == "__main__":
    main(*sys.argv[1:])
