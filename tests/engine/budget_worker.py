"""A process of the test of a shared budget: `python -m tests.engine.budget_worker URL LIMIT SEED`.

It computes prompts of its own, stores them below a limit, and prints "done". For each line on its input it refreshes,
and prints the bytes that it knows in the store.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.engine.few_shapes import few_shapes
from tests.engine.helpers import TinyModel, draw_segments

LENGTHS = (23, 31, 17, 29)
NUM_PROMPTS = 8


def main(url: str, limit: str, seed: str) -> None:
    """Runs the worker."""
    with few_shapes(), TinyModel().engine(store=url, disk_cache_bytes=int(limit), frame="none") as engine:
        for number in range(NUM_PROMPTS):
            segments = draw_segments(np.random.default_rng([int(seed), number]), LENGTHS)
            engine.generate_from_tokens(segments, max_new_tokens=1)
            engine.cache.flush()
            engine.cache.refresh()
        print("done", engine.cache.usage()["disk"].evicted, flush=True)
        for _ in sys.stdin:
            engine.cache.refresh()
            print(engine.cache.usage()["disk"].used_bytes, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
