"""The index of a store with more variants than anybody looks into: records are read when their chunk is asked for."""

import logging

import numpy as np
import pytest

import ccjax.store.commits
from ccjax.cache.variant_records import KnownVariant
from ccjax.store import ShardRecord, TieredStore
from tests.engine.helpers import TinyModel, draw_segments, permuted

MODEL = TinyModel()
SEGMENTS = draw_segments(np.random.default_rng(5), (23, 31, 17, 29))
OTHERS = draw_segments(np.random.default_rng(6), (19, 27))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One change makes a new catalog."""
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 1)


@pytest.fixture
def url(tmp_path) -> str:
    """A store with five variants of `SEGMENTS`, of which each stood behind those before it, and three of `OTHERS`."""
    url = f"file://{tmp_path}/store"
    with MODEL.engine(store=url) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        engine.generate_from_tokens(OTHERS, max_new_tokens=1)
        assert engine.cache.num_variants == 8
    return url


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Variants whose whole records were asked for, in order."""
    seen: list[str] = []
    get_record = TieredStore.get_record

    def spy(self, variant_id):
        seen.append(variant_id)
        return get_record(self, variant_id)

    monkeypatch.setattr(TieredStore, "get_record", spy)
    return seen


def test_only_records_of_requested_chunks_are_read_and_only_once(url, asked, monkeypatch):
    monkeypatch.setattr("ccjax.cache.variants._RECORDS_AT_START", 0)  # as for those beyond the first ones of a store
    monkeypatch.setattr("ccjax.cache.prefill_planner._RECORDS_PER_PLAN", 0)
    with MODEL.engine(store=url, host_cache_bytes=1) as engine:
        assert engine.cache.num_variants == 8 and asked == []
        for _ in range(2):
            report = engine.generate_from_tokens(SEGMENTS, max_new_tokens=1).reuse
            assert report.computed_tokens == len(SEGMENTS[-1])
        assert len(asked) == len(set(asked)) == 5
        assert sum(isinstance(held, KnownVariant) for held in engine._chunks.variants._by_id.values()) == 3


def test_answers_equal_those_of_the_engine_that_stored_the_variants(url):
    with MODEL.engine() as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        wanted = engine.generate_from_tokens(permuted(SEGMENTS, (2, 0, 3, 1)), max_new_tokens=12)
    with MODEL.engine(store=url) as engine:
        got = engine.generate_from_tokens(permuted(SEGMENTS, (2, 0, 3, 1)), max_new_tokens=12)
        assert got.token_ids == wanted.token_ids and got.reuse.recomputed_tokens == wanted.reuse.recomputed_tokens


def test_variant_with_unreadable_metadata_is_dropped_on_first_request(url, monkeypatch, caplog):
    of_json = ShardRecord.of_json.__func__

    def without_ranking(cls, variant_id, chunk_id, num_tokens, num_bytes, meta):
        return of_json(cls, variant_id, chunk_id, num_tokens, num_bytes, {**meta, "token_ranking": [0, 0]})

    with MODEL.engine(store=url) as engine, monkeypatch.context() as patch:
        patch.setattr(ShardRecord, "of_json", classmethod(without_ranking))
        with caplog.at_level(logging.WARNING):
            report = engine.generate_from_tokens(OTHERS, max_new_tokens=1).reuse
        assert report.reused_tokens == 0 and caplog.text.count("unreadable metadata") == 3
    with MODEL.engine(store=url) as engine:
        assert engine.cache.num_variants == 8  # five that were never looked into, three stored anew
        assert engine.generate_from_tokens(OTHERS, max_new_tokens=1).reuse.computed_tokens == len(OTHERS[-1])


def test_chunks_evicted_by_another_process_are_computed(url):
    with MODEL.engine(store=url) as engine, MODEL.engine(store=url) as other:
        for meta in tuple(other._chunks.variants):
            other._chunks.variants.discard(meta.variant_id)
        report = engine.generate_from_tokens(SEGMENTS, max_new_tokens=1).reuse
        assert report.reused_tokens == 0 and engine.generate_from_tokens(SEGMENTS, max_new_tokens=1).reuse.reused_tokens


def test_uses_of_variants_with_unread_records_survive_a_restart(url):
    with MODEL.engine(store=url) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        uses = {
            key: held.frequency_reuse for key, held in engine._chunks.variants._by_id.items() if held.frequency_reuse
        }
        assert len(uses) == 5
    with MODEL.engine(store=url):
        pass
    with MODEL.engine(store=url) as engine:
        held = engine._chunks.variants._by_id
        assert {key: one.frequency_reuse for key, one in held.items() if one.frequency_reuse} == uses
        metas = {meta.variant_id: meta.frequency_reuse for meta in engine._chunks.variants}
        assert metas == {key: uses.get(key, 0.0) for key in metas} and len(metas) == 8


def test_least_used_variants_are_evicted_first_even_with_unread_records(url):
    with MODEL.engine(store=url) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        kept = {key for key, held in engine._chunks.variants._by_id.items() if held.frequency_reuse}
    with MODEL.engine(store=url, max_variants=8) as engine:
        new = draw_segments(np.random.default_rng(9), (21, 33), system=0)
        engine.generate_from_tokens(new, max_new_tokens=1)
        held = engine._chunks.variants._by_id
        assert len(held) == 8 and kept <= held.keys()


def test_a_read_only_engine_writes_no_catalog(tmp_path, url):
    catalogs = sorted(tmp_path.rglob("catalog/*.bin"))
    assert catalogs
    for path in catalogs:
        path.unlink()
    with MODEL.engine(store=url, read_only=True) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        engine.cache.refresh()
        engine.cache.flush()
    assert not list(tmp_path.rglob("catalog/*.bin"))
    with MODEL.engine(store=url) as engine:
        engine.cache.refresh()
        assert list(tmp_path.rglob("catalog/*.bin"))
