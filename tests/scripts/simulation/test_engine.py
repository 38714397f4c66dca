"""The simulator against the real engine: the same requests one after the other compute the same tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.store.spec import KVSpec
from ccjax.types import Document
from scripts.benchmarks.ragcache_replay import request_of
from scripts.simulation.cache import SimulatedCacheSettings
from scripts.simulation.replica import Deployment
from tests.scripts.simulation.builders import PerToken, simulated, workload
from tests.server.tiny_model import write_tiny_model

KV = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
"""The tiny model's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    texts = [f"Town {n} has {n + 3} bridges. " + "The river is wide. " * (n % 5 + 1) for n in range(12)]
    write_tiny_model(folder, texts)
    return folder, texts


@pytest.mark.parametrize("budget", [1 << 30, 60_000], ids=["everything is kept", "some is evicted"])
@pytest.mark.parametrize("strategy", ["prefix", "cachecraft", "auto"])
def test_simulated_requests_compute_as_many_tokens_as_real_ones(model, strategy, budget):
    folder, texts = model
    draw = random.Random(0)
    lists = [draw.sample(range(len(texts)), 3) for _ in range(40)]
    settings = {"strategy": strategy, "eviction_policy": "lru", "host_cache_bytes": budget}
    settings |= {"recompute_ratio": 0.3} if strategy == "cachecraft" else {}
    with Engine.from_pretrained(str(folder), focus_window=None, max_model_len=512, **settings) as engine:
        asked = [request_of("Who?", [Document(texts[number]) for number in numbers]) for numbers in lists]
        reports = [engine.run(request).reuse for request in asked]
    real = np.array([report.computed_tokens + report.recomputed_tokens for report in reports])

    lengths = [[part.num_tokens for part in report.per_document if part.role == "document"] for report in reports]
    pairs = [list(zip(numbers, tokens, strict=True)) for numbers, tokens in zip(lists, lengths, strict=True)]
    system = reports[0].per_document[0].num_tokens
    question = reports[0].prompt_tokens - system - sum(lengths[0])
    apart = workload([1000.0 * number for number in range(40)], pairs, question=question, system=system)
    limits = SchedulerSettings(num_pages=1000, page_tokens=16)
    outcome = simulated(apart, Deployment(PerToken(), KV, SimulatedCacheSettings(**settings), limits)).outcome

    assert outcome.prompt.tolist() == [report.prompt_tokens for report in reports]
    assert len(real) * question < real.sum() < 0.7 * outcome.prompt.sum()
    if budget > 60_000:
        assert outcome.computed.tolist() == real.tolist()
    else:  # which of two variants goes first may differ
        assert outcome.computed.sum() == pytest.approx(real.sum(), rel=0.03)
