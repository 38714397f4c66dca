"""Documents as units of the cache: list, warm, pin, invalidate; restarts and shared stores."""

from __future__ import annotations

import itertools

import pytest

from ccjax.cache import document_registry as documents_module
from ccjax.engine import Engine, Request, SamplingParams
from ccjax.errors import (
    ContextLengthError,
    PinLimitError,
    ReadOnlyError,
    RequestError,
    UnknownDocumentError,
)
from ccjax.types import Document
from tests.engine.documents import (
    ANNA,
    BOB,
    CARLA,
    DINO,
    TEXTS,
    ask,
    files,
    ids_of,
    key_of,
    rows_of,
    set_clock,
    summary,
    where,
)
from tests.engine.helpers import After

# -- which chunk belongs to which document ----------------------------------------------------------------------


def test_document_list_reports_chunks_variants_bytes_and_use(start, url):
    engine = start(store=url)
    engine.documents._documents.registry.clock = lambda: 1000.0
    ask(engine, ANNA, BOB)
    ask(engine, ANNA, BOB)
    ask(engine, Document("No name."))
    engine.cache.flush()
    anna, bob = engine.documents.list()
    assert (anna.document_id, anna.version, anna.chunks, anna.variants) == ("anna", "1", 1, 1)
    size = next(meta.num_bytes for meta in engine._chunks.variants if meta.chunk_id == key_of(engine, ANNA))
    assert anna.num_bytes == {"host": size, "disk": size} and anna.frequency_reuse == len(ids_of(engine, ANNA))
    assert anna.last_used == 1000.0 and anna.pinned_until is None and not anna.erasing
    assert engine.documents.list("bob") == (bob,) and bob.document_id == "bob"
    assert engine.documents.counts.documents == 2
    with pytest.raises(UnknownDocumentError, match="document_id: .*'eve'"):
        engine.documents.list("eve")


def test_document_ownership_survives_restarts_and_reaches_other_processes(start, url):
    first = start(store=url)
    other = start(store=url)
    ask(first, ANNA, BOB)
    ask(first, Document(ANNA.text, "copy"))  # only reused, so no variant's record names it
    first.cache.flush()
    other.cache.refresh()
    wanted = summary(first)
    assert wanted == {("anna", "1"): (1, 1), ("bob", "1"): (1, 1), ("copy", None): (1, 1)} == summary(other)
    first.close()
    assert summary(start(store=url)) == wanted


def test_a_passage_belongs_to_its_source(start):
    engine = start()
    ask(engine, *(Document(text, f"all.md#{n}", None, "v", None, "all.md") for n, text in enumerate(TEXTS.values())))
    assert summary(engine) == {("all.md", "v"): (4, 4)}
    assert engine.documents.invalidate("all.md#2").chunks == 1 and engine.documents.invalidate("all.md").chunks == 3
    assert summary(engine) == {} and engine.cache.num_variants == 1  # the system prompt


def test_notes_of_evicted_documents_are_removed_after_an_hour(start, url, tmp_path):
    engine = start(store=url, max_variants=3)
    now = [0.0]
    set_clock(engine, now)
    ask(engine, ANNA, BOB)
    engine.cache.flush()  # queued variants are not evicted
    ask(engine, CARLA, DINO)
    assert len(engine.documents.list()) == 4 and sum(item.variants for item in engine.documents.list()) < 4
    now[0] = documents_module.ERASURE_AGE_S - 1
    engine.cache.refresh()
    assert len(engine.documents.list()) == 4
    now[0] += 601.0
    engine.cache.refresh()
    left = engine.documents.list()
    assert 0 < len(left) < 4 and all(item.variants for item in left)
    assert len([path for path in files(tmp_path) if path.name.startswith("link-")]) == len(left)


# -- warm -------------------------------------------------------------------------------------------------------


def test_warmed_document_is_reused_anywhere_and_exactly_as_first_passage(start):
    engine = start()
    warmed = engine.documents.warm([ANNA, BOB, ANNA])
    assert [(item.document_id, item.status) for item in warmed] == [
        ("anna", "computed"),
        ("bob", "computed"),
        ("anna", "present"),
    ]
    assert warmed[0].num_tokens == len(ids_of(engine, ANNA)) and engine.cache.num_variants == 3
    system = engine.documents.list()[0]
    assert system.frequency_reuse == 0
    front = ask(engine, ANNA, reuse="exact")
    assert front.exact and front.computed_tokens == front.prompt_tokens - front.reused_tokens
    assert front.per_document[1].computed_tokens == 0
    anywhere = ask(engine, CARLA, BOB)
    assert anywhere.per_document[2].computed_tokens == 0 and anywhere.per_document[1].computed_tokens > 0
    plain = start().generate("Who sings?", [ANNA], max_new_tokens=4)
    assert engine.generate("Who sings?", [ANNA], max_new_tokens=4, reuse="exact").token_ids == plain.token_ids


def test_repaired_variant_does_not_count_as_warmed(start):
    engine = start(recompute_ratio=0.15)
    ask(engine, CARLA, ANNA)
    assert not ask(engine, ANNA).exact  # which is stored after the system prompt as well
    fidelities = [meta.fidelity for meta in engine._chunks.variants if meta.chunk_id == key_of(engine, ANNA)]
    assert len(fidelities) == 2
    assert [item.status for item in engine.documents.warm([ANNA])] == ["computed"]
    assert ask(engine, ANNA, reuse="exact").per_document[1].computed_tokens == 0


def test_warming_supports_a_custom_system_prompt(start):
    engine = start()
    engine.documents.warm([ANNA], system_prompt="Sing!")
    messages = [{"role": "system", "content": "Sing!"}, {"role": "user", "content": "Who?"}]
    request = Request(messages=messages, documents=[ANNA], sampling=SamplingParams(1), reuse="exact")
    report = engine.run(request).reuse
    assert report.exact and [item.computed_tokens for item in report.per_document] == [0, 0]


def test_warming_does_not_evict_documents_it_just_warmed(start):
    engine = start(max_variants=3)
    ask(engine, DINO)
    statuses = [item.status for item in engine.documents.warm([ANNA, BOB, CARLA])]
    assert statuses == ["computed", "computed", "no_room"]
    assert {name for (name, _), (_, variants) in summary(engine).items() if variants} == {"anna", "bob"}


def test_warming_can_stop_between_layers_and_resume_later(start):
    engine = start()
    warming = engine.documents.begin_warming([ANNA, BOB])
    for num_layers in range(engine.model_config.num_layers):
        assert not engine.documents.warm_one(warming, is_cancelled=After(num_layers))
        assert engine.cache.num_variants == 0 and not engine._chunks.store._pins and warming.done == []
    while not warming.is_finished:
        assert engine.documents.warm_one(warming)
    assert [item.status for item in warming.done] == ["computed", "computed"]
    assert engine.documents.warm([CARLA], is_cancelled=lambda: True) == ()


def test_invalid_warming_is_rejected_before_anything_is_computed(start, url):
    engine = start(max_model_len=80)
    with pytest.raises(ContextLengthError, match=r"documents\[1\]: wanted at most 80 tokens"):
        engine.documents.warm([ANNA, Document("word " * 200)])
    with pytest.raises(RequestError, match=r"documents\[0\]: wanted a non-empty string under 'text'"):
        engine.documents.warm([{"text": " "}])
    with pytest.raises(RequestError, match="documents: wanted at least one"):
        engine.documents.warm([])
    assert engine.cache.num_variants == 0
    with start(store=url):
        pass
    with pytest.raises(ReadOnlyError, match="read_only"):
        start(store=url, read_only=True).documents.warm([ANNA])
    with pytest.raises(ReadOnlyError, match="strategy"):
        start(strategy="full").documents.erase("anna")


# -- pin --------------------------------------------------------------------------------------------------------


def rounds(engine: Engine, number: int) -> None:
    """Requests with other passages, each used twice, so that unpinned unused variants are evicted."""
    for count in range(number):
        document = Document(f"Passage {count} about the number {count * count} and nothing else at all.", f"n{count}")
        ask(engine, document)
        ask(engine, document)


def test_pinned_document_is_not_evicted_until_the_pin_expires(start):
    engine = start(max_variants=6)
    now = [100.0]
    set_clock(engine, now)
    engine.documents.warm([ANNA, BOB])
    pin = engine.documents.pin("anna", ttl_s=50)
    assert pin.until == 150.0 and engine.documents.list("anna")[0].pinned_until == 150.0
    assert engine.documents.counts.pins == 1
    rounds(engine, 8)
    assert summary(engine)["anna", "1"] == (1, 1) and summary(engine)["bob", "1"] == (1, 0)
    now[0] = 150.0
    assert engine.documents.list("anna")[0].pinned_until is None
    rounds(engine, 8)
    assert summary(engine)["anna", "1"] == (1, 0)


def test_pins_outlive_a_restart_and_hold_in_other_processes(start, url):
    first = start(store=url)
    first.documents.warm([ANNA, BOB])
    until = first.documents.pin("anna", "1", ttl_s=5000).until
    first.cache.flush()
    other = start(store=url, max_variants=6)
    first.close()
    for engine in (other, start(store=url, max_variants=6)):
        assert engine.documents.list("anna")[0].pinned_until == until
        rounds(engine, 6)
        assert summary(engine)["anna", "1"] == (1, 1) and summary(engine)["bob", "1"] == (1, 0)
    assert other.documents.unpin("anna", "1") and not other.documents.unpin("anna", "1")
    rounds(other, 6)
    assert summary(other)["anna", "1"] == (1, 0)


@pytest.mark.parametrize("host", [False, True])
def test_a_pin_holds_in_the_lowest_tier_and_in_host_memory_if_wanted(start, url, host):
    probe = start()
    probe.documents.warm([ANNA])
    room = int(3.5 * sum(meta.num_bytes for meta in probe._chunks.variants))
    engine = start(store=url, host_cache_bytes=room, eviction_policy="lru")
    engine.documents.warm([ANNA, BOB])
    engine.cache.flush()
    engine.documents.pin("anna", host=host)
    rounds(engine, 12)
    (anna,) = engine.documents.list("anna")
    assert anna.num_bytes["disk"] > 0 and (anna.num_bytes["host"] > 0) == host
    assert engine.documents.list("bob")[0].num_bytes["host"] == 0


def test_pins_beyond_pin_share_are_rejected(start):
    engine = start(max_variants=6, pin_share=0.5)
    engine.documents.warm([ANNA, BOB, CARLA, DINO])
    for name in ("anna", "bob", "carla"):
        engine.documents.pin(name)
    with pytest.raises(PinLimitError, match="document_id: wanted at most 3 variants pinned .* got 4 with 'dino'"):
        engine.documents.pin("dino")
    engine.documents.pin("carla", ttl_s=9)  # replaces the earlier pin
    assert engine.documents.counts.pins == 3
    total = sum(meta.num_bytes for meta in engine._chunks.variants)
    (anna,) = (meta for meta in engine._chunks.variants if meta.chunk_id == key_of(engine, ANNA))
    small = start(host_cache_bytes=total, pin_share=1.2 * anna.num_bytes / total)
    small.documents.warm([ANNA, BOB])
    small.documents.pin("anna")
    with pytest.raises(PinLimitError, match="bytes"):
        small.documents.pin("bob")


def test_later_variants_of_pinned_documents_are_kept_within_pin_share(start):
    engine = start(max_variants=6, pin_share=0.34)  # two variants
    engine.documents.warm([ANNA, BOB])
    engine.documents.pin("anna")
    engine.documents.pin("bob")
    for order in itertools.permutations([ANNA, BOB, CARLA]):
        ask(engine, *order)
    rounds(engine, 4)
    assert summary(engine)["anna", "1"][1] >= 1 and summary(engine)["bob", "1"][1] >= 1
    assert len(engine.documents._pins.pinned_ids(None)) == 2


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan"), "9", True, None])
def test_invalid_ttl_document_id_or_version_is_rejected(start, ttl_s):
    engine = start()
    engine.documents.warm([ANNA])
    with pytest.raises(RequestError, match="ttl_s: wanted a positive number of seconds"):
        engine.documents.pin("anna", ttl_s=ttl_s)
    for document_id, version, match in [
        ("", None, "document_id"),
        (5, None, "document_id"),
        ("anna", "", "version: wanted a text"),
        ("anna", "x" * 1025, "version: .* 1025 characters"),
        ("eve", None, "document_id"),
        ("anna", "2", r"version: wanted one that is cached \('1'\), got '2'"),
    ]:
        for call in (engine.documents.pin, engine.documents.invalidate, engine.documents.erase):
            with pytest.raises(RequestError, match=match):
                call(document_id, version)
    assert summary(engine) == {("anna", "1"): (1, 1)}


# -- invalidate -------------------------------------------------------------------------------------------------


def test_an_invalidated_document_is_computed_again_and_leaves_every_tier(start, url, tmp_path):
    engine = start(store=url)
    ask(engine, ANNA, BOB)
    engine.cache.flush()
    gone = [meta for meta in engine._chunks.variants if meta.chunk_id == key_of(engine, ANNA)]
    rows = rows_of(engine, [meta.variant_id for meta in gone])
    removal = engine.documents.invalidate("anna")
    assert (removal.chunks, removal.kept_chunks, removal.variants) == (1, 0, 1)
    assert removal.num_bytes == dict.fromkeys(("host", "disk"), gone[0].num_bytes)
    assert where(tmp_path, rows) == [] and summary(engine) == {("bob", "1"): (1, 1)}
    report = ask(engine, ANNA, BOB)
    assert report.per_document[1].reused_tokens == 0 and report.per_document[2].reused_tokens > 0
    engine.cache.flush()
    assert ask(engine, ANNA).per_document[1].computed_tokens == 0  # and is cached again
    engine.cache.refresh()
    assert summary(engine)["anna", "1"] == (1, 1)


def test_versions_can_be_invalidated_one_by_one_or_all_together(start, url):
    engine = start(store=url)
    versions = [Document(f"{ANNA.text} Edition {n}.", "anna", version=str(n)) for n in range(3)]
    ask(engine, *versions, Document(versions[0].text, "anna", version="9"))
    assert engine.documents.invalidate("anna", "1").chunks == 1
    assert sorted(summary(engine)) == [("anna", "0"), ("anna", "2"), ("anna", "9")]
    kept = engine.documents.invalidate("anna", "0")
    assert (kept.chunks, kept.kept_chunks) == (0, 1)  # version 9 has that text
    engine.cache.flush()
    engine.close()
    engine = start(store=url)
    assert engine.documents.invalidate("anna").chunks == 2 and engine.documents.list() == ()
    assert engine.cache.num_variants == 1


@pytest.mark.parametrize("salts", [("",), ("anna",), ("", "anna", "bob")])
def test_the_passages_that_a_new_version_still_has_are_kept(start, salts):
    """Those of every tenant."""
    engine = start()
    old = [Document(text, f"f#{n}", None, "old", None, "f") for n, text in enumerate(TEXTS.values())]
    new = [Document(old[n].text, f"f#{place}", None, "new", None, "f") for place, n in enumerate((1, 3))]

    def asked(documents, salt):
        messages, sampling = [{"role": "user", "content": "Who sings?"}], SamplingParams(max_new_tokens=1)
        request = Request(messages=messages, documents=documents, sampling=sampling, cache_salt=salt)
        return engine.run(request).reuse.per_document[1:]

    for salt in salts:
        asked(old, salt)
    removal = engine.documents.invalidate("f", keep=[*new, Document("Never asked for.", "f#2", None, "new", None, "f")])
    each = 2 * len(salts)
    assert (removal.chunks, removal.kept_chunks, removal.variants) == (each, each, each)
    assert summary(engine) == {("f", "new"): (each, each)}
    for salt in salts:
        assert [item.computed_tokens for item in asked(new, salt)] == [0, 0]


def test_old_passages_of_many_documents_are_removed_in_one_pass(start, monkeypatch):
    engine = start()
    old = {
        name: [
            Document(f"{name} {text}", f"{name}#{n}", None, "1", None, name) for n, text in enumerate(TEXTS.values())
        ]
        for name in "fgh"
    }
    ask(engine, *old["f"], *old["g"], *old["h"])
    cache, passes = engine._chunks.documents, []
    carry_out = cache._carry_out
    monkeypatch.setattr(cache, "_carry_out", lambda erasure: passes.append(erasure) or carry_out(erasure))
    new = [Document(old["f"][1].text, "f#0", None, "2", None, "f")]
    engine.documents.invalidate_old({"f": new, "g": [], "never asked for": new})
    assert len(passes) == 1
    assert summary(engine) == {("f", "2"): (1, 1), ("h", "1"): (len(TEXTS), len(TEXTS))}
    engine.documents.invalidate_old({"g": []})
    assert len(passes) == 1, "nothing of it is left"


def test_another_engine_stops_using_an_invalidated_document_after_refresh(start, url, tmp_path):
    first, other = start(store=url), start(store=url)
    ask(first, ANNA, BOB)
    first.cache.flush()
    other.cache.refresh()
    ask(other, ANNA, BOB)  # now also in its memory
    first.documents.invalidate("anna")
    assert ask(other, ANNA).per_document[1].computed_tokens == 0  # as documented: not before its refresh
    other.cache.refresh()
    assert summary(other) == {("bob", "1"): (1, 1)} and not other._chunks.store.tiers_of("anna")
    assert ask(other, ANNA).per_document[1].reused_tokens == 0
    other.cache.flush()
    first.cache.refresh()
    other.cache.refresh()
    assert summary(first)["anna", "1"] == summary(other)["anna", "1"] == (1, 1)  # computed later: stays
