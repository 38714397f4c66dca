"""Documents as units of the cache: warm, pin, invalidate, erase, list; restarts, shared stores and failing disks."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import store.commits
from ccjax.engine import Engine, Request, SamplingParams
from ccjax.engine import documents as documents_module
from ccjax.engine.prompts import chunk_id
from ccjax.engine.snapshot import inspect_snapshot
from ccjax.errors import (
    ContextLengthError,
    EraseIncompleteError,
    PinLimitError,
    ReadOnlyError,
    RequestError,
    UnknownDocumentError,
)
from ccjax.types import Document
from store.disk import TensorStoreTier
from store.files import FileRoot
from store.tiered import TieredStore
from tests.engine.helpers import After
from tests.server.tiny_model import write_tiny_model

TEXTS = {
    "anna": "Anna lives in Paris. She repairs violins in a small shop by the river.",
    "bob": "Bob works in Rome. He paints houses and drives an old green van.",
    "carla": "Carla studies whales. Her boat is called Minerva and sails from Lisbon.",
    "dino": "Dino bakes bread in Naples. His oven burns olive wood every morning.",
}
ANNA, BOB, CARLA, DINO = (Document(text, name, version="1") for name, text in TEXTS.items())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, list(TEXTS.values()))
    return directory


@pytest.fixture
def start(model):
    """`start(**settings)` is an engine; all are closed in the end."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(Engine.from_pretrained(model, **{"max_model_len": 512, **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/store"


def ask(engine: Engine, *documents: Document, **more: Any):
    """The report of a short answer."""
    return engine.generate("Who sings?", documents, max_new_tokens=1, **more).reuse


def ids_of(engine: Engine, document: Document) -> tuple[int, ...]:
    assert engine._builder is not None
    return engine._builder.document_ids(document)


def set_clock(engine: Engine, now: list[float]) -> None:
    """Lets `now[0]` be the time."""
    engine._documents.registry.clock = lambda: now[0]
    engine._documents._next_tend = 0.0


def key_of(engine: Engine, document: Document):
    return chunk_id(ids_of(engine, document))


def rows_of(engine: Engine, variant_ids) -> list[bytes]:
    """Rows of KV of variants, as bytes: of the last layer, because those of the first do not depend on the prefix."""
    rows = []
    for variant_id in variant_ids:
        ticket = engine._store.prepare_load([variant_id])
        kv = ticket.read_layers(variant_id, 0, engine.model_config.num_layers)
        rows += [np.array(kv[-1, part, 3]).tobytes() for part in (0, 1)]
        engine._store.complete_load(ticket, ok=False)
    return rows


def files(tmp_path: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}


@pytest.fixture
def cataloged(monkeypatch, tmp_path):
    """From the second flush on there is a catalog, which has copies of all records; returns what is in its parts."""
    monkeypatch.setattr(store.commits, "LEAST_CHANGES", 1)
    return lambda: b"".join(data for path, data in files(tmp_path).items() if path.parent.name == "catalog")


def where(tmp_path: Path, needles) -> list[Path]:
    """Files of the store that contain one of these."""
    return [path for path, data in files(tmp_path).items() if any(needle in data for needle in needles)]


def as_json(ids) -> bytes:
    """Token ids as a record would have them."""
    return json.dumps(list(ids), separators=(",", ":")).encode()[1:-1]


def seen_by(engine: Engine, document: Document) -> list:
    """Variants that were computed while looking at a document."""
    key = key_of(engine, document)
    return [meta for meta in engine._variants if key in engine._variants.origin(meta).seen]


def summary(engine: Engine) -> dict[tuple[str, str | None], tuple[int, int]]:
    return {(item.document_id, item.version): (item.chunks, item.variants) for item in engine.documents()}


# -- which chunk belongs to which document ----------------------------------------------------------------------


def test_the_list_tells_chunks_variants_bytes_and_use(start, url):
    engine = start(store=url)
    engine._documents.registry.clock = lambda: 1000.0
    ask(engine, ANNA, BOB)
    ask(engine, ANNA, BOB)
    ask(engine, Document("No name."))
    engine.flush()
    anna, bob = engine.documents()
    assert (anna.document_id, anna.version, anna.chunks, anna.variants) == ("anna", "1", 1, 1)
    size = next(meta.num_bytes for meta in engine._variants if meta.chunk_id == key_of(engine, ANNA))
    assert anna.num_bytes == {"host": size, "disk": size} and anna.frequency_reuse == len(ids_of(engine, ANNA))
    assert anna.last_used == 1000.0 and anna.pinned_until is None and not anna.erasing
    assert engine.documents("bob") == (bob,) and bob.document_id == "bob"
    assert engine.document_counts.documents == 2
    with pytest.raises(UnknownDocumentError, match="document_id: .*'eve'"):
        engine.documents("eve")


def test_what_belongs_to_what_outlives_a_restart_and_reaches_other_processes(start, url):
    first = start(store=url)
    other = start(store=url)
    ask(first, ANNA, BOB)
    ask(first, Document(ANNA.text, "copy"))  # only reused, so no record of a variant could tell
    first.flush()
    other.refresh()
    wanted = summary(first)
    assert wanted == {("anna", "1"): (1, 1), ("bob", "1"): (1, 1), ("copy", None): (1, 1)} == summary(other)
    first.close()
    assert summary(start(store=url)) == wanted


def test_a_passage_belongs_to_its_source(start):
    engine = start()
    ask(engine, *(Document(text, f"all.md#{n}", None, "v", None, "all.md") for n, text in enumerate(TEXTS.values())))
    assert summary(engine) == {("all.md", "v"): (4, 4)}
    assert engine.invalidate("all.md#2").chunks == 1 and engine.invalidate("all.md").chunks == 3
    assert summary(engine) == {} and engine.num_variants == 1  # the system prompt


def test_the_notes_of_evicted_documents_go_after_an_hour(start, url, tmp_path):
    engine = start(store=url, max_variants=3)
    now = [0.0]
    set_clock(engine, now)
    ask(engine, ANNA, BOB)
    ask(engine, CARLA, DINO)
    assert len(engine.documents()) == 4 and sum(item.variants for item in engine.documents()) < 4
    now[0] = documents_module.ERASURE_AGE_S - 1
    engine.refresh()
    assert len(engine.documents()) == 4
    now[0] += 601.0
    engine.refresh()
    left = engine.documents()
    assert 0 < len(left) < 4 and all(item.variants for item in left)
    assert len([path for path in files(tmp_path) if path.name.startswith("link-")]) == len(left)


# -- warm -------------------------------------------------------------------------------------------------------


def test_a_warmed_document_is_reused_anywhere_and_exactly_in_front(start):
    engine = start()
    warmed = engine.warm([ANNA, BOB, ANNA])
    assert [(item.document_id, item.status) for item in warmed] == [
        ("anna", "computed"),
        ("bob", "computed"),
        ("anna", "present"),
    ]
    assert warmed[0].num_tokens == len(ids_of(engine, ANNA)) and engine.num_variants == 3
    system = engine.documents()[0]
    assert system.frequency_reuse == 0
    front = ask(engine, ANNA, reuse="exact")
    assert front.exact and front.computed_tokens == front.prompt_tokens - front.reused_tokens
    assert front.per_document[1].computed_tokens == 0
    anywhere = ask(engine, CARLA, BOB)
    assert anywhere.per_document[2].computed_tokens == 0 and anywhere.per_document[1].computed_tokens > 0
    plain = start().generate("Who sings?", [ANNA], max_new_tokens=4)
    assert engine.generate("Who sings?", [ANNA], max_new_tokens=4, reuse="exact").token_ids == plain.token_ids


def test_warming_serves_requests_with_a_system_prompt_of_their_own(start):
    engine = start()
    engine.warm([ANNA], system_prompt="Sing!")
    messages = [{"role": "system", "content": "Sing!"}, {"role": "user", "content": "Who?"}]
    request = Request(messages=messages, documents=[ANNA], sampling=SamplingParams(1), reuse="exact")
    report = engine.run(request).reuse
    assert report.exact and [item.computed_tokens for item in report.per_document] == [0, 0]


def test_warming_does_not_push_out_what_it_warmed_before(start):
    engine = start(max_variants=3)
    ask(engine, DINO)
    statuses = [item.status for item in engine.warm([ANNA, BOB, CARLA])]
    assert statuses == ["computed", "computed", "no_room"]
    assert {name for (name, _), (_, variants) in summary(engine).items() if variants} == {"anna", "bob"}


def test_warming_stops_between_layers_and_goes_on_later(start):
    engine = start()
    warming = engine.begin_warming([ANNA, BOB])
    for num_layers in range(engine.model_config.num_layers):
        assert not engine.warm_one(warming, is_cancelled=After(num_layers))
        assert engine.num_variants == 0 and not engine._store._pins and warming.done == []
    while not warming.is_finished:
        assert engine.warm_one(warming)
    assert [item.status for item in warming.done] == ["computed", "computed"]
    assert engine.warm([CARLA], is_cancelled=lambda: True) == ()


def test_what_cannot_be_warmed_is_refused_before_anything_is_computed(start, url):
    engine = start(max_model_len=80)
    with pytest.raises(ContextLengthError, match=r"documents\[1\]: wanted at most 80 tokens"):
        engine.warm([ANNA, Document("word " * 200)])
    with pytest.raises(RequestError, match=r"documents\[0\]: wanted a non-empty string under 'text'"):
        engine.warm([{"text": " "}])
    with pytest.raises(RequestError, match="documents: wanted at least one"):
        engine.warm([])
    assert engine.num_variants == 0
    with pytest.raises(ReadOnlyError, match="read_only"):
        start(store=url, read_only=True).warm([ANNA])
    with pytest.raises(ReadOnlyError, match="strategy"):
        start(strategy="full").erase("anna")


# -- pin --------------------------------------------------------------------------------------------------------


def rounds(engine: Engine, number: int) -> None:
    """Requests over other passages, each used twice, so that unpinned unused variants would go."""
    for count in range(number):
        document = Document(f"Passage {count} about the number {count * count} and nothing else at all.", f"n{count}")
        ask(engine, document)
        ask(engine, document)


def test_a_pinned_document_stays_under_pressure_until_its_time_is_over(start):
    engine = start(max_variants=6)
    now = [100.0]
    set_clock(engine, now)
    engine.warm([ANNA, BOB])
    pin = engine.pin("anna", ttl_s=50)
    assert pin.until == 150.0 and engine.documents("anna")[0].pinned_until == 150.0
    assert engine.document_counts.pins == 1
    rounds(engine, 8)
    assert summary(engine)["anna", "1"] == (1, 1) and summary(engine)["bob", "1"] == (1, 0)
    now[0] = 150.0
    assert engine.documents("anna")[0].pinned_until is None
    rounds(engine, 8)
    assert summary(engine)["anna", "1"] == (1, 0)


def test_pins_outlive_a_restart_and_hold_in_other_processes(start, url):
    first = start(store=url)
    first.warm([ANNA, BOB])
    until = first.pin("anna", "1", ttl_s=5000).until
    first.flush()
    other = start(store=url, max_variants=6)
    first.close()
    for engine in (other, start(store=url, max_variants=6)):
        assert engine.documents("anna")[0].pinned_until == until
        rounds(engine, 6)
        assert summary(engine)["anna", "1"] == (1, 1) and summary(engine)["bob", "1"] == (1, 0)
    assert other.unpin("anna", "1") and not other.unpin("anna", "1")
    rounds(other, 6)
    assert summary(other)["anna", "1"] == (1, 0)


@pytest.mark.parametrize("host", [False, True])
def test_a_pin_holds_in_the_lowest_tier_and_in_host_memory_if_wanted(start, url, host):
    probe = start()
    probe.warm([ANNA])
    room = int(3.5 * sum(meta.num_bytes for meta in probe._variants))
    engine = start(store=url, host_cache_bytes=room, eviction_policy="lru")
    engine.warm([ANNA, BOB])
    engine.flush()
    engine.pin("anna", host=host)
    rounds(engine, 12)
    (anna,) = engine.documents("anna")
    assert anna.num_bytes["disk"] > 0 and (anna.num_bytes["host"] > 0) == host
    assert engine.documents("bob")[0].num_bytes["host"] == 0


def test_more_than_its_share_is_not_pinned(start):
    engine = start(max_variants=6, pin_share=0.5)
    engine.warm([ANNA, BOB, CARLA, DINO])
    for name in ("anna", "bob", "carla"):
        engine.pin(name)
    with pytest.raises(PinLimitError, match="document_id: wanted at most 3 variants pinned .* got 4 with 'dino'"):
        engine.pin("dino")
    engine.pin("carla", ttl_s=9)  # in place of the earlier one
    assert engine.document_counts.pins == 3
    total = sum(meta.num_bytes for meta in engine._variants)
    (anna,) = (meta for meta in engine._variants if meta.chunk_id == key_of(engine, ANNA))
    small = start(host_cache_bytes=total, pin_share=1.2 * anna.num_bytes / total)
    small.warm([ANNA, BOB])
    small.pin("anna")
    with pytest.raises(PinLimitError, match="bytes"):
        small.pin("bob")


def test_what_a_pinned_document_gains_later_is_kept_up_to_the_share_the_best_of_each_chunk_first(start):
    engine = start(max_variants=6, pin_share=0.34)  # two variants
    engine.warm([ANNA, BOB])
    engine.pin("anna")
    engine.pin("bob")
    for order in itertools.permutations([ANNA, BOB, CARLA]):
        ask(engine, *order)
    rounds(engine, 4)
    assert summary(engine)["anna", "1"][1] >= 1 and summary(engine)["bob", "1"][1] >= 1
    assert len(engine._pins.pinned_ids(None)) == 2


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan"), "9", True, None])
def test_a_bad_time_to_live_is_refused(start, ttl_s):
    engine = start()
    engine.warm([ANNA])
    with pytest.raises(RequestError, match="ttl_s: wanted a positive number of seconds"):
        engine.pin("anna", ttl_s=ttl_s)
    for document_id, version, match in [
        ("", None, "document_id"),
        (5, None, "document_id"),
        ("anna", "", "version: wanted a text"),
        ("anna", "x" * 1025, "version: .* 1025 characters"),
        ("eve", None, "document_id"),
        ("anna", "2", r"version: wanted one that is cached \('1'\), got '2'"),
    ]:
        for call in (engine.pin, engine.invalidate, engine.erase):
            with pytest.raises(RequestError, match=match):
                call(document_id, version)
    assert summary(engine) == {("anna", "1"): (1, 1)}


# -- invalidate -------------------------------------------------------------------------------------------------


def test_an_invalidated_document_is_computed_again_and_leaves_every_tier(start, url, tmp_path):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.flush()
    gone = [meta for meta in engine._variants if meta.chunk_id == key_of(engine, ANNA)]
    rows = rows_of(engine, [meta.variant_id for meta in gone])
    removal = engine.invalidate("anna")
    assert (removal.chunks, removal.kept_chunks, removal.variants) == (1, 0, 1)
    assert removal.num_bytes == dict.fromkeys(("host", "disk"), gone[0].num_bytes)
    assert where(tmp_path, rows) == [] and summary(engine) == {("bob", "1"): (1, 1)}
    report = ask(engine, ANNA, BOB)
    assert report.per_document[1].reused_tokens == 0 and report.per_document[2].reused_tokens > 0
    engine.flush()
    assert ask(engine, ANNA).per_document[1].computed_tokens == 0  # and is cached anew
    engine.refresh()
    assert summary(engine)["anna", "1"] == (1, 1)


def test_the_same_text_under_two_documents_goes_with_the_last(start, url):
    engine = start(store=url)
    copy = Document(ANNA.text, "copy", version="7")
    ask(engine, ANNA)
    ask(engine, copy)
    removal = engine.invalidate("anna")
    assert (removal.chunks, removal.kept_chunks, removal.variants) == (0, 1, 0)
    assert summary(engine) == {("copy", "7"): (1, 1)} and ask(engine, copy).per_document[1].computed_tokens == 0
    assert engine.erase("copy", "7").variants == 1 and engine.documents() == ()


def test_versions_go_one_by_one_or_all_together(start, url):
    engine = start(store=url)
    versions = [Document(f"{ANNA.text} Edition {n}.", "anna", version=str(n)) for n in range(3)]
    ask(engine, *versions, Document(versions[0].text, "anna", version="9"))
    assert engine.invalidate("anna", "1").chunks == 1
    assert sorted(summary(engine)) == [("anna", "0"), ("anna", "2"), ("anna", "9")]
    kept = engine.invalidate("anna", "0")
    assert (kept.chunks, kept.kept_chunks) == (0, 1)  # version 9 has that text
    engine.flush()
    engine.close()
    engine = start(store=url)
    assert engine.invalidate("anna").chunks == 2 and engine.documents() == ()
    assert engine.num_variants == 1


def test_the_passages_that_a_new_version_still_has_are_kept(start):
    engine = start()
    old = [Document(text, f"f#{n}", None, "old", None, "f") for n, text in enumerate(TEXTS.values())]
    new = [Document(old[n].text, f"f#{place}", None, "new", None, "f") for place, n in enumerate((1, 3))]
    ask(engine, *old)
    removal = engine.invalidate("f", keep=[*new, Document("Never asked for.", "f#2", None, "new", None, "f")])
    assert (removal.chunks, removal.kept_chunks, removal.variants) == (2, 2, 2)
    assert summary(engine) == {("f", "new"): (2, 2)}
    assert [item.computed_tokens for item in ask(engine, *new).per_document[1:]] == [0, 0]


def test_another_engine_stops_using_it_after_its_next_refresh(start, url, tmp_path):
    first, other = start(store=url), start(store=url)
    ask(first, ANNA, BOB)
    first.flush()
    other.refresh()
    ask(other, ANNA, BOB)  # now in its memory, too
    first.invalidate("anna")
    assert ask(other, ANNA).per_document[1].computed_tokens == 0  # as documented: not before it looks
    other.refresh()
    assert summary(other) == {("bob", "1"): (1, 1)} and not other._store.tiers_of("anna")
    assert ask(other, ANNA).per_document[1].reused_tokens == 0
    other.flush()
    first.refresh()
    other.refresh()
    assert summary(first)["anna", "1"] == summary(other)["anna", "1"] == (1, 1)  # computed after it: stays


# -- erase ------------------------------------------------------------------------------------------------------


def fill(engine: Engine) -> None:
    """ANNA in front of others, behind them, and KV of others that was repaired on top of what had seen her."""
    ask(engine, ANNA, BOB, CARLA)
    ask(engine, CARLA, ANNA, BOB)
    ask(engine, DINO, BOB, CARLA)
    engine.flush()


def test_nothing_of_an_erased_document_is_left(start, url, tmp_path, cataloged):
    engine = start(store=url, device_cache_bytes=16 << 20)
    fill(engine)
    assert as_json(ids_of(engine, ANNA)) in cataloged()
    tainted = seen_by(engine, ANNA)
    assert all("device" in engine._store.tiers_of(meta.variant_id) for meta in tainted)
    derived = [meta for meta in tainted if key_of(engine, ANNA) not in (meta.chunk_id, *meta.prefix_ids)]
    assert derived, "KV behind DINO was taken over from behind ANNA: its record must say so"
    rows = rows_of(engine, [meta.variant_id for meta in tainted])
    needles = [*rows, as_json(ids_of(engine, ANNA)), b"anna"]
    assert all(where(tmp_path, [needle]) for needle in needles)  # the search finds what is there
    untouched = {meta.variant_id for meta in engine._variants} - {meta.variant_id for meta in tainted}
    removal = engine.erase("anna")
    assert (removal.chunks, removal.variants) == (1, len(tainted)) and removal.num_bytes["disk"] > 0
    assert where(tmp_path, needles) == []
    assert not any(engine._store.tiers_of(meta.variant_id) for meta in tainted)
    assert {meta.variant_id for meta in engine._variants} == untouched and untouched
    assert not any(array.tobytes() in rows for _, array in engine._store._memory["host"]._shards.values())
    assert key_of(engine, ANNA) not in engine._variants.tokens.known()
    hints = json.loads(next(data for path, data in files(tmp_path).items() if path.name == "hints.json"))
    assert not hints["frequency_reuse"].keys() & {meta.variant_id for meta in tainted}
    engine.flush()
    assert where(tmp_path, needles) == [] and cataloged()
    report = ask(engine, ANNA, BOB)
    assert report.per_document[1].reused_tokens == 0


def test_copies_of_records_of_evicted_variants_are_erased_too(start, url, tmp_path, cataloged):
    engine = start(store=url)
    fill(engine)
    for meta in seen_by(engine, ANNA):
        engine._variants.discard(meta.variant_id)
    engine._store._writer.flush()
    assert [path.parent.name for path in where(tmp_path, [as_json(ids_of(engine, ANNA))])] == ["catalog"]
    assert engine.erase("anna").variants == 0
    assert where(tmp_path, [as_json(ids_of(engine, ANNA))]) == []


def test_another_process_that_still_knows_the_records_does_not_copy_them_again(start, url, tmp_path, cataloged):
    first, other = start(store=url), start(store=url)
    fill(first)
    other._store.refresh()
    first.erase("anna")
    other._store.renew_catalog()
    other.flush()
    assert where(tmp_path, [as_json(ids_of(first, ANNA))]) == [] and cataloged()


def test_copies_of_what_was_stored_late_go_with_it(start, url, tmp_path, cataloged, monkeypatch):
    first, other = start(store=url), start(store=url)
    fill(first)
    other.refresh()
    first.erase("anna")
    ask(other, CARLA, ANNA)
    other.flush()
    assert as_json(ids_of(first, ANNA)) in cataloged()
    monkeypatch.setattr(store.commits, "LEAST_CHANGES", 64)  # so few changes alone make no new one
    first.refresh()
    assert where(tmp_path, [as_json(ids_of(first, ANNA))]) == [] and cataloged()


def test_records_that_were_never_looked_into_are_not_used_once_erased(start, url, tmp_path, cataloged):
    first = start(store=url)
    fill(first)
    other, late = start(store=url), start(store=url)
    tainted = {meta.variant_id for meta in seen_by(first, ANNA)}
    needles = [*rows_of(first, tainted), as_json(ids_of(first, ANNA))]
    kept = {path: data for path, data in files(tmp_path).items() if {"records", "data"} & set(path.parts)}
    first.erase("anna")
    assert where(tmp_path, needles) == []
    for path, data in kept.items():  # as if another process had stored it again, without knowing
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    chunk_ids = [chunk.chunk_id for chunk in late._assemble(request_of(CARLA, ANNA, BOB)).chunks]

    def found(look) -> set:
        return {meta.variant_id for metas in look(chunk_ids).values() for meta in metas}

    assert found(late._variants.peek) & tainted
    late._documents.registry.follow(*late._documents.fetch())  # knows of the erasure, and dropped nothing yet
    before = late._variants.ids()
    assert found(late._variants.peek) and not found(late._variants.peek) & tainted
    assert not {meta.variant_id for meta in late._variants} & tainted
    assert late._variants.ids() == before and not late._variants._origins  # to look changes nothing
    other.refresh()
    assert tainted.isdisjoint(other._variants.ids()) and where(tmp_path, needles) == []
    assert found(late._variants.of_chunks) and not found(late._variants.of_chunks) & tainted


def request_of(*documents: Document) -> Request:
    messages = [{"role": "user", "content": "Who sings?"}]
    return Request(messages=messages, documents=documents, sampling=SamplingParams(1))


def test_opening_reads_no_record_but_after_an_erasure(start, url, monkeypatch):
    first = start(store=url)
    fill(first)
    seen: list[str] = []
    get_record = TieredStore.get_record
    monkeypatch.setattr(TieredStore, "get_record", lambda self, key: (seen.append(key), get_record(self, key))[1])
    first.close()
    assert start(store=url).num_variants > 3 and seen == []
    start(store=url).erase("bob")
    seen.clear()
    engine = start(store=url)
    assert set(seen) == set(engine._variants.ids()) and seen


def test_a_snapshot_does_not_bring_back_what_was_erased(start, url, tmp_path):
    engine = start(store=url)
    fill(engine)
    tainted = {meta.variant_id for meta in seen_by(engine, ANNA)}
    needles = [*rows_of(engine, tainted), as_json(ids_of(engine, ANNA))]
    engine.save_snapshot(tmp_path / "snapshot")
    held = engine.num_variants
    engine.erase("anna")
    written = engine.store_usage()["disk"].writes
    report = engine.restore_snapshot(tmp_path / "snapshot")
    engine.flush()
    assert (report.num_erased, report.num_present) == (len(tainted), held - len(tainted))
    assert engine.store_usage()["disk"].writes == written  # not for a moment
    index = inspect_snapshot(tmp_path / "snapshot")
    engine._variants.restore((variant.record, variant.frequency_reuse) for variant in index.variants)
    assert where(tmp_path, needles) == [] and tainted.isdisjoint(engine._variants.ids())
    ask(engine, ANNA)
    again = {meta.variant_id for meta in seen_by(engine, ANNA)}
    engine.save_snapshot(tmp_path / "later")
    for variant_id in again:
        engine._variants.discard(variant_id)
    assert engine.restore_snapshot(tmp_path / "later").num_erased == 0
    assert {meta.variant_id for meta in seen_by(engine, ANNA)} == again != set()  # sent once more, after the erasure


def test_an_invalidation_leaves_what_stood_behind_it(start):
    engine = start()
    fill(engine)
    assert engine.invalidate("anna").variants < len(seen_by(engine, ANNA)) + 3
    assert seen_by(engine, ANNA)


def test_where_kv_came_from_outlives_a_restart(start, url, tmp_path):
    engine = start(store=url)
    fill(engine)
    tainted = {meta.variant_id for meta in seen_by(engine, ANNA)}
    engine.close()
    engine = start(store=url)
    assert {meta.variant_id for meta in seen_by(engine, ANNA)} == tainted
    needles = [*rows_of(engine, tainted), as_json(ids_of(engine, ANNA))]
    assert engine.erase("anna", "1").variants == len(tainted)
    engine.close()
    assert where(tmp_path, needles) == []
    assert ("anna", "1") not in summary(start(store=url))


def test_a_write_in_the_queue_is_erased_too(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    entered, gate = threading.Event(), threading.Event()
    write = TensorStoreTier.write

    def slow(tier, record, kv, **options):
        entered.set()
        assert gate.wait(30)
        return write(tier, record, kv, **options)

    monkeypatch.setattr(TensorStoreTier, "write", slow)
    ask(engine, ANNA, BOB)
    assert entered.wait(30)  # the system prompt's is under way, the others wait
    rows = rows_of(engine, [meta.variant_id for meta in seen_by(engine, ANNA)])
    outcomes: list[Any] = []
    erasing = threading.Thread(target=lambda: outcomes.append(engine.erase("anna")))
    erasing.start()
    erasing.join(0.2)
    assert erasing.is_alive()  # it does not return before the queue is settled
    gate.set()
    erasing.join(30)
    assert outcomes[0].variants == 2 and where(tmp_path, [*rows, as_json(ids_of(engine, ANNA))]) == []
    engine.flush()
    assert where(tmp_path, rows) == [] and engine.store_usage()["disk"].num_variants == 1


def test_quarantine_and_parts_of_killed_writes_are_erased_too(start, url, tmp_path):
    engine = start(store=url)
    ask(engine, ANNA)
    engine.flush()
    record = next(path for path, data in files(tmp_path).items() if as_json(ids_of(engine, ANNA)) in data)
    space = record.parent.parent
    raw = record.read_bytes()
    for left in (space / "quarantine" / record.name, space / "records" / "x.json.0.tmp", space / "data/0f/c"):
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(raw)
    engine.erase("anna")
    assert where(tmp_path, [as_json(ids_of(engine, ANNA))]) == []


def refuse(monkeypatch: pytest.MonkeyPatch, matches) -> list[str]:
    """Deletions of matching keys fail while the list that is returned is empty."""
    relent: list[str] = []
    delete = FileRoot.delete

    def stubborn(root, key):
        if matches(key) and not relent:
            raise OSError(5, "Input/output error")
        return delete(root, key)

    monkeypatch.setattr(FileRoot, "delete", stubborn)
    return relent


@pytest.mark.parametrize("folder", ["/records/", "/data/", "/notes/link", "/catalog/"])
def test_what_a_disk_refuses_to_delete_is_reported_not_used_and_tried_again(
    start, url, tmp_path, monkeypatch, cataloged, folder
):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.flush()
    rows = rows_of(engine, [meta.variant_id for meta in seen_by(engine, ANNA)])
    needles = [*rows, as_json(ids_of(engine, ANNA)), b"anna"]
    relent = refuse(monkeypatch, lambda key: folder in key)
    with pytest.raises(EraseIncompleteError, match="could not be deleted") as caught:
        engine.erase("anna")
    assert caught.value.remaining and where(tmp_path, needles)
    assert engine.document_counts.unfinished_erasures == 1 and engine.documents("anna")[0].erasing
    assert not seen_by(engine, ANNA)
    report = ask(engine, ANNA, reuse="off")
    engine.refresh()
    assert engine.document_counts.unfinished_erasures == 1 and not seen_by(engine, ANNA)
    assert report.reused_tokens == 0
    relent.append("now")
    engine.refresh()
    assert where(tmp_path, needles) == [] and engine.document_counts.unfinished_erasures == 0
    assert ("anna", "1") not in summary(engine)


def test_an_unfinished_erasure_is_finished_by_the_next_process(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.flush()
    needles = [*rows_of(engine, [meta.variant_id for meta in seen_by(engine, ANNA)]), as_json(ids_of(engine, ANNA))]
    relent = refuse(monkeypatch, lambda key: "/records/" in key)
    with pytest.raises(EraseIncompleteError):
        engine.erase("anna")
    engine.close()
    engine = start(store=url)
    assert engine.document_counts.unfinished_erasures == 1 and not seen_by(engine, ANNA)
    relent.append("now")
    engine.close()
    engine = start(store=url)
    assert where(tmp_path, [*needles, b"anna"]) == [] and engine.document_counts.unfinished_erasures == 0
    assert summary(engine) == {("bob", "1"): (1, 0)}


def test_an_erasure_that_cannot_be_noted_is_an_error_and_holds_all_the_same(start, url, tmp_path, monkeypatch):
    engine = start(store=url)
    ask(engine, ANNA)
    engine.flush()
    create = FileRoot.create

    def full(root, key, data):
        if "/notes/eras" in key:
            raise OSError(28, "No space left on device")
        return create(root, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(FileRoot, "create", full)
        with pytest.raises(EraseIncompleteError) as caught:
            engine.erase("anna")
    assert "No space left" in caught.value.remaining[0] and not seen_by(engine, ANNA)
    engine.refresh()
    assert engine.document_counts.unfinished_erasures == 0 and engine.documents() == ()
    assert where(tmp_path, [b"anna", as_json(ids_of(engine, ANNA))]) == []


def test_erase_in_one_engine_reaches_the_memory_of_another_and_what_it_stores_late(start, url, tmp_path):
    first, other = start(store=url), start(store=url)
    ask(first, ANNA, BOB)
    first.flush()
    other.refresh()
    ask(other, ANNA, BOB)
    rows = rows_of(first, [meta.variant_id for meta in seen_by(first, ANNA)])
    first.erase("anna")
    ask(other, CARLA, ANNA)  # does not know yet: it uses her, and stores what it computed behind her, and her anew
    other.flush()
    assert where(tmp_path, [as_json(ids_of(first, ANNA))])
    first.refresh()
    assert not seen_by(first, ANNA) and where(tmp_path, [as_json(ids_of(first, ANNA))]) == []
    assert seen_by(other, ANNA)
    other.refresh()
    assert not seen_by(other, ANNA)
    assert not any(array.tobytes() in rows for _, array in other._store._memory["host"]._shards.values())
    ask(other, ANNA)
    other.flush()
    first.refresh()
    assert seen_by(first, ANNA) and seen_by(other, ANNA)  # sent once more, after the erasure: a new document


def test_after_an_hour_the_erasure_itself_is_forgotten(start, url, tmp_path):
    engine = start(store=url)
    now = [1000.0]
    set_clock(engine, now)
    ask(engine, ANNA)
    engine.flush()
    key = key_of(engine, ANNA).encode()
    engine.erase("anna")
    assert len(where(tmp_path, [key])) == 1  # the note that stops late writers
    now[0] += documents_module.ERASURE_AGE_S + 1
    engine.refresh()
    assert where(tmp_path, [key]) == [] and not engine._documents.registry._erasures
    ask(engine, ANNA)
    assert seen_by(engine, ANNA)


def test_text_that_two_erased_documents_share_goes_with_the_second_even_while_the_first_is_unfinished(
    start, url, tmp_path, monkeypatch
):
    engine = start(store=url)
    ask(engine, ANNA)
    ask(engine, Document(ANNA.text, "copy"))
    ask(engine, BOB)
    engine.flush()
    relent = refuse(monkeypatch, lambda key: "/notes/link" in key)
    with pytest.raises(EraseIncompleteError):
        engine.erase("anna")  # keeps the text, "copy" has it, but cannot delete its own notes
    with pytest.raises(EraseIncompleteError):
        engine.erase("copy")
    relent.append("now")
    engine.refresh()
    assert summary(engine) == {("bob", "1"): (1, 1)} and where(tmp_path, [as_json(ids_of(engine, ANNA))]) == []


def test_pins_of_an_erased_document_go_with_it(start, url, tmp_path):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.pin("anna")
    engine.pin("anna", "1")
    engine.pin("bob")
    engine.erase("anna", "1")
    assert engine.document_counts.pins == 1 and where(tmp_path, [b"anna"]) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"document_id": 5}', b'{"chunk_ids": 3, "links": [], "at": 1}']
)
@pytest.mark.parametrize("kind", ["link", "pin", "erasing", "erased", "other"])
def test_a_damaged_note_counts_as_none(start, url, tmp_path, kind, content):
    engine = start(store=url)
    ask(engine, ANNA)
    engine.close()
    (space,) = [path for path in (tmp_path / "store").iterdir() if path.is_dir()]
    (space / "notes" / f"{kind}-{'0' * 32}.json").write_bytes(content)
    engine = start(store=url)
    engine.refresh()
    assert summary(engine) == {("anna", "1"): (1, 1)} and engine.num_variants == 2
