"""The first pass of questions, and the prefill by the plan that it revises, against the slow float64 oracle."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from ccjax.policy.question import revise
from ccjax.runner.context_loader import JobFailedError
from ccjax.runner.device import kv_spec_of
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import Pack, Piece
from ccjax.runner.pages import RequestPages, shared_segments
from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.runner.question_first import QuestionFirst, QuestionPass
from ccjax.runner.split_prompt import SplitPrompt
from ccjax.types import PlannedSegment, PrefillPlan, VariantId
from tests.engine.helpers import TOLERANCE, Memory, loader, selective_oracle
from tests.engine.test_selective import MODEL, World, computed_offsets

SPEC = kv_spec_of(MODEL.config, "float32")
NUM_LAYERS = 5


class Prefill:
    """Some worlds in one pool, each with a plan and a job; call `close` at the end."""

    def __init__(
        self, worlds: Sequence[World], plans: Sequence[PrefillPlan], *, scale: float = 1.0, answer: Sequence[int] = ()
    ) -> None:
        self.pool = DevicePool(SPEC, SPEC.num_bytes(80 * PAGE_TOKENS))
        self.model = DeviceModel(MODEL.loaded.params, MODEL.config)
        self._loaders = contextlib.ExitStack()
        self.jobs = []
        for world, plan in zip(worlds, plans, strict=True):
            ticket = Memory(lambda *where, world=world: world.read_layers(*where) * np.float32(scale))
            contexts = self._loaders.enter_context(loader(self.model, plan, ticket))
            pages = RequestPages(self.pool, plan, {})
            for _ in answer:
                pages.append()
            token_ids = np.concatenate([world.prompt, np.asarray(answer, np.int32)])
            self.jobs.append(PrefillJob(token_ids, plan, pages, contexts=contexts))

    def close(self) -> None:
        self._loaders.close()

    def second(self, pieces: Sequence[Piece], loaded: Sequence[PrefillJob]) -> Pack:
        return Pack(self.model, self.pool, pieces, loaded=loaded)

    def first(self, pieces: Sequence[Piece]) -> QuestionFirst:
        return QuestionFirst(self.model, self.pool, pieces, self.second)


@pytest.fixture
def prefill():
    with contextlib.ExitStack() as stack:

        def make(*args, **settings) -> Prefill:
            made = Prefill(*args, **settings)
            stack.callback(made.close)
            return made

        yield make


def asking(world: World, share: float = 0.2) -> PrefillPlan:
    """The world's plan; the question chooses among d, b and a (segments 1, 3 and 4), not c."""
    return dataclasses.replace(world.plan(share), chosen_by_question=(1, 3, 4))


def received(world: World) -> np.ndarray:
    """By definition: mass that the question puts on each token, over the stored KV; the computed chunk n is hidden."""
    segments = world.plan(0.0).segments
    rows = np.arange(segments[-1].start, len(world.prompt))
    computed = segments[2]
    assert computed.action == "compute"
    _, attentions = selective_oracle(
        MODEL.weights,
        MODEL.raw,
        world.prompt,
        world.cached(),
        [rows] * NUM_LAYERS,
        hidden_rows=range(computed.start, computed.start + computed.num_tokens),
    )
    return sum(attention.mean(1).sum(0) for attention in attentions)


def early(world: World, share: float = 0.2) -> PrefillPlan:
    """The same, and the computed chunk n, which stands before b, a and c, asks with the question."""
    plan = asking(world, share)
    start = plan.segments[2].start
    return dataclasses.replace(plan, early_question=(start, start + plan.segments[2].num_tokens))


def received_from_both(world: World) -> np.ndarray:
    """The mass from n and the question as if n stood between c and the question; its own place is hidden. [n, n again
    behind the others, question]."""
    plan = world.plan(0.0)
    first, end = plan.segments[2].start, plan.segments[-1].start
    moved = np.concatenate([world.prompt[:end], world.tokens["n"], world.prompt[end:]]).astype(np.int32)
    cached = [tuple(np.insert(part, [end] * 25, np.nan, axis=0) for part in layer) for layer in world.cached()]
    rows = [np.arange(end, len(moved))] * NUM_LAYERS
    hidden = range(first, first + 25)
    _, attentions = selective_oracle(MODEL.weights, MODEL.raw, moved, cached, rows, hidden_rows=hidden)
    return sum(attention.mean(1).sum(0) for attention in attentions)


def wanted_logits(world: World, plan: PrefillPlan) -> np.ndarray:
    rows = [computed_offsets(plan)] * NUM_LAYERS
    return selective_oracle(MODEL.weights, MODEL.raw, world.prompt, world.cached(), rows)[0]


def run(pack: QuestionFirst | Pack) -> np.ndarray:
    while not pack.is_done:
        pack.run_layer()
    return np.asarray(pack.logits()[1])


def measured(model: DeviceModel, pool: DevicePool, job: PrefillJob) -> np.ndarray:
    """What the first pass of a prompt measures."""
    caught: list[np.ndarray] = []
    job.revise = caught.append  # type: ignore[method-assign]
    first = QuestionPass(model, pool, [job])
    while not first.is_done:
        first.run_layer()
    first.revise()
    return caught[0]


def masses(case: Prefill) -> np.ndarray:
    (job,) = case.jobs
    return measured(case.model, case.pool, job)


def test_attention_to_each_token_matches_the_oracle(prefill):
    world = World(seed=7)
    wanted, got = received(world), masses(prefill([world], [asking(world)]))
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    assert got.sum() == pytest.approx(NUM_LAYERS * 8, rel=1e-5), "each of the question's tokens has a mass of 1"
    # Mutant: slightly wrong keys and values.
    assert np.abs(masses(prefill([world], [asking(world)], scale=1.01)) - wanted).max() > 10 * TOLERANCE


def test_a_question_that_is_not_finite_leaves_the_masses_of_others_as_they_are(prefill):
    worlds = [World(seed=7), World(seed=8)]
    case = prefill(worlds, [asking(world) for world in worlds])
    (token, *_) = set(worlds[1].prompt[-8:].tolist()) - set(worlds[0].prompt[-8:].tolist())
    top = case.model.top
    case.model.top = dataclasses.replace(top, embedding=top.embedding.at[token].set(np.nan))
    caught: list[np.ndarray] = []
    case.jobs[0].revise, case.jobs[1].revise = caught.append, lambda received: None  # type: ignore[method-assign]
    first = QuestionPass(case.model, case.pool, case.jobs)
    while not first.is_done:
        first.run_layer()
    first.revise()
    np.testing.assert_allclose(caught[0], received(worlds[0]), atol=TOLERANCE)


def test_a_question_before_the_passages_attends_to_them_as_if_it_stood_behind(prefill):
    world = World(seed=7)
    plan, wanted = early(world), received_from_both(world)
    (first, last), end = plan.early_question, plan.segments[-1].start
    assert not wanted[first:last].any()
    wanted[first:last] = wanted[end : end + 25]
    wanted = np.delete(wanted, range(end, end + 25))
    got = masses(prefill([world], [plan]))
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    assert got.sum() == pytest.approx(NUM_LAYERS * (8 + 25), rel=1e-5)
    alone = masses(prefill([world], [asking(world)]))
    assert np.abs(got - alone)[:first].max() > 100 * TOLERANCE


def test_where_a_question_stands_does_not_change_what_is_computed(prefill):
    world = World(seed=8)
    case = prefill([world], [early(world)])
    (job,) = case.jobs
    got = run(case.first([Piece(job, 0, len(job.offsets))]))[0]
    np.testing.assert_allclose(got, wanted_logits(world, job.plan), atol=TOLERANCE)
    assert job.result.computed_token_layers == NUM_LAYERS * (len(job.offsets) + 25 + 8)


def test_neither_the_answer_so_far_nor_a_scored_one_has_a_say(prefill):
    """Else a preempted request would continue over other KV, and a given answer would help itself to a better score."""
    world, scored = World(seed=7), World(seed=7)
    wanted = masses(prefill([world], [asking(world)]))
    np.testing.assert_array_equal(masses(prefill([world], [asking(world)], answer=[3, 1, 4])), wanted)

    scored.tokens["q"] = np.concatenate([world.tokens["q"], [3, 1]])
    scored.prompt = np.concatenate([scored.tokens[name] for name in scored.order]).astype(np.int32)
    case = prefill([scored], [asking(scored)])
    case.jobs[0].num_logits = 3  # behind the question, and behind the two tokens
    np.testing.assert_array_equal(masses(case)[: len(wanted)], wanted)
    case = prefill([scored], [asking(scored)])
    assert np.abs(masses(case)[: len(wanted)] - wanted).max() > 10 * TOLERANCE, "they are part of the question"
    case = prefill([scored], [asking(scored)])
    case.jobs[0].num_logits = 10
    assert masses(case).sum() == pytest.approx(NUM_LAYERS, rel=1e-5), "at least the question's first token has a say"


def test_attention_of_a_long_question_matches_the_oracle():
    """150 tokens, more than one block of weights, and nothing else."""
    tokens = np.random.default_rng(1).integers(0, 97, 150).astype(np.int32)
    plan = PrefillPlan((PlannedSegment("question", "compute", 0, 150),))
    model, pool = DeviceModel(MODEL.loaded.params, MODEL.config), DevicePool(SPEC, SPEC.num_bytes(16 * PAGE_TOKENS))
    got = measured(model, pool, PrefillJob(tokens, plan, RequestPages(pool, plan, {})))
    nothing = [(np.zeros((150, *shape)), np.zeros((150, *shape))) for shape in [(2, 8)] * NUM_LAYERS]
    _, attentions = selective_oracle(MODEL.weights, MODEL.raw, tokens, nothing, [np.arange(150)] * NUM_LAYERS)
    by_layer = [weights.mean(1).sum(0) for weights in attentions]
    np.testing.assert_allclose(got, sum(by_layer), atol=10 * TOLERANCE)  # each sums up the masses of 150 tokens
    wrong = [*by_layer[:-1], attentions[-1][:-16].mean(1).sum(0)]  # Mutant: the last block is missing in one layer
    assert np.abs(got - sum(wrong)).max() > 100 * TOLERANCE


def test_tokens_of_two_prompts_are_chosen_by_their_questions_and_a_third_has_no_say(prefill):
    worlds = [World(seed=seed) for seed in (3, 4, 5)]
    plans = [asking(worlds[0]), worlds[1].plan(0.3), asking(worlds[2], 0.5)]
    case = prefill(worlds, plans)
    pack = case.first([Piece(job, 0, len(job.offsets)) for job in case.jobs])
    pack.run_layer()
    assert pack.has_new_sizes, "the first pass counts, so that its compilation is not taken for computing"
    logits = run(pack)
    assert pack.layer == 2 * NUM_LAYERS
    assert NUM_LAYERS * pack.num_computed == sum(job.result.computed_token_layers for job in case.jobs)
    for world, plan, job, got in zip(worlds, plans, case.jobs, logits, strict=False):
        wanted = revise(plan, received(world).tolist()) if plan.chosen_by_question else plan
        assert job.plan == wanted
        assert not plan.chosen_by_question or wanted.segments != plan.segments, "the first choice was another one"
        np.testing.assert_allclose(got, wanted_logits(world, wanted), atol=TOLERANCE)
        num_question = 8 if plan.chosen_by_question else 0
        assert job.result.computed_token_layers == NUM_LAYERS * (len(job.offsets) + num_question)
    # Mutant: the plan as it was before.
    assert np.abs(logits[0] - wanted_logits(worlds[0], plans[0])).max() > 10 * TOLERANCE


def test_a_long_prompt_that_was_revised_runs_in_pieces(prefill):
    world = World(seed=9)
    plan = asking(world, 0.4)
    case = prefill([world], [plan])
    (job,) = case.jobs
    num_rows, logits = len(job.offsets), np.zeros(())
    for begin in range(0, num_rows, 30):
        piece = Piece(job, begin, min(begin + 30, num_rows))
        logits = run(case.first([piece]) if begin == 0 else case.second([piece], ()))
    np.testing.assert_allclose(logits[0], wanted_logits(world, revise(plan, received(world).tolist())), atol=TOLERANCE)


def test_a_prompt_longer_than_a_pack_is_revised_before_it_drops_tokens(prefill):
    world = World(seed=9)
    plan = dataclasses.replace(asking(world, 0.4), focus_window=9)  # longer than there are layers: no cut
    case = prefill([world], [plan])
    (job,) = case.jobs

    def split(pieces: Sequence[Piece], loaded: Sequence[PrefillJob]) -> SplitPrompt:
        return SplitPrompt(case.model, case.pool, pieces[0].job, max_rows=30, is_loaded=pieces[0].job in loaded)

    logits = run(QuestionFirst(case.model, case.pool, [Piece(job, 0, len(job.offsets))], split))
    np.testing.assert_allclose(logits[0], wanted_logits(world, revise(plan, received(world).tolist())), atol=TOLERANCE)


@pytest.mark.parametrize("num_layers", [0, 2, NUM_LAYERS - 1, NUM_LAYERS + 2])
def test_a_prompt_that_is_dropped_writes_nothing_and_the_other_is_unchanged(prefill, num_layers):
    """Dropped during the first pass, before its last layer, and during the second."""
    worlds = [World(seed=3), World(seed=4)]
    plans = [asking(world) for world in worlds]
    case = prefill(worlds, plans)
    dropped, kept = case.jobs
    pack = case.first([Piece(job, 0, len(job.offsets)) for job in case.jobs])
    for _ in range(num_layers):
        pack.run_layer()
    pack.drop(dropped)
    slots = dropped.pages.slots
    before = [jax.tree.map(np.asarray, case.pool.pages(layer)) for layer in range(NUM_LAYERS)]
    logits = run(pack)
    assert pack.logits()[0] == [kept]
    wanted = revise(plans[1], received(worlds[1]).tolist())
    np.testing.assert_allclose(logits[0], wanted_logits(worlds[1], wanted), atol=TOLERANCE)
    for layer, pages in enumerate(before):
        for old, new in zip(*map(jax.tree.leaves, (pages, case.pool.pages(layer))), strict=True):
            rows = [np.asarray(value).reshape(value.shape[0], -1, value.shape[-1])[:, slots] for value in (old, new)]
            np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_prompt_runs_on_if_the_only_one_with_a_choice_is_dropped(prefill, num_layers):
    worlds = [World(seed=3), World(seed=4)]
    plans = [asking(worlds[0]), worlds[1].plan(0.3)]
    case = prefill(worlds, plans)
    pack = case.first([Piece(job, 0, len(job.offsets)) for job in case.jobs])
    for _ in range(num_layers):
        pack.run_layer()
    pack.drop(case.jobs[0])
    np.testing.assert_allclose(run(pack)[0], wanted_logits(worlds[1], plans[1]), atol=TOLERANCE)


def test_all_prompts_dropped_end_the_pack(prefill):
    case = prefill([World(seed=3)], [asking(World(seed=3))])
    pack = case.first([Piece(case.jobs[0], 0, len(case.jobs[0].offsets))])
    pack.run_layer()
    pack.drop(case.jobs[0])
    assert pack.is_done and pack.logits() == ([], None)


def test_a_failed_load_names_the_prompt_and_the_others_continue(prefill):
    worlds = [World(seed=3), World(seed=4)]
    plans = [asking(world) for world in worlds]
    worlds[0].read_layers = lambda *where: 1 / 0  # type: ignore[method-assign]
    case = prefill(worlds, plans)
    pack = case.first([Piece(job, 0, len(job.offsets)) for job in case.jobs])
    with pytest.raises(JobFailedError) as caught:
        pack.run_layer()
    assert caught.value.job is case.jobs[0]
    pack.drop(case.jobs[0])
    wanted = revise(plans[1], received(worlds[1]).tolist())
    np.testing.assert_allclose(run(pack)[0], wanted_logits(worlds[1], wanted), atol=TOLERANCE)


def test_segments_that_the_question_may_choose_from_are_not_shared():
    """Their tokens are computed in pages of the request; even if the first choice has none of them."""
    plan = dataclasses.replace(World(seed=3).plan(0.0), chosen_by_question=(3,))
    assert shared_segments(plan, {VariantId(name) for name in "sdbac"}) == {0, 1, 4, 5}
