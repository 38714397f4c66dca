"""Runs a target in its own process, which a finding ends, and reports the result."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOWEST_S = 10
MOST_MEMORY_MB = 4096
LONGEST = 8192
# A new process inherits its parent's peak memory, which libFuzzer would count as its own; one started by the shell
# inherits the shell's.
FROM_SHELL = ["sh", "-c", '"$@"; exit $?', "sh"]


@dataclasses.dataclass(frozen=True)
class FuzzResult:
    """Result of fuzzing a target.

    Attributes:
      is_clean: it ran for the whole time and found nothing.
      num_runs: inputs that were tried. coverage: edges that they reached, as counted by libFuzzer.
      line: a summary; with a finding its last line and the command to reproduce it.
    """

    is_clean: bool
    num_runs: int
    coverage: int
    line: str


def fuzz(
    module: str, name: str, seeds: Iterable[bytes], seconds: float, output: Path, *, num_runs: int = -1, seed: int = 0
) -> FuzzResult:
    """Fuzzes `TARGETS[name]` of a module, from the corpus of earlier runs and the seeds.

    Args:
      output: folder for the corpus and the findings, in a subfolder by the target's name.
      num_runs: maximum number of inputs; -1 for no maximum.
      seed: of random draws; 0 for a different one every time.
    """
    folder = (output / name).resolve()
    corpus, findings = folder / "corpus", folder / "findings"
    for path in (corpus, findings):
        path.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    command = [sys.executable, "-m", "scripts.fuzzing.run", f"{module}:{name}"]
    options = [f"-max_total_time={max(1, round(seconds))}", f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MOST_MEMORY_MB}"]
    options += [f"-max_len={LONGEST}", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
    options += [f"-runs={num_runs}", f"-seed={seed}", str(corpus)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    started = [*FROM_SHELL, *command, *options]
    # libFuzzer skips Python's cleanup at exit, so a target's files are removed here; they are in memory if possible.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ccjax-fuzz-", dir=memory) as temporary:
        environment["TMPDIR"] = temporary
        done = subprocess.run(started, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    num_runs = _last_number(r"stat::number_of_executed_units: (\d+)", done.stderr)
    coverage = _last_number(r" cov: (\d+)", done.stderr)
    if done.returncode == 0 and num_runs:
        return FuzzResult(True, num_runs, coverage, f"{num_runs} inputs, {coverage} edges, nothing found")
    artifact = re.search(r"Test unit written to (\S+)", done.stderr)
    again = f"{' '.join(command)} {artifact[1]}" if artifact else f"see {folder / 'log.txt'}"
    return FuzzResult(False, num_runs, coverage, f"FOUND {_error(done.stdout + done.stderr)}\n    {again}")


def _last_number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _error(log: str) -> str:
    """The exception, or libFuzzer's message on a hang or memory."""
    lines = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*|^.*(?:ERROR: libFuzzer: ).*", log, re.MULTILINE
    )
    return lines[0][:300] if lines else "failed without a message"
