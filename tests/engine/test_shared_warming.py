"""Warming in parts of a large job: division of work, contents of the disk at the end, chunks computed after
neighbours; and pruning."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ccjax.cache.warming import shared as warming
from ccjax.engine import Engine, EngineConfig
from ccjax.errors import ReadOnlyError, RequestError
from ccjax.loading.model import load_model
from ccjax.policy.capture import make_variant_id
from ccjax.store.errors import StoreUnavailableError
from ccjax.types import Document
from tests.engine.helpers import After, check_deviations

ANNA, BOB, CARLA, DINO = (
    Document(f"{name} sings in the {name} choir.", f"{name}.md#0", name, "1", source_id=f"{name}.md")
    for name in ("Anna", "Bob", "Carla", "Dino")
)


@pytest.fixture(scope="module")
def model():
    return load_model("demo", dtype="float32")


@pytest.fixture(autouse=True)
def claims_that_do_not_expire(monkeypatch):
    monkeypatch.setattr(warming, "LEAST_CLAIM_S", 3600.0)


@pytest.fixture
def start(model, tmp_path):
    """`start(**settings)` returns an engine on one store; all are closed at the end."""
    engines: list[Engine] = []

    def make(**settings) -> Engine:
        engines.append(Engine(model, EngineConfig(**{"store": tmp_path.as_uri(), **settings})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def id_of(engine, document, behind=()):
    system, _ = engine.documents.prompt_overhead()
    chunks = engine.documents.passage_chunks([*behind, document])
    return make_variant_id(chunks[-1].chunk_id, (system.chunk_id, *(one.chunk_id for one in chunks[:-1])), "exact")


def statuses(results):
    return [one.status for one in results]


def leases(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("leases/*"))


def test_shared_warming_writes_results_to_disk_and_releases_all_leases(start, tmp_path):
    engine = start()
    results = engine.documents.warm_shared([ANNA, BOB, ANNA])
    assert statuses(results) == ["computed", "computed", "present"] and leases(tmp_path) == []
    names = {path.stem for path in tmp_path.rglob("records/*.json")}
    assert {id_of(engine, ANNA), id_of(engine, BOB)} < names and len(names) == 3
    on_disk = [engine._chunks.store.charge_bytes("disk", id_of(engine, one)) for one in (ANNA, BOB)]
    assert [one.num_bytes for one in results] == [*on_disk, 0]
    system, _ = engine.documents.prompt_overhead()
    lengths = [len(chunk.token_ids) for chunk in engine.documents.passage_chunks([ANNA, BOB])]
    assert [one.computed_tokens for one in results] == [len(system.token_ids) + lengths[0] + 1, lengths[1] + 1, 0]
    assert statuses(start().documents.warm_shared([ANNA, BOB])) == ["present", "present"]


def test_documents_claimed_by_another_process_are_skipped_and_reused_later(start, tmp_path):
    engine, other = start(), start()
    assert other._chunks.store.claims.claim([id_of(engine, BOB)], 3600)
    assert statuses(engine.documents.warm_shared([ANNA, BOB, CARLA])) == ["computed", "elsewhere", "computed"]
    assert len(leases(tmp_path)) == 1, "the other one's"
    assert statuses(other.documents.warm_shared([BOB])) == ["computed"] and leases(tmp_path) == []
    found = engine.documents.warm_shared([BOB])  # no refresh in between
    assert statuses(found) == ["present"] and found[0].computed_tokens == 0


def test_loser_of_a_claim_race_leaves_all_documents_to_the_winner(start, monkeypatch):
    engine, other = start(), start()
    acquire = engine._chunks.store._disk.leases.acquire

    def lose(keys, seconds):
        assert other._chunks.store.claims.claim(keys[:1], 3600) == (keys[0],)
        return acquire(keys, seconds)

    monkeypatch.setattr(engine._chunks.store._disk.leases, "acquire", lose)
    assert statuses(engine.documents.warm_shared([ANNA, BOB, CARLA])) == ["elsewhere"] * 3
    assert statuses(other.documents.warm_shared([ANNA, BOB, CARLA])) == ["computed"] * 3


def test_neighbours_and_frame_stored_by_another_process_are_reused(start):
    engine, other = start(), start()
    other.documents.warm_shared([ANNA, BOB])
    other.documents.warm([BOB])
    lengths = [len(chunk.token_ids) for chunk in engine.documents.passage_chunks([CARLA, DINO])]
    (result,) = engine.documents.warm_shared([CARLA], behind=[[ANNA]])
    assert result.computed_tokens == lengths[0] + 1, "neither the system prompt nor the neighbour again"
    (result,) = engine.documents.warm_shared([DINO], behind=[engine.documents.frame.documents])
    assert result.computed_tokens == lengths[1] + 1, "nor the frame"


def test_warming_continues_if_the_store_refuses_leases(start, monkeypatch):
    engine = start()

    def refuse(*_, **__):
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(engine._chunks.store._disk.leases, "acquire", refuse)
    monkeypatch.setattr(engine._chunks.store._disk.leases, "held", refuse)
    assert statuses(engine.documents.warm_shared([ANNA])) == ["computed"]


def test_document_that_cannot_be_written_is_reported_as_unwritten(start, monkeypatch):
    engine = start()
    engine.documents.warm_shared([ANNA])
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise StoreUnavailableError("disk full")

        patch.setattr(engine._chunks.store._disk, "write", fail)
        (result,) = engine.documents.warm_shared([BOB])
        assert (result.status, result.num_bytes) == ("unwritten", 0) and result.reason
        assert id_of(engine, BOB) not in engine._chunks.variants, "memory must not pass for the store"
    assert statuses(engine.documents.warm_shared([BOB])) == ["computed"]


def test_failure_of_one_document_does_not_affect_others(start, monkeypatch, tmp_path):
    engine, compute = start(), type(start().documents._warmer).compute
    seen = []

    def fail_once(self, warming, *args, **kwargs):
        seen.append(1)
        if len(seen) == 2:
            raise RuntimeError("device lost")
        return compute(self, warming, *args, **kwargs)

    monkeypatch.setattr(type(engine.documents._warmer), "compute", fail_once)
    results = engine.documents.warm_shared([ANNA, BOB, CARLA])
    assert statuses(results) == ["computed", "failed", "computed"] and results[1].reason == "RuntimeError: device lost"
    assert leases(tmp_path) == [] and not engine._chunks.store._pins


def test_cancelled_warming_stops_between_layers_with_finished_work_on_disk(start, tmp_path):
    engine = start()
    engine.documents.warm_shared([DINO])
    in_the_second = After(3)  # also called while steps compile: counts only from the first on
    results = engine.documents.warm_shared(
        [ANNA, BOB, CARLA],
        is_cancelled=lambda: id_of(engine, ANNA) in engine._chunks.variants and in_the_second(),
    )
    assert statuses(results) == ["computed"] and leases(tmp_path) == [] and not engine._chunks.store._pins
    assert statuses(start().documents.warm_shared([ANNA, BOB])) == ["present", "computed"]


def test_warming_behind_neighbours_stores_and_compares_only_the_document(start):
    engine = start()
    engine.documents.warm_shared([ANNA, BOB, CARLA])
    before = set(engine._chunks.variants.ids())
    (result,) = engine.documents.warm_shared([CARLA], behind=[[ANNA, BOB]])
    assert set(engine._chunks.variants.ids()) - before == {id_of(engine, CARLA, [ANNA, BOB])}
    lengths = [len(chunk.token_ids) for chunk in engine.documents.passage_chunks([BOB, CARLA])]
    assert result.computed_tokens == sum(lengths) + 1, "the first neighbour is stored alone"
    (meta,) = (one for one in engine._chunks.variants if one.variant_id == id_of(engine, CARLA, [ANNA, BOB]))
    check_deviations(engine, meta)
    response = engine.generate("Who sings?", [ANNA, BOB, CARLA], reuse="exact", max_new_tokens=2)
    assert response.reuse.per_document[-1].reused_tokens == lengths[1]


def test_invalid_shared_warming_and_pruning_is_rejected(start, model):
    engine = start()
    with pytest.raises(RequestError, match="behind: wanted one list for each of 1 documents, got 2"):
        engine.documents.warm_shared([ANNA], behind=[[], []])
    with pytest.raises(ReadOnlyError):
        start(read_only=True).documents.warm_shared([ANNA])
    with pytest.raises(ReadOnlyError):
        start(read_only=True).documents.prune(set())
    with Engine(model, EngineConfig()) as memory, pytest.raises(ValueError, match="store: wanted an engine"):
        memory.documents.warm_shared([ANNA])


# -- prune ------------------------------------------------------------------------------------------------------


def test_pruning_removes_unlisted_passages_and_kv_computed_behind_them(start):
    engine = start()
    engine.documents.warm_shared([ANNA, BOB, CARLA])
    engine.documents.warm_shared([CARLA, ANNA], behind=[[BOB], [CARLA]])
    engine.generate("Who sings?", [Document("Eve came with a request.", "eve")], max_new_tokens=1)
    engine.cache.flush()
    size = sum(engine._chunks.store.charge_bytes("disk", id_of(engine, *one)) for one in ((BOB,), (CARLA, [BOB])))
    keep = {chunk.chunk_id for chunk in engine.documents.passage_chunks([ANNA, CARLA])}
    other = start()
    pruned = other.documents.prune(keep)
    assert (pruned.passages, pruned.variants, pruned.num_bytes) == (1, 2, size)
    assert {one.document_id for one in other.documents.list()} == {"Anna.md", "Carla.md", "eve"}
    assert (
        id_of(engine, CARLA, [BOB]) not in other._chunks.variants
        and id_of(engine, ANNA, [CARLA]) in other._chunks.variants
    )
    assert dataclasses.astuple(other.documents.prune(keep)) == (0, 0, 0)
    engine.cache.refresh()
    assert id_of(engine, CARLA, [BOB]) not in set(engine._chunks.store.ids("disk"))


def test_pruning_keeps_pinned_documents_and_those_of_requests(start):
    engine = start()
    engine.documents.warm_shared([ANNA, BOB])
    engine.generate("Who sings?", [dataclasses.replace(BOB, id="mine", source_id=None)], max_new_tokens=1)
    engine.documents.pin("Anna.md")
    assert engine.documents.prune(set()).variants == 0
    engine.documents.unpin("Anna.md")
    assert engine.documents.prune(set()).variants == 1 and id_of(engine, BOB) in engine._chunks.variants


def test_new_documents_can_be_linked_to_stored_passages(start):
    engine = start()
    engine.documents.warm_shared([ANNA])
    renamed = dataclasses.replace(ANNA, id="new.md#0", source_id="new.md")
    engine.documents.note_passages(engine.documents.passage_chunks([renamed]))
    engine.cache.flush()
    assert {one.document_id for one in start().documents.list()} == {"Anna.md", "new.md"}
