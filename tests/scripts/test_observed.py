"""The speed of a machine, fitted to prefills whose times were worked out by hand."""

import collections
import dataclasses

import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.types import Document
from scripts.benchmarks.ragcache_replay import request_of
from scripts.simulation.costs import GridCosts, SimulatedPiece
from scripts.simulation.observed import Prefill, fit
from scripts.simulation.replica import HostWork
from tests.server.tiny_model import write_tiny_model

GRID = PrefillGrid((0, 100), (10, 210), ((0.010, 0.210), (0.020, 0.220)))
"""A millisecond for each new token, a tenth of one for each cached token."""
COSTS = GridCosts(GRID, 4, decode_fixed_s=0.0)
HOST = HostWork(before_s=0.003, after_s=0.005, pack_s=0.004, piece_s=0.006, wake_s=0.020, apart_s=0.002)
SCALE = 1.5
HEAD_S = 0.0075
PACK = 300


@dataclasses.dataclass
class Waiting:
    """A prompt in line."""

    arrived_s: float
    cached: int
    new: int
    left: int = 0
    packs_s: tuple[float, ...] = ()


def replay(arrivals_s, sizes, factors=None, host=HOST):
    """Prefills of `(cached, new)` tokens on a machine like that, those that wait sharing packs."""
    line = [Waiting(arrived_s, *size, size[1]) for arrived_s, size in zip(arrivals_s, sizes, strict=True)]
    free_s, found, awake, after_s = 0.0, [], False, 0.0
    while line:
        has_paused = not awake and line[0].arrived_s > free_s
        now_s = line[0].arrived_s if has_paused else free_s + after_s
        waiting = [prompt for prompt in line if prompt.arrived_s <= (now_s if has_paused else free_s)]
        room, pieces, ending, begun = PACK, [], [], 0
        members = []
        for prompt in waiting:
            if not room:
                break
            size = min(prompt.left, room)
            room -= size
            prompt.left -= size
            begun += not prompt.packs_s
            members.append(prompt)
            pieces.append(SimulatedPiece(size, prompt.cached + prompt.new - prompt.left, not prompt.left))
            ending += [] if prompt.left else [prompt]
        started_s = now_s + max(1, begun) * host.before_s
        taken_s = SCALE * COSTS.pack_s(pieces) + host.pack_s + (len(pieces) - 1) * host.piece_s
        taken_s += host.wake_s if has_paused else 0.0
        free_s = started_s + taken_s * (1.0 if factors is None else next(factors)) - (0.0 if ending else HEAD_S)
        for prompt in members:
            prompt.packs_s += (started_s,)
        for prompt in ending:
            line.remove(prompt)
            ttft_s = free_s - prompt.arrived_s + host.apart_s
            found.append(
                Prefill(prompt.cached, prompt.new, prompt.arrived_s, prompt.packs_s, free_s - HEAD_S, free_s, ttft_s)
            )
        awake, after_s = not ending, len(ending) * host.after_s
    return found


def some(num_prefills=80, mean_pause_s=0.6, **options):
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(0, 100)), int(rng.integers(10, 500))) for _ in range(num_prefills)]
    arrivals_s = np.cumsum(rng.exponential(mean_pause_s, num_prefills))
    arrivals_s[1::8] = arrivals_s[::8]  # two at once
    return replay(arrivals_s.tolist(), sizes, **options)


@pytest.fixture
def prefills():
    found = some()
    num_in = collections.Counter(started_s for prefill in found for started_s in prefill.packs_s)
    assert collections.Counter(num_in.values()).keys() >= {1, 2, 3}
    assert {len(prefill.packs_s) for prefill in found} == {1, 2, 3}
    return found


def assert_same(found: HostWork, wanted: HostWork) -> None:
    assert found.jitter == pytest.approx([1.0] * len(found.jitter))
    seconds = [dataclasses.astuple(dataclasses.replace(work, jitter=())) for work in (found, wanted)]
    assert seconds[0][:-1] == pytest.approx(seconds[1][:-1])


def test_fit_recovers_scale_and_host_work(prefills):
    found = fit(prefills, COSTS, PACK)
    num_packs = len({started_s for prefill in prefills for started_s in prefill.packs_s})
    assert len({prefill.ended_s for prefill in prefills}) == found.num_fitted < num_packs
    assert found.scale == pytest.approx(SCALE) and found.head_s == pytest.approx(HEAD_S / SCALE)
    assert_same(found.host_work, HOST)


def test_packs_with_an_unknown_division_are_ignored_in_the_fit(prefills):
    """Two prompts go on behind the same pack, so nothing is known of the packs that they end in, nor of who began there
    and goes on."""
    shift_s = prefills[-1].ended_s + 1.0

    def more(new: int, packs_s: tuple[float, ...], ended_s: float) -> Prefill:
        starts_s = tuple(shift_s + HOST.before_s + start_s for start_s in packs_s)
        return Prefill(0, new, shift_s, starts_s, shift_s + ended_s - HEAD_S, shift_s + ended_s, ended_s + HOST.apart_s)

    alone = fit(prefills, COSTS, PACK)
    odd = [more(400, (0.0, 5.0), 9.0), more(350, (0.0, 5.0), 9.0), more(500, (5.0, 10.0), 14.0)]
    odd += [more(PACK, (20.0,), 24.0), more(500, (20.0, 25.0), 29.0)]  # more than fits
    found = fit([*prefills, *odd], COSTS, PACK)
    assert found.num_fitted == alone.num_fitted and found.scale == pytest.approx(SCALE)
    wanted = dataclasses.replace(HOST, after_s=found.host_work.after_s)
    assert_same(found.host_work, wanted)


def test_fit_is_robust_to_noise_and_reports_the_jitter():
    rng = np.random.default_rng(1)
    found = fit(some(600, factors=iter(lambda: rng.uniform(0.9, 1.1), None)), COSTS, PACK)
    assert found.scale == pytest.approx(SCALE, rel=0.04)
    jitter = np.asarray(found.host_work.jitter)
    assert len(jitter) == found.num_fitted > 300 and jitter.mean() == pytest.approx(1.0, abs=0.005)
    assert jitter.std() == pytest.approx(0.2 / 12**0.5, rel=0.1)


@pytest.mark.parametrize("arrivals_s", [[0.0, 10.0, 20.0, 30.0, 40.0], [0.0, 10.0]], ids=["pauses alone", "two"])
def test_fit_rejects_too_few_packs(arrivals_s):
    with pytest.raises(ValueError, match="wanted packs in which prompts end, both after a pause and without one, got"):
        fit(replay(arrivals_s, [(0, 100)] * len(arrivals_s)), COSTS, PACK)


def test_a_traced_answer_says_what_ran_and_when(tmp_path):
    texts = ["Anna lives by the river in Paris.", "Bob paints houses in Rome."]
    write_tiny_model(tmp_path, texts)
    documents = [Document(text) for text in texts]
    request = dataclasses.replace(request_of("Who?", documents), trace=True)
    with Engine.from_pretrained(str(tmp_path), strategy="prefix", max_model_len=512) as engine:
        first, again = (engine.run(request) for _ in range(2))
    first_prefill, other = (Prefill.of(response, response.ttft_s) for response in (first, again))
    assert (first_prefill.cached, first_prefill.new) == (0, first.reuse.prompt_tokens)
    assert (other.cached, other.new) == (again.reuse.reused_tokens, again.reuse.computed_tokens) and other.cached
    for prefill in (first_prefill, other):
        assert len(prefill.packs_s) == 1
        assert prefill.arrived_s < prefill.packs_s[0] < prefill.layers_s < prefill.ended_s
    assert first_prefill.ended_s < other.arrived_s
