"""scripts/snapshot.py as users run it: the demo model's store to a snapshot, to another store, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ccjax.engine import Engine
from ccjax.engine.loading import load_model, read_model_files
from ccjax.engine.snapshot import inspect_snapshot
from scripts.snapshot import main
from tests.engine.snapshots import data_files

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [{"text": "Anna lives in Paris and has a dog."}, {"text": "Bob lives in Rome. He is a baker."}]
QUESTION = "Where does Bob live?"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store in which the demo model answered a question twice; the answer."""
    url = tmp_path_factory.mktemp("store").as_uri()
    with Engine.from_pretrained("demo", store=url) as engine:
        engine.generate(QUESTION, DOCUMENTS)
        return url, engine.generate(QUESTION, DOCUMENTS).token_ids


@pytest.fixture
def snapshot(filled, tmp_path):
    place = tmp_path / "snapshot"
    assert main(["save", "--store", filled[0], "--to", str(place)]) == 0
    return place


def refusal(capsys, *arguments):
    """The one line of a run that is refused."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("ccjax snapshot: error: ") and errors.count("\n") == 1
    return errors


def test_a_store_moves_by_the_command_line(filled, tmp_path, capsys):
    """First as a process of its own; the answer after the move reuses what was computed before it."""
    url, answer = filled
    other = (tmp_path / "other").as_uri()

    def run(*arguments):
        command = [sys.executable, "scripts/snapshot.py", *arguments, "--json"]
        environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    saved, errors = run("save", "--store", url, "--to", str(tmp_path / "snapshot"))
    assert saved["num_variants"] == 3 and "Saving" in errors and "WARNING" not in errors
    capsys.readouterr()
    assert main(["restore", "--store", other, "--from", str(tmp_path / "snapshot"), "--json"]) == 0
    output, errors = capsys.readouterr()
    restored = json.loads(output)
    assert restored["num_restored"] == 3 and restored["failed_writes"] == 0 and "Restoring" in errors
    with Engine.from_pretrained("demo", store=other) as engine:
        response = engine.generate(QUESTION, DOCUMENTS)
        frequencies = {meta.variant_id: meta.frequency_reuse for meta in engine._variants}
    assert response.token_ids == answer and response.reuse.exact
    assert response.reuse.computed_tokens == response.reuse.prompt_tokens - response.reuse.reused_tokens
    assert {part.tier for part in response.reuse.per_document} == {"disk"}
    for variant in inspect_snapshot(tmp_path / "snapshot").variants:
        assert frequencies[variant.record.variant_id] > variant.frequency_reuse > 0  # restored, then used once more


def test_restoring_counts_what_is_there_and_what_is_beyond_the_limit(snapshot, tmp_path, capsys):
    url = (tmp_path / "other").as_uri()
    smallest = min(variant.record.num_bytes for variant in inspect_snapshot(snapshot).variants)
    arguments = ["restore", "--store", url, "--from", str(snapshot)]
    capsys.readouterr()
    assert main([*arguments, "--max-bytes", str(smallest)]) == 0
    assert "Restored 1 variants, " in capsys.readouterr().out
    assert main(arguments) == 0
    assert "Restored 2 variants" in (text := capsys.readouterr().out) and text.endswith("; 1 there already\n")


def test_damage_is_told_by_the_exit_code(snapshot, tmp_path, capsys):
    file = data_files(snapshot)[0]
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    assert main(["restore", "--store", (tmp_path / "other").as_uri(), "--from", str(snapshot)]) == 1
    assert "; 1 damaged, left out" in capsys.readouterr().out


def test_inspect_shows_the_hottest_chunks(snapshot, capsys):
    capsys.readouterr()
    assert main(["inspect", str(snapshot), "--model", "demo"]) == 0
    text = capsys.readouterr().out
    assert "Anna lives in Paris and has a dog." in text and "3 of 3 chunks" in text and "float32, 6 layers" in text
    assert main(["inspect", str(snapshot), "--json", "--top", "2", "--model", "demo"]) == 0
    facts = json.loads(capsys.readouterr().out)
    index = inspect_snapshot(snapshot)
    assert (facts["num_variants"], facts["num_bytes"]) == (3, index.num_bytes) and 0 <= facts["age_s"] < 86_400
    hottest = [chunk["frequency_reuse"] for chunk in facts["hottest"]]
    assert hottest == [variant.frequency_reuse for variant in index.variants[:2]] and hottest[0] >= hottest[1] > 0
    assert facts["hottest"][0]["text"].strip() == DOCUMENTS[0]["text"]


def test_refusals_name_what_was_wanted(filled, snapshot, tmp_path, capsys):
    url = filled[0]
    assert "holds a snapshot already" in refusal(capsys, "save", "--store", url, "--to", snapshot)
    text = refusal(capsys, "save", "--store", url, "--to", tmp_path / "new", "--tenant-salt", "another")
    assert "holds no KV of demo (under this tenant salt)" in text and not (tmp_path / "new").exists()
    text = refusal(capsys, "save", "--store", url, "--to", tmp_path / "new", "--dtype", "bfloat16")
    assert "holds no KV of demo in bfloat16" in text
    text = refusal(capsys, "save", "--store", (tmp_path / "typo").as_uri(), "--to", tmp_path / "new")
    assert "wanted a directory" in text and not (tmp_path / "typo").exists()
    other = (tmp_path / "other").as_uri()
    text = refusal(capsys, "restore", "--store", other, "--from", snapshot, "--tenant-salt", "another")
    assert "taken under another tenant salt" in text
    text = refusal(capsys, "restore", "--store", other, "--from", snapshot, "--model", tmp_path / "none")
    assert 'wanted "demo", "smollm2", a directory' in text
    assert "holds no snapshot" in refusal(capsys, "inspect", tmp_path)
    assert "--model: wanted" in refusal(capsys, "inspect", snapshot, "--model", tmp_path)


def test_the_fingerprint_needs_no_weights_in_memory():
    files = read_model_files("demo")
    assert [files.fingerprint(dtype) for dtype in ("float32", "bfloat16")] == [
        load_model("demo", dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")
    ]
