"""Questions answered in several ways: against a plain forward pass, and what each way reused and recomputed."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.engine import EngineConfig
from ccjax.evaluation.measure import measure, measure_store
from ccjax.evaluation.questions import demo_questions
from ccjax.evaluation.scores import exact_match
from ccjax.evaluation.towns import KINDS, held_out_contexts
from ccjax.evaluation.ways import DEFAULT, FULL, Way
from tests.evaluation.plain_answers import answered


def right(outcome):
    return [exact_match(one.text, one.question.answers[0]) for one in outcome.answers]


def test_full_prefill_score_equals_that_of_a_plain_forward_pass(model, tmp_path):
    (outcome,) = measure(model, demo_questions(1), [FULL], tmp_path)
    contexts = [context for kind in KINDS for context in held_out_contexts(kind, 1)]
    assert right(outcome) == answered(contexts, batch_size=len(contexts))
    for one in outcome.answers:
        assert (one.computed_ratio, one.cfo, one.first_kl, one.is_same) == (1.0, 1.0, 0.0, True)
    assert not list(tmp_path.iterdir()), "full prefill stores nothing"


QUESTIONS = demo_questions(1, (3,), kinds=("single", "pronoun"))
SEEN = [
    Way("reuse"),
    *(Way(name, 0.3) for name in ("cachecraft", "legolink", "random")),
    Way("cachecraft", 0.3, (0,)),
    Way("cacheblend", 0.15),
]
PREPARED = [Way("cachecraft", 0.3), Way("auto", 0.3), Way("h2o", 0.3), Way("map_rerank"), Way("map_reduce")]


@pytest.fixture(scope="module")
def seen(model, tmp_path_factory):
    """Questions in the ways `SEEN`, whose passages an earlier prompt had: outcomes, progress."""
    done = []
    outcomes = measure(
        model,
        QUESTIONS,
        SEEN,
        tmp_path_factory.mktemp("seen"),
        states=["seen"],
        progress=lambda stage, *counts: done.append(counts),
    )
    return outcomes, done


@pytest.fixture(scope="module")
def prepared(model, tmp_path_factory):
    """Questions in the ways `PREPARED`, over prepared passages: the outcome of each way, and the directory."""
    directory = tmp_path_factory.mktemp("prepared")
    outcomes = measure(model, QUESTIONS, PREPARED, directory)
    return {outcome.way: outcome for outcome in outcomes}, directory


def test_each_way_recomputes_its_ratio_and_full_prefill_is_listed_first(seen):
    outcomes, done = seen
    assert [outcome.way for outcome in outcomes] == [FULL, *SEEN]
    assert [outcome.state for outcome in outcomes] == [None, *["seen"] * len(SEEN)]
    naive, *rest, _ = ([one.computed_ratio for one in outcome.answers] for outcome in outcomes[1:])
    assert naive == [0.0] * len(QUESTIONS)
    for shares in rest:
        assert all(0.3 <= share < 0.3 + 1 / 20 for share in shares)  # passages of over 20 tokens, rounded up each
    assert done[-1][0] == done[-1][1] == len(done)
    texts = {tuple(one.first_kl for one in outcome.answers) for outcome in outcomes}
    assert len(texts) == len(outcomes), "every way changes the first token's distribution in its own manner"
    assert all(one.first_kl > 0.0 for outcome in outcomes[1:] for one in outcome.answers)


def test_computed_ratio_includes_layers_run_for_all_tokens(model, seen):
    *_, outcome = seen[0]
    num_layers = model.config.num_layers
    whole_first = (1 + 0.15 * (num_layers - 1)) / num_layers
    for one in outcome.answers:
        assert whole_first - 0.01 < one.computed_ratio < whole_first + 0.05  # rounded up on every layer


@pytest.mark.parametrize("strategy", ["auto", "h2o"])
def test_other_rankings_recompute_as_much_of_a_prompt_as_cachecraft(prepared, strategy):
    outcomes, directory = prepared
    craft, other_way = (outcomes[Way(name, 0.3)] for name in ("cachecraft", strategy))
    for one, other in zip(craft.answers, other_way.answers, strict=True):
        assert one.computed_ratio == pytest.approx(other.computed_ratio) and 0.0 < one.computed_ratio < 0.35
        assert one.first_kl != other.first_kl
    assert not list(directory.iterdir()), "stores go with their state"


def test_map_ways_reuse_passages_that_were_stored_alone(prepared):
    full, rerank, reduce = (prepared[0][way] for way in (FULL, Way("map_rerank"), Way("map_reduce")))
    for one in rerank.answers:
        assert one.computed_ratio == 0.0 and one.text
    for one, whole in zip(reduce.answers, full.answers, strict=True):
        assert 0.0 < one.computed_ratio < 2.0 and one.ttft_s > whole.ttft_s / 100
    assert sum(right(rerank)) >= 1, "what one passage says is found without the others"


def test_unrotated_keys_increase_divergence(model, tmp_path):
    ways = [Way("reuse"), Way("reuse", fixes_positions=False)]
    _, moved, old = measure(model, demo_questions(4, kinds=("single",)), ways, tmp_path, states=["seen"])
    assert np.mean([one.first_kl for one in old.answers]) > 3 * np.mean([one.first_kl for one in moved.answers])


def test_forced_answers_are_scored_in_every_state(model, tmp_path):
    """Full prefill and the default options in each state, with the scores of given answers."""
    questions = demo_questions(2, (3,), kinds=("single",))
    ways = [DEFAULT, Way("reuse")]
    outcomes = measure(
        model, questions, ways, tmp_path, states=["empty", "alone", "seen"], with_forced=True, max_new_tokens=8
    )
    full, empty, *rest = outcomes
    assert [(one.way, one.state) for one in rest] == [(way, state) for state in ("alone", "seen") for way in ways]
    assert (empty.way, empty.state) == (DEFAULT, "empty"), "with nothing to reuse all ways are one"
    for whole, one in zip(full.answers, empty.answers, strict=True):
        assert (whole.forced.kl, whole.forced.agreement) == (0.0, 1.0)
        assert one.computed_ratio == 1.0 and one.forced.kl < 1e-9 and one.forced.agreement == 1.0
        assert one.forced.nll == pytest.approx(whole.forced.nll, abs=1e-4) and whole.forced.nll < 0.5
    for outcome in rest:
        for whole, one in zip(full.answers, outcome.answers, strict=True):
            assert 0.0 <= one.computed_ratio < 0.5 and one.forced.kl > 1e-9
            # The first of the answer's tokens stands behind the prompt alone, as the first that is drawn.
            assert one.first_kl <= one.forced.kl * (1 + len(whole.token_ids)) * 1.01 + 1e-9
            assert one.forced.nll != whole.forced.nll


def test_forced_scores_require_the_option_and_a_single_prompt(model, tmp_path, seen):
    assert all(one.forced is None for outcome in seen[0] for one in outcome.answers)
    questions = demo_questions(1, (3,), kinds=("single",))
    _, rerank = measure(model, questions, [Way("map_rerank")], tmp_path, states=["alone"], with_forced=True)
    assert rerank.answers[0].forced is None


def test_existing_store_is_measured_unchanged(model, tmp_path):
    questions, done = demo_questions(1, (3,), kinds=("single",)), []
    config = EngineConfig(store=tmp_path.as_uri())
    full, own = measure_store(model, questions, config, progress=lambda *counts: done.append(counts))
    assert done == [(1, 2), (2, 2)] and (full.way, own.way) == (FULL, Way("auto"))
    assert own.answers[0].computed_ratio == 1.0 and own.answers[0].is_same


@pytest.mark.parametrize("num_questions", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_partial_recompute_restores_accuracy_lost_on_pronoun_questions(model, tmp_path, num_questions):
    """The property that the world was made for, on so many pronoun questions and as many over one passage."""
    questions = demo_questions(num_questions, kinds=("single", "pronoun"))
    ways = [Way("reuse"), Way("cachecraft", 0.3), Way("auto", 0.15)]
    full, naive, craft, auto = (
        {
            kind: np.mean(scores)
            for kind, scores in zip(("single", "pronoun"), np.split(np.asarray(right(out)), 2), strict=True)
        }
        for out in measure(model, questions, ways, tmp_path)
    )
    assert naive["pronoun"] <= full["pronoun"] - 0.25
    assert craft["pronoun"] >= full["pronoun"] - 0.1
    assert auto["pronoun"] >= full["pronoun"] - 0.1
    assert naive["single"] >= full["single"] - 0.1


def test_passages_pasted_into_a_message_are_reused_as_documents_are(model, tmp_path):
    how = {"states": ["prepared"], "with_forced": True}
    shares = {}
    for pasted in (False, True):
        full, default = measure(model, QUESTIONS, [DEFAULT], tmp_path, pasted=pasted, **how)
        assert all(one.computed_ratio == pytest.approx(1.0) for one in full.answers)
        assert all(one.forced is not None and 0.0 < one.forced.kl < 0.5 for one in default.answers)
        shares[pasted] = [one.computed_ratio for one in default.answers]
    assert all(one < two + 0.15 < 0.6 for one, two in zip(shares[True], shares[False], strict=True)), shares
