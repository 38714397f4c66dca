"""Idle time: approximate variants become exact, changes of other processes are applied, `f_r` survives a restart."""

import dataclasses
import json
import logging
import threading

import numpy as np
import pytest

from ccjax.cache import variants as variants_module
from ccjax.cache.chunk_tokens import ChunkTokens
from ccjax.engine import Request
from ccjax.engine.maintenance import MaintenanceCounts
from ccjax.prompts import chunk_id
from ccjax.types import ChunkId
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.oracles import llama_forward
from tests.policy.builders import variant

MODEL = TinyModel(seed=6)
SEGMENTS = draw_segments(np.random.default_rng(6), [40, 30, 50])
SHUFFLED = permuted(SEGMENTS, [2, 1, 0])


def approximate(engine):
    return [meta for meta in engine._chunks.variants if meta.fidelity == "approx"]


def fill(engine):
    """Stores the passages in one order, then repairs them in another: three approximate variants."""
    engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
    engine.generate_from_tokens(SHUFFLED, max_new_tokens=1)
    assert len(approximate(engine)) == 3


def repair_all(engine) -> int:
    """Repairs until nothing is left; returns the number of repairs."""
    for count in range(20):
        if not engine.cache.repair_one():
            return count
    raise AssertionError("repairs without end")


def kv_of(engine, variant_id):
    """Stored KV [L, 2, T, K, H] of a variant."""
    ticket = engine._chunks.store.prepare_load([variant_id])
    kv = ticket.read_layers(variant_id, 0, MODEL.config.num_layers)
    engine._chunks.store.complete_load(ticket)
    return kv


def distance_to_full_prefill(engine, meta, segments) -> float:
    """Largest difference of a variant's KV to a float64 full prefill of its prefix and chunk."""
    tokens = {chunk_id(segment): segment for segment in segments[:-1]}
    prompt = [token for key in (*meta.prefix_ids, meta.chunk_id) for token in tokens[key]]
    _, layers = llama_forward(MODEL.weights, MODEL.raw, prompt)
    wanted = np.stack([np.stack([layer.key, layer.value]) for layer in layers])[:, :, -meta.num_tokens :]
    return float(np.abs(kv_of(engine, meta.variant_id) - wanted).max())


def test_repaired_variant_equals_full_prefill_behind_its_prefix():
    with MODEL.engine() as engine:
        fill(engine)
        before = {(meta.chunk_id, meta.prefix_ids) for meta in engine._chunks.variants}
        for meta in approximate(engine):
            assert distance_to_full_prefill(engine, meta, SEGMENTS) > 100 * TOLERANCE  # there is something to repair
        assert repair_all(engine) >= 1
        assert {(meta.chunk_id, meta.prefix_ids) for meta in engine._chunks.variants} == before
        for meta in engine._chunks.variants:
            assert meta.fidelity == "exact"
            assert distance_to_full_prefill(engine, meta, SEGMENTS) < TOLERANCE
        assert engine.cache.maintenance_counts == MaintenanceCounts(repaired=3) and not engine._chunks.store._pins
        report = engine.generate_from_tokens(SHUFFLED, max_new_tokens=1, reuse="exact").reuse
        assert report.exact and report.computed_tokens == len(SHUFFLED[-1])
        assert not engine.cache.repair_one()


@pytest.mark.parametrize("has_system", [True, False])
def test_repaired_metadata_equals_that_of_a_fresh_request(has_system):
    """The ranking ignores the system prompt; without one, it must not ignore the first passage instead."""
    order = [*SEGMENTS[:3], SEGMENTS[3], SEGMENTS[-1]] if has_system else [[], *SEGMENTS[1:]]
    shuffled = permuted(order, [2, 1, 0])
    with MODEL.engine() as engine, MODEL.engine() as fresh:
        engine.generate_from_tokens(order, max_new_tokens=1)
        engine.generate_from_tokens(shuffled, max_new_tokens=1)
        repair_all(engine)
        fresh.generate_from_tokens(shuffled, max_new_tokens=1)
        wanted = {meta.variant_id: meta for meta in fresh._chunks.variants}
        got = {meta.variant_id: meta for meta in engine._chunks.variants}
        assert wanted.keys() <= got.keys() and len(wanted) == 3 + has_system
        for variant_id, meta in wanted.items():
            assert got[variant_id].token_ranking == meta.token_ranking
            np.testing.assert_allclose(got[variant_id].inter_by_prefix, meta.inter_by_prefix, atol=1e-4)
            np.testing.assert_allclose(got[variant_id].cci, meta.cci, rtol=1e-4)


def test_most_used_variant_is_repaired_first_and_keeps_its_f_r():
    with MODEL.engine() as engine:
        fill(engine)
        earlier = {(meta.chunk_id, meta.prefix_ids): meta.frequency_reuse for meta in engine._chunks.variants}
        engine.generate_from_tokens(permuted(SHUFFLED, [0]), max_new_tokens=1)  # the first one has one more use
        metas = {(meta.chunk_id, meta.prefix_ids): meta for meta in engine._chunks.variants}
        first = max(approximate(engine), key=lambda meta: meta.frequency_reuse)
        assert first.frequency_reuse > 0 and len(first.prefix_ids) == 1
        assert engine.cache.repair_one()
        assert first.variant_id not in engine._chunks.variants and len(approximate(engine)) == 2
        repair_all(engine)
        for meta in engine._chunks.variants:
            assert meta.frequency_reuse == metas[meta.chunk_id, meta.prefix_ids].frequency_reuse
        assert earlier != {key: meta.frequency_reuse for key, meta in metas.items()}


def test_approximate_variants_of_the_prefix_are_replaced_along_the_way():
    with MODEL.engine() as engine:
        fill(engine)
        last = max(approximate(engine), key=lambda meta: len(meta.prefix_ids))
        engine._chunks.variants.credit([(last.variant_id, 1.0)])
        assert engine.cache.repair_one() and approximate(engine) == []
        assert engine.cache.maintenance_counts.repaired == 3 and engine.cache.num_variants == 7


def test_exact_variant_from_a_request_replaces_the_approximate_one():
    with MODEL.engine() as engine:
        fill(engine)
        engine.generate_from_tokens(SHUFFLED, max_new_tokens=1)
        used = {(meta.chunk_id, meta.prefix_ids): meta.frequency_reuse for meta in approximate(engine)}
        assert min(used.values()) > 0
        engine.generate_from_tokens(SHUFFLED, max_new_tokens=1, reuse="exact")
        assert approximate(engine) == [] and engine.cache.num_variants == 7
        got = {(meta.chunk_id, meta.prefix_ids): meta.frequency_reuse for meta in engine._chunks.variants}
        assert {key: got[key] for key in used} == used


def test_repair_stays_within_max_variants_and_evicts_nothing():
    with MODEL.engine(max_variants=7) as engine:
        fill(engine)
        kept = {meta.variant_id for meta in engine._chunks.variants if meta.fidelity == "exact"}
        repair_all(engine)
        assert engine.cache.num_variants == 7 and kept <= {meta.variant_id for meta in engine._chunks.variants}


@pytest.mark.parametrize("num_layers", range(3))
def test_repair_can_be_cancelled_between_layers_without_effect(num_layers, request):
    with MODEL.engine() as engine:
        fill(engine)
        before = set(engine._chunks.variants)
        events = request.getfixturevalue("events")  # recorded from now on

        def num_run():
            return sum(event.startswith("run") for event in events)

        assert not engine.cache.repair_one(is_cancelled=lambda: num_run() >= num_layers)
        assert num_run() == num_layers
        assert set(engine._chunks.variants) == before and not engine._chunks.store._pins
        assert engine.cache.maintenance_counts == MaintenanceCounts()
        assert engine.cache.repair_one(is_cancelled=lambda: False)


def test_repair_compiles_nothing_in_a_warmed_up_engine():
    """Requests would have to wait for the compilation."""
    with MODEL.engine() as engine:
        engine.warmup(only_first=True)
        fill(engine)
        before = engine._device.compiled.compiled("pack")
        assert repair_all(engine) and approximate(engine) == []
        assert engine._device.compiled.compiled("pack") == before
        assert engine.cache.maintenance_counts.repaired > 0


def test_a_failed_repair_is_logged_and_not_tried_again(monkeypatch, caplog):
    with MODEL.engine() as engine:
        fill(engine)
        doomed = max(approximate(engine), key=lambda meta: len(meta.prefix_ids))
        background = engine.cache._maintenance._background
        run, tried = background.run, []

        def fail(prompt, *args, **kwargs):
            tried.append(prompt.chunks[-1].chunk_id)
            if tried[-1] == doomed.chunk_id:
                raise MemoryError("no room")
            return run(prompt, *args, **kwargs)

        engine._chunks.variants.credit([(doomed.variant_id, 1.0)])  # so it is tried first
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(background, "run", fail)
            assert engine.cache.repair_one()
            assert len(approximate(engine)) == 3 and doomed.variant_id in caplog.text
            repair_all(engine)
        assert [meta.variant_id for meta in approximate(engine)] == [doomed.variant_id]
        assert tried.count(doomed.chunk_id) == 1
        assert engine.cache.maintenance_counts.repair_failed == 1 and not engine._chunks.store._pins
        assert engine.generate_from_tokens(SHUFFLED, max_new_tokens=1).reuse.recomputed_tokens == 0


@pytest.mark.parametrize("settings", [{"read_only": True}, {"strategy": "full"}])
def test_read_only_and_full_strategy_engines_never_repair(url, settings):
    with MODEL.engine(store=url) as engine:
        fill(engine)
    with MODEL.engine(store=url, **settings) as engine:
        assert not engine.cache.repair_one() and len(approximate(engine)) == 3


def test_engine_in_use_does_not_repair():
    with MODEL.engine() as engine:
        fill(engine)
        stream = engine.stream(Request(segments=SEGMENTS))
        next(stream)
        assert not engine.cache.repair_one()
        stream.close()
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)  # queued after it
        assert engine.cache.repair_one()
    with pytest.raises(RuntimeError, match="closed"):
        engine.cache.repair_one()


def test_a_restarted_engine_repairs_what_the_store_holds(url):
    with MODEL.engine(store=url) as engine:
        fill(engine)
    with MODEL.engine(store=url) as engine:
        assert len(approximate(engine)) == 3 and repair_all(engine) >= 1
        engine.cache.flush()
        for meta in engine._chunks.variants:
            assert distance_to_full_prefill(engine, meta, SEGMENTS) < TOLERANCE
    with MODEL.engine(store=url) as engine:
        assert engine.cache.num_variants == 7 and approximate(engine) == []


@pytest.mark.parametrize("is_older", [True, False])
def test_variants_without_or_with_wrong_token_ids_load_but_are_not_repaired(url, monkeypatch, is_older):
    record_from_meta = variants_module.record_from_meta

    def changed(meta, prompt):
        record = record_from_meta(meta, prompt)
        lasting = {name: value for name, value in record.meta.items() if name != "token_ids"}
        if not is_older:
            lasting = record.meta | {"token_ids": [token + 1 for token in record.meta["token_ids"]]}
        return dataclasses.replace(record, meta=lasting)

    with monkeypatch.context() as patch:
        patch.setattr(variants_module, "record_from_meta", changed)
        with MODEL.engine(store=url) as engine:
            fill(engine)
    with MODEL.engine(store=url) as engine:
        assert engine.cache.num_variants == 7 and not engine.cache.repair_one()
        assert engine.cache.maintenance_counts == MaintenanceCounts()
        assert engine.generate_from_tokens(SHUFFLED, max_new_tokens=1).reuse.recomputed_tokens == 0


def test_variants_longer_than_max_model_len_are_not_repaired(url):
    with MODEL.engine(store=url) as engine:
        fill(engine)
    # 7 + 50 + 30 tokens and the one-token question fit, the third passage of 40 does not
    with MODEL.engine(store=url, max_model_len=88) as engine:
        repair_all(engine)
        assert [len(meta.prefix_ids) for meta in approximate(engine)] == [3]
        assert engine.cache.maintenance_counts == MaintenanceCounts(repaired=2)


def test_token_ids_are_kept_as_long_as_a_variant_needs_them():
    a, b, c = ([1, 2, 3], [4, 5], [6])
    keys = [chunk_id(ids) for ids in (a, b, c)]
    behind = variant(keys[1], num_tokens=2)
    behind = type(behind)(**{name: getattr(behind, name) for name in behind.__slots__} | {"prefix_ids": (keys[0],)})
    alone = variant(keys[0], num_tokens=3)
    tokens = ChunkTokens()
    tokens.hold(behind)
    for key, ids in zip(keys, (a, b, c), strict=True):
        tokens.learn(key, ids)
    assert set(tokens.known()) == set(keys[:2])  # nothing refers to c
    tokens.hold(alone)
    tokens.release(behind)
    assert set(tokens.known()) == {keys[0]} and tokens.chunk(keys[0]).token_ids == (1, 2, 3)
    assert tokens.num_tokens(keys) == 3
    tokens.release(alone)
    assert not tokens.known() and not tokens._num_uses
    tokens.hold(alone)
    tokens.learn(keys[0], [1, 2, 4])  # not these
    tokens.learn(ChunkId("other"), a)
    assert not tokens.known()


def test_token_ids_are_dropped_with_their_variants():
    with MODEL.engine(max_variants=5) as engine:
        for seed in range(4):
            engine.generate_from_tokens(draw_segments(np.random.default_rng(seed), [20] * 4), max_new_tokens=1)
            held = {key for meta in engine._chunks.variants for key in (meta.chunk_id, *meta.prefix_ids)}
            assert set(engine._chunks.variants.tokens.known()) == held and len(held) <= 10


def test_approximate_copy_of_a_variant_repaired_elsewhere_is_replaced(url):
    with MODEL.engine(store=url) as first:
        fill(first)
        first.cache.flush()
        with MODEL.engine(store=url) as second:
            second.generate_from_tokens(SHUFFLED, max_new_tokens=1)  # now in its memory, with a credit
            credits = sorted(meta.frequency_reuse for meta in approximate(second))
            repair_all(first)
            first.cache.flush()
            second.cache.refresh()
            assert len(approximate(second)) == 3 and second.cache.num_variants == 10
            assert repair_all(second) == 3
            assert approximate(second) == [] and second.cache.maintenance_counts.repaired == 3
            taken_over = sorted(meta.frequency_reuse for meta in second._chunks.variants if len(meta.prefix_ids) > 0)
            assert all(credit in taken_over for credit in credits) and min(credits) > 0


def test_refresh_does_not_block_requests_while_listing_the_disk(url, monkeypatch):
    """Requests are answered while the disk is listed, however long that takes."""
    with MODEL.engine(store=url) as engine:
        listing, there = threading.Event(), threading.Event()

        def slow():
            listing.set()
            assert there.wait(120)
            return (), ("gone",)

        monkeypatch.setattr(engine._chunks.store, "refresh", slow)
        refreshing = threading.Thread(target=engine.cache.refresh)
        refreshing.start()
        assert listing.wait(120)
        assert engine.generate_from_tokens(SEGMENTS, max_new_tokens=1).token_ids
        there.set()
        refreshing.join(120)
        assert not refreshing.is_alive()


def frequencies(engine):
    return {meta.variant_id: meta.frequency_reuse for meta in engine._chunks.variants}


def test_engines_that_share_a_store_do_not_lower_each_others_f_r(url):
    busy = MODEL.engine(store=url)
    busy.generate_from_tokens(SEGMENTS, max_new_tokens=1)
    busy.cache.flush()
    with MODEL.engine(store=url) as calm:
        busy.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        wanted = frequencies(busy)
        busy.close()
        assert set(frequencies(calm).values()) == {0.0}
    with MODEL.engine(store=url) as engine:
        assert frequencies(engine) == wanted and min(wanted.values()) > 0


@pytest.mark.parametrize("values", [[1], {"x": 1}, "all", None, {"ID": "much"}, {"ID": -1}, {"ID": float("inf")}])
def test_damaged_hints_lose_only_f_r(url, tmp_path, values):
    with MODEL.engine(store=url) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        some_id = next(iter(engine._chunks.variants)).variant_id
    (file,) = tmp_path.rglob("hints.json")
    file.write_text(json.dumps({"frequency_reuse": values}).replace("ID", some_id))
    with MODEL.engine(store=url) as engine:
        assert engine.cache.num_variants == 4 and set(frequencies(engine).values()) == {0.0}


def test_a_read_only_engine_writes_no_hints(url, tmp_path):
    with MODEL.engine(store=url) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
    (file,) = tmp_path.rglob("hints.json")
    before = file.read_bytes()
    with MODEL.engine(store=url, read_only=True) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        engine.cache.flush()
    assert file.read_bytes() == before
