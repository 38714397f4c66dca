"""Determines how much reuse must recompute: ccjax calibrate --model DIR --questions FILE

Answers the questions with full prefill and with each strategy at several shares and alphas, with and without the focus
cut, and writes the shares of kept answers to calibration.json beside the model. In mode bounded, servers then recompute
no less than that. If no share up to 30 % keeps the target, they serve as without a calibration and report what was
measured; a request with a target of its own is answered with exact reuse.

Exit codes: 0 done; 1 done, but some strategy cannot keep the target; 2 refused.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, PositiveInt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ccjax.cli.options import run_command
from ccjax.cli.progress import bars
from ccjax.cli.questions import AskOptions, measurement, questions_of, run
from ccjax.cli.values import check_installed, check_writable
from ccjax.config.base import Described
from ccjax.config.engine import FocusRule
from ccjax.config.values import FilePath

if TYPE_CHECKING:
    from ccjax.evaluation.measure import WayResults
    from ccjax.evaluation.questions import QAQuestion
    from ccjax.evaluation.states import State
    from ccjax.evaluation.ways import Way
    from ccjax.loading.model import LoadedModel
    from ccjax.policy.calibration import Calibration, Trial

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
ALPHAS = (0.1, 0.2, 0.35, 0.5, 1.0)
DEVIATIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
BY_TOKEN: Literal["agreement"] = "agreement"
ANSWERED = 0.5
"""A question on which full prefill scores less counts as not answered."""


class CalibrateOptions(AskOptions):
    """What to try, and what is to be kept."""

    model_config = ConfigDict(title="calibration")

    seed: str = "validation"
    """Of the demo's towns; training uses neither test nor validation."""
    cached: Literal["alone", "prepared", "seen", "idle"] = "prepared"
    """How passages were computed before, as with ccjax evaluate."""
    strategies: tuple[str, ...] = Field(default=("auto", "cachecraft"), min_length=1)
    """Strategies to calibrate."""
    focus_windows: Annotated[tuple[PositiveInt, ...], Described(metavar="LAYERS")] = (3,)
    """Of CacheCraft alg. 1, tried besides no focus cut; with none, no cut is tried."""
    focus_rule: FocusRule = "entropy"
    """Of CacheCraft alg. 1."""
    target: float = 0.95
    """Share of full prefill's answers to keep."""
    confidence: float = 0.95
    """Confidence of that share."""
    score: Literal["agreement", "exact_match", "contains", "f1", "jaccard", "rouge_l"] = BY_TOKEN
    """What counts as kept: the tokens of full prefill's answer that stay the likeliest ones (agreement; needs no right
    answers), or answers whose score is no lower than full prefill's."""
    worlds: int = Field(default=0, ge=0)
    """New towns of the demo to verify the choice on."""
    resume: FilePath | None = None
    """Results of ccjax evaluate --resume FILE with the same options: takes its ways, and asks only what is missing."""
    output: FilePath | None = None
    """Without it calibration.json beside the model."""
    json_: bool = False
    """Print the calibration as one JSON object on the last line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_command(CalibrateOptions, argv, _run, prog="ccjax calibrate", description=__doc__)


def _run(args: CalibrateOptions) -> int:
    from ccjax.evaluation.parts import ResultsFile, read_measurement
    from ccjax.evaluation.ways import parse_way
    from ccjax.loading.calibration import CALIBRATION_FILE, write_calibration
    from ccjax.loading.model import load_model
    from ccjax.policy.calibration import Calibration

    if args.worlds and args.questions != "demo":
        raise ValueError(f"--worlds: wanted only with the demo's questions, got {args.questions}")
    if args.score == "rouge_l":
        check_installed("evaluate", "rouge_score")
    questions = questions_of(args)
    ways, resume = ways_of(args.strategies, args.focus_windows, args.focus_rule), None
    states: list[State] = [args.cached]
    if args.resume is not None:
        results = Path(args.resume)
        found = read_measurement(results)
        texts, cached = found.get("ways"), found.get("cached")
        if not isinstance(texts, list) or not isinstance(cached, list):
            raise ValueError(f"resume: wanted a file of an earlier evaluation, got {args.resume}")
        states = cached
        ways = [parse_way(str(text)) for text in texts]
        if args.cached not in states:
            raise ValueError(f"--cached: wanted one of {', '.join(states)}, as in {args.resume}, got {args.cached}")
        resume = ResultsFile(results, measurement(args, ways, states))
    model = load_model(args.model, dtype=args.dtype, quantization=args.quantization, tokenizer=args.tokenizer)
    calibration = Calibration(
        model=model.fingerprint,
        questions=fingerprint(questions),
        score=args.score,
        target=args.target,
        confidence=args.confidence,
        trials={},
        settings={"cached": args.cached, "max_tokens": args.max_tokens, "num_questions": len(questions)},
    )
    output = Path(args.output or (model.directory or Path()) / CALIBRATION_FILE)
    check_writable("output", output)
    with bars() as progress:
        scored = {"with_forced": args.score == BY_TOKEN or resume is not None}
        outcomes = run(args, model, questions, ways, states, progress, "calibrating", resume=resume, **scored)
        outcomes = [outcome for outcome in outcomes if outcome.state in (None, args.cached)]
        calibration = dataclasses.replace(
            calibration,
            trials={name: trials(name, outcomes, args.score) for name in args.strategies},
            settings={**calibration.settings, "focus_cut_layers": focus_cut_layers(outcomes)},
        )
        worlds = _fresh_worlds(args, model, calibration, progress)
    _print(calibration, worlds)
    if args.json_:
        print(json.dumps({**calibration.to_json(), "worlds": worlds}))
    write_calibration(output, calibration)
    print(f"written to {output}", file=sys.stderr)
    return 0 if all(calibration.choose(name) is not None for name in args.strategies) else 1


def _fresh_worlds(
    args: CalibrateOptions, model: LoadedModel, calibration: Calibration, progress: Progress
) -> dict[str, list[float]]:
    """Share of answers that the chosen settings keep in towns not used for calibration: strategy -> a share for each
    town."""
    chosen = {name: trial for name in args.strategies if (trial := calibration.choose(name)) is not None}
    kept: dict[str, list[float]] = {name: [] for name in chosen}
    for number in range(args.worlds if chosen else 0):
        questions = questions_of(args.replace(seed=f"{args.seed}/{number}"))
        ways = [way_of(name, trial) for name, trial in chosen.items()]
        town, by_token = f"town {number + 1} of {args.worlds}", args.score == BY_TOKEN
        outcomes = run(args, model, questions, ways, [args.cached], progress, town, with_forced=by_token)
        for name, shares in kept.items():
            (trial,) = trials(name, outcomes, args.score)
            shares.append(trial.num_kept / trial.num_answers)
    return kept


def way_of(strategy: str, trial: Trial) -> Way:
    """The way that a trial used."""
    from ccjax.evaluation.ways import Way
    from ccjax.policy.strategies import STRATEGIES

    if not STRATEGIES[strategy].recomputes:
        return Way(strategy)
    return Way(
        strategy,
        trial.recompute_ratio,
        alpha=trial.alpha,
        max_deviation=trial.max_deviation,
        focus_window=trial.focus_window,
        focus_rule=trial.focus_rule,
    )


def ways_of(strategies: Sequence[str], focus_windows: Sequence[int] = (), focus_rule: str = "entropy") -> list[Way]:
    """Settings to try for each strategy: shares, alphas and deviations without the focus cut, shares with it."""
    from ccjax.evaluation.ways import Way, parse_way
    from ccjax.policy.strategies import STRATEGIES

    ways = []
    for name in strategies:
        way = parse_way(name)
        if way != Way(name) or name not in STRATEGIES or STRATEGIES[name].exact_only:
            raise ValueError(f"--strategies: wanted names of strategies that reuse approximately, got {name!r}")
        ways += [Way(name, ratio) for ratio in RATIOS] if STRATEGIES[name].recomputes else [way]
        options = STRATEGIES[name].options
        ways += [Way(name, alpha=alpha) for alpha in ALPHAS if "alpha" in options]
        ways += [Way(name, max_deviation=deviation) for deviation in DEVIATIONS if "max_deviation" in options]
        if "alpha" in options:
            cuts = ((ratio, window) for window in focus_windows for ratio in RATIOS)
            ways += [Way(name, ratio, focus_window=window, focus_rule=focus_rule) for ratio, window in cuts]
    return ways


def trials(strategy: str, outcomes: Sequence[WayResults], score: str) -> tuple[Trial, ...]:
    """What each setting of a strategy kept of full prefill's answers, which are the first outcome.

    With the score `agreement`, the share of an answer's tokens that stay the likeliest ones behind those before them
    (teacher forced); with any other, whether its score against the right answers is no lower than full prefill's.

    Raises:
      ValueError: full prefill answers none of the questions, or no outcome is of the strategy.
    """
    from ccjax.config import EngineConfig
    from ccjax.evaluation.scores import TEXT_SCORES, best
    from ccjax.evaluation.ways import DEFAULT
    from ccjax.policy.calibration import Trial
    from ccjax.policy.strategies import STRATEGIES

    def scored(outcome: WayResults) -> list[float]:
        if score == BY_TOKEN:
            return [answer.forced.agreement for answer in outcome.answers if answer.forced is not None]
        rated = (answer for answer in outcome.answers if answer.question.answers)
        return [best(TEXT_SCORES[score], answer.text, answer.question.answers) for answer in rated]

    full = scored(outcomes[0])
    answered = [index for index, value in enumerate(full) if value >= ANSWERED]
    if not answered:
        raise ValueError(f"--questions: wanted some that full prefill answers ({score}), got {len(full)} that it fails")

    def is_tried(way: Way) -> bool:
        """Servers can be set to serve like it."""
        is_of = way.strategy == strategy or (way == DEFAULT and strategy == EngineConfig().strategy)
        return is_of and way.fixes_positions and way.ranking_layers is None

    found = []
    for outcome in outcomes[1:]:
        if is_tried(outcome.way):
            own = scored(outcome)
            by_token = score == BY_TOKEN
            found.append(
                Trial(
                    computed_share=sum(answer.computed_ratio for answer in outcome.answers) / len(outcome.answers),
                    num_answers=len(answered),
                    num_kept=int(sum(own)) if by_token else sum(own[index] >= full[index] for index in answered),
                    shares=tuple(own) if by_token else (),
                    alpha=outcome.way.settings.get("alpha", 1.0),
                    max_deviation=outcome.way.max_deviation,
                    recompute_ratio=outcome.way.recompute_ratio if STRATEGIES[strategy].recomputes else 0.0,
                    focus_window=outcome.way.focus_window,
                    focus_rule=outcome.way.focus_rule,
                )
            )
    if not found:
        ways = ", ".join(str(outcome.way) for outcome in outcomes[1:])
        raise ValueError(f"--strategies: wanted some of the ways {ways}, got {strategy}")
    return tuple(found)


def focus_cut_layers(outcomes: Sequence[WayResults]) -> dict[str, dict[str, int]]:
    """For each way with a focus cut, the first layer that ran without the unfocused passages -> how many questions."""
    found = {}
    for outcome in outcomes:
        if outcome.way.focus_window is not None:
            layers = collections.Counter(answer.focus_cut_layer for answer in outcome.answers)
            ordered = sorted(layers.items(), key=lambda item: (item[0] is None, item[0]))
            found[str(outcome.way)] = {"none" if layer is None else str(layer): n for layer, n in ordered}
    return found


def fingerprint(questions: Sequence[QAQuestion]) -> str:
    """sha256 (hex) of the questions with their passages and right answers."""
    return hashlib.sha256(json.dumps([dataclasses.asdict(question) for question in questions]).encode()).hexdigest()


def _print(calibration: Calibration, worlds: Mapping[str, Sequence[float]]) -> None:
    from ccjax.evaluation.ways import parse_way
    from ccjax.policy.calibration import confidence_of_each, fewest_answers

    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, found in calibration.trials.items():
        chosen = calibration.choose(name)
        table = Table("recomputed", "computed", "kept", "kept at least", "", title=name)
        for trial in sorted(found, key=lambda trial: trial.computed_share):
            setting = f"alpha {trial.alpha:g}" if trial.recompute_ratio is None else f"{trial.recompute_ratio:.0%}"
            setting = setting if trial.max_deviation is None else f"deviations above {trial.max_deviation:g}"
            setting += "" if trial.focus_window is None else f", focus cut ({trial.focus_rule}, {trial.focus_window})"
            bound = math.floor(1000 * calibration.bound(name, trial)) / 1000  # rounded up it would promise too much
            cells = f"{trial.computed_share:.1%}", f"{trial.num_kept} of {trial.num_answers}", f"{bound:.1%}"
            table.add_row(setting, *cells, "chosen" if trial == chosen else "")
        console.print(table)
        if chosen is None:
            text = "it will be served as without a calibration, and with exact reuse where a request has a target"
            console.print(f"{name}: no setting keeps {calibration.target:.1%}; {text}")
            fewest = fewest_answers(calibration.target, confidence_of_each(found, calibration.confidence))
            if found[0].num_answers < fewest:
                asked = f"{found[0].num_answers} answers cannot show it even if all are kept"
                console.print(f"{name}: {asked}; ask more questions, so that at least {fewest} are answered")
        for way, layers in calibration.settings["focus_cut_layers"].items():
            if parse_way(way).strategy == name:
                counts = ", ".join(f"{layer} ({count})" for layer, count in layers.items())
                console.print(f"{way}: first layer behind the cut (questions): {counts}")
        shares = worlds.get(name)
        if shares:
            missed = sum(share < calibration.target for share in shares)
            console.print(f"{name}: {missed} of {len(shares)} new towns kept less, at least {min(shares):.1%}")
