"""scripts/mutants.py and scripts/check.py: what applies, what is told of what does not, and which tests are near."""

from __future__ import annotations

import pytest

from scripts import check, mutants
from scripts.mutants import Mutant

SOURCE = "def one():\n    return 1 + 1\n\n\nclass Two:\n    def one(self):\n        return 1 + 1\n"
LISTED = '[[mutant]]\nfile = "store/a.py"\nold = "1"\nnew = "2"\ntest = "tests/store/test_a.py"\n'


def change(old="1 + 1", new="1 - 1", within="Two.one"):
    return Mutant("store/a.py", old, new, "tests/store/test_a.py::test_it", within)


def test_mutant_changes_only_the_named_place():
    assert change().applied(SOURCE) == SOURCE[:-6] + "1 - 1\n"


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (change(within=""), "occurs 2 times in the file, not once"),
        (change(within="Three"), "there are 0 definitions of Three"),
        (change(old="2 + 2"), "occurs 0 times in Two.one"),
        (change(new="1 + 1"), "replaced by itself"),
        (change(new="1 +"), "it is no Python"),
    ],
)
def test_error_explains_why_a_mutant_does_not_apply(mutant, words):
    with pytest.raises(ValueError, match=words):
        mutant.applied(SOURCE)


def test_mutant_lists_reject_duplicates_and_unknown_keys(tmp_path):
    (tmp_path / "a.toml").write_text(LISTED)
    assert mutants.read_mutants(tmp_path) == [Mutant("store/a.py", "1", "2", "tests/store/test_a.py")]
    (tmp_path / "b.toml").write_text(LISTED)
    with pytest.raises(ValueError, match="listed twice"):
        mutants.read_mutants(tmp_path)
    (tmp_path / "b.toml").write_text(LISTED.replace("old", "odl"))
    with pytest.raises(ValueError, match="b.toml, mutant 1: .*'odl'"):
        mutants.read_mutants(tmp_path)


def test_all_mutants_apply_to_this_tree(capsys):
    assert mutants.main(["--check"]) == 0, capsys.readouterr().out
    assert len(mutants.read_mutants(mutants.LISTS)) >= 100
    assert mutants.main(["--check", "no/such/folder"]) == 2


def test_surviving_mutants_and_missing_tests_are_reported(monkeypatch, capsys):
    outcomes = {"1 + 1": ("killed", ""), "1": ("survived", "1 passed")}
    monkeypatch.setattr(
        mutants, "_outcome", lambda copy, mutant, *_: outcomes[mutant.old] if mutant else ("survived", "")
    )
    assert mutants.run([change()], 1) == 0
    assert mutants.run([change(), change(old="1")], 1) == 1
    assert "survived: store/a.py" in capsys.readouterr().out
    outcomes["1"] = ("does not apply", "no tests ran")
    assert mutants.run([change(old="1")], 1) == 2
    monkeypatch.setattr(mutants, "_outcome", lambda *_: ("killed", "1 failed"))
    assert mutants.run([change()], 1) == 2, "the tests fail without any mutant"


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("ccjax/policy/focus.py", "tests/policy/test_focus.py"),
        ("scripts/snapshot.py", "tests/scripts/test_snapshot.py"),
        ("tests/engine/skewed_worker.py", "tests/engine/test_clock_skew_processes.py"),  # started as a process
        ("scripts/serve.py", "tests/server/test_startup.py"),  # that, too
        ("tests/redis_server.py", "tests/store/test_index.py"),  # by a fixture of conftest.py
    ],
)
def test_changed_file_selects_its_tests(changed, test):
    assert test in check.nearest_tests([changed])


def test_nearest_tests_are_chosen_first_within_the_time_limit():
    near = {"changed": 0, "near": 1, "long": 2, "far": 3, "farther": 4}
    seconds = {"changed": 30.0, "near": 30.0, "long": 70.0, "far": 30.0, "farther": 30.0}
    assert check.within(near, seconds, 100.0) == ["changed", "near", "far"]
    with pytest.raises(SystemExit):
        check.main(["no/such/file.py"])
