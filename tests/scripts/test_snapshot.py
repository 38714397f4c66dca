"""scripts/snapshot.py as users run it: the demo model's store to a snapshot, to another store, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ccjax.cache.snapshot import inspect_snapshot
from ccjax.engine import Engine
from ccjax.loading.model import load_model, read_model_files
from scripts.snapshot import main
from tests.cache.snapshots import data_files
from tests.scripts import in_process

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [{"text": "Anna lives in Paris and has a dog."}, {"text": "Bob lives in Rome. He is a baker."}]
QUESTION = "Where does Bob live?"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store in which the demo model answered a question twice; the answer."""
    url = tmp_path_factory.mktemp("store").as_uri()
    with Engine.from_pretrained("demo", store=url, frame="none") as engine:
        engine.generate(QUESTION, DOCUMENTS)
        return url, engine.generate(QUESTION, DOCUMENTS).token_ids


@pytest.fixture
def snapshot(filled, tmp_path):
    place = tmp_path / "snapshot"
    assert in_process.run(main, "save", "--store", filled[0], "--to", place).returncode == 0
    return place


def printed(*arguments, code=0):
    """What a run with this exit code prints."""
    done = in_process.run(main, *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_store_is_moved_by_the_command_line(filled, tmp_path):
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
    done = in_process.run(main, "restore", "--store", other, "--from", tmp_path / "snapshot", "--json")
    output, errors = done.stdout, done.stderr
    restored = json.loads(output)
    assert restored["num_restored"] == 3 and restored["failed_writes"] == 0 and "Restoring" in errors
    with Engine.from_pretrained("demo", store=other, frame="none") as engine:
        response = engine.generate(QUESTION, DOCUMENTS)
        frequencies = {meta.variant_id: meta.frequency_reuse for meta in engine._chunks.variants}
    assert response.token_ids == answer and response.reuse.exact
    assert response.reuse.computed_tokens == response.reuse.prompt_tokens - response.reuse.reused_tokens
    assert {part.tier for part in response.reuse.per_document} == {"disk"}
    for variant in inspect_snapshot(tmp_path / "snapshot").variants:
        assert frequencies[variant.record.variant_id] > variant.frequency_reuse > 0  # restored, then used once more


def test_restore_skips_existing_variants_obeys_the_byte_limit_and_reports_damage(snapshot, tmp_path):
    smallest = min(variant.record.num_bytes for variant in inspect_snapshot(snapshot).variants)
    arguments = ["restore", "--from", snapshot, "--store", (tmp_path / "other").as_uri()]
    assert "Restored 1 variants, " in printed(*arguments, "--max-bytes", smallest)
    text = printed(*arguments)
    assert "Restored 2 variants" in text and text.endswith("; 1 there already\n")
    file = data_files(snapshot)[0]
    raw = file.read_bytes()
    file.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    assert "; 1 damaged, left out" in printed(*arguments[:-1], (tmp_path / "third").as_uri(), code=1)


def test_inspect_shows_the_hottest_chunks(snapshot):
    text = printed("inspect", "--from", snapshot, "--model", "demo")
    assert "Anna lives in Paris and has a dog." in text and "3 of 3 chunks" in text and "float32, 6 layers" in text
    facts = json.loads(printed("inspect", "--from", snapshot, "--json", "--top", "2", "--model", "demo"))
    index = inspect_snapshot(snapshot)
    assert (facts["num_variants"], facts["num_bytes"]) == (3, index.num_bytes) and 0 <= facts["age_s"] < 86_400
    hottest = [chunk["frequency_reuse"] for chunk in facts["hottest"]]
    assert hottest == [variant.frequency_reuse for variant in index.variants[:2]] and hottest[0] >= hottest[1] > 0
    assert facts["hottest"][0]["text"].strip() == DOCUMENTS[0]["text"]


def test_errors_name_what_was_expected(filled, snapshot, tmp_path):
    new, other, typo = tmp_path / "new", tmp_path / "other", tmp_path / "typo"
    save, restore = ["save", "--store", filled[0], "--to"], ["restore", "--store", other.as_uri(), "--from", snapshot]
    for arguments, words in (
        ([*save, snapshot], "holds a snapshot already"),
        ([*save, new, "--tenant-salt", "another"], "holds no KV of demo (under this tenant salt)"),
        ([*save, new, "--dtype", "bfloat16"], "holds no KV of demo in bfloat16"),
        (["save", "--store", typo.as_uri(), "--to", new], "wanted a directory"),
        ([*restore, "--tenant-salt", "another"], "taken under another tenant salt"),
        ([*restore, "--model", tmp_path / "none"], 'wanted "demo", "smollm2", a directory'),
        (["inspect", "--from", tmp_path], "holds no snapshot"),
        (["inspect", "--from", snapshot, "--model", tmp_path], "--model: wanted"),
    ):
        done = in_process.run(main, *arguments)
        assert (done.returncode, done.stdout) == (2, "") and words in done.stderr
        assert done.stderr.startswith("ccjax snapshot: error: ") and done.stderr.count("\n") == 1
    assert not new.exists() and not typo.exists()


def test_fingerprint_is_computed_without_loading_the_model():
    files = read_model_files("demo")
    assert [files.fingerprint(dtype) for dtype in ("float32", "bfloat16")] == [
        load_model("demo", dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")
    ]
