"""A second process for the tests of shared computation: `python -m tests.engine.sharing_worker URL START_FILE SECONDS`.

Warms up on its own prompts, prints "ready", waits for the file, answers one prompt and prints one JSON line. With
SECONDS > 0 it prints "computing" in the middle of that answer and pauses there for that long. Its claims last an hour,
and it waits equally long for other processes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from ccjax.cache.shared import prefill as sharing
from ccjax.runner.pack import Pack
from tests.engine.few_shapes import few_shapes
from tests.engine.helpers import TinyModel, draw_segments

LENGTHS = (23, 31, 17, 29)
SEGMENTS = draw_segments(np.random.default_rng(11), LENGTHS)


def main(url: str, start_file: str, seconds: str) -> None:
    """Runs the worker."""
    with few_shapes(), TinyModel().engine(store=url, share_computation=True) as engine:
        # Neither claims nor waits time out, however slow the machine is: a claim that did would not be released.
        sharing.claim_s = sharing.longest_shared_wait_s = lambda *_: 3600.0
        for seed in range(2):  # the second one measures; the system prompt must differ as well
            own = draw_segments(np.random.default_rng([time.time_ns(), seed]), LENGTHS)
            engine.generate_from_tokens(own, max_new_tokens=4)
            engine.generate_from_tokens(own, max_new_tokens=4)
        engine.cache.flush()
        if float(seconds):
            run_layer = Pack.run_layer

            def slow(self: Pack) -> None:
                print("computing", flush=True)
                time.sleep(float(seconds))
                run_layer(self)

            Pack.run_layer = slow  # type: ignore[method-assign]
        print("ready", flush=True)
        while not Path(start_file).exists():
            time.sleep(0.001)
        response = engine.generate_from_tokens(SEGMENTS, max_new_tokens=4)
        report = response.reuse
        print(
            json.dumps(
                {
                    "tokens": list(response.token_ids),
                    "computed": report.computed_tokens,
                    "reused": report.reused_tokens,
                    "recomputed": report.recomputed_tokens,
                    "waited_s": report.load_wait_s,
                    "ttft_s": response.ttft_s,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
