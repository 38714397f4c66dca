"""A short look at every parser by coverage-guided fuzzing; `make fuzz` looks for longer."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import pytest

import scripts.fuzzing.fuzz as fuzzing
from scripts.fuzzing.fuzz import fuzz

ENOUGH_S = 600
"""Each of them ends by what it finds or by the number of its inputs, and none by its time."""

needs_atheris = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris (ccjax[fuzz]) is not installed")


@pytest.fixture(scope="module")
def targets():
    """What imports all parsers and writes files to begin with, where these tests run alone."""
    from scripts.fuzzing import targets

    return targets


def test_each_target_accepts_its_seeds_and_handles_malformed_input(targets):
    for target in targets.TARGETS.values():
        for seed in target.seeds:
            target.run(seed)
        for data in (b"", b"\0", b"\xff\xfe", b"[" * 4000, b"[" * 100_000, b"{}", b"[1]", b"null", b"a: &a [*a]"):
            with contextlib.suppress(*target.allowed):
                target.run(data)


@pytest.mark.slow
@needs_atheris
def test_a_short_look_finds_nothing(tmp_path, monkeypatch, targets):
    monkeypatch.setattr(fuzzing, "SLOWEST_S", ENOUGH_S)
    outcome = fuzz("scripts.fuzzing.targets", "any", targets.ANY.seeds, ENOUGH_S, tmp_path, num_runs=1500, seed=1)
    assert outcome.is_clean, outcome.line
    assert outcome.num_runs >= 1500 and outcome.coverage > 500, outcome.line


@needs_atheris
def test_fuzzing_finds_and_saves_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "SLOWEST_S", ENOUGH_S)
    outcome = fuzz("tests.fuzz.broken", "fault", [b"ant"], ENOUGH_S, tmp_path, seed=1)
    assert not outcome.is_clean and "KeyError" in outcome.line, outcome.line
    (found,) = (tmp_path / "fault" / "findings").iterdir()
    assert found.read_bytes().startswith(b"bug") and outcome.line.endswith(str(found))


@needs_atheris
@pytest.mark.parametrize(
    ("name", "limit", "value", "message"),
    [("hang", "SLOWEST_S", 1, "timeout"), ("hoard", "MOST_MEMORY_MB", 700, "out-of-memory")],
)
def test_fuzzing_finds_a_hang_and_excessive_memory_use(tmp_path, monkeypatch, name, limit, value, message):
    monkeypatch.setattr(fuzzing, "SLOWEST_S", ENOUGH_S)
    monkeypatch.setattr(fuzzing, limit, value)
    outcome = fuzz("tests.fuzz.broken", name, [b"a"], ENOUGH_S, tmp_path)
    assert not outcome.is_clean and message in outcome.line, outcome.line


@needs_atheris
def test_parent_process_memory_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "MOST_MEMORY_MB", 700)
    monkeypatch.setattr(fuzzing, "SLOWEST_S", ENOUGH_S)
    held = b"\1" * (1 << 30)
    outcome = fuzz("tests.fuzz.broken", "fine", [b"a"], ENOUGH_S, tmp_path, num_runs=200)
    assert len(held) and outcome.is_clean, outcome.line
