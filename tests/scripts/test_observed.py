"""The speed of a machine, fitted to prefills whose times were worked out by hand."""

import dataclasses

import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.simulation.replica import HostWork
from ccjax.types import Document
from scripts.benchmarks.ragcache_replay import request_of
from scripts.simulation.observed import Prefill, fit
from tests.server.tiny_model import write_tiny_model

GRID = PrefillGrid((0, 100), (10, 210), ((0.010, 0.210), (0.020, 0.220)))
"""A millisecond for each new token, a tenth of one for each cached token."""
HOST = HostWork(before_s=0.003, after_s=0.005, pack_s=0.004, wake_s=0.020, apart_s=0.002)
SCALE = 1.5
HEAD_S = 0.0075
PACK = 300


def replay(arrivals_s, sizes, *, scale=SCALE, host=HOST):
    """Prefills of `(cached, new)` tokens one after the other on a machine like that."""
    free_s, found = -1.0, []
    for arrived_s, (cached, new) in zip(arrivals_s, sizes, strict=True):
        has_paused = arrived_s >= free_s
        started_s = (arrived_s if has_paused else free_s + host.after_s) + host.before_s
        packs_s, free_s = [], started_s
        while new > 0:
            packs_s.append(free_s)
            size, is_last = min(new, PACK), new <= PACK
            free_s += scale * GRID.prefill_s(cached, size) + host.pack_s - (0.0 if is_last else HEAD_S)
            free_s += host.wake_s if has_paused and len(packs_s) == 1 else 0.0
            cached, new = cached + size, new - size
        ttft_s = free_s - arrived_s + host.apart_s
        found.append(Prefill(*sizes[len(found)], arrived_s, tuple(packs_s), free_s - HEAD_S, free_s, ttft_s))
    return found


@pytest.fixture
def prefills():
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(0, 100)), int(rng.integers(10, 500))) for _ in range(60)]
    found = replay(np.cumsum(rng.exponential(0.5, 60)).tolist(), sizes)
    waited = [one.packs_s[0] - one.arrived_s > HOST.before_s + 1e-9 for one in found]
    assert 10 < sum(waited) < 50 and 10 < sum(len(one.packs_s) == 2 for one in found) < 50
    return found


def assert_same(found: HostWork, wanted: HostWork) -> None:
    assert found.jitter == pytest.approx([1.0] * len(found.jitter))
    seconds = [dataclasses.astuple(dataclasses.replace(one, jitter=())) for one in (found, wanted)]
    assert seconds[0][:-1] == pytest.approx(seconds[1][:-1])


def test_scale_and_host_work_are_what_they_were(prefills):
    found = fit(prefills, GRID, PACK)
    assert found.num_fitted == 60
    assert found.scale == pytest.approx(SCALE) and found.head_s == pytest.approx(HEAD_S / SCALE)
    assert_same(found.host_work, HOST)


def test_what_shared_a_pack_tells_nothing(prefills):
    """The second pack of one that is spread is the first of another."""
    shift_s = prefills[-1].ended_s + 1.0

    def more(new: int, packs_s: tuple[float, ...], ended_s: float) -> Prefill:
        starts_s = tuple(shift_s + start_s for start_s in packs_s)
        return Prefill(0, new, shift_s, starts_s, shift_s + ended_s, shift_s + ended_s, ended_s + HOST.apart_s)

    spread, beside = more(600, (0.0, 5.0), 9.0), more(50, (5.0,), 9.0)
    found = fit([*prefills, spread, beside, more(50, (20.0,), 23.0), more(50, (20.0,), 24.0)], GRID, PACK)
    assert found.num_fitted == 60 and found.scale == pytest.approx(SCALE)
    assert_same(found.host_work, HOST)


def test_noise_moves_it_little(prefills):
    rng = np.random.default_rng(1)
    noisy = [
        dataclasses.replace(one, ended_s=one.packs_s[0] + (one.ended_s - one.packs_s[0]) * rng.uniform(0.9, 1.1))
        for one in prefills
    ]
    found = fit(noisy, GRID, PACK)
    assert found.scale == pytest.approx(SCALE, rel=0.06)
    jitter = np.asarray(found.host_work.jitter)
    assert len(jitter) == 60 and jitter.mean() == pytest.approx(1.0, abs=0.02)
    assert 0.045 < jitter.std() < 0.1  # of what was drawn: 0.058


@pytest.mark.parametrize("arrivals_s", [[0.0, 10.0, 20.0, 30.0, 40.0], [0.0, 10.0]], ids=["pauses alone", "two"])
def test_too_little_is_refused(arrivals_s):
    with pytest.raises(ValueError, match="wanted prefills alone in their packs, some after a pause and some not"):
        fit(replay(arrivals_s, [(0, 100)] * len(arrivals_s)), GRID, PACK)


def test_a_traced_answer_says_what_ran_and_when(tmp_path):
    texts = ["Anna lives by the river in Paris.", "Bob paints houses in Rome."]
    write_tiny_model(tmp_path, texts)
    documents = [Document(text) for text in texts]
    request = dataclasses.replace(request_of("Who?", documents), trace=True)
    with Engine.from_pretrained(str(tmp_path), strategy="prefix", max_model_len=512) as engine:
        first, again = (engine.run(request) for _ in range(2))
    one, other = (Prefill.of(response, response.ttft_s) for response in (first, again))
    assert (one.cached, one.new) == (0, first.reuse.prompt_tokens)
    assert (other.cached, other.new) == (again.reuse.reused_tokens, again.reuse.computed_tokens) and other.cached
    for prefill in (one, other):
        assert len(prefill.packs_s) == 1
        assert prefill.arrived_s < prefill.packs_s[0] < prefill.layers_s < prefill.ended_s
    assert one.ended_s < other.arrived_s
