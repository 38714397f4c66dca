"""Snapshots: what comes back, how much of it, and what is refused."""

import shutil

import numpy as np
import pytest

from ccjax.cache.snapshot import inspect_snapshot, restore_snapshot, save_snapshot
from ccjax.cache.snapshot import save as save_module
from ccjax.cache.snapshot.packs import PackFolder
from ccjax.engine import Request, SamplingParams
from ccjax.errors import ReadOnlyError
from ccjax.policy.eviction import DEFAULT_POLICY
from ccjax.store import StoreUnavailableError
from ccjax.types import VariantId
from tests.cache.snapshots import (
    BF16,
    BYTES,
    SPEC,
    contents,
    data_files,
    kv_of,
    make_kv,
    make_record,
    open_cache,
    put,
    save_ten,
)
from tests.engine.helpers import TinyModel, draw_segments, permuted


@pytest.mark.parametrize("kv_spec", [SPEC, BF16], ids=lambda spec: spec.dtype)
def test_round_trip_preserves_every_byte_and_field(place, monkeypatch, kv_spec):
    monkeypatch.setattr(save_module, "PACK_BYTES", 3 * kv_spec.num_bytes(9))
    monkeypatch.setattr(save_module, "PART_BYTES", 8 * kv_spec.num_bytes(9))
    steps = []
    with open_cache(kv_spec=kv_spec) as cache:
        for number in range(23):
            put(cache, number, frequency=number % 7 + 0.1, num_tokens=1 + number * 5 % 17)
        expected = contents(cache)
        report = save_snapshot(cache, place, progress=lambda *step: steps.append(step))
    total = sum(len(kv) for kv, _, _ in expected.values())
    assert (report.num_variants, report.num_bytes, report.num_evicted, report.num_damaged) == (23, total, 0, 0)
    assert steps[0] == ("save", 0, total) and steps[-1] == ("save", total, total) and len(steps) > 3
    steps.clear()
    with open_cache(kv_spec=kv_spec) as cache:
        report = restore_snapshot(cache, str(place), progress=lambda *step: steps.append(step))
        assert contents(cache) == expected
    assert (report.num_restored, report.restored_bytes) == (23, total)
    assert steps[0] == ("restore", 0, total) and steps[-1] == ("restore", total, total) and len(steps) > 3


def test_a_snapshot_of_a_restored_cache_is_the_same_snapshot(tmp_path, small_packs):
    save_ten(tmp_path / "first")
    with open_cache() as cache:
        restore_snapshot(cache, tmp_path / "first")
        save_snapshot(cache, tmp_path / "second")
    first, second = (inspect_snapshot(tmp_path / name) for name in ("first", "second"))
    assert first.variants == second.variants and first.parts == second.parts == (0, 0, 1, 1, 2)
    files = [[path.read_bytes() for path in data_files(tmp_path / name)] for name in ("first", "second")]
    assert len(files[0]) == 5 and files[0] == files[1]


@pytest.mark.parametrize("is_used", [False, True])
def test_restore_brings_back_the_use_counts_for_eviction(place, tmp_path, is_used):
    """Into an empty cache, and into one that counts requests of its own."""
    with open_cache() as cache:
        for number in range(4):
            record = make_record(number)
            cache.store.complete_store(cache.store.prepare_store(record), make_kv(number))
            uses = {record.variant_id: [number + 1, 1, number - 8.5, -number, 0.0]} if number else {}
            cache.variants.restore([(record, 1.0)], {"policy": DEFAULT_POLICY, "uses": uses})
        expected = cache.variants.uses()
        assert sorted(values[0] for values in expected["uses"].values()) == [2, 3, 4]
        save_snapshot(cache, place)
    with open_cache((tmp_path / "kv").as_uri()) as cache:
        own = VariantId(put(cache, 77))
        if is_used:
            cache.variants.credit([(own, 0.5)])
        before = cache.variants.uses()["uses"]
        restore_snapshot(cache, place)
        cache.store.flush()
        uses = cache.variants.uses()["uses"]
    assert len(before) == is_used
    wanted = expected["uses"] | before
    assert {key: values[:2] for key, values in uses.items()} == {key: values[:2] for key, values in wanted.items()}
    for key, values in uses.items():  # older by the request that was counted here already
        assert values[2] == pytest.approx(wanted[key][2], abs=0.01)


def test_an_empty_cache_gives_an_empty_snapshot(place):
    with open_cache() as cache:
        assert save_snapshot(cache, place).num_variants == 0
        assert restore_snapshot(cache, place).num_restored == 0


def test_restore_does_not_change_answers(place):
    model = TinyModel(seed=3)
    segments = draw_segments(np.random.default_rng(3), [40, 31, 60])
    requests = [
        Request(segments=each, sampling=SamplingParams(max_new_tokens=8, logprobs=0), reuse="bounded")
        for each in (segments, permuted(segments, [2, 0, 1]), permuted(segments, [1, 2, 0]))
    ]

    def answers(engine):
        responses = [engine.run(request) for request in requests]
        counts = [(each.reuse.reused_tokens, each.reuse.recomputed_tokens, each.reuse.exact) for each in responses]
        return [(each.token_ids, each.logprobs) for each in responses], counts

    with model.engine() as engine:
        for request in requests:
            engine.run(request)
        engine.cache.save_snapshot(place)
        expected, counts = answers(engine)
    assert {meta.record.meta["fidelity"] for meta in inspect_snapshot(place).variants} == {"exact", "approx"}
    with model.engine() as engine:
        assert engine.cache.restore_snapshot(place).num_restored == len(inspect_snapshot(place).variants)
        got, got_counts = answers(engine)
    assert got == expected and got_counts == counts
    assert counts[0] == (sum(map(len, segments[:-1])), 0, True)
    (place.parent / "kv").mkdir()
    with model.engine(store=(place.parent / "kv").as_uri(), read_only=True) as engine:
        with pytest.raises(ReadOnlyError, match="read_only: wanted an engine that stores chunks"):
            engine.cache.restore_snapshot(place)


def test_restored_variants_can_be_repaired(place):
    """The token ids came along."""
    model = TinyModel(seed=3)
    segments = draw_segments(np.random.default_rng(4), [40, 31])
    with model.engine(recompute_ratio=0.5) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        engine.generate_from_tokens(permuted(segments, [1, 0]), max_new_tokens=1)
        engine.cache.save_snapshot(place)
    with model.engine() as engine:
        engine.cache.restore_snapshot(place)
        assert engine.cache.repair_one() and engine.cache.maintenance_counts.repaired >= 1
        assert engine.cache.maintenance_counts.repair_failed == 0


# -- how much ------------------------------------------------------------------------------------------------------


def test_restore_to_a_smaller_host_keeps_the_hottest_variants(place, small_packs):
    ids, expected = save_ten(place)
    with open_cache(host_bytes=3 * BYTES + 1) as cache:
        report = restore_snapshot(cache, place)
        assert contents(cache) == {key: expected[key] for key in ids[:3]}
    assert (report.num_restored, report.num_no_room) == (3, 7)


def test_variants_that_do_not_fit_host_memory_are_restored_to_disk(place, tmp_path, small_packs):
    ids, expected = save_ten(place)
    with open_cache((tmp_path / "kv").as_uri(), host_bytes=3 * BYTES) as cache:
        assert restore_snapshot(cache, place).num_restored == 10
        cache.store.flush()
        assert contents(cache) == expected
        assert [key for key in ids if "host" in cache.store.tiers_of(key)] == ids[:3]
        assert all("disk" in cache.store.tiers_of(key) for key in ids)


def test_restore_to_a_small_disk_keeps_the_hottest_variants(place, tmp_path, small_packs):
    ids, _ = save_ten(place)
    with open_cache((tmp_path / "kv").as_uri(), host_bytes=0, disk_bytes=10_000) as cache:
        report = restore_snapshot(cache, place)
        cache.store.flush()
        kept = list(contents(cache))
    assert 2 <= len(kept) == report.num_restored < 10 and report.num_no_room == 10 - len(kept)
    assert set(kept) == set(ids[: len(kept)])


def test_restore_respects_max_variants(place, small_packs):
    ids, _ = save_ten(place)
    with open_cache(max_variants=4) as cache:
        put(cache, 77)
        report = restore_snapshot(cache, place)
        assert set(contents(cache)) == {make_record(77).variant_id, *ids[:3]}
    assert (report.num_restored, report.num_no_room) == (3, 7)


def test_max_bytes_limits_reads_to_the_hottest_variants(place, small_packs):
    ids, expected = save_ten(place)
    needed = {0, 1}  # packs of two
    for file in data_files(place):
        if int(file.parent.name.removeprefix("pack-")) not in needed:
            shutil.rmtree(file.parent)
    with open_cache() as cache:
        report = restore_snapshot(cache, place, max_bytes=4 * BYTES - 1)
        assert contents(cache) == {key: expected[key] for key in ids[:3]}
        assert (report.num_restored, report.num_left_out, report.num_damaged) == (3, 7, 0)
        again = restore_snapshot(cache, place, max_bytes=4 * BYTES)
        assert (again.num_restored, again.num_present, again.num_left_out) == (1, 3, 6)
        assert restore_snapshot(cache, place, max_bytes=0).num_left_out == 10


def test_a_variant_that_is_too_large_does_not_stop_smaller_ones(place):
    with open_cache() as cache:
        large, small = put(cache, 1, 9.0, num_tokens=50), put(cache, 2, 1.0)
        save_snapshot(cache, place)
    for limits in ({"host_bytes": 2 * BYTES}, {}):
        with open_cache(**limits) as cache:
            restore_snapshot(cache, place, max_bytes=None if limits else 2 * BYTES)
            assert list(contents(cache)) == [small] and large not in cache.variants


@pytest.mark.parametrize("bad", [-1, 1.5, True, "1GB"])
def test_invalid_max_bytes_is_rejected(place, bad):
    with open_cache() as cache, pytest.raises(ValueError, match=f"max_bytes: wanted an int >= 0, got {bad!r}"):
        restore_snapshot(cache, place, max_bytes=bad)


def test_present_variants_are_kept_with_the_higher_frequency(place, small_packs):
    ids, expected = save_ten(place)
    with open_cache() as cache:
        other = np.zeros(SPEC.shape(5), np.float32)
        for number, frequency in ((9, 3.0), (8, 99.0)):  # in the snapshot: 10 and 9
            record = make_record(number)
            cache.store.complete_store(cache.store.prepare_store(record), other)
            cache.variants.restore([(record, frequency)])
        report = restore_snapshot(cache, place)
        held = contents(cache)
    assert (report.num_restored, report.num_present) == (8, 2)
    assert held[ids[0]] == (other.tobytes(), expected[ids[0]][1], 10.0)
    assert held[ids[1]] == (other.tobytes(), expected[ids[1]][1], 99.0)
    assert {key: held[key] for key in ids[2:]} == {key: expected[key] for key in ids[2:]}


# -- beside requests -----------------------------------------------------------------------------------------------


def test_requests_run_while_a_snapshot_is_taken(place, monkeypatch):
    """Between two parts requests come, and push out variants that were listed."""
    model = TinyModel(seed=3)
    random = np.random.default_rng(5)
    monkeypatch.setattr(save_module, "PACK_BYTES", 1)
    monkeypatch.setattr(save_module, "PART_BYTES", 1)
    write = PackFolder.write
    with model.engine(max_variants=8) as engine:
        for _ in range(3):
            engine.generate_from_tokens(draw_segments(random, [20, 25]), max_new_tokens=1)
        before = {meta.variant_id for meta in engine._chunks.variants}

        def write_beside_requests(folder, part, packs):
            if part < 3:
                engine.generate_from_tokens(draw_segments(random, [20, 25]), max_new_tokens=1)
            write(folder, part, packs)

        monkeypatch.setattr(PackFolder, "write", write_beside_requests)
        report = engine.cache.save_snapshot(place)
        kept = {key: kv_of(engine.cache._indexed, key).tobytes() for key in before if key in engine._chunks.variants}
    assert report.num_evicted > 0 and report.num_variants == len(before) - report.num_evicted
    with model.engine() as engine:
        assert engine.cache.restore_snapshot(place).num_restored == report.num_variants
        restored = {meta.variant_id for meta in engine._chunks.variants}
        assert restored <= before
        for key in restored & kept.keys():
            assert kv_of(engine.cache._indexed, key).tobytes() == kept[key]
        assert len(restored & kept.keys()) > 1


def test_requests_run_while_a_snapshot_is_restored(place, monkeypatch):
    """A request that computes what is just being read keeps its own, and neither is lost."""
    model = TinyModel(seed=3)
    segments = draw_segments(np.random.default_rng(6), [30, 40])
    with model.engine() as engine:
        first = engine.generate_from_tokens(segments, max_new_tokens=4)
        engine.cache.save_snapshot(place)
    read = PackFolder.read
    with model.engine() as engine:

        def read_beside_a_request(folder, part, numbers):
            assert engine.generate_from_tokens(segments, max_new_tokens=4).token_ids == first.token_ids
            return read(folder, part, numbers)

        monkeypatch.setattr(PackFolder, "read", read_beside_a_request)
        assert engine.cache.restore_snapshot(place).num_restored == 3
        again = engine.generate_from_tokens(segments, max_new_tokens=4)
        assert again.token_ids == first.token_ids and again.reuse.computed_tokens == len(segments[-1])


def test_failed_restore_stores_nothing_and_can_be_repeated(place, monkeypatch):
    ids, expected = save_ten(place)

    def fail(*_):
        raise StoreUnavailableError("gone")

    with open_cache() as cache:
        with monkeypatch.context() as patch:
            patch.setattr(PackFolder, "read", fail)
            with pytest.raises(StoreUnavailableError, match="gone"):
                restore_snapshot(cache, place)
        assert contents(cache) == {} and restore_snapshot(cache, place).num_restored == 10
        assert contents(cache) == expected and len(ids) == 10
