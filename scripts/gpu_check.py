"""Checks the kernels and measures this machine's device: `python scripts/gpu_check.py [--quick] [--only STEP ...]`.

Runs `pytest -m gpu` over the kernels and the identities of reuse, then `bench.py` kernels, ttft, decode and serve with
the server's defaults (serve: 30 requests in a run, beside full prefill alone), each in its own process. Needs jax, the
package's requirements and pytest; without an accelerator everything runs on the CPU. After each step it writes one JSON
object to --output: `tests`: `tests`, `failures`, `errors`, `skipped`, `seconds`, `failed` (test -> message);
`benchmarks`: name -> the figures of `bench.py NAME --json`; `wrong`: what failed, in words. The exit status is 1 if
that is not empty.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS: dict[str, list[str]] = {
    "kernels": [],
    "ttft": [],
    "decode": [],
    "serve": ["--strategies", "default", "full", "--requests", "30"],
}
"""Names of `bench.py` with their options: without them, the first of three strategies of `serve` takes more than 20
minutes on two CPU cores."""
_COUNTS = ("tests", "failures", "errors", "skipped")


def main() -> int:
    """Runs the steps; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes in the benchmarks, to see that they run")
    parser.add_argument("--only", nargs="+", choices=("tests", *BENCHMARKS), default=("tests", *BENCHMARKS))
    parser.add_argument("--tests", metavar="EXPRESSION", help="only the tests that match, as pytest's -k")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of each step (%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-check.json", metavar="FILE")
    arguments = parser.parse_args()
    # JAX would reserve three quarters of the device's memory at once.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found: dict[str, Any] = {"tests": {}, "benchmarks": {}, "wrong": []}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for step in arguments.only:
        print(f"== {step}", flush=True)
        try:
            if step == "tests":
                found["tests"] = _tests(arguments.tests, environment, arguments.limit_s)
                found["wrong"] += [f"{name}: {message}" for name, message in found["tests"]["failed"].items()]
            else:
                found["benchmarks"][step] = _benchmark(step, arguments.quick, environment, arguments.limit_s)
        except (OSError, ValueError, ElementTree.ParseError, subprocess.SubprocessError) as error:
            found["wrong"].append(f"{step}: {error}")
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([*(f"FAILED {line}" for line in found["wrong"]), str(arguments.output)]))
    return 1 if found["wrong"] else 0


def _tests(expression: str | None, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """What pytest counts, and messages of what failed. Warnings are only shown: versions of jax have different ones."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "--junitxml", str(report)]
        command += ["tests/pallas_kernels", *([] if expression is None else ["-k", expression])]
        code, _ = _run(command, environment, limit_s)
        if code not in (0, 1) or not report.exists():
            raise ValueError(f"pytest ended with status {code}")
        suite = ElementTree.parse(report).getroot()[0]
    cases = [(f"{case.get('classname')}.{case.get('name')}", part) for case in suite.iter("testcase") for part in case]
    failed = {name: part.get("message", "") for name, part in cases if part.tag in ("failure", "error")}
    return {**{name: int(suite.get(name, 0)) for name in _COUNTS}, "seconds": suite.get("time"), "failed": failed}


def _benchmark(name: str, is_quick: bool, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """The figures of a benchmark."""
    command = [sys.executable, "scripts/bench.py", name, "--json", *(["--quick"] if is_quick else BENCHMARKS[name])]
    code, output = _run(command, environment, limit_s, stdout=subprocess.PIPE)
    *lines, last = output.splitlines() or [""]
    print("\n".join(lines), flush=True)
    if code:
        raise ValueError(f"bench.py {name} ended with status {code}: {last:.300}")
    return json.loads(last)


def _run(command: list[str], environment: dict[str, str], limit_s: float, stdout: int | None = None) -> tuple[int, str]:
    """Exit status and output; what the command started is killed with it if it takes too long."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=stdout, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output or ""


if __name__ == "__main__":
    sys.exit(main())
