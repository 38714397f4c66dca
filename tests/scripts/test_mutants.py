"""scripts/mutants.py: every mutant applies to this tree, and what survives or does not apply is told."""

from __future__ import annotations

import pytest

from scripts import mutants

MUTANT = {"file": "store/a.py", "old": "1 + 1", "new": "1 - 1", "test": "tests/store/test_a.py::test_it"}


def test_all_mutants_apply_to_this_tree(capsys):
    assert mutants.main(["--check"]) == 0, capsys.readouterr().out
    assert mutants.main(["--check", "no/such/folder"]) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [({"old": "2 + 2"}, "occurs 0 times"), ({"old": "1"}, "occurs 2 times"), ({"new": "1 +"}, "it is no Python")],
)
def test_error_explains_why_a_mutant_does_not_apply(change, words):
    with pytest.raises(ValueError, match=words):
        mutants.applied(MUTANT | change, "a = 1 + 1\n")
    assert mutants.applied(MUTANT, "a = 1 + 1\n") == "a = 1 - 1\n"


@pytest.mark.parametrize(
    ("test", "status"),
    [
        ("def test_it(): assert a.two() == 2", "killed"),
        ("def test_it(): a.two()", "survived"),
        ("def test_it(): assert a.two() == 3", "does not apply"),  # fails without the mutant, too
        ("import pytest\n\n@pytest.mark.skip\ndef test_it(): pass", "does not apply"),
    ],
)
def test_outcome_of_a_mutant(monkeypatch, tmp_path, test, status):
    (tmp_path / "store").mkdir()
    (tmp_path / "tests" / "store").mkdir(parents=True)
    (tmp_path / "store" / "a.py").write_text("def two():\n    return 1 + 1\n")
    (tmp_path / "tests" / "store" / "test_a.py").write_text(f"from store import a\n\n\n{test}\n")
    mutants.subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    assert mutants.run([MUTANT]) == [status]
