"""One replica against times and tokens worked out by hand."""

import numpy as np
import pytest

from scripts.simulation.costs import SimulatedPiece
from scripts.simulation.run import Simulation
from scripts.simulation.workload import Workload, draw_which, poisson, zipf_lists
from tests.scripts.simulation.builders import PerToken, deployment, simulated, workload

A, B, C = (1, 100), (2, 50), (3, 20)


def times(simulation):
    return simulation.outcome.ttft_s.tolist()


def test_cached_passages_are_reused_with_partial_recompute():
    run = simulated(workload([0, 1, 2], [[A, B], [A, B], [B, A]]), deployment())
    # All; the question; behind another prefix 30 % of both, ceil of each, and the question.
    assert run.outcome.computed.tolist() == [160, 10, 15 + 30 + 10]
    assert run.outcome.recomputed.tolist() == [0, 0, 45]
    assert times(run) == pytest.approx([0.160, 0.010, 0.055], abs=1e-6)
    assert run.outcome.hits.tolist() == [0, 2, 2]
    assert run.outcome.tier_tokens["host"].tolist() == [0, 150, 150]


SLOW_DISK = PerToken(disk_bytes_per_s=100)


@pytest.mark.parametrize(
    ("lists", "settings", "computed"),
    [
        ([[A, B], [A, C], [B, A]], {"strategy": "prefix", "eviction_policy": "pgdsf"}, [160, 30, 160]),
        ([[A, B], [A, B]], {"strategy": "full", "reuse": "off"}, [160, 160]),
        ([[A], [A]], {"costs": SLOW_DISK, "host_cache_bytes": 0, "disk_cache_bytes": 1 << 20}, [110, 110]),
    ],
    ids=["a prefix as far as it goes", "no reuse", "a disk slower than computing"],
)
def test_computed_tokens_by_setting(lists, settings, computed):
    run = simulated(workload(range(len(lists)), lists), deployment(**settings))
    assert run.outcome.computed.tolist() == computed
    assert len(run.replicas[0].cache.index) == 0 or settings.get("reuse") != "off"


def test_requests_queue_behind_running_requests_or_share_a_pack():
    work = workload([0, 0.01, 0.02], [[A], [B], [C]])
    run = simulated(work, deployment(scheduler={"max_num_seqs": 1}))
    # 110 ms, then 60 and 30 in turn, or 30 and 60: the order is by cached tokens, of which none has any.
    assert times(run) == pytest.approx([0.110, 0.110 - 0.01 + 0.060, 0.110 - 0.02 + 0.060 + 0.030])
    run = simulated(work, deployment())
    assert run.outcome.num_packs == 2
    assert times(run)[1:] == pytest.approx([0.110 + 0.090 - 0.01, 0.110 + 0.090 - 0.02])


def test_latency_includes_decode_steps():
    run = simulated(workload([0], [[A]], answers=5), deployment())
    assert run.outcome.num_decode_steps == 4
    assert run.outcome.latency_s[0] == pytest.approx(0.110 + 4 * 0.01)


def test_decode_continues_between_the_layers_of_a_long_prefill():
    work = workload([0, 0.125], [[C], [(9, 2000)]], answers=30)
    run = simulated(work, deployment(scheduler={"max_decode_gap_s": 0.6}))
    # A layer of the long prompt takes 2.01 s / 4; the answer's pause may be 0.6 s.
    whole = run.outcome.latency_s[0]
    assert whole < 0.030 + 29 * 0.01 + 2.01
    patient = simulated(work, deployment(scheduler={"max_decode_gap_s": 60.0}))
    assert patient.outcome.num_decode_steps > 0 and patient.outcome.ttft_s[1] < run.outcome.ttft_s[1]


def test_layerwise_loading_exposes_only_one_layer():
    # 3,200 bytes of KV at 32,000 bytes a second: 0.1 s, against 10 ms of products in 4 layers.
    costs = PerToken(host_bytes_per_s=32_000)
    work = workload([0, 1], [[A], [A]])
    layerwise = simulated(work, deployment(costs))
    assert times(layerwise)[1] == pytest.approx(0.1 + 0.010 / 4)
    sync = simulated(work, deployment(costs, loading="sync"))
    assert times(sync)[1] == pytest.approx(0.110)
    on_device = simulated(work, deployment(costs, device_cache_bytes=1 << 20))
    assert times(on_device)[1] == pytest.approx(0.010)
    assert on_device.outcome.tier_tokens["device"].tolist() == [0, 100]


def test_disk_chunks_are_preloaded_while_requests_wait():
    costs = PerToken(disk_bytes_per_s=32_000)
    work = workload([0, 1, 1.001], [[A], [(9, 500)], [A]])
    settings = {"host_cache_bytes": 0, "disk_cache_bytes": 1 << 20, "scheduler": {"max_num_seqs": 1}}
    waited = simulated(work, deployment(costs, preloads=False, **settings))
    ahead = simulated(work, deployment(costs, **settings))
    assert waited.outcome.tier_tokens["disk"][2] == ahead.outcome.tier_tokens["disk"][2] == 100
    assert times(waited)[2] - times(ahead)[2] > 0.09


@pytest.mark.parametrize(("settings", "hits"), [({}, [0, 1, 0, 1, 0]), ({"eviction_policy": "lru"}, [0, 1, 0, 0, 0])])
def test_least_valuable_variant_is_evicted(settings, hits):
    """Room for one passage: the one that is used again stays."""
    work = workload(range(5), [[A], [A], [(5, 100)], [A], [(5, 100)]])
    assert simulated(work, deployment(host_cache_bytes=3200, **settings)).outcome.hits.tolist() == hits


def test_full_queue_refuses_requests():
    run = simulated(
        workload([0, 0, 0, 0], [[A], [A], [A], [A]]),
        deployment(scheduler={"max_queue": 2, "max_num_seqs": 1, "flow_share": 100.0}),
    )
    figures = run.outcome.figures(run._workload)
    assert figures["refused"] == 2 and figures["answered"] == 2
    assert np.isnan(run.outcome.ttft_s).sum() == 2


def test_page_shortage_preempts_requests_and_all_answers_finish():
    work = workload([0] * 6, [[(n, 40)] for n in range(6)], answers=60)
    run = simulated(work, deployment(scheduler={"num_pages": 17}))
    assert run.outcome.num_preempted > 0
    assert not np.isnan(run.outcome.latency_s).any()
    assert run.replicas[0]._free_pages == 17


def test_output_head_runs_once_for_a_prompt_split_over_packs(monkeypatch):
    seen = []
    pack_s = PerToken.pack_s
    monkeypatch.setattr(PerToken, "pack_s", lambda self, pieces: [seen.append(pieces), pack_s(self, pieces)][1])
    simulated(workload([0], [[A]]), deployment(scheduler={"max_num_batched_tokens": 64}))
    assert [piece for pieces in seen for piece in pieces][-2:] == [
        SimulatedPiece(64, 64, False),
        SimulatedPiece(46, 110, True),
    ]


def drawn(count, rate, seed=0):
    lists = zipf_lists(60, 80, 3, [20, 40, 70], exponent=0.9, seed=seed)
    which = draw_which(count, len(lists), exponent=0.9, seed=seed)
    return Workload(poisson(count, rate, seed), which, lists, 10, np.full(count, 3), 8)


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("prefix", "pgdsf"), ("prefix", "lru"), ("cachecraft", "saved_seconds"), ("auto", "pgdsf"), ("auto", "lru")],
)
def test_random_run_respects_budgets_and_accounts_for_every_token(strategy, policy):
    work = drawn(300, 15.0)
    budget = 3000 * 32
    tiers = {"device_cache_bytes": budget // 4, "host_cache_bytes": budget, "disk_cache_bytes": 2 * budget}
    run = simulated(work, deployment(strategy=strategy, eviction_policy=policy, **tiers))
    for usage in run.replicas[0].cache.store.usage().values():
        assert usage.used_bytes <= usage.budget_bytes
    outcome = run.outcome
    reused = sum(tokens for tokens in outcome.tier_tokens.values())
    documents = np.array([sum(work.lists[place].num_tokens) for place in work.which])
    assert (outcome.prompt == documents + 18).all()
    assert (reused <= documents).all()
    assert (outcome.computed >= 10).all() and (outcome.computed <= outcome.prompt).all()
    assert (outcome.latency_s >= outcome.ttft_s).all()
    assert not run.replicas[0].cache.store._pins


def test_the_same_seed_gives_the_same_run():
    first, second = (simulated(drawn(120, 15.0), deployment(replicas=3), seed=4) for _ in range(2))
    assert first.outcome.ttft_s.tobytes() == second.outcome.ttft_s.tobytes()
    other = simulated(drawn(120, 15.0, seed=1), deployment(replicas=3), seed=4)
    assert first.outcome.ttft_s.tobytes() != other.outcome.ttft_s.tobytes()


def test_requests_are_routed_to_the_replica_with_their_passages():
    """Two lists that share nothing, in turn, far apart in time: each stays where it was first."""
    work = workload(range(40), [[A, B] if n % 2 else [(7, 100), (8, 50)] for n in range(40)])
    seen = []
    run = Simulation(deployment(replicas=2), work)
    run.run(seen.append)
    assert sum(seen) == 40, "progress"
    homes = run.outcome.replica
    assert len(set(homes[0::2].tolist())) == len(set(homes[1::2].tolist())) == 1
    assert run.outcome.computed[4:].tolist() == [10] * 36
