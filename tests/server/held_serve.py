"""scripts/serve.py whose engine stands still while a file is there: `python -m tests.server.held_serve FILE ARGUMENTS`.
It stops before a step that decodes, and at a start before the second step that is compiled. It pads to few sizes."""

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
    """`run`, which waits from the call after the first `free` ones on."""
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
draining._REFUSAL_S = 300  # however slow the machine is

sys.exit(main(sys.argv[2:]))
