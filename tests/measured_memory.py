"""The peak of what a piece of code takes from the operating system, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAN_MEASURE = Path("/proc/self/status").exists()
"""Linux's RssAnon is what is read: it leaves out pages of files that are mapped."""

_PROGRAM = """
import gc, sys, threading
import jax, jax.numpy as jnp, numpy as np

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

jnp.asarray(np.ones((64, 64), np.float32)).block_until_ready()
{setup}

def run(way):
{code}

def measured(way):
    gc.collect()
    start, highest, done = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            highest.append(max(highest.pop(), anonymous_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(way)
    done.set()
    watcher.join()
    return highest[0] - start

print(*map(measured, {ways}))
"""


def peak_bytes(code: str, *arguments: str, ways: Sequence[str], setup: str = "") -> list[int]:
    """Anonymous bytes at the worst moment of `code`, above those before it, in each of `ways`, one after the other in
    one process.

    Args:
      code, setup: Python; jax, jnp, np and sys are there, `arguments` are `sys.argv[1:]`. The code finds its `way`;
        what it makes is gone before the next.
    """
    code = textwrap.indent(textwrap.dedent(code), "    ")
    program = _PROGRAM.format(setup=textwrap.dedent(setup), code=code, ways=list(ways))
    # So that glibc gives freed tensors back at once; else up to 70 MB of them stay in its heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    # There is much to compute and little to compile, other than in most tests.
    environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace("optimization_level=0", "optimization_level=2")
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.splitlines()[-1].split()]
