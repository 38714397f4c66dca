"""Requests with different cache salts: no tier shares anything between them, and timing reveals nothing."""

import collections

import numpy as np
import pytest

import ccjax.assembly
from ccjax.cache.warming.order import PrefillOrder
from ccjax.engine import Request
from ccjax.prompts import as_chunk, chunk_id, tenant_of, tenant_tag
from ccjax.requests import SamplingParams
from ccjax.runner.pack import Pack
from ccjax.types import Segment
from tests.engine.helpers import TinyModel, draw_segments, permuted

SEGMENTS = draw_segments(np.random.default_rng(5), [40, 60, 50])
SAMPLING = SamplingParams(max_new_tokens=2)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def request(salt="", segments=SEGMENTS, reuse="exact") -> Request:
    return Request(segments=segments, sampling=SAMPLING, reuse=reuse, cache_salt=salt)


def tiers_hit(engine, salt, **how) -> list[str | None]:
    return [one.tier for one in engine.run(request(salt, **how)).reuse.per_document[1:]]


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_no_hit_across_salts_in_any_tier(model, tmp_path, place):
    budgets = {"device": {"device_cache_bytes": 4 << 20}, "host": {}, "disk": {"host_cache_bytes": 1}}
    with model.engine(store=tmp_path.as_uri(), **budgets[place]) as engine:
        plain = engine.run(request("anna"))
        engine._chunks.store.flush()
        assert tiers_hit(engine, "anna") == [place] * 3
        for other in ("bob", "", "ann", "anna "):
            assert tiers_hit(engine, other) == [None] * 3
            engine._chunks.store.flush()
        # Nor approximately, after another prefix, where any variant of the same text would be reused.
        assert tiers_hit(engine, "carla", segments=permuted(SEGMENTS, [2, 0, 1]), reuse="fast") == [None] * 3
        assert engine.run(request("bob")).token_ids == plain.token_ids
        engine._chunks.store.flush()
        ids = {one.chunk_id for one in engine._chunks.store.summaries()}
        assert collections.Counter(map(tenant_of, ids)).keys() == {
            tenant_tag(salt) for salt in ("anna", "bob", "", "ann", "anna ", "carla")
        }


def test_salts_isolate_tenants_across_processes_sharing_a_store(model, tmp_path):
    with model.engine(store=tmp_path.as_uri()) as engine:
        engine.run(request("anna"))
    with model.engine(store=tmp_path.as_uri()) as engine:
        assert tiers_hit(engine, "bob") == [None] * 3
        assert tiers_hit(engine, "anna") == ["disk"] * 3


def test_chunk_id_includes_the_tenant_tag_but_not_the_salt():
    ids = (1, 2, 3)
    assert len({chunk_id(ids, tag) for tag in ("", tenant_tag("a"), tenant_tag("b"))}) == 3
    assert chunk_id(ids, tenant_tag("a"))[:64] != chunk_id(ids)  # not only in the tag: routers use the first digits
    assert tenant_of(chunk_id(ids, tenant_tag("a"))) == tenant_tag("a") and tenant_of(chunk_id(ids)) == ""
    assert "secret" not in chunk_id(ids, tenant_tag("secret"))


def test_prefill_orders_keep_their_tenant():
    chunks = tuple(as_chunk(ids, None, tenant_tag("anna")) for ids in ((1, 2), (3, 4)))
    order = PrefillOrder(tuple(Segment("passage", chunk) for chunk in chunks))
    assert PrefillOrder.decode(order.encode()) == order and b"anna" not in order.encode()
    with pytest.raises(ValueError, match="tenant"):
        PrefillOrder.decode(order.encode().replace(tenant_tag("anna").encode(), b"../../etc"))


def test_salted_chunks_can_be_repaired(model):
    """Approximate variants are recomputed in idle time, also if their ids have a salt."""
    with model.engine() as engine:
        engine.run(request("anna", reuse="fast"))
        engine.run(request("anna", segments=permuted(SEGMENTS, [2, 0, 1]), reuse="fast"))
        assert {tenant_of(key) for key in engine._chunks.variants.tokens.known()} == {tenant_tag("anna")}
        assert engine.cache.repair_one()


# -- timing ------------------------------------------------------------------------------------------------------------


class Work:
    """The work of an engine for a request, which determines its time: steps by size, variants pinned and read, tokens
    sampled."""

    def __init__(self, engine, monkeypatch) -> None:
        self._engine, self._done = engine, []
        run_layer, prepare_load = Pack.run_layer, engine._chunks.store.prepare_load

        def noted(pack) -> None:
            self._done.append(("layer", sum(len(piece.offsets) for piece in pack._pieces), len(pack._inputs.k_slot)))
            run_layer(pack)

        def noted_load(variant_ids, **options):
            self._done.append(("load", len(variant_ids)))
            return prepare_load(variant_ids, **options)

        monkeypatch.setattr(Pack, "run_layer", noted)
        monkeypatch.setattr(engine._chunks.store, "prepare_load", noted_load)

    def of(self, salt, segments) -> list:
        self._done.clear()
        report = self._engine.run(request(salt, segments)).reuse
        return [*self._done, report.computed_tokens, report.recomputed_tokens, report.loaded_bytes]


def work_of(model, monkeypatch) -> dict[str, list]:
    """Work for passages that the other tenant just used, for new passages, and for the tenant's own."""
    with model.engine() as engine:
        work = Work(engine, monkeypatch)
        theirs, fresh = (draw_segments(np.random.default_rng(seed), [40, 60, 50]) for seed in (8, 9))
        work.of("anna", theirs)
        return {"theirs": work.of("bob", theirs), "fresh": work.of("bob", fresh), "own": work.of("bob", fresh)}


def test_cache_hits_of_another_tenant_cannot_be_inferred_from_timing(model, monkeypatch):
    """A tenant's own hit shows, so the measure is sensitive enough; so does a salt that is ignored."""
    with monkeypatch.context() as patch:
        work = work_of(model, patch)
    assert work["theirs"] == work["fresh"] != work["own"]
    monkeypatch.setattr(ccjax.assembly, "tenant_tag", lambda salt: "")
    work = work_of(model, monkeypatch)
    assert work["theirs"] != work["fresh"]
