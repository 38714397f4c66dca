"""Prefill in llama.cpp, for comparison, by its own llama-bench."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.common import BenchmarkError

NAME = "llama-bench"


def find(folder: Path | None) -> Path | None:
    """The program in a folder or its `bin`, or on PATH if no folder is given; None if PATH lacks it.

    Raises:
      BenchmarkError: the folder lacks it.
    """
    if folder is None:
        found = shutil.which(NAME)
        return Path(found) if found else None
    found = shutil.which(NAME, path=os.pathsep.join([str(folder), str(folder / "bin")]))
    if found is None:
        raise BenchmarkError(f"--llama-cpp: wanted a folder with {NAME}, got {folder}")
    return Path(found)


def prefill_s(program: Path, model: Path, lengths: Sequence[int], repetitions: int) -> dict[int, list[float]]:
    """Seconds of each run that prefills this many tokens on all cores, after an uncounted one.

    Raises:
      BenchmarkError: it fails, or its output is not llama-bench's.
    """
    folder = program.resolve().parent
    libraries = [str(folder), str(folder / "lib"), str(folder.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    command = [str(program), "-m", str(model), "-p", ",".join(map(str, lengths))]
    command += f"-n 0 -r {repetitions} -t {os.cpu_count()} -o json".split()
    try:
        environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found = {int(one["n_prompt"]): [ns / 1e9 for ns in one["samples_ns"]] for one in json.loads(done.stdout)}
        return {length: found[length] for length in lengths}
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchmarkError(f"{program}: exit code {error.returncode}: {last}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{program}: wanted llama-bench's JSON, got {type(error).__name__}: {error}") from error
