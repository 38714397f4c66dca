"""The engine as a library: arguments, errors, reports, variants, restarts, damaged stores."""

from pathlib import Path

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.errors import ConfigError, ContextLengthError, RequestError
from ccjax.kernels import dispatch
from ccjax.types import Document
from tests.engine.helpers import TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=2)
ROOT = Path(__file__).resolve().parents[2]


def segments_of(lengths, seed=0, **kwargs):
    return draw_segments(np.random.default_rng(seed), lengths, **kwargs)


def test_report_token_counts_add_up_and_cover_every_segment():
    segments = segments_of([40, 30, 50])
    with MODEL.engine() as engine:
        engine.generate_from_tokens(segments, max_new_tokens=2)
        report = engine.generate_from_tokens(permuted(segments, [2, 0, 1]), max_new_tokens=2).reuse
    total = sum(map(len, segments))
    assert report.prompt_tokens == total
    assert report.computed_tokens + report.recomputed_tokens + report.reused_tokens == total
    assert report.computed_tokens == len(segments[-1]) and report.recomputed_tokens > 0
    assert [document.role for document in report.per_document] == ["instructions", "passage", "passage", "passage"]
    for document in report.per_document:
        parts = (document.reused_tokens, document.recomputed_tokens, document.computed_tokens)
        assert sum(parts) == document.num_tokens and document.tier == "host"
    assert [document.exact for document in report.per_document] == [True, False, False, False]
    assert not report.exact and report.loaded_bytes > 0
    num_runs = 2 * report.computed_tokens + report.recomputed_tokens  # the question runs first to choose tokens
    assert report.computed_share == num_runs / total
    assert report.to_json()["per_document"][1]["num_tokens"] == 50


@pytest.mark.parametrize("strategy", ["auto", "cachecraft"])
@pytest.mark.parametrize(("ratio", "wanted"), [(0.15, [15, 9, 6]), (0.3, [30, 18, 12]), (0.0, [0, 0, 0])])
def test_forced_ratio_recomputes_that_share_of_each_approximate_chunk(strategy, ratio, wanted):
    segments = segments_of([40, 60, 100])
    with MODEL.engine(strategy=strategy, recompute_ratio=ratio) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        report = engine.generate_from_tokens(permuted(segments, [2, 1, 0]), max_new_tokens=1).reuse
    counts = [document.recomputed_tokens for document in report.per_document[1:]]
    assert counts == wanted if strategy == "cachecraft" else sum(counts) == sum(wanted), "the question chooses"


def test_tokens_are_ranked_by_the_chosen_layers():
    segments = segments_of([40, 60])

    def rankings(layers):
        with MODEL.engine(ranking_layers=layers) as engine:
            engine.generate_from_tokens(segments, max_new_tokens=1)
            return {meta.variant_id: meta.token_ranking for meta in engine._chunks.variants}

    every_layer = tuple(range(MODEL.config.num_layers))
    assert rankings(None) == rankings(every_layer) != rankings((0,))


def test_fast_recomputes_at_most_five_percent():
    segments = segments_of([40, 60, 100])
    with MODEL.engine() as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        report = engine.generate_from_tokens(permuted(segments, [2, 1, 0]), max_new_tokens=1, reuse="fast").reuse
    assert all(d.recomputed_tokens <= 0.05 * d.num_tokens for d in report.per_document)
    assert report.recomputed_tokens > 0


def test_repaired_variants_are_stored_and_reused_for_the_same_order():
    segments = segments_of([40, 30])
    shuffled = permuted(segments, [1, 0])
    with MODEL.engine() as engine:
        engine.generate_from_tokens(segments, max_new_tokens=2)
        first = engine.generate_from_tokens(shuffled, max_new_tokens=2)
        again = engine.generate_from_tokens(shuffled, max_new_tokens=2)
        assert first.reuse.recomputed_tokens > 0 and again.reuse.recomputed_tokens == 0
        assert again.token_ids == first.token_ids and not again.reuse.exact
        exact = engine.generate_from_tokens(shuffled, max_new_tokens=2, reuse="exact")
        assert exact.reuse.computed_tokens == len(shuffled[-1]) + 70  # `exact` does not use approximate variants


def test_cache_stays_within_max_variants_and_byte_budget():
    segments = segments_of([40, 30, 50, 20, 60])
    random = np.random.default_rng(1)
    with MODEL.engine(max_variants=7) as few, MODEL.engine(host_cache_bytes=90_000) as small:
        for _ in range(8):
            shuffled = permuted(segments, random.permutation(5))
            wanted = small.generate_from_tokens(shuffled, max_new_tokens=3, reuse="off").token_ids
            for engine in (few, small):
                got = engine.generate_from_tokens(shuffled, max_new_tokens=3, reuse="exact")
                assert got.token_ids == wanted
            assert few.cache.num_variants <= 7
            usage = small.cache.usage()["host"]
            assert 0 < usage.used_bytes <= usage.budget_bytes == 90_000
            assert small.cache.num_variants == usage.num_variants


def test_read_only_adds_nothing():
    segments = segments_of([40, 30])
    with MODEL.engine(read_only=True) as engine:
        for _ in range(2):
            report = engine.generate_from_tokens(segments, max_new_tokens=1).reuse
            assert report.reused_tokens == 0
        assert engine.cache.num_variants == 0


def test_chip_without_kernels_works_with_xla_attention_unless_they_are_named(monkeypatch, caplog):
    """In prefill, decode and warm-up: a chip without known block sizes, as this CPU is for Triton."""
    monkeypatch.setitem(dispatch.BEST, "cpu", "triton")
    with pytest.raises(ConfigError, match=r"attention: .*'triton': wanted a chip of .*, got 'cpu'"):
        MODEL.engine(attention="triton")
    segments = segments_of([40, 30])
    small = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 128}
    dispatch._warn.cache_clear()
    with MODEL.engine(**small) as engine:
        assert "XLA's form is used" in caplog.text
        engine.warmup()
        answer = engine.generate_from_tokens(segments, max_new_tokens=4)
        assert engine.batch_counts.retries == 0
    monkeypatch.undo()
    with MODEL.engine(**small) as engine:
        assert engine.generate_from_tokens(segments, max_new_tokens=4).token_ids == answer.token_ids


def test_head_dimension_unsupported_by_decode_is_rejected():
    with pytest.raises(ConfigError, match="attention: triton: wanted a head dimension of 32, 64, 128 or 256, got 16"):
        TinyModel(head_dim=16).engine(attention="triton_interpret")


def test_prompt_that_is_too_long_is_an_error_unless_truncated():
    segments = segments_of([40, 40, 40])
    with MODEL.engine(max_model_len=100) as engine:
        with pytest.raises(ContextLengthError, match=r"prompt: wanted at most 100 tokens .* got 136 prompt tokens"):
            engine.generate_from_tokens(segments, max_new_tokens=1)
        cut = engine.generate_from_tokens(segments, max_new_tokens=4, truncate=True)
        assert cut.num_prompt_tokens == 96 and len(cut.token_ids) == 4
        assert cut.token_ids == engine.generate_from_tokens(permuted(segments, [0, 1]), max_new_tokens=4).token_ids
        with pytest.raises(ContextLengthError, match="100"):
            engine.generate_from_tokens([[1], [2] * 120], truncate=True)
        roomy = engine.generate_from_tokens(segments, max_new_tokens=None, truncate=True)
        assert roomy.num_prompt_tokens == 56 and len(roomy.token_ids) == 44  # at least a quarter of the context
        unbounded = engine.generate_from_tokens(permuted(segments, [0, 1]), max_new_tokens=None)
        assert len(unbounded.token_ids) == 4 and unbounded.finish_reason == "length"
        with pytest.raises(ContextLengthError, match="100"):
            engine.prefill_logits([1] * 101)
        assert engine.prefill_logits([1] * 100).shape == (100, 97)


def test_documents_may_be_mappings_but_not_combined_with_segments():
    assert Request(prompt="Who?", documents=[{"text": "a", "id": "7"}]).documents == (Document("a", "7"),)
    with pytest.raises(RequestError, match="documents: wanted none with segments"):
        Request(segments=[[1], [2]], documents=[Document("a")])


def test_same_seed_repeats_the_answer_and_other_seeds_vary_it():
    segments = segments_of([20])
    with MODEL.engine() as engine:
        draws = [
            engine.generate_from_tokens(segments, max_new_tokens=12, temperature=1.5, seed=seed).token_ids
            for seed in (1, 1, 2, 3)
        ]
        greedy = engine.generate_from_tokens(segments, max_new_tokens=12).token_ids
        narrow = engine.generate_from_tokens(segments, max_new_tokens=12, temperature=1.0, top_p=1e-9, seed=5).token_ids
    assert draws[0] == draws[1] and len(set(draws)) == 3
    assert narrow == greedy


def test_cancelled_stream_frees_the_engine_and_keeps_computed_chunks():
    segments = segments_of([30, 30])
    with MODEL.engine() as engine:
        stream = engine.stream(Request(segments=segments, sampling=SamplingParams(max_new_tokens=50)))
        assert next(stream).token_ids
        stream.close()
        report = engine.generate_from_tokens(segments, max_new_tokens=1).reuse
        assert report.computed_tokens == len(segments[-1])


def test_streamed_tokens_equal_those_of_the_response():
    segments = segments_of([30])
    with MODEL.engine() as engine:
        sampling = SamplingParams(max_new_tokens=7, logprobs=2)
        deltas = list(engine.stream(Request(segments=segments, sampling=sampling)))
        response = deltas[-1].response
    assert response is not None and all(delta.response is None for delta in deltas[:-1])
    assert tuple(token for delta in deltas for token in delta.token_ids) == response.token_ids
    assert len(response.token_ids) == 7 and response.ttft_s <= response.total_s
    assert [len(token.top) for token in response.logprobs] == [2] * 7
    assert all(token.top[0][0] == token.token_id for token in response.logprobs)  # greedy: the likeliest token


def test_two_models_keep_their_kv_in_one_store(url, caplog):
    for models, reused in ((MODEL, TinyModel(seed=3)), False), ((MODEL, TinyModel(seed=3)), True):
        for model in models:
            with model.engine(store=url) as engine:
                report = engine.generate_from_tokens(segments_of([20]), max_new_tokens=1).reuse
            assert (report.reused_tokens > 0) == reused
    assert [message for message in caplog.messages if "none of this model, tiny-3" in message]


def test_damaged_shards_are_computed_again_with_the_right_answer(url, tmp_path):
    segments = segments_of([40, 30, 50])
    with MODEL.engine(store=url) as engine:
        wanted = engine.generate_from_tokens(segments, max_new_tokens=6).token_ids
    shards = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert len(shards) == 3  # the passages; the system prompt is smaller
    for path in shards[:2]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)
    with MODEL.engine(store=url) as engine:
        assert engine.cache.num_variants == 4
        response = engine.generate_from_tokens(segments, max_new_tokens=6)
        assert response.token_ids == wanted
        assert response.reuse.failed_loads == 2 and response.reuse.exact
        assert engine.cache.usage()["disk"].corrupt == 2
    with MODEL.engine(store=url) as engine:  # the damaged shards were rewritten
        healed = engine.generate_from_tokens(segments, max_new_tokens=6)
        assert healed.token_ids == wanted and healed.reuse.failed_loads == 0
        assert healed.reuse.computed_tokens == len(segments[-1])


def test_passage_stored_as_first_is_repaired_when_placed_behind_others():
    """Its old prefix is only the system prompt, which is in every prefix and says nothing about the passages."""
    segments = segments_of([40, 30, 50])
    with MODEL.engine() as engine:
        for first in range(3):  # each passage is stored as the first one
            engine.generate_from_tokens([segments[0], segments[1 + first], segments[-1]], max_new_tokens=1)
        report = engine.generate_from_tokens(segments, max_new_tokens=1).reuse
    assert report.per_document[1].exact
    assert all(document.recomputed_tokens > 0 for document in report.per_document[2:])


def test_a_repair_that_the_focus_cut_stopped_is_not_kept():
    segments = segments_of([40, 30, 50, 60])
    with TinyModel(seed=2, num_hidden_layers=6).engine(focus_window=1) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        shuffled = permuted(segments, [3, 2, 1, 0])
        report = engine.generate_from_tokens(shuffled, max_new_tokens=1).reuse
        dropped = [d for d in report.per_document[1:] if d.focused is False]
        assert report.focus_cut_layer == 2 and dropped
        again = engine.generate_from_tokens(shuffled, max_new_tokens=1).reuse
        for before, after in zip(report.per_document[1:], again.per_document[1:], strict=True):
            assert (after.recomputed_tokens > 0) == (before.focused is False)


def test_reuse_earns_credit_and_the_least_used_variant_is_evicted():
    random = np.random.default_rng(8)
    popular, rare, fresh = (draw_segments(random, [30], system=0)[1] for _ in range(3))
    question = [5, 6]
    with MODEL.engine(max_variants=2) as engine:
        for passage in (rare, popular, popular, popular):
            engine.generate_from_tokens([[], passage, question], max_new_tokens=1)
        credits = sorted(meta.frequency_reuse for meta in engine._chunks.variants)
        assert credits == [0.0, 60.0]  # two exact reuses of 30 tokens, CFO floored at one token
        engine.generate_from_tokens([[], fresh, question], max_new_tokens=1)
        reused = [
            engine.generate_from_tokens([[], passage, question], max_new_tokens=1).reuse.reused_tokens
            for passage in (popular, fresh, rare)
        ]
    assert reused == [30, 30, 0]


def test_variants_of_one_prompt_do_not_evict_each_other():
    with MODEL.engine(max_variants=6) as engine:
        for seed in range(2):
            engine.generate_from_tokens(segments_of([20] * 5, seed=seed, system=0), max_new_tokens=1)
        report = engine.generate_from_tokens(segments_of([20] * 5, seed=1, system=0), max_new_tokens=1).reuse
        assert report.reused_tokens == 100 and engine.cache.num_variants == 6


def test_pins_are_released_after_answers_cancellations_and_failures(tmp_path, monkeypatch):
    segments = segments_of([40, 30])
    with MODEL.engine(store=f"file://{tmp_path}/s") as engine:
        for _ in range(2):
            engine.generate_from_tokens(segments, max_new_tokens=2)
        stream = engine.stream(Request(segments=segments))
        next(stream)
        assert engine._chunks.store._pins
        stream.close()
        engine.generate_from_tokens(segments, max_new_tokens=2)  # after the closed stream
        monkeypatch.setattr("ccjax.runner.decode.paged_decode_step", None)
        with pytest.raises(TypeError):  # each retry of the prefill samples a token without that step
            engine.generate_from_tokens(segments, max_new_tokens=8)
        assert not engine._chunks.store._pins
        everything = [meta.variant_id for meta in engine._chunks.variants]
        assert set(engine._chunks.store.evict("host", everything)) == set(everything)


def test_failed_capture_prevents_reuse_but_not_the_answer(monkeypatch, caplog):
    segments = segments_of([40, 30])
    with MODEL.engine() as engine:
        wanted = engine.generate_from_tokens(segments, max_new_tokens=3, reuse="off").token_ids

        def fail(*_, **__):
            raise MemoryError("no room")

        monkeypatch.setattr(engine._chunks.variants, "add", fail)
        assert engine.generate_from_tokens(segments, max_new_tokens=3).token_ids == wanted
        assert "could not be stored" in caplog.text
        monkeypatch.undo()
        assert engine.generate_from_tokens(segments, max_new_tokens=3).token_ids == wanted
