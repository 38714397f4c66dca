"""Questions answered in several ways: against a plain forward pass, and what each way reused and recomputed."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.demo.evaluate import answered, held_out_contexts
from ccjax.demo.export import load_model
from ccjax.demo.world import KINDS
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.loading import load_model as load_engine_model
from ccjax.evaluation.measure import measure
from ccjax.evaluation.questions import demo_questions
from ccjax.evaluation.scores import exact_match
from ccjax.evaluation.ways import FULL, Way
from ccjax.types import Document

OTHERS = (
    Document("The old wall keeps out the sea.", title="Walls"),
    Document("The bells ring at noon.", title="Bells"),
)


@pytest.fixture(scope="module")
def model():
    return load_engine_model("demo", dtype="float32")


def right(outcome):
    return [exact_match(one.text, one.question.answers[0]) for one in outcome.answers]


def test_full_prefill_scores_what_a_plain_forward_pass_scores(model, tmp_path):
    questions = demo_questions(3)
    (outcome,) = measure(model, questions, [FULL], OTHERS, tmp_path)
    matches = [match for kind in KINDS for match in answered(*load_model(), held_out_contexts(kind, 3), batch_size=3)]
    assert right(outcome) == matches
    for one in outcome.answers:
        assert (one.computed_ratio, one.cfo, one.first_kl, one.is_same) == (1.0, 1.0, 0.0, True)
    assert not list(tmp_path.iterdir()), "full prefill stores nothing"


BEHIND = [
    Way("reuse"),
    *(Way(name, 0.3) for name in ("cachecraft", "legolink", "random")),
    Way("cachecraft", 0.3, (0,)),
    Way("cacheblend", 0.15),
]
BOTH = [Way("cachecraft", 0.3), Way("auto", 0.3), Way("h2o", 0.3), Way("map_rerank"), Way("map_reduce")]


@pytest.fixture(scope="module")
def behind(model, tmp_path_factory):
    """One question of each kind in the ways `BEHIND`, with passages that were computed behind others: outcomes,
    progress, directory."""
    done, directory = [], tmp_path_factory.mktemp("behind")
    outcomes = measure(
        model,
        demo_questions(1),
        BEHIND,
        OTHERS,
        directory,
        cached="behind others",
        progress=lambda stage, *counts: done.append(counts),
    )
    return outcomes, done, directory


@pytest.fixture(scope="module")
def both(model, tmp_path_factory):
    """One question of each kind in the ways `BOTH`, with passages computed alone and behind others: the outcome of
    each way, and the directory."""
    directory = tmp_path_factory.mktemp("both")
    outcomes = measure(model, demo_questions(1), BOTH, OTHERS, directory)
    return {outcome.way: outcome for outcome in outcomes}, directory


def test_each_way_recomputes_the_share_it_says_and_full_prefill_comes_first(behind):
    outcomes, done, _ = behind
    assert [outcome.way for outcome in outcomes] == [FULL, *BEHIND]
    naive, *rest, _ = ([one.computed_ratio for one in outcome.answers] for outcome in outcomes[1:])
    assert naive == [0.0] * 4
    for shares in rest:
        assert all(0.3 <= share < 0.3 + 1 / 20 for share in shares)  # passages of over 20 tokens, rounded up each
    assert done[-1][0] == done[-1][1] == len(done)
    texts = {tuple(one.first_kl for one in outcome.answers) for outcome in outcomes}
    assert len(texts) == len(outcomes), "every way changes the first token's distribution in its own manner"
    assert all(one.first_kl > 0.0 for outcome in outcomes[1:] for one in outcome.answers)


def test_the_share_counts_layers_that_ran_for_all_tokens(model, behind):
    *_, outcome = behind[0]
    num_layers = model.config.num_layers
    whole_first = (1 + 0.15 * (num_layers - 1)) / num_layers
    for one in outcome.answers:
        assert whole_first - 0.01 < one.computed_ratio < whole_first + 0.05  # rounded up on every layer


def test_auto_recomputes_as_much_of_a_prompt_as_cachecraft(both):
    craft, auto = (both[0][Way(name, 0.3)] for name in ("cachecraft", "auto"))
    for one, other in zip(craft.answers, auto.answers, strict=True):
        assert one.computed_ratio == pytest.approx(other.computed_ratio) and 0.0 < one.computed_ratio < 0.35
        assert one.first_kl != other.first_kl


@pytest.mark.parametrize(("cached", "lengths"), [("alone", [1]), ("behind others", [3]), ("both", [1, 3])])
def test_passages_are_cached_as_asked(model, request, tmp_path, cached, lengths):
    if cached == "alone":
        measure(model, demo_questions(1), [Way("reuse")], OTHERS, tmp_path, cached=cached)
        directory = tmp_path
    else:
        *_, directory = request.getfixturevalue("both" if cached == "both" else "behind")
    passages = {document for question in demo_questions(1) for document in question.documents}
    with Engine(model, EngineConfig(store=(directory / "auto").as_uri())) as engine:
        found = sorted(len(meta.prefix_ids) for meta in engine._variants)
        compared = sum(bool(meta.token_deviations) for meta in engine._variants)
    # The system prompt, the others one behind the other, and every passage behind all of those.
    before = [] if cached == "alone" else [1, 2]
    assert found == sorted([0, *before, *(length for length in lengths for _ in passages)])
    assert (compared >= len(passages)) == (cached == "both")


def test_passage_by_passage_computes_no_passage_that_is_stored_alone(both):
    full, rerank, reduce = (both[0][way] for way in (FULL, Way("map_rerank"), Way("map_reduce")))
    for one in rerank.answers:
        assert one.computed_ratio == 0.0 and one.text
    for one, whole in zip(reduce.answers, full.answers, strict=True):
        assert 0.0 < one.computed_ratio < 2.0 and one.ttft_s > whole.ttft_s / 100
    assert sum(right(rerank)) >= 1, "what one passage says is found without the others"


def test_h2o_reuses_what_it_measured_itself(both):
    outcomes, directory = both
    drew, craft = (outcomes[Way(name, 0.3)] for name in ("h2o", "cachecraft"))
    for one, other in zip(drew.answers, craft.answers, strict=True):
        assert one.computed_ratio == pytest.approx(other.computed_ratio) and one.first_kl != other.first_kl
    assert sorted(path.name for path in directory.iterdir()) == ["auto", "h2o"]


def test_keys_at_old_positions_cost_answers(model, tmp_path):
    ways = [Way("reuse"), Way("reuse", fixes_positions=False)]
    _, moved, old = measure(model, demo_questions(4, kinds=("single",)), ways, OTHERS, tmp_path)
    assert np.mean([one.first_kl for one in old.answers]) > 3 * np.mean([one.first_kl for one in moved.answers])


def test_others_do_not_stand_before_themselves(model, tmp_path):
    questions = demo_questions(1, kinds=("single",))
    others = questions[0].documents[:2]
    measure(model, questions, [Way("reuse")], others, tmp_path, cached="behind others")
    with Engine(model, EngineConfig(store=(tmp_path / "auto").as_uri())) as engine:
        for meta in engine._variants:
            assert len(set(meta.prefix_ids)) == len(meta.prefix_ids) and meta.chunk_id not in meta.prefix_ids


@pytest.mark.parametrize("num_questions", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_reuse_hurts_where_the_passage_before_matters_and_a_few_tokens_bring_it_back(model, tmp_path, num_questions):
    """The property that the world was made for, on so many pronoun questions and as many over one passage."""
    questions = demo_questions(num_questions, kinds=("single", "pronoun"))
    ways = [Way("reuse"), Way("cachecraft", 0.3), Way("auto", 0.15)]
    full, naive, craft, auto = (
        {
            kind: np.mean(scores)
            for kind, scores in zip(("single", "pronoun"), np.split(np.asarray(right(out)), 2), strict=True)
        }
        for out in measure(model, questions, ways, OTHERS, tmp_path)
    )
    assert naive["pronoun"] <= full["pronoun"] - 0.25
    assert craft["pronoun"] >= full["pronoun"] - 0.1
    assert auto["pronoun"] >= full["pronoun"] - 0.1
    assert naive["single"] >= full["single"] - 0.1
