"""What reuse costs in answers: measured through the engine, and the shipped model has the property it was built for."""

import dataclasses

import pytest

from ccjax.demo.evaluate import VALIDATION_SEED, answered, held_out_contexts
from ccjax.demo.export import load_model
from ccjax.demo.reuse import FULL, NAIVE, NUM_OTHERS, WAYS, Way, measure_ways
from ccjax.demo.world import KINDS
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.loading import load_model as load_engine_model


@pytest.fixture(scope="module")
def model():
    return load_engine_model("demo", dtype="float32")


def test_full_prefill_scores_what_a_plain_forward_pass_scores(model, tmp_path):
    (outcome,) = measure_ways(model, [FULL], tmp_path, num_questions=8)
    for kind in KINDS:
        matches = answered(*load_model(), held_out_contexts(kind, 8))
        assert outcome.scores[kind].accuracy_ratio == sum(matches) / 8
        assert outcome.scores[kind].num_questions == 8
    assert outcome.computed_ratio == 1.0
    assert not list(tmp_path.iterdir()), "full prefill stores nothing"


def test_each_way_recomputes_the_share_it_says(model, tmp_path):
    done = []
    ways = [*NAIVE, *(Way(name, "behind others", recompute_ratio=0.3) for name in ("cachecraft", "random"))]
    outcomes = measure_ways(model, ways, tmp_path, num_questions=1, progress=lambda *counts: done.append(counts))
    assert [outcome.way for outcome in outcomes] == ways
    assert [outcome.computed_ratio == 0.0 for outcome in outcomes] == [True, True, False, False]
    craft, drawn = outcomes[2:]
    assert 0.3 <= craft.computed_ratio < 0.3 + 1 / 20  # each passage of over 20 tokens rounds up by less than one
    assert drawn.computed_ratio == craft.computed_ratio
    assert all(0.25 < outcome.mean_cfo < 1.0 for outcome in outcomes)
    assert done[-1][0] == done[-1][1] == len(done)


def test_the_share_counts_layers_that_ran_for_all_tokens(model, tmp_path):
    way = Way("cacheblend", "behind others", recompute_ratio=0.15)
    (outcome,) = measure_ways(model, [way], tmp_path, num_questions=1)
    num_layers = model.config.num_layers
    whole_first = (1 + 0.15 * (num_layers - 1)) / num_layers
    assert whole_first - 0.01 < outcome.computed_ratio < whole_first + 0.05  # rounded up on every layer


def test_passages_are_cached_behind_what_the_way_says(model, tmp_path):
    measure_ways(model, NAIVE, tmp_path, num_questions=1)
    num_passages = len({p for kind in KINDS for context in held_out_contexts(kind, 1) for p in context.passages})
    for cached, num_others in (("alone", 0), ("behind-others", NUM_OTHERS)):
        with Engine(model, EngineConfig(store=(tmp_path / cached).as_uri())) as engine:
            lengths = [len(meta.prefix_ids) for meta in engine._variants]
        # The system prompt, the other town's passages behind each other, and every passage behind all of those.
        assert sorted(lengths) == [*range(num_others + 1), *[num_others + 1] * num_passages]


def test_validation_questions_are_not_the_test_questions():
    for kind in KINDS:
        assert held_out_contexts(kind, 3) != held_out_contexts(kind, 3, seed=VALIDATION_SEED)
        assert held_out_contexts(kind, 3) == held_out_contexts(kind, 3)


def test_no_two_ways_are_the_same():
    assert len({dataclasses.astuple(way) for way in WAYS}) == len(WAYS)


def test_reuse_hurts_where_the_passage_before_matters_and_a_few_tokens_bring_it_back(model, tmp_path):
    """The property that the world was made for, on 32 pronoun questions and 32 over one passage."""
    ways = [FULL, NAIVE[1], Way("cachecraft", "behind others", recompute_ratio=0.3)]
    outcomes = measure_ways(model, ways, tmp_path, num_questions=32, kinds=("single", "pronoun"))
    full, naive, craft = ({kind: score.accuracy_ratio for kind, score in out.scores.items()} for out in outcomes)
    assert naive["pronoun"] <= full["pronoun"] - 0.25
    assert craft["pronoun"] >= full["pronoun"] - 0.1
    assert naive["single"] >= full["single"] - 0.1
