"""Command lines in this process, where one of their own would show nothing more: no second import of jax, and what is
compiled once serves all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from scripts import bench as bench_script

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@dataclasses.dataclass(frozen=True)
class Done:
    """What a shell would see."""

    returncode: int
    stdout: str
    stderr: str


def run(main: Callable[[Sequence[str]], int | None], *arguments: object) -> Done:
    """`main(arguments)`, with what it prints; what it changes in this process is put back."""
    out, err = io.StringIO(), io.StringIO()
    with put_back(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code if not isinstance(end.code, str) else print(end.code, file=err) or 1
    return Done(code or 0, out.getvalue(), err.getvalue())


def bench(name: str, *options: object) -> Done:
    """`bench.py` with a benchmark's name and options."""
    return run(bench_script.main, name, *options)


def figures(name: str, *options: object) -> tuple[list[str], dict[str, Any]]:
    """The lines of a benchmark that went well, and its figures, which are the last line."""
    done = bench(name, "--quick", "--json", *options)
    assert done.returncode == 0, done.stderr + done.stdout
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Handlers of signals and logs, the environment, and where JAX keeps what it compiles."""
    environment, root = dict(os.environ), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    handled = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        root.handlers[:] = handlers
        root.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        if jax.config.jax_compilation_cache_dir != settings["jax_compilation_cache_dir"]:
            compilation_cache.reset_cache()  # else it stays where the first compilation found it
        for name, value in settings.items():
            jax.config.update(name, value)
