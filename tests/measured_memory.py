"""The peak of what a piece of code takes from the operating system, in a process of its own. Knows no model."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAN_MEASURE = Path("/proc/self/status").exists()
"""Linux's RssAnon is what is read: it leaves out pages of files that are mapped."""

_BEFORE = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

jnp.asarray(np.ones((64, 64), np.float32)).block_until_ready()
{setup}
start = peak = anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
"""
_AFTER = """
done.set()
watcher.join()
print(peak - start)
"""


def peak_bytes(code: str, *arguments: str, setup: str = "") -> int:
    """Anonymous bytes at the worst moment of `code`, above those after `setup`.

    Args:
      code, setup: Python; jax, jnp, np and sys are there, `arguments` are `sys.argv[1:]`.
    """
    program = _BEFORE.format(setup=textwrap.dedent(setup)) + textwrap.dedent(code) + _AFTER
    # So that glibc gives freed tensors back at once; else up to 70 MB of them stay in its heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])
