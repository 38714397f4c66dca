"""The gates of the ahead-of-time check, and that its committed table holds every case of every chip within them."""

import json

import pytest

from scripts.kernels import gpu, tpu
from scripts.kernels.cases import ALL_CASES
from scripts.kernels_aot import TABLE, violations

LIMITS = {"spill_bytes": {"a100": 0}, "shared_bytes": {"a100": 166_912}}
GOOD = {"registers": 200, "spill_bytes": 0, "shared_bytes": 100_000}


def test_figures_within_limits_and_slack_pass():
    known = {"registers": 195, "spill_bytes": 0, "shared_bytes": 120_000}
    assert violations("a100", "case", GOOD, LIMITS, known) == []


@pytest.mark.parametrize(
    ("figures", "known", "wanted"),
    [
        (GOOD | {"spill_bytes": 4}, GOOD | {"spill_bytes": 4}, ["a100, case: spill_bytes is 4, the limit is 0"]),
        (GOOD | {"shared_bytes": 166_913}, GOOD | {"shared_bytes": 166_912}, ["is 166,913, the limit is 166,912"]),
        (GOOD, GOOD | {"registers": 190}, ["registers rose from 190 to 200"]),
        (GOOD, None, ["case: not in aot_table.json"]),
    ],
    ids=["a spill", "over shared memory", "a regression", "an unknown case"],
)
def test_anything_else_is_named(figures, known, wanted):
    found = violations("a100", "case", figures, LIMITS, known)
    assert len(found) == len(wanted) and all(part in line for part, line in zip(wanted, found, strict=True))


@pytest.mark.parametrize("target", [gpu, tpu], ids=["gpu", "tpu"])
def test_the_committed_figures_are_within_limits(target):
    table = json.loads(TABLE.read_text())[target.__name__.rpartition(".")[2]]
    assert set(table["versions"]) == set(target.PACKAGES)
    assert set(table["figures"]) == set(target.CHIPS)
    for chip, cases in table["figures"].items():
        assert set(cases) == {case.name for case in ALL_CASES}
        for name, figures in cases.items():
            assert violations(chip, name, figures, target.LIMITS, figures) == []
