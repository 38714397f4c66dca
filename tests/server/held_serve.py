"""scripts/serve.py whose engine pauses while a file exists: `python -m tests.server.held_serve FILE ARGUMENTS`. It
pauses before a decode step, and at start before the second compilation. It pads to few sizes."""

import itertools
import sys
import time
from pathlib import Path

from ccjax.runner import warmup
from ccjax.runner.decode import DecodeBatch
from ccjax.server import draining
from scripts.serve import main
from tests.engine.few_shapes import few_shapes

FILE = Path(sys.argv[1])


def held(run, free: int = 0):
    """A `run` that waits from the call after the first `free` ones on."""
    numbers = itertools.count()

    def wait_and_run(*args, **kwargs):
        number = next(numbers)
        while number >= free and FILE.exists():
            time.sleep(0.005)
        return run(*args, **kwargs)

    return wait_and_run


SIZES = few_shapes()
SIZES.__enter__()
DecodeBatch.step = held(DecodeBatch.step)
warmup.compile_pack = held(warmup.compile_pack, 1)
draining._REFUSAL_S = 300  # for slow machines

sys.exit(main(sys.argv[2:]))
