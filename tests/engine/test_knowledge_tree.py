"""RAGCache's knowledge tree in an engine: parents stay while a child is cached, and answers do not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccjax.types import VariantMeta
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer, assert_same

MODEL = TinyModel(seed=12)
LENGTHS = (40, 33, 64, 17)
SEGMENTS = draw_segments(np.random.default_rng(12), LENGTHS)
TOKEN = MODEL.token_bytes


def held(engine) -> dict[str, VariantMeta]:
    """The variants in memory, by id."""
    metas = {meta.variant_id: meta for meta in engine._chunks.variants}
    return {key: meta for key, meta in metas.items() if "host" in engine._chunks.store.tiers_of(key)}


def check_tree(engine) -> None:
    """Checks that all ancestors of each variant in memory are there as well."""
    metas = held(engine)
    chains = {(*meta.prefix_ids, meta.chunk_id) for meta in metas.values() if meta.fidelity == "exact"}
    assert all(chain[:-1] in chains for chain in chains if len(chain) > 1)


@given(st.lists(st.permutations(range(4)).map(lambda order: order[:3]), max_size=7), st.integers(150, 420))
@settings(max_examples=max(5, settings.default.max_examples // 4))
def test_memory_holds_whole_paths_and_answers_equal_full_prefill(orders, room):
    with MODEL.engine(strategy="prefix", eviction_policy="pgdsf", host_cache_bytes=room * TOKEN) as engine:
        for order in orders:
            segments = permuted(SEGMENTS, order)
            assert_same(answer(engine, segments, "bounded", tokens=2), answer(engine, segments, "off", tokens=2))
            check_tree(engine)


def test_leaves_of_the_tree_are_evicted_first():
    with MODEL.engine(strategy="prefix", eviction_policy="pgdsf", host_cache_bytes=260 * TOKEN) as engine:
        for order in ([0, 1, 2], [0, 1, 2], [0, 3, 2], [1, 3]):
            answer(engine, permuted(SEGMENTS, order), "bounded", tokens=1)
            check_tree(engine)
        depths = [len(meta.prefix_ids) for meta in held(engine).values()]
        assert len(depths) > 2 and max(depths) >= 1


@pytest.mark.parametrize(("most", "reused"), [(1, (0,)), (2, (0, 1)), (None, (0, 1, 2))])
def test_only_the_first_documents_of_a_prompt_are_cached(most, reused):
    with MODEL.engine(cached_documents=most) as engine:
        segments = permuted(SEGMENTS, [0, 1, 2])
        answer(engine, segments, "exact", tokens=1)
        report = answer(engine, segments, "exact", tokens=1)[2]
    documents = [one for one in report.per_document if one.role == "passage"]
    assert tuple(place for place, one in enumerate(documents) if one.reused_tokens) == reused
    assert next(one for one in report.per_document if one.role == "instructions").reused_tokens


def test_after_a_restart_leaves_are_evicted_first_even_with_unread_records(tmp_path):
    def opened(**more):
        return MODEL.engine(strategy="prefix", eviction_policy="pgdsf", store=f"file://{tmp_path}/store", **more)

    with opened() as engine:
        for order in ([0, 1, 2], [3, 1]):
            answer(engine, permuted(SEGMENTS, order), "bounded", tokens=1)
        depths = {key: len(meta.prefix_ids) for key, meta in held(engine).items()}
    with opened() as engine:
        policy = engine._chunks.variants._placement._policies["disk"]
        order = policy.victims(sum(engine._chunks.store.charges("disk", list(depths)).values()))
        assert order is not None and set(order) == set(depths)
        place = {key: number for number, key in enumerate(order)}
        parents = policy.state(0)["parents"]
        assert len(parents) == sum(depth > 0 for depth in depths.values())
        assert all(place[key] < place[parent] for key, parent in parents.items())
