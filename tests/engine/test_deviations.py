"""Deviation of each token when a chunk is computed after a second prefix, against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.cache.capture import context_deviations
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.engine_cache import EngineCache
from ccjax.errors import ConfigError
from ccjax.loading.model import load_model
from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.store import KVSpec
from tests.engine.helpers import TinyModel, check_deviations, draw_segments, permuted
from tests.oracles import llama_forward
from tests.store.kv import make_record

MODEL = TinyModel(seed=4, num_hidden_layers=3)


def oracle_kv(segments, index):
    """Keys before RoPE and values [L, 2, T, K, H] of one segment."""
    tokens = np.concatenate([np.asarray(one, int) for one in segments])
    start = sum(map(len, segments[:index]))
    rows = slice(start, start + len(segments[index]))
    _, layers = llama_forward(MODEL.weights, MODEL.raw, tokens)
    return np.stack([np.stack([layer.key[rows], layer.value[rows]]) for layer in layers])


def oracle_deviations(own, other):
    distance = np.sqrt(((own - other) ** 2).sum((3, 4)))
    scale = np.sqrt((own**2).sum((3, 4)).mean(2, keepdims=True))
    return (distance / scale).mean((0, 1))


def metas(engine):
    return {(meta.chunk_id, meta.prefix_ids): meta for meta in engine._chunks.variants}


@pytest.fixture(params=[{}, {"device_cache_bytes": 8 << 20}], ids=["host", "device"])
def engine(request):
    with MODEL.engine(strategy="auto", max_model_len=512, **request.param) as engine:
        yield engine


def test_chunk_computed_behind_a_second_prefix_records_token_deviations(engine):
    segments = draw_segments(np.random.default_rng(0), [40, 30, 20])
    shuffled = permuted(segments, [2, 0, 1])
    engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
    first = metas(engine)
    assert not any(meta.token_deviations for meta in first.values())
    engine.generate_from_tokens(shuffled, max_new_tokens=1, reuse="exact")
    measured = {key: meta for key, meta in metas(engine).items() if key not in first}
    assert len(measured) == 3
    by_length = {meta.num_tokens: meta.token_deviations for meta in measured.values()}
    for length, (before, after) in {40: (1, 2), 30: (2, 3), 20: (3, 1)}.items():
        own, other = oracle_kv(shuffled, after), oracle_kv(segments, before)
        wanted = oracle_deviations(own, other)
        np.testing.assert_allclose(by_length[length], wanted, rtol=6e-3)  # three digits are stored
        assert np.abs(oracle_deviations(other, own) / wanted - 1).max() > 6e-3  # the mutant: relative to the other


def test_deviations_select_recomputed_tokens_and_survive_a_restart(tmp_path):
    segments = draw_segments(np.random.default_rng(1), [40, 30, 20])
    settings = {"strategy": "auto", "max_model_len": 512, "store": tmp_path.as_uri(), "recompute_ratio": 0.2}
    asked = permuted(segments, [1, 2, 0])
    with MODEL.engine(**settings) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
        engine.generate_from_tokens(permuted(segments, [2, 0, 1]), max_new_tokens=1, reuse="exact")
        known = metas(engine)
    with MODEL.engine(**settings, read_only=True) as engine:
        report = engine.generate_from_tokens(asked, max_new_tokens=1).reuse
        found = {key: meta.token_deviations for key, meta in metas(engine).items()}
    assert found == {key: meta.token_deviations for key, meta in known.items()} and any(found.values())
    assert report.recomputed_tokens == 8 + 6 + 4
    counts = {one.num_tokens: one.recomputed_tokens for one in report.per_document if one.role == "passage"}
    assert sorted(counts) == [20, 30, 40] and counts != {40: 8, 30: 6, 20: 4}, "the budget is the prompt's"


def test_deviations_are_measured_only_between_exact_variants(tmp_path):
    segments = draw_segments(np.random.default_rng(2), [40, 30])
    with MODEL.engine(strategy="auto", max_model_len=512, recompute_ratio=0.2) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        engine.generate_from_tokens(permuted(segments, [1, 0]), max_new_tokens=1)  # repaired: approximate
        assert {meta.fidelity for meta in engine._chunks.variants} == {"exact", "approx"}
        assert not any(meta.token_deviations for meta in engine._chunks.variants)
        repaired = 0
        while engine.cache.repair_one():
            repaired += 1
        assert repaired and all(meta.fidelity == "exact" for meta in engine._chunks.variants)
        assert any(meta.token_deviations for meta in engine._chunks.variants), "idle time makes up for it"


def test_bfloat16_deviations_are_computed_in_float32():
    import ml_dtypes

    random = np.random.default_rng(4)
    own, other = (random.normal(size=(2, 2, 5, 3, 4)).astype(ml_dtypes.bfloat16) for _ in range(2))
    wanted = oracle_deviations(own.astype(float), other.astype(float))
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=4, dtype="bfloat16")
    pool = DevicePool(spec, 4 * spec.num_bytes(PAGE_TOKENS))
    for name, kv in (("own", own), ("other", other)):
        pool.put(make_record(name, 5, spec), kv)
    for theirs in (other, pool.get("other")):
        np.testing.assert_allclose(context_deviations(pool.get("own"), theirs), wanted, rtol=6e-3)
    assert not pool.bytes_to_host


def documents(count):
    return [
        {"id": str(number), "text": f"{name} sings in the {name} choir."} for number, name in enumerate(NAMES[:count])
    ]


NAMES = ("Anna", "Bob", "Carla", "Dora")


def test_warming_computes_documents_alone_and_behind_the_frame_and_compares(demo):
    with Engine(demo, EngineConfig(strategy="auto")) as engine:
        assert [one.status for one in engine.documents.warm(documents(3))] == ["computed"] * 3
        frame = tuple(chunk.chunk_id for chunk in engine.documents.frame.chunks(""))
        assert len(frame) == 2 and engine.cache.num_variants == 1 + 2 + 3 * 2, "instructions, frame, documents"
        metas = list(engine._chunks.variants)
        framed = [meta for meta in metas if meta.prefix_ids[1:] == frame]
        assert len(framed) == 3
        for meta in framed:
            check_deviations(engine, meta)
            assert meta.cci > 0.5 and meta.inter_by_prefix[0] == 0.0 < min(meta.inter_by_prefix[1:])
            own = (one for one in metas if one.chunk_id == meta.chunk_id and not one.chunks_before)
            assert not next(own).token_deviations, "once is enough"
        assert not engine._chunks.store._pins
        assert [one.status for one in engine.documents.warm(documents(3))] == ["present"] * 3


def test_requested_passages_are_prepared_in_idle_time_reused_ones_first(demo, monkeypatch, tmp_path):
    anna, bob, carla = documents(3)
    path = tmp_path / "frame.txt"
    path.write_text("Dora paints.\n\nEmil bakes.")
    with Engine(demo, EngineConfig(strategy="auto", frame=str(path))) as engine:
        engine.generate("Who sings?", [carla], max_new_tokens=1, reuse="exact")
        report = engine.generate("Who sings?", [anna, bob], max_new_tokens=1).reuse
        assert [one.framed for one in report.per_document] == [False, True, True] and not framed(engine)
        assert engine.cache.repair_one() and engine.cache.maintenance_counts.prepared == 1
        assert len(framed(engine)) == 1, "prepared for the request, and now compared"
        with monkeypatch.context() as patch:
            patch.setattr(EngineCache, "capacity_used", 0.81)
            while engine.cache.repair_one():
                pass
            assert framed(engine) == {"0", "1"}, "Carla was computed only, and the cache is nearly full"
        while engine.cache.repair_one():
            pass
        assert framed(engine) == {"0", "1", "2"} and engine.cache.maintenance_counts.prepared == 3
        assert not engine.cache.repair_one() and not engine._chunks.store._pins


def test_passage_that_cannot_be_prepared_does_not_block_others(demo, monkeypatch, caplog):
    with Engine(demo, EngineConfig(strategy="auto")) as engine:
        engine.generate("Who sings?", documents(2), max_new_tokens=1)
        run, failed = engine._background.run, []

        def fail_once(*args, **kwargs):
            if not failed:
                failed.append(True)
                raise MemoryError("no room")
            return run(*args, **kwargs)

        monkeypatch.setattr(engine.documents._warmer, "_run_prefill", fail_once)
        while engine.cache.repair_one():
            pass
        assert framed(engine) == {"0"} and "could not be prepared" in caplog.text and not engine._chunks.store._pins


def framed(engine):
    """The documents with a variant behind the frame and known deviations."""
    frame = tuple(chunk.chunk_id for chunk in engine.documents.frame.chunks(""))
    metas = list(engine._chunks.variants)
    behind = {meta.chunk_id for meta in metas if meta.prefix_ids[1:] == frame}
    own = behind & {meta.chunk_id for meta in metas if meta.token_deviations}
    named = {document["id"]: engine.documents.passage_chunks([document])[0] for document in documents(3)}
    return {name for name, chunk in named.items() if chunk.chunk_id in own}


def test_passages_reused_with_unknown_deviations_are_noted_as_reused(demo):
    with Engine(demo, EngineConfig(strategy="auto", frame="none")) as engine:
        passages = documents(4)
        engine.generate("Who sings?", passages, max_new_tokens=1)
        engine.generate("Who sings?", [passages[1], passages[3]], max_new_tokens=1)  # 3 others had stood before it
        reused = set()
        while found := engine._chunks.capture.unprepared.pop(only_reused=True):
            reused.add(found[0].chunks[-1].chunk_id)
        assert reused == {chunk.chunk_id for chunk in engine.documents.passage_chunks([passages[1], passages[3]])}


def test_a_passage_is_unprepared_until_it_is_prepared(demo, monkeypatch):
    with Engine(demo, EngineConfig(unprepared="compute")) as engine:
        engine.generate("Who sings?", documents(2), max_new_tokens=1)
        warmer, counts = engine.cache._warmer, []
        run = warmer._run_prefill

        def counted(*args, **kwargs):
            counts.append(engine.cache.num_unprepared)
            return run(*args, **kwargs)

        monkeypatch.setattr(warmer, "_run_prefill", counted)
        assert engine.cache.num_unprepared == 2
        with monkeypatch.context() as full:
            full.setattr(EngineCache, "capacity_used", 0.9)  # then those that were only computed are left out
            assert engine.cache.num_unprepared == 0
        while engine.cache.repair_one():
            pass
        assert set(counts) == {2, 1} and counts == sorted(counts, reverse=True)
        assert engine.cache.num_unprepared == 0


@pytest.mark.parametrize("erased", ["never", "before", "meanwhile"])
def test_erased_passages_are_not_prepared(demo, erased, monkeypatch):
    anna, bob = documents(2)
    with Engine(demo, EngineConfig(strategy="auto")) as engine:
        for asked in ([anna], [bob], [anna, bob]):
            engine.generate("Who sings?", asked, max_new_tokens=1)
        noted, run = engine._chunks.capture.unprepared, engine._background.run
        (chunk,) = engine.documents.passage_chunks([bob])
        assert noted.count(only_reused=False) == 2

        def erase_first(*args, **kwargs):
            monkeypatch.undo()
            engine.documents.erase("1")
            return run(*args, **kwargs)

        if erased == "before":
            engine.documents.erase("1")
            assert noted.count(only_reused=False) == 1
        elif erased == "meanwhile":
            monkeypatch.setattr(engine.documents._warmer, "_run_prefill", erase_first)
        while engine.cache.repair_one():
            pass
        is_held = bool(engine._chunks.variants.of_chunks({chunk.chunk_id}).get(chunk.chunk_id))
        assert is_held == (erased == "never") == ("1" in {one.document_id for one in engine.documents.list()})


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"strategy": "cachecraft"}, 0),
        ({"strategy": "deviation"}, 3),
        ({"frame": "none"}, 0),
        ({"max_model_len": 40}, 0),  # no room for the frame
    ],
)
def test_warming_uses_the_frame_where_the_strategy_does_and_it_fits(demo, settings, count):
    with Engine(demo, EngineConfig(**settings)) as engine:
        engine.documents.warm(documents(3))
        assert sum(bool(meta.token_deviations) for meta in engine._chunks.variants) == count
        assert engine.cache.num_variants == 4 + (2 + count if count else 0)


def test_frame_can_be_read_from_a_file(demo, tmp_path):
    path = tmp_path / "frame.txt"
    path.write_text("Dora paints.\n \nEmil is a baker.\n")
    with Engine(demo, EngineConfig(frame=str(path))) as engine:
        assert [one.text for one in engine.documents.frame.documents] == ["Dora paints.", "Emil is a baker."]
        engine.documents.warm(documents(1))
        report = engine.generate("Who sings?", documents(2)[::-1], max_new_tokens=1).reuse
        assert [one.framed for one in report.per_document] == [False, True, True]
        engine.documents.warm([{"text": "Emil is a baker."}])  # a passage of the frame is not placed after itself
        assert not any(len(set(meta.prefix_ids)) < len(meta.prefix_ids) for meta in engine._chunks.variants)


@pytest.mark.parametrize("content", [None, "", " \n\n", b"\xff\xfe\x00"])
def test_a_frame_that_cannot_be_used_is_refused(demo, tmp_path, content):
    path = tmp_path / "frame.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="^frame: wanted"):
        Engine(demo, EngineConfig(frame=str(path)))


@pytest.fixture(scope="module")
def demo():
    return load_model("demo", dtype="float32")
