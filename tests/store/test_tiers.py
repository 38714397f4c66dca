"""One suite for host memory, disk, both, and buckets: stored variants are loaded unchanged, within budgets."""

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.store import KVSpec, ShardNotFoundError, ShardRecord, TensorStoreTier, TieredStore
from ccjax.store.files import FileRoot
from ccjax.store.formats import KV_DTYPES
from tests.store.kv import (
    BF16,
    OURS,
    SPEC,
    assert_same_bytes,
    bytes_on_disk,
    get,
    make_kv,
    make_record,
    object_files,
    open_store,
    put,
    record_file,
    url_of,
)
from tests.store.places import Place

ONE = SPEC.num_bytes(5)  # bytes of one variant in host memory


@pytest.fixture
def tiers(tier_kind):
    """The tiers in use, the fastest first; a bucket is the disk tier, too."""
    return {"host": ("host",), "both": ("host", "disk")}.get(tier_kind, ("disk",))


@pytest.fixture
def place(tier_kind, make_place) -> Place | None:
    return None if tier_kind == "host" else make_place("file" if tier_kind == "both" else tier_kind)


@pytest.fixture(params=[SPEC, BF16], ids=lambda spec: spec.dtype)
def kv_spec(request):
    return request.param


@pytest.fixture
def make_store(tiers, place):
    stores = []

    def make(kv_spec: KVSpec = SPEC, folder: str = "kv", **options: Any) -> TieredStore:
        options.setdefault("host_bytes", 1 << 20 if "host" in tiers else 0)
        stores.append(open_store(place and place.below(folder).url, kv_spec=kv_spec, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_only_the_given_tiers_store_a_variant(make_store, tiers):
    store = make_store()
    for number, allowed in enumerate(((), *((tier,) for tier in tiers), tiers)):
        name = f"v{number}"
        ticket = store.prepare_store(make_record(name))
        assert store.complete_store(ticket, make_kv(name), tiers=allowed) == tuple(t for t in tiers if t in allowed)
        assert store.flush(120) and store.tiers_of(name) == tuple(tier for tier in tiers if tier in allowed)


def test_stored_variants_are_loaded_byte_for_byte(make_store, kv_spec, tiers):
    first, second = make_store(kv_spec), make_store(kv_spec, folder="second")
    for number, num_tokens in enumerate([1, 5, 16, 33]):
        variant_id = f"v{number}"
        assert put(first, variant_id, num_tokens) == tiers
        loaded = get(first, variant_id)
        assert_same_bytes(loaded, make_kv(variant_id, num_tokens, kv_spec))
        second.complete_store(second.prepare_store(make_record(variant_id, num_tokens, kv_spec)), loaded)
        second.flush()
        assert_same_bytes(get(second, variant_id), make_kv(variant_id, num_tokens, kv_spec))
        assert first.tier_of(variant_id) == tiers[0] and first.tiers_of(variant_id) == tiers
        for tier in tiers:
            charge = first.charge_bytes(tier, variant_id)
            assert charge and first.charges(tier, [variant_id, "never there"]) == {variant_id: charge}
    assert (
        first.records()
        == second.records()
        == [make_record(f"v{number}", num_tokens, kv_spec) for number, num_tokens in enumerate([1, 5, 16, 33])]
    )


def test_every_bf16_value_survives(make_store):
    spec = KVSpec(num_layers=2, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    store = make_store(spec)
    kv = np.arange(1 << 16, dtype=np.uint16).view(spec.np_dtype).reshape(spec.shape(32))  # NaNs, infinities, -0 too
    record = ShardRecord("all", "c", 32, spec.num_bytes(32))
    store.complete_store(store.prepare_store(record), kv)
    store.flush()
    np.testing.assert_array_equal(get(store, "all").view(np.uint16), kv.view(np.uint16))


def test_loaded_layers_are_read_only_and_outlive_the_ticket(make_store, tiers):
    store = make_store()
    put(store, "v")
    ticket = store.prepare_load(["v"])
    ticket.prefetch("v", 1, 3)
    parts = [ticket.read_layers("v", 2, 3), ticket.read_layers("v", 0, 1), ticket.read_layers("v", 1, 3)]
    assert ticket.ready("v", 0, 3)
    assert sum(ticket.bytes_read.values()) == (ONE * 4 // 3 if tiers[0] == "host" else ONE)
    store.complete_load(ticket)
    store.evict(tiers[0], ["v"])
    for part, layers in zip(parts, [slice(2, 3), slice(0, 1), slice(1, 3)], strict=True):
        assert_same_bytes(part, make_kv("v")[layers])
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


@pytest.mark.parametrize("kind", ["normal", "zeros", "not contiguous"])
def test_store_keeps_a_copy_in_order(make_store, kind):
    wanted = np.zeros(SPEC.shape(5), np.float32) if kind == "zeros" else make_kv("v")
    kv = np.array(wanted, order="F" if kind == "not contiguous" else "C")
    store = make_store()
    store.complete_store(store.prepare_store(make_record("v")), kv)
    kv[:] = np.nan
    store.flush()
    assert_same_bytes(get(store, "v"), wanted)
    assert get(store, "v").flags.c_contiguous


def test_missing_variants_and_invalid_layer_ranges_are_rejected(make_store):
    store = make_store()
    put(store, "v")
    ticket = store.prepare_load(["v", "w", "w"])
    assert ticket.missing == {"w"} and set(ticket.tiers) == {"v"} and store.tier_of("w") is None
    with pytest.raises(ShardNotFoundError, match="variant w"):
        ticket.read_layers("w", 0, 1)
    with pytest.raises(ValueError, match="prepared for, got 'x'"):
        ticket.read_layers("x", 0, 1)
    for first, last in [(0, 0), (-1, 1), (0, 4), (2, 1)]:
        with pytest.raises(ValueError, match="first, last"):
            ticket.read_layers("v", first, last)
    store.complete_load(ticket)
    with pytest.raises(ValueError, match="completed already"):
        ticket.read_layers("v", 0, 1)
    with pytest.raises(ValueError, match="completed already"):
        store.complete_load(ticket)


def test_bad_kv_is_refused_and_leaves_no_trace(make_store):
    store = make_store()
    for bad in (make_kv("v", 6), make_kv("v").astype(np.float64), make_kv("v", kv_spec=BF16)):
        with pytest.raises(ValueError, match=r"kv: wanted float32\[3, 2, 5, 2, 4\], got"):
            store.complete_store(store.prepare_store(make_record("v")), bad)
    with pytest.raises(ValueError, match="num_bytes: wanted 960"):
        store.prepare_store(ShardRecord("v", "c", 5, 961))
    assert store.tier_of("v") is None and all(tier.used_bytes == 0 for tier in store.usage().values())
    assert put(store, "v")


def test_second_store_of_a_variant_does_nothing(make_store, tiers):
    store = make_store()
    first = store.prepare_store(make_record("v"))
    second = store.prepare_store(make_record("v"))
    assert not first.exists and second.exists and second.shortfall_bytes == {}
    store.complete_store(first, make_kv("v"))
    assert store.complete_store(second, make_kv("v", writer=1)) == ()
    third = store.prepare_store(make_record("v"))
    assert third.exists and store.complete_store(third, make_kv("v", writer=1)) == ()
    store.flush()
    assert_same_bytes(get(store, "v"), make_kv("v"))
    assert [usage.num_variants for name, usage in store.usage().items() if name in tiers] == [1] * len(tiers)


def test_abandoned_store_frees_its_space(make_store):
    store = make_store()
    ticket = store.prepare_store(make_record("v"))
    assert store.complete_store(ticket, None) == ()
    with pytest.raises(ValueError, match="completed already"):
        store.complete_store(ticket, make_kv("v"))
    assert store.tier_of("v") is None and put(store, "v")


def test_pinned_is_never_evicted(make_store, tiers):
    store = make_store()
    put(store, "v")
    put(store, "w")
    first, second = store.prepare_load(["v"]), store.prepare_load(["v", "gone"])
    for tier in tiers:
        assert store.evict(tier, ["v", "w", "gone"]) == ("w",)
    store.complete_load(first, ok=False)
    assert store.evict(tiers[-1], ["v"]) == ()
    assert_same_bytes(second.read_layers("v", 0, 3), make_kv("v"))
    store.complete_load(second, ok=False)
    for tier in tiers:
        assert store.evict(tier, ["v"]) == ("v",)
    assert store.records() == []


def test_shortfall_is_the_exact_excess_and_no_tier_exceeds_its_budget(tiers, place, tmp_path):
    room = TensorStoreTier(url_of(tmp_path / "probe"), SPEC, OURS).charge_bytes(make_record("v0"))
    budgets = {"host": 2 * ONE + 10, "disk": 2 * room + 10}
    host_bytes = budgets["host"] if "host" in tiers else 0
    with open_store(place and place.url, host_bytes=host_bytes, disk_bytes=budgets["disk"]) as store:
        assert put(store, "v0") == put(store, "v1") == tiers
        ticket = store.prepare_store(make_record("v2"))
        sizes = {"host": ONE, "disk": room}
        assert ticket.shortfall_bytes == {tier: sizes[tier] - 10 for tier in tiers}
        assert ticket.tiers == tiers
        other = store.prepare_store(make_record("v3"))
        assert other.shortfall_bytes == {tier: 2 * sizes[tier] - 10 for tier in tiers}  # both are announced
        assert store.complete_store(ticket, make_kv("v2")) == ()  # nobody made room
        assert {name: usage.skipped_writes for name, usage in store.usage().items() if name in tiers} == dict.fromkeys(
            tiers, 1
        )
        for tier in tiers:
            assert store.evict(tier, ["v0"]) == ("v0",)
        assert other.shortfall_bytes == {}
        assert store.complete_store(other, make_kv("v3")) == tiers
        store.flush()
        assert {record.variant_id for record in store.records()} == {"v1", "v3"}
        for tier in tiers:
            assert store.usage()[tier].used_bytes == 2 * sizes[tier] <= budgets[tier]
        if place:
            assert place.num_bytes() == 2 * room


def test_variant_larger_than_the_budget_is_no_shortfall(make_store, tiers):
    store = make_store(host_bytes=10, disk_bytes=10 if "disk" in tiers else None)
    ticket = store.prepare_store(make_record("v"))
    assert ticket.tiers == () and ticket.shortfall_bytes == {}
    assert store.complete_store(ticket, make_kv("v")) == ()


def test_discard_ignores_pins_and_is_permanent(make_store, tiers):
    store = make_store()
    put(store, "v")
    put(store, "w")
    ticket = store.prepare_load(["v"])
    store.discard("v")
    store.discard("v")
    assert store.tier_of("v") is None and [record.variant_id for record in store.records()] == ["w"]
    assert {name: usage.discarded for name, usage in store.usage().items() if name in tiers} == dict.fromkeys(tiers, 1)
    if tiers[0] == "host":
        assert_same_bytes(ticket.read_layers("v", 0, 3), make_kv("v"))
    else:
        with pytest.raises(ShardNotFoundError):
            ticket.read_layers("v", 0, 3)
    store.complete_load(ticket)
    assert store.tier_of("v") is None
    assert put(store, "v") == tiers
    assert_same_bytes(get(store, "v"), make_kv("v"))


def test_a_discard_by_record_removes_only_copies_of_that_record(tmp_path):
    """Memory has the first writer's copy, disk another process's newer one."""
    with open_store(tmp_path) as ours, open_store(tmp_path, host_bytes=0) as theirs:
        for key in ("v", "w"):
            put(ours, key)
        theirs.refresh()
        for key in ("v", "w"):
            theirs.discard(key)
            record = dataclasses.replace(make_record(key), meta={"anew": True})
            assert theirs.complete_store(theirs.prepare_store(record), make_kv(key, writer=1)) == ("disk",)
        assert (
            theirs.flush(120)
            and ours._disk is not None
            and ours._disk.apply_commits({"v": None, "w": None}) == ("v", "w")
        )
        ours.discard("v", lambda record: "anew" not in record.meta)
        assert ours.tiers_of("v") == ("disk",)
        assert_same_bytes(get(ours, "v"), make_kv("v", writer=1))
        ours.discard("w", lambda record: "anew" in record.meta)
        assert ours.tiers_of("w") == ("host",) and not record_file(tmp_path, "w").exists()
        assert_same_bytes(get(ours, "w"), make_kv("w"))
        used = ours.usage()["disk"].used_bytes
        assert used == bytes_on_disk(tmp_path) == ours._disk.charged("v")


def test_usage_counts_hits_misses_writes_and_bytes(make_store, tiers):
    store = make_store()
    put(store, "v")
    get(store, "v", ok=False)
    store.complete_load(store.prepare_load(["nothing"]))
    usage = store.usage()
    fast = usage[tiers[0]]
    assert (fast.hits, fast.misses, fast.writes, fast.bytes_read) == (1, 1, 1, ONE)
    if tiers == ("disk",):
        assert (usage["host"].hits, usage["host"].misses) == (0, 2)
    if tiers == ("host", "disk"):
        assert (usage["disk"].hits, usage["disk"].misses, usage["disk"].writes) == (0, 1, 1)
    assert set(usage) == {"host"} | set(tiers)


def test_invalid_arguments_and_use_after_close_are_rejected(make_store):
    store = make_store()
    with pytest.raises(ValueError, match="tier: wanted one of"):
        store.evict("device", ["v"])
    with pytest.raises(ValueError, match="host_bytes: wanted an int >= 0, got -1"):
        open_store(None, host_bytes=-1)
    store.close()
    store.close()
    for call in (lambda: store.prepare_load(["v"]), lambda: store.prepare_store(make_record("v"))):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_completely_read_variants_are_promoted_to_host_memory_if_they_fit(tmp_path):
    with open_store(tmp_path, host_bytes=2 * ONE) as store:
        for variant_id in ("a", "b", "c"):
            put(store, variant_id)
        assert {record.variant_id: store.tier_of(record.variant_id) for record in store.records()} == {
            "a": "host",
            "b": "host",
            "c": "disk",
        }
        assert store.evict("host", ["a", "b"]) == ("a", "b")
        ticket = store.prepare_load(["a", "b", "c"])
        assert store.shortfall_bytes("host", 3 * ONE) is None  # never
        assert store.shortfall_bytes("host", 2 * ONE) == 0
        a = ticket.read_layers("a", 0, 3)
        ticket.read_layers("b", 0, 2)
        ticket.read_layers("b", 2, 3)
        ticket.read_layers("c", 0, 2)  # not whole
        assert tuple(ticket.whole()) == ("a", "b")
        assert store.complete_load(ticket) == {"host": ("a", "b")}
        assert [store.tier_of(key) for key in ("a", "b", "c")] == ["host", "host", "disk"]
        again = store.prepare_load(["a", "c"])
        assert np.shares_memory(a, again.read_layers("a", 0, 3))  # promotion does not copy
        again.read_layers("c", 0, 3)
        store.evict("host", ["b"])
        assert store.complete_load(again, ok=False) == {}  # a failed prefill promotes nothing
        for variant_id in ("a", "b", "c"):
            assert_same_bytes(get(store, variant_id), make_kv(variant_id))


def test_only_named_variants_are_promoted(tmp_path):
    with open_store(tmp_path, host_bytes=9 * ONE) as store:
        for variant_id in ("a", "b"):
            put(store, variant_id)
        store.evict("host", ["a", "b"])
        ticket = store.prepare_load(["a", "b"])
        for variant_id in ("a", "b"):
            ticket.read_layers(variant_id, 0, 3)
        assert store.complete_load(ticket, promote={"host": ["b", "c"]}) == {"host": ("b",)}
        assert [store.tier_of(key) for key in ("a", "b", "c")] == ["disk", "host", None]
        with pytest.raises(ValueError, match="tier: wanted one of.*'tape'"):
            store.shortfall_bytes("tape", 1)


def test_promotion_does_not_use_announced_space(tmp_path):
    with open_store(tmp_path, host_bytes=ONE) as store:
        put(store, "a")
        store.evict("host", ["a"])
        announced = store.prepare_store(make_record("b"))
        ticket = store.prepare_load(["a"])
        ticket.read_layers("a", 0, 3)
        assert store.shortfall_bytes("host", ONE) == ONE
        assert store.complete_load(ticket) == {}
        assert store.complete_store(announced, make_kv("b")) == ("host", "disk")


def test_concurrent_threads_can_wait_for_prefetched_layers(tmp_path):
    with open_store(tmp_path, host_bytes=0) as store:
        ids = [f"v{number}" for number in range(8)]
        for variant_id in ids:
            put(store, variant_id, 16)
        ticket = store.prepare_load(ids)
        failures = []

        def read(offset: int) -> None:
            for variant_id in ids[offset:] + ids[:offset]:
                for layer in range(3):
                    if (
                        ticket.read_layers(variant_id, layer, layer + 1).tobytes()
                        != make_kv(variant_id, 16)[layer].tobytes()
                    ):
                        failures.append((variant_id, layer))

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
        for variant_id in ids:
            ticket.prefetch(variant_id, 0, 2)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and ticket.bytes_read == {"device": 0, "host": 0, "disk": 8 * SPEC.num_bytes(16)}
        store.complete_load(ticket)


def test_object_is_a_zarr3_shard_that_can_be_read_without_our_code(tmp_path):
    with open_store(tmp_path) as store:
        put(store, "v")
    (file,) = object_files(tmp_path)
    assert file.name == "c.0.0.0.0.0"
    raw, kv = file.read_bytes(), make_kv("v")
    index = np.frombuffer(raw[-16 * 3 :], "<u8").reshape(3, 2).tolist()
    for layer, (offset, length) in enumerate(index):
        assert raw[offset : offset + length] == kv[layer].tobytes()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kv_spec", [SPEC, BF16], ids=["f32", "bf16"])
def test_direct_file_access_and_tensorstore_use_identical_files(tmp_path, monkeypatch, kv_spec, kv_dtype):
    """Direct file access and tensorstore use one format: each reads the other's files, byte for byte."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path, uses_tensorstore in ((ours, False), (theirs, True)):
        with monkeypatch.context() as patch:
            if uses_tensorstore:
                patch.setattr(FileRoot, "folder", lambda *_: None)
            with open_store(path, kv_spec=kv_spec, kv_dtype=kv_dtype) as store:
                put(store, "v", 16)
    assert object_files(ours)[0].read_bytes() == object_files(theirs)[0].read_bytes()
    found = []
    for reads_with_tensorstore in (False, True):
        if reads_with_tensorstore:
            monkeypatch.setattr(FileRoot, "folder", lambda *_: None)
        for path in (ours, theirs):
            with open_store(path, kv_spec=kv_spec, host_bytes=0) as store:
                found.append(get(store, "v"))
    if kv_dtype == "auto":
        found.append(make_kv("v", 16, kv_spec))
    for kv in found[1:]:
        assert_same_bytes(kv, found[0])


def test_no_file_stays_open_after_reading_or_release(tmp_path):
    def num_open():
        links = Path("/proc/self/fd").iterdir()
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    with open_store(tmp_path, host_bytes=0) as store:
        put(store, "v")
        disk = store._disk
        whole, part = disk.open("v"), disk.open("v")
        assert_same_bytes(whole.wait(0, 3), make_kv("v"))
        part.wait(0, 1)
        assert num_open() == 1
        del part
        assert num_open() == 0
