"""The audit of dependencies: what it takes for clean, for a finding, and for not having looked."""

import pytest

from scripts import audit

CLEAN = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}
OURS = {"name": "ccjax", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "code", "told"),
    [
        ([CLEAN, OURS], 0, "0 of 1 packages"),
        ([CLEAN, FLAWED, OURS], 1, "b 2: CVE-1, fixed in 3"),
        ([CLEAN, UNKNOWN], 0, "the index does not know 1: c"),
        ([UNKNOWN, OURS], 77, "SKIPPED"),
        ([], 77, "SKIPPED"),
    ],
)
def test_verdict_and_message_for_audited_packages(capsys, packages, code, told):
    assert audit.judge(packages) == code
    assert told in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("stderr", "code"),
    [
        ("Traceback\nrequests.exceptions.ConnectionError: no route\n", 77),
        ("ERROR:pip_audit._cli:Could not connect to the vulnerability feed", 77),
        ("Traceback\nKeyError: 'vulns'\n", 2),
        ("", 2),
        ("venv takes forever", 77),
        ("pip-audit takes forever", 77),
    ],
)
def test_missing_report_is_an_error_unless_the_index_is_unreachable(monkeypatch, capsys, tmp_path, stderr, code):
    slow = stderr.removesuffix(" takes forever") if "forever" in stderr else None
    if slow != "venv":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "pip-audit").touch()

    def run(command, **how):
        if slow and slow in " ".join(map(str, command)):
            raise audit.subprocess.TimeoutExpired(command, how["timeout"])
        return audit.subprocess.CompletedProcess(command, 1, stdout="", stderr=stderr)

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main(["--with", str(tmp_path), "--of", "python"]) == code
    assert ("SKIPPED" in capsys.readouterr().err) == (code == 77)
