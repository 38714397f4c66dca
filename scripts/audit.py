"""Reports known vulnerabilities of the packages of an environment, by pip-audit.

Exit codes: 0 none, 1 some, 77 if no advisory database answered, so that nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS = "ccjax"
"""Message if no index knows any of the packages."""

SKIPPED = 77
_LONGEST_S = 120.0
_UNREACHED = re.compile(r"^requests\.exceptions\.\w+|Could not connect")
_PIP_AUDIT = "pip-audit>=2.9,<3"
_PATHS = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the audit; returns the exit code."""
    parser = argparse.ArgumentParser(prog="audit.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--with", dest="tools", required=True, metavar="DIR", help="environment of pip-audit, created if missing"
    )
    parser.add_argument("--of", required=True, metavar="FILE", help="the interpreter of the environment to check")
    args = parser.parse_args(argv)
    tool = Path(args.tools) / "bin" / "pip-audit"
    try:
        if not tool.exists():
            subprocess.run([sys.executable, "-m", "venv", args.tools], check=True, timeout=_LONGEST_S)
            install = [str(tool.with_name("pip")), "install", "--quiet", "--disable-pip-version-check", _PIP_AUDIT]
            subprocess.run(install, check=True, timeout=_LONGEST_S)
    except subprocess.SubprocessError as error:
        return _skipped(f"{_PIP_AUDIT} cannot be installed ({error})")
    packages = subprocess.run([args.of, "-c", _PATHS], capture_output=True, text=True, check=True).stdout.strip()
    command = [str(tool), "--path", packages, "--progress-spinner", "off", "--format", "json"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        return _skipped(f"there was no answer within {_LONGEST_S:.0f} s")
    try:
        return judge(json.loads(found.stdout)["dependencies"])
    except (ValueError, KeyError) as error:
        said = [line for line in found.stderr.splitlines() if line.strip()]
        if any(_UNREACHED.search(line) for line in said):
            return _skipped(f"the index does not answer ({said[-1][:200]})")
        print(found.stderr, file=sys.stderr)
        print(f"audit.py: error: pip-audit ended with {found.returncode} and no report: {error}", file=sys.stderr)
        return 2


def _skipped(why: str) -> int:
    print(f"audit.py: SKIPPED: {why}; nothing was checked", file=sys.stderr)
    return SKIPPED


def judge(packages: Sequence[dict[str, Any]]) -> int:
    """Prints pip-audit's JSON findings for `packages`; returns the exit code. pip-audit itself reports packages that
    the index does not know as clean."""
    unknown = [package["name"] for package in packages if "skip_reason" in package and package["name"] != OURS]
    known = [package for package in packages if "skip_reason" not in package]
    for package in known:
        for flaw in package["vulns"]:
            fixed = ", ".join(flaw["fix_versions"]) or "none yet"
            print(f"{package['name']} {package['version']}: {flaw['id']}, fixed in {fixed}")
    if unknown:
        print(f"audit.py: the index does not know {len(unknown)}: {', '.join(sorted(unknown))}", file=sys.stderr)
    if not known:
        print("audit.py: SKIPPED: the index knows none of the packages; nothing was checked", file=sys.stderr)
        return SKIPPED
    flawed = sum(bool(package["vulns"]) for package in known)
    print(f"audit.py: {flawed} of {len(known)} packages have known vulnerabilities")
    return 1 if flawed else 0


if __name__ == "__main__":
    sys.exit(main())
