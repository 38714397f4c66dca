"""The benchmark program end to end at its smallest: what it prints is what docs/benchmarks.md promises."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ttft_prints_every_case_as_json():
    command = [sys.executable, "scripts/bench.py", "ttft", "--quick", "--json", "--no-peers", "--repetitions", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert {"benchmark", "date", "commit", "machine", "device", "python", "versions", "shapes"} <= figures.keys()
    assert figures["peers"] == []
    cases = [(case["strategy"], case["ratio"], case.get("focus")) for case in figures["cases"]]
    assert cases == [
        ("full", 1.0, None),
        ("reuse", 0.0, None),
        ("cachecraft", 0.15, True),
        ("cachecraft", 0.15, False),
        ("cachecraft", 0.3, True),
        ("cachecraft", 0.3, False),
    ]
    for case in figures["cases"]:
        assert case["context_tokens"] == 512 and case["ttft_s"] > 0
    shares = {
        case[:2]: figures["cases"][index]["computed_share"] for index, case in enumerate(cases) if case[2] is not True
    }
    assert shares["full", 1.0] == 1.0
    # 16 question tokens, and of eight passages of 58 tokens each the ratio, rounded up: 9 and 18.
    assert shares["reuse", 0.0] == 16 / 512
    assert shares["cachecraft", 0.15] == (16 + 8 * 9) / 512 and shares["cachecraft", 0.3] == (16 + 8 * 18) / 512
    assert any("cachecraft" in line for line in table)


def test_an_unknown_benchmark_is_named():
    command = [sys.executable, "scripts/bench.py", "speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "'speed'" in done.stderr
