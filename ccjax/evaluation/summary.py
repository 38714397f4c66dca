"""Figures of an evaluation: means with intervals for every way, as plain JSON types."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ccjax.evaluation.measure import Answered, WayResults
from ccjax.evaluation.scores import TEXT_SCORES, best, mean_interval, ratio_interval


def figures(outcomes: Sequence[WayResults]) -> list[dict[str, Any]]:
    """The scores of each way, `ways` of `ccjax evaluate --json`; the first outcome is full prefill's.

    Intervals are 95 %: Wilson's for shares of questions, percentile bootstraps for other means; ratios and differences
    draw questions in pairs. Keys:
      `state` of the store (null for full prefill); `computed_share` of the passages' tokens, over all layers;
      `mean_cfo` (Cache-Craft eq. 12; 1 for a passage that was computed whole); `ttft_s`, the median
      `gold`: exact match, `contains` (the right answer's words in a row), F1, Jaccard and ROUGE-L, over the questions
        that have right answers; `against_full`: the same against full prefill's text; `of_full`: right answers in the
        text (F1 if full prefill has none) over those of full prefill; `kinds`: exact match by kind
      `forced`: scores of given answers, token by token: `kl` (KL(full, way) in nats) and `agreement` (same likeliest
        token) over full prefill's own answer; `nll` of the right answer, nats a token, and `nll_difference` from full
        prefill's
      `same_share`: questions with exactly full prefill's tokens; `first_kl`: KL of the first token's distribution
    """
    full = outcomes[0]
    return [_way(outcome, full) for outcome in outcomes]


def _way(outcome: WayResults, full: WayResults) -> dict[str, Any]:
    way = outcome.way
    answers = outcome.answers
    known = [index for index, answer in enumerate(answers) if answer.question.answers]
    gold = {name: [_gold(answers[index], name) for index in known] for name in TEXT_SCORES}
    full_gold = {name: [_gold(full.answers[index], name) for index in known] for name in TEXT_SCORES}
    against = {
        name: [score(answer.text, whole.text) for answer, whole in zip(answers, full.answers, strict=True)]
        for name, score in TEXT_SCORES.items()
    }
    kinds = dict.fromkeys(answer.question.kind for answer in answers if answer.question.kind)
    return {
        "way": str(way),
        "state": outcome.state,
        "series": way.series,
        "strategy": way.strategy,
        "ratio": way.recompute_ratio,
        "ranking_layers": way.ranking_layers,
        "alpha": way.settings.get("alpha"),
        "computed_share": _mean(answer.computed_ratio for answer in answers),
        "mean_cfo": _mean(answer.cfo for answer in answers),
        "ttft_s": float(np.median([answer.ttft_s for answer in answers])),
        "gold": {name: _interval(values) for name, values in gold.items()} if len(known) > 1 else {},
        "of_full": _of_full(gold, full_gold) if len(known) > 1 else None,
        "against_full": {name: _interval(values) for name, values in against.items()},
        "first_kl": _interval([answer.first_kl for answer in answers], may_be_share=False),
        "same_share": _interval([float(answer.is_same) for answer in answers]),
        "forced": _forced(outcome, full),
        "kinds": {kind: _of_kind(outcome, full, kind) for kind in kinds},
    }


def _forced(outcome: WayResults, full: WayResults) -> dict[str, Any] | None:
    pairs = [
        (own.forced, whole.forced)
        for own, whole in zip(outcome.answers, full.answers, strict=True)
        if own.forced is not None and whole.forced is not None
    ]
    if not pairs:
        return None
    known = [(own.nll, whole.nll) for own, whole in pairs if own.nll is not None and whole.nll is not None]
    has_nll = len(known) > 1
    return {
        "kl": _interval([own.kl for own, _ in pairs], may_be_share=False),
        "median_kl": float(np.median([own.kl for own, _ in pairs])),
        "agreement": _interval([own.agreement for own, _ in pairs]),
        "nll": _interval([own for own, _ in known], may_be_share=False) if has_nll else None,
        "nll_difference": _interval([own - whole for own, whole in known], may_be_share=False) if has_nll else None,
    }


def _of_kind(outcome: WayResults, full: WayResults, kind: str) -> dict[str, Any]:
    picked = [index for index, answer in enumerate(outcome.answers) if answer.question.kind == kind]
    own, whole = ([_gold(results.answers[index], "exact_match") for index in picked] for results in (outcome, full))
    guesses = [outcome.answers[index].question.guess_ratio for index in picked]
    known = [guess for guess in guesses if guess is not None]
    ratio = ratio_interval(own, whole) if len(picked) > 1 else None
    return {
        "exact_match": _interval(own) if len(picked) > 1 else None,
        "of_full": None if ratio is None else dataclasses.asdict(ratio),
        "guess": _mean(known) if known else None,
        "num_questions": len(picked),
    }


def _of_full(gold: dict[str, list[float]], full_gold: dict[str, list[float]]) -> dict[str, Any] | None:
    for name in ("contains", "f1"):
        interval = ratio_interval(gold[name], full_gold[name])
        if interval is not None:
            return {"score": name, **dataclasses.asdict(interval)}
    return None


def _gold(answered: Answered, name: str) -> float:
    return best(TEXT_SCORES[name], answered.text, answered.question.answers)


def _interval(values: Sequence[float], *, may_be_share: bool = True) -> dict[str, float]:
    return dataclasses.asdict(mean_interval(values, may_be_share=may_be_share))


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
