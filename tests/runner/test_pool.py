"""The device tier's pages: what is read is what was written, whatever else moved; pages in use stay as they are."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.store import ShardNotFoundError, TierFullError
from tests.store.kv import BF16, SPEC, make_kv, make_record

PAGE = SPEC.num_bytes(PAGE_TOKENS)


def put(pool, name, num_tokens):
    pool.put(make_record(name, num_tokens, pool.kv_spec), make_kv(name, num_tokens, pool.kv_spec))


def check(pool, name, num_tokens, shard=None):
    wanted = make_kv(name, num_tokens, pool.kv_spec)
    got = (shard or pool.get(name)).read_layers(0, pool.kv_spec.num_layers)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kv_spec", [SPEC, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 33, 100])
def test_pool_reads_back_what_was_written(kv_spec, num_tokens):
    pool = DevicePool(kv_spec, 20 * kv_spec.num_bytes(PAGE_TOKENS))
    put(pool, "before", 5)
    put(pool, "v", num_tokens)
    put(pool, "after", 40)
    check(pool, "v", num_tokens)
    part = pool.get("v").read_layers(1, 2)
    assert part.tobytes() == make_kv("v", num_tokens, kv_spec)[1:2].tobytes()
    assert pool.charged("v") == -(-num_tokens // PAGE_TOKENS) * kv_spec.num_bytes(PAGE_TOKENS)


def test_random_operations_keep_variants_intact_and_leak_no_pages():
    random = np.random.default_rng(0)
    pool, held = DevicePool(SPEC, 12 * PAGE + PAGE - 1), {}
    assert pool.num_pages == 12 and pool.budget.limit_bytes == 12 * PAGE
    for number in range(120):
        if held and random.random() < 0.45:
            name = list(held)[random.integers(len(held))]
            assert pool.remove(name) and not pool.remove(name)
            del held[name]
        else:
            name, num_tokens = f"v{number}", int(random.integers(1, 70))
            try:
                put(pool, name, num_tokens)
                held[name] = num_tokens
            except TierFullError:
                assert pool.budget.shortfall(-(-num_tokens // PAGE_TOKENS) * PAGE) > 0  # pages fit wherever they lie
        assert pool.budget.used_bytes == sum(-(-tokens // PAGE_TOKENS) * PAGE for tokens in held.values())
        assert len(pool) == len(held) and {one.variant_id for one in pool.summaries()} == set(held)
    for name, num_tokens in held.items():
        check(pool, name, num_tokens)
    for name in held:
        pool.remove(name)
    put(pool, "all", 12 * PAGE_TOKENS)
    check(pool, "all", 12 * PAGE_TOKENS)


def test_concurrent_allocations_never_take_pages_of_each_other():
    pool, failures = DevicePool(SPEC, PAGE), []

    def allocate():
        for _ in range(2000):
            with contextlib.suppress(TierFullError):
                try:
                    pool.allocate([1])  # freed at once
                except IndexError as error:
                    failures.append(error)
                    return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=allocate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures and pool.num_free == 1


def test_pages_of_a_removed_variant_are_not_reused_while_held():
    pool = DevicePool(SPEC, 3 * PAGE)
    put(pool, "a", 32)
    shard = pool.get("a")
    assert pool.remove("a") and "a" not in pool and pool.charged("a") is None
    with pytest.raises(ShardNotFoundError, match="'?a"):
        pool.get("a")
    with pytest.raises(TierFullError, match=f"wanted {2 * PAGE} bytes of pages, {PAGE} more than are free"):
        put(pool, "b", 32)
    assert pool.budget.used_bytes == 2 * PAGE
    put(pool, "c", 16)
    check(pool, "a", 32, shard)
    del shard
    gc.collect()
    put(pool, "b", 32)
    check(pool, "b", 32)
    check(pool, "c", 16)


def test_write_beyond_the_budget_is_rejected_without_side_effects():
    pool = DevicePool(SPEC, 2 * PAGE)
    put(pool, "a", 17)
    with pytest.raises(TierFullError, match="device tier"):
        put(pool, "b", 1)
    put(pool, "a", 17)  # again: nothing to do
    check(pool, "a", 17)
    assert "b" not in pool and pool.budget.used_bytes == 2 * PAGE


def test_a_budget_below_one_page_is_refused():
    with pytest.raises(ValueError, match=f"device_cache_bytes: wanted at least {PAGE}.*got {PAGE - 1}"):
        DevicePool(SPEC, PAGE - 1)


def test_context_is_gathered_from_pages_and_other_sources():
    pool = DevicePool(SPEC, 20 * PAGE)
    for name in ("x", "a", "y", "b"):
        put(pool, name, 37)
    pool.remove("x")
    pool.put(make_record("nan", 30), np.full(SPEC.shape(30), np.nan, np.float32))
    # b at 3, a at 70; the rest empty
    num_slots, layer = 128, 1
    slots = np.full(num_slots, pool.num_slots, np.int32)
    wanted = np.zeros((2, *SPEC.shape(num_slots)[2:]), np.float32)
    for name, start in (("b", 3), ("a", 70)):
        slots[start : start + 37] = pool.get(name).slots
        wanted[:, start : start + 37] = make_kv(name, 37)[layer]
    k, v = pool.gather(layer, jnp.asarray(slots))
    assert np.asarray(k).tobytes() == wanted[0].tobytes() and np.asarray(v).tobytes() == wanted[1].tobytes()


def test_reads_of_one_thread_go_on_while_another_one_writes():
    pool, failures = DevicePool(SPEC, 40 * PAGE), []
    put(pool, "a", 50)
    done = threading.Event()

    def read():
        while not done.is_set():
            try:
                check(pool, "a", 50)
            except Exception as error:
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        put(pool, f"v{number}", 16)
        pool.remove(f"v{number}")
    done.set()
    reader.join(120)
    assert not failures and not reader.is_alive()
