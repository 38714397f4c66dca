"""Compilation beside requests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from ccjax.runner.compiled_sizes import CompiledSizes
from ccjax.runner.warmup import BackgroundCompiler


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


TIMES = """
import os, threading
import jax, jax.numpy as jnp
from ccjax.runner import compiler_threads

def ticks():
    found = {}
    for name in os.listdir("/proc/self/task"):
        fields = open(f"/proc/self/task/{name}/stat").read().rpartition(")")[2].split()
        found[int(name)] = int(fields[16]), int(fields[11]) + int(fields[12])
    return found

def work(x):
    for _ in range(120):
        x = jnp.sort(jnp.tanh(x @ x) - x.sum(0, keepdims=True), axis=0)
    return x

compiler_threads.find_compilers()
jax.jit(lambda x: work(x) + 1.0).lower(jax.ShapeDtypeStruct((32, 32), "float32")).compile()  # as a warm-up does
before, found = ticks(), {}

def compile_beside_requests():
    compiler_threads.lower_compilers()
    jax.jit(work).lower(jax.ShapeDtypeStruct((32, 32), "float32")).compile()
    found.update(ticks())  # while this thread still exists

thread = threading.Thread(target=compile_beside_requests)
thread.start()
thread.join()
found = {name: at for name, at in found.items() if name in compiler_threads._found}
print(min(nice for nice, _ in found.values()), sum(at - before[name][1] for name, (_, at) in found.items()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where each thread has a priority")
def test_xlas_own_threads_compile_at_the_low_priority_too():
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # or nothing would be compiled the second time
    command = [sys.executable, "-c", TIMES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    nice, spent = map(int, run.stdout.split())
    assert nice >= 15
    assert spent > 0, "ticks of processor time: the found threads are those that compile"


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
