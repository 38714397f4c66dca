"""One process of a model that is split over several: `python -m tests.engine.hosts_worker ADDRESS PROCESS FILE`.

The JSON file has the model's directory, the engine's settings and the requests: [segments, reuse] each, then `crowd` at
once. Process 0 prints one JSON line with the results; the others print one about the weights that they read.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ccjax.engine import Engine, Request, SamplingParams
from ccjax.engine.hosts import follow
from ccjax.models import lockstep
from ccjax.models.llama3 import leaves
from ccjax.runner.heavy_hitters import received_mass
from tests.engine.few_shapes import few_shapes


def main(address: str, process: str, file: str) -> None:
    """Runs the worker."""
    wanted = json.loads(Path(file).read_text())
    group = lockstep.join(address, 2, int(process), 120)
    read, num_read = leaves.read_part, 0

    def counting(*args: Any) -> Any:
        nonlocal num_read
        part = read(*args)
        num_read += part.nbytes
        return part

    leaves.read_part = counting
    if not group.is_leader:
        follow(wanted["model"], **wanted["settings"])
        print(json.dumps({"num_read": num_read}), flush=True)
        return
    with Engine.from_pretrained(wanted["model"], **wanted["settings"]) as engine:

        def answer(asked: list[Any]) -> dict[str, Any]:
            segments, reuse = asked
            sampling = SamplingParams(max_new_tokens=6, logprobs=0)
            response = engine.run(Request(segments=segments, sampling=sampling, reuse=reuse))
            assert response.logprobs is not None
            return {
                "tokens": list(response.token_ids),
                "logprobs": [token.logprob for token in response.logprobs],
                "reused": response.reuse.reused_tokens,
                "recomputed": response.reuse.recomputed_tokens,
            }

        tokens = [token for part in wanted["asked"][0][0] for token in part]
        got = {
            "num_read": num_read,
            "warmed": len(list(ThreadPoolExecutor(4).map(lambda seed: compute_apart(engine, seed), range(4)))),
            "logits": engine.prefill_logits(tokens).tolist(),
            "answers": [answer(asked) for asked in wanted["asked"]],
            "crowd": list(ThreadPoolExecutor(4).map(answer, wanted["crowd"])),
        }
        print(json.dumps(got), flush=True)


def compute_apart(engine: Engine, seed: int) -> None:
    """Runs steps that do not wait for other threads' steps, like those of the background compiler beside the batch: all
    devices must still run all steps in the same order, or their sums get mixed up."""
    for _ in range(20):
        received_mass(engine._model, np.zeros((16, 128)[seed % 2], np.int32))


if __name__ == "__main__":
    with few_shapes():
        main(*sys.argv[1:])
