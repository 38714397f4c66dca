"""Runs a target in a process of its own, which a finding ends, and says what came of it."""

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
# A process that another starts begins with that one's peak of memory, which libFuzzer takes for its own; one that the
# shell starts begins with the shell's.
FROM_SHELL = ["sh", "-c", '"$@"; exit $?', "sh"]


@dataclasses.dataclass(frozen=True)
class FuzzResult:
    """What fuzzing a target came to.

    Attributes:
      is_clean: it ran as long as it should and found nothing.
      num_runs: inputs that were tried. coverage: edges that they reached, as libFuzzer counts.
      line: the same for a person; with a finding its last line and how to see it again.
    """

    is_clean: bool
    num_runs: int
    coverage: int
    line: str


def fuzz(
    module: str, name: str, seeds: Iterable[bytes], seconds: float, output: Path, *, num_runs: int = -1, seed: int = 0
) -> FuzzResult:
    """Fuzzes `TARGETS[name]` of a module, from what earlier runs learnt and the seeds.

    Args:
      output: where the corpus and the findings go, in a folder by the target's name.
      num_runs: inputs after which it ends, if that is sooner; -1 for no such end.
      seed: of what is drawn; 0 for another one every time.
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
    # libFuzzer ends without Python's own end, so what a target writes is removed here, from memory if possible.
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
    """The exception, or what libFuzzer says of a hang or of memory."""
    lines = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*|^.*(?:ERROR: libFuzzer: ).*", log, re.MULTILINE
    )
    return lines[0][:300] if lines else "no more than a failure"
