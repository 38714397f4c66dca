"""Measured rates against simulated links: parallel reads, queues, latency, hangs, single odd measurements."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Cost, LoadRate, Rates, fit
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.store.throttle import ThrottledLink


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Disk:
    """A link of `bytes_per_s` that serves reads in order, each `latency_s` after its start at the earliest."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.clock = Clock()
        self.rate = LoadRate(self.clock)
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s

    def burst(self, sizes: list[int], *, slower: float = 1.0) -> None:
        """Reads that start at once, to the end of the last."""
        free_at = self.clock.now + self._latency_s * slower
        keys = [self.rate.begin() for _ in sizes]
        for key, size in zip(keys, sizes, strict=True):
            free_at += size / self._bytes_per_s * slower
            self.clock.now = free_at
            self.rate.end(key, size)
        self.clock.now += 100.0  # what is idle says nothing


@pytest.mark.parametrize("parallel", [1, 2, 8])
def test_latency_and_bandwidth_are_estimated_with_any_number_of_parallel_reads(parallel):
    disk = Disk(bytes_per_s=1000.0, latency_s=0.02)
    for number in range(1, 7):
        disk.burst([10 * number] * parallel)
    assert disk.rate.cost is not None
    assert disk.rate.cost.fixed_s == pytest.approx(0.02) and disk.rate.cost.unit_s == pytest.approx(1e-3)
    assert disk.rate.cost.seconds(500) == pytest.approx(0.52) and disk.rate.cost.seconds(0) == 0.0


def test_bursts_of_one_size_give_their_mean_rate():
    disk = Disk(1000.0, 0.02)
    disk.burst([100])
    assert disk.rate.cost == Cost(0.0, pytest.approx(0.0012)) and not disk.rate.is_settled
    for _ in range(4):
        disk.burst([100])
    assert disk.rate.cost.seconds(100) == pytest.approx(0.12) and disk.rate.is_settled


def test_rate_ignores_a_few_outliers_but_learns_a_lasting_change():
    draw = random.Random(0)
    disk = Disk(1e5, 0.0)  # so that the slow bursts, too, end within a second
    for number in range(20):
        disk.burst([draw.randrange(50, 500) for _ in range(4)], slower=30.0 if number % 5 == 2 else 1.0)
    assert disk.rate.cost.seconds(1000) == pytest.approx(0.01, rel=0.05)
    for _ in range(32):
        disk.burst([draw.randrange(50, 500) for _ in range(4)], slower=3.0)
    assert disk.rate.cost.seconds(1000) == pytest.approx(0.03, rel=0.05)


def test_a_burst_without_end_is_measured_every_second():
    rate = LoadRate(clock := Clock())
    keys = [rate.begin()]
    for _ in range(100):  # the next read begins before the last one ends
        clock.now += 0.1
        keys.append(rate.begin())
        rate.end(keys.pop(0), 50)
    assert rate.is_settled and rate.cost.seconds(1000) == pytest.approx(2.0, rel=0.01)


def test_a_read_that_hangs_does_not_make_idle_time_count():
    disk = Disk(1000.0, 0.0)
    hanging = disk.rate.begin()
    disk.clock.now += 50.0
    for _ in range(5):
        disk.burst([100, 300])
    assert disk.rate.cost.seconds(1000) == pytest.approx(1.0)
    disk.rate.end(hanging, 1000)  # came after all, and says nothing
    disk.burst([100, 300])
    assert disk.rate.cost.seconds(1000) == pytest.approx(1.0)


def test_failed_reads_are_not_measured():
    rate = LoadRate(clock := Clock())
    read: Future = Future()
    assert rate(read, 1000) is read
    clock.now += 1.0
    read.set_exception(ValueError("gone"))
    assert rate.cost is None
    good: Future = Future()
    rate(good, 1000)
    clock.now += 0.5
    good.set_result(None)
    assert rate.cost == Cost(0.0, 0.0005)


def test_measured_rate_equals_the_settings_of_a_throttled_link():
    rate = LoadRate(clock := Clock())
    link = ThrottledLink(2000.0, 0.25, clock=clock, sleep=clock.sleep)
    for size in (100, 200, 400, 800):
        done: Future = Future()
        done.set_result(None)
        read: Future = Future()
        rate(read, size)
        read.set_result(link(done, size).result(timeout=120))
    assert rate.cost.fixed_s == pytest.approx(0.25) and rate.cost.unit_s == pytest.approx(1 / 2000)


def test_compute_time_has_a_fixed_part_and_a_part_per_token():
    rates = Rates(Clock())
    assert rates.compute_s(5) is None and rates.seconds_per_token is None and rates.load_s("disk", 5) is None
    for tokens in (10, 200, 1000):
        rates.compute.add(tokens, 0.1 + 0.002 * tokens)
    assert rates.compute_s(500) == pytest.approx(1.1) and rates.seconds_per_token == pytest.approx(0.002)


def test_disk_reads_and_host_merges_overlap_in_the_estimate():
    rates = Rates(Clock())
    assert rates.load_behind_s(100, 50) is None
    rates.tiers["host"].add(100, 1.0)
    assert rates.load_behind_s(200, 0) == pytest.approx(2.0)
    rates.tiers["disk"].add(100, 3.0)
    assert rates.load_behind_s(200, 50) == pytest.approx(2.0) and rates.load_behind_s(200, 100) == pytest.approx(3.0)


def test_fit_refuses_no_samples_and_falls_back_to_the_median_rate():
    with pytest.raises(ValueError, match="^samples: wanted at least one"):
        fit([])
    assert fit([(10, 5.0), (20, 1.0), (40, 1.0)]) == Cost(0.0, 0.05)  # more in less time: the median of each one's


@pytest.mark.parametrize("odd", [(1, 100.0), (100, 100.0), (10**6, 0.5)])
def test_fit_is_robust_to_one_outlier_in_five_samples(odd):
    samples = [(count, 0.01 + 1e-4 * count) for count in (50, 60, 100, 130)]
    assert fit([*samples, odd]).seconds(100) == pytest.approx(0.02, rel=0.1)


def test_full_prefill_is_estimated_only_for_measured_prompt_lengths():
    rates = Rates()
    costs = MeasuredCosts(rates)
    assert costs.full_prefill_s(1) is None
    for count, seconds in ((10, 0.1), (11, 0.1), (12, 0.1), (200, 0.4), (300, 0.9)):
        rates.compute.add(count, seconds)
    assert costs.full_prefill_s(240) == pytest.approx((0.48 + 0.72) / 2)
    assert costs.full_prefill_s(100) == pytest.approx(0.2)
    assert costs.full_prefill_s(600) == pytest.approx(1.8)
    for unknown in (25, 99, 601):
        assert costs.full_prefill_s(unknown) is None
    grid = PrefillGrid((0, 100), (100, 1000), ((1.0, 10.0), (2.0, 20.0)))
    assert MeasuredCosts(rates, grid).full_prefill_s(1000) == 10.0


def test_runs_without_positive_compute_time_are_ignored():
    """Seconds per token below zero once made every later schedule fail."""
    rates = Rates()
    for tokens, seconds in ((16, -1e-4), (16, 0.0)):
        rates.compute.add(tokens, seconds)
        assert rates.seconds_per_token is None
    rates.compute.add(16, 0.02)
    rates.compute.add(256, -0.5)
    assert rates.seconds_per_token == pytest.approx(0.02 / 16)
