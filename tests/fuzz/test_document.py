"""The server's OpenAPI document by schemathesis' own command: no fault, and no schema looser than the checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.test_api import ADMIN, EXAMPLES, SETTINGS

pytestmark = pytest.mark.slow
_LACKS = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "501", "504"]\n'
"""504 is a time limit's, 501 a lack: the tests' server has no encoder."""
_MISMATCH = "schema constraints don't match API validation"


def test_every_operation_takes_what_the_document_says(start_server, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(_LACKS)
    header = f"Authorization: {ADMIN['Authorization']}"
    with start_server(SETTINGS) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", config, "run"]
        command += [f"{server.url}/openapi.json", "--url", server.url, "-H", header, "--no-color"]
        command += ["--request-timeout", "300", "--checks", "not_a_server_error"]
        command += ["--phases", "examples,fuzzing", "--max-examples", EXAMPLES or "10", "--generation-deterministic"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=tmp_path)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert "Tested: 2" in output, "about 21 operations"
        assert _MISMATCH not in output, output[output.index(_MISMATCH) - 200 :][:1500]
