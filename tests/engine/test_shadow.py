"""Answers with approximate reuse, compared with a full prefill in idle time; checked against full prefill's answers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig, Request
from ccjax.engine.divergence import kl_divergence
from ccjax.engine.shadow import MOST_WAITING, ShadowCounts
from ccjax.policy.shadow import WINDOW
from ccjax.requests import SamplingParams
from tests.engine.helpers import TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=8)
SETTINGS = {"max_model_len": 512, "shadow_ratio": 1.0, "recompute_ratio": 0.1, "strategy": "cachecraft"}
NUM_TOKENS = 2


def prompts(count):
    random = np.random.default_rng(0)
    return [draw_segments(random, [30, 25, 20]) for _ in range(count)]


def ask(engine, segments, **sampling):
    params = SamplingParams(NUM_TOKENS, **{"first_logits": True, **sampling})
    return engine.run(Request(segments=segments, sampling=params))


def full(engine, segments):
    params = SamplingParams(NUM_TOKENS, first_logits=True)
    return engine.run(Request(segments=segments, sampling=params, reuse="off"))


def test_shadow_counts_equal_a_comparison_with_full_prefill():
    asked = prompts(8)
    with MODEL.engine(**{**SETTINGS, "recompute_ratio": 0.6}) as engine:
        same = kl = 0
        for segments in asked:
            engine.generate_from_tokens(segments, max_new_tokens=1)
            shuffled = permuted(segments, [2, 0, 1])
            answer, whole = ask(engine, shuffled), full(engine, shuffled)
            same += answer.token_ids == whole.token_ids
            kl += kl_divergence(whole.first_logits, answer.first_logits)
        assert engine.cache.shadow_counts == ShadowCounts()
        checked = 0
        while engine.cache.check_one():
            checked += 1
        counts = engine.cache.shadow_counts
        assert checked == counts.checks == counts.greedy == 8 and not engine.cache.check_one()
        assert counts.same == same and 0 < same < 8, "a case where all agree, or none, would prove little"
        assert counts.tokens == 8 * NUM_TOKENS and same * NUM_TOKENS <= counts.agreed_tokens < counts.tokens
        assert counts.first_kl == pytest.approx(kl, rel=1e-3) and kl > 1e-3


def test_exact_answers_and_those_not_selected_are_not_checked():
    segments = prompts(1)[0]
    with MODEL.engine(**SETTINGS) as engine:
        for _ in range(2):
            engine.generate_from_tokens(segments, max_new_tokens=2)
        full(engine, segments)
        assert not engine.cache.check_one()
    with MODEL.engine(**{**SETTINGS, "shadow_ratio": 0.0}) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        ask(engine, permuted(segments, [2, 0, 1]))
        assert not engine.cache.check_one()


def test_sampled_answer_is_checked_for_divergence_only():
    segments = prompts(1)[0]
    with MODEL.engine(**SETTINGS) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        ask(engine, permuted(segments, [2, 0, 1]), temperature=1.0, seed=1)
        assert engine.cache.check_one()
        counts = engine.cache.shadow_counts
        assert (counts.checks, counts.greedy, counts.tokens) == (1, 0, 0) and counts.first_kl > 0.0


def test_shadow_checks_do_not_change_answers():
    segments = prompts(1)[0]
    shuffled = permuted(segments, [2, 0, 1])
    answers = []
    for ratio in (0.0, 1.0):
        with MODEL.engine(**{**SETTINGS, "shadow_ratio": ratio}) as engine:
            engine.generate_from_tokens(segments, max_new_tokens=1)
            answers.append(ask(engine, shuffled, first_logits=False))
            several = ask(engine, permuted(segments, [1, 2, 0]), n=2, temperature=1.0, seed=3)
            assert len(several.choices) == 2
            assert engine.cache.check_one() == (ratio == 1.0) and not engine.cache.check_one(), (
                "one answer of several is not checked"
            )
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].first_logits is None and answers[1].first_logits is None


def test_answers_agree_only_if_full_prefill_also_ends_there():
    """The token that ends an answer counts, although it is not part of it."""
    asked = {}
    with MODEL.engine(**SETTINGS) as engine:
        for number, segments in enumerate(prompts(12)):
            engine.generate_from_tokens(segments, max_new_tokens=1)
            shuffled = permuted(segments, [2, 0, 1])
            own, whole = ask(engine, shuffled).token_ids, full(engine, shuffled).token_ids
            if own[0] == whole[0] and own[1] not in (own[0], whole[1]):
                asked[number] = own
    assert asked, "a prompt whose first token is full prefill's and whose second is not"
    number, tokens = next(iter(asked.items()))
    segments = prompts(12)[number]
    for eos_id, num_tokens, is_same in ((tokens[1], NUM_TOKENS, False), (tokens[1], 1, True)):
        loaded = dataclasses.replace(MODEL.loaded, eos_ids=frozenset({eos_id}))
        with Engine(loaded, EngineConfig(**SETTINGS)) as engine:
            engine.generate_from_tokens(segments, max_new_tokens=1)
            params = SamplingParams(num_tokens)
            answer = engine.run(Request(segments=permuted(segments, [2, 0, 1]), sampling=params))
            assert answer.token_ids == tokens[:1] and engine.cache.check_one()
            assert (engine.cache.shadow_counts.same, engine.cache.shadow_counts.agreed_tokens) == (is_same, 1)


def test_oldest_waiting_answers_are_dropped_if_too_many_wait():
    segments = prompts(1)[0]
    with MODEL.engine(**SETTINGS) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        for _ in range(MOST_WAITING + 3):
            ask(engine, permuted(segments, [2, 0, 1]))
        assert engine.cache.shadow_counts.dropped == 3 and engine._shadow.num_waiting == MOST_WAITING


def test_cancelled_check_leaves_the_answer_queued():
    segments = prompts(1)[0]
    with MODEL.engine(**SETTINGS) as engine:
        engine.generate_from_tokens(segments, max_new_tokens=1)
        ask(engine, permuted(segments, [2, 0, 1]))
        assert not engine.cache.check_one(is_cancelled=lambda: True) and engine._shadow.num_waiting == 1
        assert engine.cache.check_one() and engine.cache.shadow_counts.checks == 1


def test_recompute_share_grows_while_answers_differ():
    asked = prompts(WINDOW)
    with MODEL.engine(**{**SETTINGS, "recompute_ratio": 0.04, "shadow_target": 1.0}) as engine:
        for segments in asked:
            engine.generate_from_tokens(segments, max_new_tokens=1)
        before = [ask(engine, permuted(segments, [2, 0, 1])).reuse.recomputed_tokens for segments in asked]
        while engine.cache.check_one():
            pass
        assert engine.cache.shadow_counts.same < WINDOW and engine.cache.shadow_counts.factor == 1.5
        after = [ask(engine, permuted(segments, [1, 2, 0])).reuse.recomputed_tokens for segments in asked]
    # 2 + 1 + 1 of 30, 25 and 20 tokens, then 0.06 of them; the first passage may be in its old place
    assert set(before) == {4} and min(after) >= 5


def test_answers_in_mode_fast_are_checked_without_changing_what_others_recompute():
    asked = prompts(WINDOW)
    with MODEL.engine(**{**SETTINGS, "recompute_ratio": 0.04, "shadow_target": 1.0}) as engine:
        for segments in asked:
            engine.generate_from_tokens(segments, max_new_tokens=1)
        for segments in asked:
            params = SamplingParams(NUM_TOKENS)
            engine.run(Request(segments=permuted(segments, [2, 0, 1]), sampling=params, reuse="fast"))
        while engine.cache.check_one():
            pass
        counts = engine.cache.shadow_counts
        assert counts.checks == WINDOW and counts.same < WINDOW and counts.factor == 1.0
