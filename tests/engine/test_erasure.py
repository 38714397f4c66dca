"""Erasing documents: nothing remains in any tier, in spite of other processes, restarts and failing disks."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

import ccjax.store.commits
from ccjax.cache import document_registry as documents_module
from ccjax.cache.document_registry import Origin
from ccjax.cache.snapshot import inspect_snapshot
from ccjax.cache.variant_records import with_origin
from ccjax.engine import Engine, Request, SamplingParams
from ccjax.errors import EraseIncompleteError
from ccjax.store.copies import host_array
from ccjax.store.disk import TensorStoreTier
from ccjax.store.files import FileRoot
from ccjax.store.tiered import TieredStore
from ccjax.types import Document, VariantId
from tests.engine.documents import (
    ANNA,
    BOB,
    CARLA,
    DINO,
    as_json,
    ask,
    files,
    ids_of,
    key_of,
    rows_of,
    seen_by,
    set_clock,
    summary,
    where,
)


@pytest.fixture
def cataloged(monkeypatch, tmp_path):
    """Writes a catalog with copies of all records from the second flush on; returns a function that reads its parts."""
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 1)
    return lambda: b"".join(data for path, data in files(tmp_path).items() if path.parent.name == "catalog")


def ids_seen_by(engine: Engine, document: Document) -> set[VariantId]:
    return {meta.variant_id for meta in seen_by(engine, document)}


def as_written(engine: Engine) -> bytes:
    """ANNA's token ids as they are written in records."""
    return as_json(ids_of(engine, ANNA))


def fill(engine: Engine) -> None:
    """ANNA before and after other documents, and repaired KV of others whose computation attended to her."""
    ask(engine, ANNA, BOB, CARLA)
    ask(engine, CARLA, ANNA, BOB)
    ask(engine, DINO, BOB, CARLA)
    engine.cache.flush()


def test_nothing_derived_from_an_erased_document_remains(start, url, tmp_path, cataloged):
    engine = start(store=url, device_cache_bytes=16 << 20)
    fill(engine)
    assert as_written(engine) in cataloged()
    tainted = seen_by(engine, ANNA)
    assert all("device" in engine._chunks.store.tiers_of(meta.variant_id) for meta in tainted)
    derived = [meta for meta in tainted if key_of(engine, ANNA) not in (meta.chunk_id, *meta.prefix_ids)]
    assert derived, "KV behind DINO was taken over from behind ANNA: its record must say so"
    rows = rows_of(engine, [meta.variant_id for meta in tainted])
    needles = [*rows, as_written(engine), b"anna"]
    assert all(where(tmp_path, [needle]) for needle in needles)  # the search finds existing traces
    untouched = {meta.variant_id for meta in engine._chunks.variants} - {meta.variant_id for meta in tainted}
    removal = engine.documents.erase("anna")
    assert (removal.chunks, removal.variants) == (1, len(tainted)) and removal.num_bytes["disk"] > 0
    assert where(tmp_path, needles) == []
    assert not any(engine._chunks.store.tiers_of(meta.variant_id) for meta in tainted)
    assert {meta.variant_id for meta in engine._chunks.variants} == untouched and untouched
    held = [kv for _, kv in engine._chunks.store._memory["host"]._shards.values()]
    assert held and not any(host_array(kv).tobytes() in rows for kv in held)
    assert key_of(engine, ANNA) not in engine._chunks.variants.tokens.known()
    hints = json.loads(next(data for path, data in files(tmp_path).items() if path.name == "hints.json"))
    assert not hints["frequency_reuse"].keys() & {meta.variant_id for meta in tainted}
    engine.cache.flush()
    assert where(tmp_path, needles) == [] and cataloged()
    report = ask(engine, ANNA, BOB)
    assert report.per_document[1].reused_tokens == 0


def test_catalog_copies_of_evicted_records_are_erased_too(start, url, tmp_path, cataloged):
    engine = start(store=url)
    fill(engine)
    for meta in seen_by(engine, ANNA):
        engine._chunks.variants.discard(meta.variant_id)
    engine._chunks.store._writer.flush()
    assert [path.parent.name for path in where(tmp_path, [as_written(engine)])] == ["catalog"]
    assert engine.documents.erase("anna").variants == 0
    assert where(tmp_path, [as_written(engine)]) == []


def test_another_process_does_not_write_erased_records_to_a_new_catalog(start, url, tmp_path, cataloged):
    first, other = start(store=url), start(store=url)
    fill(first)
    other._chunks.store.refresh()
    first.documents.erase("anna")
    other._chunks.store.renew_catalog()
    other.cache.flush()
    assert where(tmp_path, [as_written(first)]) == [] and cataloged()


def test_catalog_copies_of_late_writes_are_erased_too(start, url, tmp_path, cataloged, monkeypatch):
    first, other = start(store=url), start(store=url)
    fill(first)
    other.cache.refresh()
    first.documents.erase("anna")
    ask(other, CARLA, ANNA)
    other.cache.flush()
    assert as_written(first) in cataloged()
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 64)  # too few changes for a new catalog
    first.cache.refresh()
    assert where(tmp_path, [as_written(first)]) == [] and cataloged()


def test_unread_records_of_an_erased_document_are_never_used(start, url, tmp_path, cataloged, monkeypatch):
    monkeypatch.setattr("ccjax.cache.variants._RECORDS_AT_START", 0)
    first = start(store=url)
    fill(first)
    other, late = start(store=url), start(store=url)
    tainted = ids_seen_by(first, ANNA)
    needles = [*rows_of(first, tainted), as_written(first)]
    kept = {path: data for path, data in files(tmp_path).items() if {"records", "data"} & set(path.parts)}
    first.documents.erase("anna")
    assert where(tmp_path, needles) == []
    for path, data in kept.items():  # as if another process had stored it again, unaware of the erasure
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    chunk_ids = [chunk.chunk_id for chunk in late.assemble(request_of(CARLA, ANNA, BOB)).chunks]

    def found(look) -> set:
        return {meta.variant_id for metas in look(chunk_ids).values() for meta in metas}

    assert found(late._chunks.variants.peek) & tainted
    cached = late.documents._documents
    cached.registry.apply_changes(*cached.fetch())  # knows of the erasure, but has dropped nothing yet
    before = late._chunks.variants.ids()
    assert found(late._chunks.variants.peek) and not found(late._chunks.variants.peek) & tainted
    assert not {meta.variant_id for meta in late._chunks.variants} & tainted
    assert late._chunks.variants.ids() == before and not late._chunks.variants._origins  # reading changes nothing
    other.cache.refresh()
    assert tainted.isdisjoint(other._chunks.variants.ids()) and where(tmp_path, needles) == []
    assert found(late._chunks.variants.of_chunks) and not found(late._chunks.variants.of_chunks) & tainted


def request_of(*documents: Document) -> Request:
    messages = [{"role": "user", "content": "Who sings?"}]
    return Request(messages=messages, documents=documents, sampling=SamplingParams(1))


def test_opening_a_store_reads_records_only_after_an_erasure(start, url, monkeypatch):
    monkeypatch.setattr("ccjax.cache.variants._RECORDS_AT_START", 0)  # as for those beyond the first ones of a store
    first = start(store=url)
    fill(first)
    seen: list[str] = []
    get_record = TieredStore.get_record
    monkeypatch.setattr(TieredStore, "get_record", lambda self, key: (seen.append(key), get_record(self, key))[1])
    first.close()
    assert start(store=url).cache.num_variants > 3 and seen == []
    start(store=url).documents.erase("bob")
    seen.clear()
    engine = start(store=url)
    assert set(seen) == set(engine._chunks.variants.ids()) and seen


def test_a_snapshot_does_not_bring_back_what_was_erased(start, url, tmp_path):
    engine = start(store=url)
    fill(engine)
    tainted = ids_seen_by(engine, ANNA)
    needles = [*rows_of(engine, tainted), as_written(engine)]
    engine.cache.save_snapshot(tmp_path / "snapshot")
    held = engine.cache.num_variants
    engine.documents.erase("anna")
    written = engine.cache.usage()["disk"].writes
    report = engine.cache.restore_snapshot(tmp_path / "snapshot")
    engine.cache.flush()
    assert (report.num_erased, report.num_present) == (len(tainted), held - len(tainted))
    assert engine.cache.usage()["disk"].writes == written  # not written even temporarily
    index = inspect_snapshot(tmp_path / "snapshot")
    engine._chunks.variants.restore((variant.record, variant.frequency_reuse) for variant in index.variants)
    assert where(tmp_path, needles) == [] and tainted.isdisjoint(engine._chunks.variants.ids())
    ask(engine, ANNA)
    again = ids_seen_by(engine, ANNA)
    engine.cache.save_snapshot(tmp_path / "later")
    for variant_id in again:
        engine._chunks.variants.discard(variant_id)
    assert engine.cache.restore_snapshot(tmp_path / "later").num_erased == 0
    assert ids_seen_by(engine, ANNA) == again != set()  # sent again after the erasure


def test_invalidation_keeps_variants_computed_behind_the_document(start):
    engine = start()
    fill(engine)
    assert engine.documents.invalidate("anna").variants < len(seen_by(engine, ANNA)) + 3
    assert seen_by(engine, ANNA)


def test_origin_of_kv_survives_a_restart(start, url, tmp_path):
    engine = start(store=url)
    fill(engine)
    tainted = ids_seen_by(engine, ANNA)
    engine.close()
    engine = start(store=url)
    assert ids_seen_by(engine, ANNA) == tainted
    needles = [*rows_of(engine, tainted), as_written(engine)]
    assert engine.documents.erase("anna", "1").variants == len(tainted)
    engine.close()
    assert where(tmp_path, needles) == []
    assert ("anna", "1") not in summary(start(store=url))


def test_a_write_in_the_queue_is_erased_too(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    entered, gate = threading.Event(), threading.Event()
    write = TensorStoreTier.write

    def slow(tier, record, kv, **options):
        entered.set()
        assert gate.wait(120)
        return write(tier, record, kv, **options)

    monkeypatch.setattr(TensorStoreTier, "write", slow)
    ask(engine, ANNA, BOB)
    assert entered.wait(120)  # the system prompt is being written, the others wait
    rows = rows_of(engine, ids_seen_by(engine, ANNA))
    outcomes: list[Any] = []
    erasing = threading.Thread(target=lambda: outcomes.append(engine.documents.erase("anna")))
    erasing.start()
    erasing.join(0.2)
    assert erasing.is_alive()  # it does not return before the queue is processed
    gate.set()
    erasing.join(120)
    assert outcomes[0].variants == 2 and where(tmp_path, [*rows, as_written(engine)]) == []
    engine.cache.flush()
    assert where(tmp_path, rows) == [] and engine.cache.usage()["disk"].num_variants == 1


def test_quarantine_and_parts_of_killed_writes_are_erased_too(start, url, tmp_path):
    engine = start(store=url)
    ask(engine, ANNA)
    engine.cache.flush()
    record = next(path for path, data in files(tmp_path).items() if as_written(engine) in data)
    space = record.parent.parent
    raw = record.read_bytes()
    for left in (space / "quarantine" / record.name, space / "records" / "x.json.0.tmp", space / "data/0f/c"):
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(raw)
    engine.documents.erase("anna")
    assert where(tmp_path, [as_written(engine)]) == []


def refuse(monkeypatch: pytest.MonkeyPatch, matches) -> list[str]:
    """Makes deletions of matching keys fail while the returned list is empty."""
    relent: list[str] = []
    delete = FileRoot.delete

    def stubborn(root, key):
        if matches(key) and not relent:
            raise OSError(5, "Input/output error")
        return delete(root, key)

    monkeypatch.setattr(FileRoot, "delete", stubborn)
    return relent


@pytest.mark.parametrize("folder", ["/records/", "/data/", "/notes/link", "/catalog/"])
def test_failed_deletions_are_reported_not_used_and_retried(start, url, tmp_path, monkeypatch, cataloged, folder):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.cache.flush()
    rows = rows_of(engine, ids_seen_by(engine, ANNA))
    needles = [*rows, as_written(engine), b"anna"]
    relent = refuse(monkeypatch, lambda key: folder in key)
    with pytest.raises(EraseIncompleteError, match="could not be deleted") as caught:
        engine.documents.erase("anna")
    assert caught.value.remaining and where(tmp_path, needles)
    assert engine.documents.counts.unfinished_erasures == 1 and engine.documents.list("anna")[0].erasing
    assert not seen_by(engine, ANNA)
    report = ask(engine, ANNA, reuse="off")
    engine.cache.refresh()
    assert engine.documents.counts.unfinished_erasures == 1 and not seen_by(engine, ANNA)
    assert report.reused_tokens == 0
    relent.append("now")
    engine.cache.refresh()
    assert where(tmp_path, needles) == [] and engine.documents.counts.unfinished_erasures == 0
    assert ("anna", "1") not in summary(engine)


def test_an_unfinished_erasure_is_finished_by_the_next_process(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.cache.flush()
    needles = [*rows_of(engine, ids_seen_by(engine, ANNA)), as_written(engine)]
    relent = refuse(monkeypatch, lambda key: "/records/" in key)
    with pytest.raises(EraseIncompleteError):
        engine.documents.erase("anna")
    engine.close()
    engine = start(store=url)
    assert engine.documents.counts.unfinished_erasures == 1 and not seen_by(engine, ANNA)
    relent.append("now")
    engine.close()
    engine = start(store=url)
    assert where(tmp_path, [*needles, b"anna"]) == [] and engine.documents.counts.unfinished_erasures == 0
    assert summary(engine) == {("bob", "1"): (1, 0)}


def test_erasure_that_cannot_be_recorded_raises_but_still_applies(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    ask(engine, ANNA)
    engine.cache.flush()
    create = FileRoot.create

    def full(root, key, data):
        if "/notes/eras" in key:
            raise OSError(28, "No space left on device")
        return create(root, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(FileRoot, "create", full)
        with pytest.raises(EraseIncompleteError) as caught:
            engine.documents.erase("anna")
    assert "No space left" in caught.value.remaining[0] and not seen_by(engine, ANNA)
    engine.cache.refresh()
    assert engine.documents.counts.unfinished_erasures == 0 and engine.documents.list() == ()
    assert where(tmp_path, [b"anna", as_written(engine)]) == []


def test_erasure_reaches_the_memory_and_late_writes_of_another_engine(start, url, tmp_path):
    first, other = start(store=url), start(store=url)
    ask(first, ANNA, BOB)
    first.cache.flush()
    other.cache.refresh()
    ask(other, ANNA, BOB)
    rows = rows_of(first, ids_seen_by(first, ANNA))
    first.documents.erase("anna")
    ask(other, CARLA, ANNA)  # unaware of the erasure: uses her, and stores her and what it computed after her
    other.cache.flush()
    assert where(tmp_path, [as_written(first)])
    first.cache.refresh()
    assert not seen_by(first, ANNA) and where(tmp_path, [as_written(first)]) == []
    assert seen_by(other, ANNA)
    other.cache.refresh()
    assert not seen_by(other, ANNA)
    held = [kv for _, kv in other._chunks.store._memory["host"]._shards.values()]
    assert held and not any(host_array(kv).tobytes() in rows for kv in held)
    ask(other, ANNA)
    other.cache.flush()
    first.cache.refresh()
    assert seen_by(first, ANNA) and seen_by(other, ANNA)  # sent again after the erasure: a new document


def test_variants_stored_by_another_engine_during_an_erasure_are_erased(start, url, tmp_path, monkeypatch):
    first, other = start(store=url), start(store=url)
    fill(first)
    other.cache.refresh()
    erase, rounds = first._chunks.store.erase, []

    def erase_before_other_writes(covered, **options):
        remaining = erase(covered, **options)
        if not rounds:
            ask(other, CARLA, ANNA)  # not aware of it yet
            other.cache.flush()
            first._chunks.store.refresh()
        rounds.append(set(covered))
        return remaining

    monkeypatch.setattr(first._chunks.store, "erase", erase_before_other_writes)
    assert first.documents.erase("anna").variants == len(rounds[0])
    assert len(rounds) == 2 and len(rounds[1]) > len(rounds[0])
    assert where(tmp_path, [as_written(first)]) == []


def test_other_engines_are_notified_when_an_erasure_starts_and_ends(start, url, monkeypatch):
    engine, events = start(store=url), []
    fill(engine)
    registry = engine.documents._documents.registry
    for name, what, call in (
        ("told", engine._chunks.store, "request_relisting"),
        ("deleted", engine._chunks.store, "erase"),
        ("noted", registry, "note"),
        ("finished", registry, "finish"),
    ):
        real = getattr(what, call)
        monkeypatch.setattr(what, call, lambda *a, _n=name, _f=real, **k: [events.append(_n), _f(*a, **k)][1])
    engine.documents.erase("anna")
    assert events[:3] == ["noted", "told", "deleted"] and events[-2:] == ["finished", "told"]


def test_late_notice_of_an_erasure_spares_variants_computed_after_it(start, url, tmp_path):
    """The third engine learns of the new variants, which have the ids of the old ones, before it learns of the erasure,
    and has the old ones in memory."""
    first, other, third = start(store=url), start(store=url), start(store=url)
    ask(first, ANNA, BOB)
    first.cache.flush()
    for engine in (other, third):
        engine.cache.refresh()
        ask(engine, ANNA, BOB)
    old = rows_of(first, ids_seen_by(first, ANNA))
    first.documents.erase("anna")
    other.cache.refresh()
    ask(other, ANNA, BOB)
    other.cache.flush()
    renewed = ids_seen_by(other, ANNA)
    assert third._chunks.store._disk.apply_commits(dict.fromkeys(renewed)) and "host" in third._chunks.store.tiers_of(
        next(iter(renewed))
    )
    third.cache.refresh()
    assert {third._chunks.store.tiers_of(key) for key in renewed} == {("disk",)}
    assert ids_seen_by(third, ANNA) == renewed
    assert ask(third, ANNA, BOB).recomputed_tokens == 0 and rows_of(third, renewed) == rows_of(other, renewed)
    fresh = start(store=url)
    assert ids_seen_by(fresh, ANNA) == renewed and rows_of(fresh, renewed) != []
    assert other.documents.erase("anna").variants == len(renewed) and where(tmp_path, old) == []


def test_second_round_of_an_erasure_spares_variants_computed_after_it(start, url, monkeypatch):
    first, late, other = start(store=url), start(store=url), start(store=url)
    ask(first, ANNA)
    first.cache.flush()
    late.cache.refresh()
    ask(late, ANNA)
    erase, rounds = first._chunks.store.erase, []

    def erase_before_others_write(covered, **options):
        remaining = erase(covered, **options)
        if not rounds:
            other.cache.refresh()
            ask(other, ANNA)  # aware of the erasure
            other.cache.flush()
            ask(late, ANNA, CARLA)  # not aware of it yet
            late.cache.flush()
            first._chunks.store.refresh()
        rounds.append(set(covered))
        return remaining

    monkeypatch.setattr(first._chunks.store, "erase", erase_before_others_write)
    first.documents.erase("anna")
    (renewed,) = ids_seen_by(other, ANNA)
    assert renewed in rounds[0] and len(rounds) == 2
    assert ids_seen_by(first, ANNA) == {renewed}
    assert first._chunks.store.tiers_of(renewed) == ("disk",)


def test_origin_is_tracked_for_a_variant_rewritten_by_another_process(start, url):
    """Its KV was repaired with KV that had attended to DINO; that of the copy in memory was not."""
    first, other = start(store=url), start(store=url)
    ask(first, DINO)
    ask(first, ANNA)
    first.cache.flush()
    (known,) = ids_seen_by(first, ANNA)
    record, dino = first._chunks.store.get_record(known), key_of(first, DINO)
    assert record is not None and dino not in first._chunks.variants.origin_of(known).seen
    ticket = first._chunks.store.prepare_load([known])
    kv = np.array(ticket.read_layers(known, 0, first.model_config.num_layers))
    first._chunks.store.complete_load(ticket)
    other._chunks.store.refresh()
    other._chunks.store._disk.remove([known])
    origin = Origin(frozenset({dino, key_of(first, ANNA)}))
    assert other._chunks.store._disk.write(with_origin(record, origin), kv)
    assert first._chunks.store._disk.apply_commits({known: None}) == (known,)
    first._chunks.updater.apply_changes((known,), ())
    assert dino in first._chunks.variants.origin_of(known).seen
    first.documents.erase("dino")
    assert first._chunks.store.tiers_of(known) == ("host",)


def test_erasure_record_is_dropped_after_an_hour(start, url, tmp_path):
    engine = start(store=url)
    now = [1000.0]
    set_clock(engine, now)
    ask(engine, ANNA)
    engine.cache.flush()
    key = key_of(engine, ANNA).encode()
    engine.documents.erase("anna")
    assert len(where(tmp_path, [key])) == 1  # the note that rejects late writers
    now[0] += documents_module.ERASURE_AGE_S + 1
    engine.cache.refresh()
    assert where(tmp_path, [key]) == [] and not engine.documents._documents.registry._erasures
    ask(engine, ANNA)
    assert seen_by(engine, ANNA)


def test_shared_text_is_erased_with_the_second_document_if_the_first_failed(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    ask(engine, ANNA)
    ask(engine, Document(ANNA.text, "copy"))
    ask(engine, BOB)
    engine.cache.flush()
    relent = refuse(monkeypatch, lambda key: "/notes/link" in key)
    with pytest.raises(EraseIncompleteError):
        engine.documents.erase("anna")  # keeps the text, which "copy" shares, but cannot delete its own notes
    with pytest.raises(EraseIncompleteError):
        engine.documents.erase("copy")
    relent.append("now")
    engine.cache.refresh()
    assert summary(engine) == {("bob", "1"): (1, 1)} and where(tmp_path, [as_written(engine)]) == []


def test_pins_of_an_erased_document_are_removed(start, url, tmp_path):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.documents.pin("anna")
    engine.documents.pin("anna", "1")
    engine.documents.pin("bob")
    engine.documents.erase("anna", "1")
    assert engine.documents.counts.pins == 1 and where(tmp_path, [b"anna"]) == []
