"""Compilation beside requests."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.runner.warmup import BackgroundCompiler


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where each thread has a priority")
def test_only_the_compiling_thread_has_a_low_priority():
    sizes, seen, before = CompiledSizes(), [], niceness()
    sizes.substitute([("decode", (1, 16)), ("decode", (2, 16))])
    steps = SimpleNamespace(compile=lambda key: seen.append((key, niceness())) or sizes.note(*key))
    compiler = BackgroundCompiler(SimpleNamespace(sizes=sizes), steps)
    while compiler.compile_next(None):
        pass
    compiler.close()
    assert dict(seen) == dict.fromkeys([("decode", (1, 16)), ("decode", (2, 16))], max(15, before))
    assert niceness() == before
