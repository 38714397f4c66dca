"""scripts/precompute.py as users run it: a server over its store computes no passage; killed, joined, interrupted,
changed documents, refusals."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import psutil
import pytest

from ccjax.cli import precompute
from ccjax.cli.options import parse, part
from ccjax.cli.serving.options import serve_options
from ccjax.config import DocumentOptions
from ccjax.engine import Engine
from ccjax.loading.model import DEMO_CORPUS
from ccjax.precompute import worker, workers
from ccjax.server.loading import open_documents
from tests.polling import wait_until
from tests.scripts import in_process
from tests.server.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NUM_DOCS = 8
NUM_OTHERS = 3
"""Variants of the system prompt and of both passages of the frame."""
QUESTION = "Which tool does Yara Ames own?"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """What runs keep between each other: compiled steps."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny one, whose tokenizer knows the demo's words; in 8 bits its KV takes about a quarter."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, [path.read_text() for path in sorted(DEMO_CORPUS.iterdir())[:NUM_DOCS]], head_dim=32)
    return folder


@pytest.fixture(scope="module")
def docs(tmp_path_factory) -> Path:
    """A tenth of the demo's documents, a passage each; the first one answers the question."""
    return some_documents(tmp_path_factory.mktemp("docs"))


def some_documents(folder: Path) -> Path:
    for path in sorted(DEMO_CORPUS.iterdir())[:NUM_DOCS]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def start(tmp_path, cache, model, docs):
    """`start(name, *options, **how)` runs `held_precompute` beside the test, in a session of its own; all are
    ended."""
    processes = []

    def run(name: str, *options: object, **how: object) -> subprocess.Popen[str]:
        script = ["-m", "tests.scripts.held_precompute", json.dumps({"store": str(tmp_path / "store"), **how})]
        command = [sys.executable, *script, *arguments(tmp_path, cache, model, name), *map(str, options)]
        command += ["--documents", str(docs)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes))
        return processes[-1]

    yield run
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def run_here(tmp_path, cache, model, monkeypatch):
    """`run_here(name, *options)` runs the script in this process, its workers on threads."""

    class Worker(threading.Thread):
        exitcode = 0

        def __init__(self, target, args, name):
            connection, settings = args
            self._own = multiprocessing.connection.Connection(os.dup(connection.fileno()))
            super().__init__(target=target, args=(self._own, settings), name=name)

        def run(self):
            with self._own:
                super().run()

        def kill(self):
            with socket.socket(fileno=os.dup(self._own.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    context = types.SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Worker)
    here = types.SimpleNamespace(get_context=lambda how: context, connection=multiprocessing.connection)
    monkeypatch.setattr(workers, "multiprocessing", here)
    handled = types.SimpleNamespace(signal=lambda number, handler: None, **dict(signal.Signals.__members__))
    handled.SIG_IGN = signal.SIG_IGN
    monkeypatch.setattr(worker, "signal", handled)
    monkeypatch.setattr(worker, "_ROUNDS", 1)
    return lambda name, *options: in_process.run(precompute.main, *arguments(tmp_path, cache, model, name), *options)


def arguments(tmp_path: Path, cache: Path, model: Path, name: str) -> list[str]:
    given = {
        "model": model,
        "store": (tmp_path / "store").as_uri(),
        "report": tmp_path / f"{name}.json",
        "compile-cache-dir": cache,
        "index-dir": tmp_path / f"index-{name}",
        "search": "lexical",
    }
    return [text for key, value in given.items() for text in (f"--{key}", str(value))]


def report(tmp_path: Path, name: str) -> dict:
    return json.loads((tmp_path / f"{name}.json").read_text())


def finished(process: subprocess.Popen[str]) -> str:
    """What a run that went well printed on stderr."""
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return errors


def records(tmp_path: Path) -> set[str]:
    return {path.stem for path in tmp_path.glob("store/*/records/*.json")}


def claims(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.glob("store/*/leases/*")}


def wait_for_records(tmp_path: Path, count: int, process: subprocess.Popen[str]) -> None:
    def are_there() -> bool:
        assert process.poll() is None
        return len(records(tmp_path)) >= count

    wait_until(are_there, timeout_s=600)


def retriever_of(tmp_path: Path, engine: Engine, name: str, docs: Path):
    options = DocumentOptions(docs=str(docs), index_dir=str(tmp_path / f"index-{name}"), search="lexical")
    retriever = open_documents("tiny", options, engine.tokenizer)
    assert retriever is not None and retriever.report.rebuilt is None and not retriever.report.added, "embedded again"
    return retriever


def test_killed_run_is_resumed_by_two_and_the_server_computes_no_passage(start, model, tmp_path, docs):
    """Neither of the two goes on before the other has computed something; claims of theirs last however slow the
    machine is."""
    killed = start("killed", "--neighbours", 1, held_at=5, claim_s=0.1)
    wait_for_records(tmp_path, 5, killed)
    all_of_it = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    wait_until(
        lambda: all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in all_of_it)
    )
    before, claimed = records(tmp_path), claims(tmp_path)
    assert not (tmp_path / "killed.json").exists()

    made = {name: str(tmp_path / f"{name}.computed") for name in ("one", "two")}
    pairs = (("one", "two"), ("two", "one"))
    runs = [start(own, "--neighbours", 1, own=made[own], other=made[other], claim_s=3600.0) for own, other in pairs]
    for process in runs:
        finished(process)
    one, two = (report(tmp_path, name) for name in ("one", "two"))
    computed = [found["run"]["computed"] for found in (one, two)]
    assert min(computed) > 0
    # Who estimates first does so before anything is computed.
    assert sum(computed) == max(found["estimate"]["variants"] for found in (one, two)), "nothing twice"
    num_variants = 3 * NUM_DOCS + NUM_OTHERS
    others_before = sum(computed) - (3 * NUM_DOCS - len(before))  # what is no passage's
    assert 5 <= len(before) < num_variants and others_before in (1, NUM_OTHERS)
    assert len(records(tmp_path)) == num_variants
    for found in (one, two):
        assert found["failed"] == []
        assert found["passages"] == {"total": NUM_DOCS, "stored": NUM_DOCS, "share": 1.0, "token_share": 1.0}
        assert found["framed"]["stored"] == found["behind_neighbours"]["stored"] == NUM_DOCS
    assert claims(tmp_path) <= claimed, "of the killed run alone: what it was at"
    assert list(tmp_path.glob(".ccjax-sample-*")) == []

    with Engine.from_pretrained(model, store=one["store"], read_only=True) as engine:
        retriever = retriever_of(tmp_path, engine, "one", docs)
        assert retriever.search(QUESTION, 1)[0].document_id == retriever.document_ids[0]
        of_documents = map(retriever.passages, retriever.document_ids[:5])
        passages = [found.as_document() for own in of_documents for found in own]
        alone = engine.generate(QUESTION, passages[:1], max_new_tokens=8)
        assert alone.reuse.exact
        assert alone.token_ids == engine.generate(QUESTION, passages[:1], max_new_tokens=8, reuse="off").token_ids
        assert [part.computed_tokens + part.recomputed_tokens for part in alone.reuse.per_document] == [0, 0]
        several = engine.generate(QUESTION, passages, max_new_tokens=1)
        assert [part.computed_tokens for part in several.reuse.per_document] == [0] * 6
        assert several.reuse.per_document[1].recomputed_tokens == 0 < several.reuse.recomputed_tokens
        # A variant that existed before there was any question: exact behind the neighbour it was computed behind.
        near, *_ = retriever.neighbours(1)[passages[0].id or ""]
        neighbour = next(found.as_document() for found in retriever.passages(near.partition("#")[0]))
        both = [neighbour, passages[0]]
        second = engine.generate(QUESTION, both, max_new_tokens=1, reuse="exact").reuse.per_document[-1]
        assert second.reused_tokens == second.num_tokens


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_signal_stops_precompute_cleanly(start, tmp_path, number, code):
    process = start("ended", "--neighbours", 2, "--disk-kv-dtype", "int8", held_at=5, claim_s=3600.0)
    wait_for_records(tmp_path, 5, process)
    os.killpg(process.pid, number)  # as a terminal does: to the workers as well
    _, errors = process.communicate(timeout=600)
    found = report(tmp_path, "ended")
    assert process.returncode == code and "run the same command again to continue" in errors
    assert found["interrupted"] == signal.Signals(number).name and found["failed"] == []
    stored = sum(found[name]["stored"] for name in ("passages", "framed", "behind_neighbours"))
    assert 0 < stored == found["run"]["computed"] < 3 * NUM_DOCS
    assert len(records(tmp_path)) - stored in (1, NUM_OTHERS) and claims(tmp_path) == set()


def test_precompute_handles_changed_documents_pruning_and_questions(run_here, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    some_documents(docs)
    questions = tmp_path / "questions.jsonl"
    lines = (DEMO_CORPUS.parent / "demo_questions.jsonl").read_text().splitlines()[:3]
    questions.write_text("\n".join(lines))
    done = run_here("run", "--documents", docs, "--workers", 2)
    assert done.returncode == 0, done.stderr
    run, estimate = (report(tmp_path, "run")[name] for name in ("run", "estimate"))
    assert run["computed"] == estimate["variants"] == 2 * NUM_DOCS and run["present"] == 0
    assert estimate["num_bytes"] == pytest.approx(run["stored_bytes"], rel=0.01)
    first = records(tmp_path)
    changed, gone, *_ = sorted(docs.iterdir())
    changed.write_text(changed.read_text().replace("mallet", "hammer"))
    gone.unlink()
    (docs / "ends.pdf").write_bytes(b"not a PDF")
    done = run_here("run", "--documents", docs, "--prune", "--questions", questions, "--top-k", 1, "--max-tokens", 4)
    assert done.returncode == 0, done.stderr
    found = report(tmp_path, "run")
    left = NUM_DOCS - 1
    assert (found["run"]["computed"], found["passages"]["stored"], found["passages"]["total"]) == (2, left, left)
    assert (found["pruned"]["passages"], found["pruned"]["variants"]) == (2, 4)
    assert len(records(tmp_path) - first) == 2 and len(first - records(tmp_path)) == 4
    assert [Path(file["path"]).name for file in found["unusable_files"]] == ["ends.pdf"]
    quality = found["quality"]
    assert (quality["num_questions"], quality["num_documents"], quality["num_known"]) == (3, 1.0, 3)
    assert quality["same_tokens"]["mean"] == 1.0 and 0.0 <= quality["computed_share"] < 1.0


def test_a_dry_run_and_refusals_leave_nothing_behind(run_here, docs, tmp_path):
    def refusal(*options: object) -> str:
        done = run_here("dry", "--documents", docs, *options)
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]

    text = refusal("--disk-cache-bytes", "1kB")
    wanted = re.match(r"ccjax precompute: error: --store: wanted space for (\d+)", text)
    assert wanted is not None and "1000 left of" in text
    assert not (tmp_path / "store").exists()
    done = run_here("dry", "--documents", docs, "--dry-run", "--disk-kv-dtype", "int8")
    assert done.returncode == 0 and re.search(r"hide loads of at least \S+ .B/s: .* usual", done.stderr), done.stderr
    found = report(tmp_path, "dry")
    assert found["dry_run"] and found["estimate"]["seconds"] > 0 and found["run"]["computed"] == 0
    assert 4.0 < 2 * 20_153_376 / found["estimate"]["object_bytes"] * 1.15 and not (tmp_path / "store").exists()
    assert "--documents: wanted a directory, or demo, got" in refusal("--documents", tmp_path / "none")
    assert "--devices: wanted one for each of 1 workers, got '0,1'" in refusal("--devices", "0,1")
    assert "--report: wanted a file in a directory" in refusal("--report", tmp_path / "none" / "report.json")


def test_document_options_match_those_of_the_server():
    given = ["--chunk-tokens", "50", "--index-dir", "/i", "--search", "lexical"]
    flags = ["--store", "file:///s", "--documents", "/d", "--frame", "none", *given]
    (settings,) = precompute._settings(parse(precompute.PrecomputeOptions, flags, prog="x"))
    assert settings.documents == part(serve_options(["--docs", "/d", *given]), DocumentOptions)
    assert settings.engine == {"dtype": "auto", "store": "file:///s", "frame": "none"}
