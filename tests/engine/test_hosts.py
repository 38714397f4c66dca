"""One model over two processes: the identities hold, and answers equal those of one device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ccjax.engine import Engine
from tests.conftest import ROOT
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer, assert_same
from tests.oracles import llama_forward

MODEL = TinyModel(num_attention_heads=8, num_key_value_heads=2, head_dim=16, vocab_size=96)
"""Each kv head is in one process, on both of its devices if it has two; each process receives half of a chunk."""

_DEVICES = "--xla_force_host_platform_device_count="

SEGMENTS = draw_segments(np.random.default_rng(1), [40, 33, 61], vocab=96)
PERMUTED = permuted(SEGMENTS, [2, 0, 1])
ASKED = [
    *((SEGMENTS, reuse) for reuse in ("off", "bounded", "bounded", "exact")),
    *((PERMUTED, reuse) for reuse in ("off", "bounded", "exact")),
]
CROWD = [
    (draw_segments(np.random.default_rng(seed), [30, 20 + seed], vocab=96), reuse)
    for seed, reuse in enumerate(("off", "bounded", "exact", "bounded", "off", "fast"))
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(MODEL.raw))
    save_file(MODEL.weights, directory / "model.safetensors")
    return directory


def run(tmp_path: Path, directory: Path, num_devices: int, **settings: Any) -> list[dict[str, Any]]:
    """The JSON lines that each process printed."""
    asked = {
        "model": str(directory),
        "settings": {"tensor_parallel_size": 2 * num_devices, "max_model_len": 512, "dtype": "float32", **settings},
        "asked": ASKED,
        "crowd": CROWD,
    }
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    environment = os.environ | {"XLA_FLAGS": " ".join([f"{_DEVICES}{num_devices}", *flags])}
    command = [sys.executable, "-m", "tests.engine.hosts_worker", f"127.0.0.1:{free_port()}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, str(number), str(tmp_path / "asked.json")], cwd=ROOT, env=environment, **pipes)
        for number in range(2)
    ]
    try:
        printed = []
        for process in processes:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            printed.append(json.loads(output.splitlines()[-1]))  # gloo prints before it
        return printed
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("num_devices", "settings"),
    # tests/server/test_hosts.py has two processes of one device each
    [(2, {}), pytest.param(1, {"device_cache_bytes": 2 << 20, "strategy": "cacheblend"}, marks=pytest.mark.slow)],
)
def test_two_processes_give_the_same_answers_as_one_device(tmp_path, directory, num_devices, settings):
    store = f"file://{tmp_path}/store"
    leader, follower = run(tmp_path, directory, num_devices, store=store, **settings)
    tokens = [token for segment in SEGMENTS for token in segment]
    wanted = llama_forward(MODEL.weights, MODEL.raw, tokens)[0]
    np.testing.assert_allclose(np.asarray(leader["logits"]), wanted, atol=TOLERANCE)

    total, question = len(tokens), len(SEGMENTS[-1])
    with MODEL.engine(max_model_len=512, **settings) as single:
        for (segments, reuse), got in zip((*ASKED, *CROWD), (*leader["answers"], *leader["crowd"]), strict=True):
            one = answer(single, segments, reuse)
            assert_same((tuple(got["tokens"]), got["logprobs"]), one)
            assert (got["reused"], got["recomputed"]) == (one[2].reused_tokens, one[2].recomputed_tokens)
        plain = answer(single, PERMUTED, "off")
    # At first nothing is stored, then everything but the question; a new order is repaired, or reused unchanged.
    assert [got["reused"] for got in leader["answers"][:4]] == [0, 0, *2 * [total - question]]
    assert leader["answers"][5]["recomputed"] > 0 and leader["answers"][6]["tokens"] == list(plain[0])

    # Each process has read its half of the weights, and the norms and embeddings, which are not split.
    num_bytes = sum(weight.nbytes for weight in MODEL.weights.values())
    for process in (leader, follower):
        assert 0.5 * num_bytes <= process["num_read"] < 0.6 * num_bytes

    # Written on one mesh, read on another.
    with Engine.from_pretrained(directory, max_model_len=512, store=store) as later:
        found = answer(later, SEGMENTS, "bounded")
        assert_same(found, answer(later, SEGMENTS, "off"))
        assert found[2].reused_tokens == total - question
