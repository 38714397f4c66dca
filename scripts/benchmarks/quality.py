"""Answer quality: what naive reuse, Cache-Craft and random repair cost in right answers, on the demo model.

Four kinds of question over held-out towns; every request goes through the public engine. Also picks Cache-Craft's alpha
(eq. 13) on other towns of the same kind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ccjax.demo.reuse import ALPHAS, FULL, QUICK_WAYS, WAYS, Outcome, Way, measure_ways
from ccjax.demo.world import KINDS
from ccjax.engine.loading import LoadedModel, load_model
from ccjax.policy.calibration import AlphaTrial, choose_alpha
from scripts.benchmarks.common import environment

TARGET_OF_FULL = 0.95
NAMES = {
    "reuse": "naive reuse",
    "cachecraft": "Cache-Craft",
    "cacheblend": "CacheBlend",
    "legolink": "first tokens (LegoLink)",
    "random": "random tokens",
}
COLOURS = ("tab:blue", "tab:purple", "tab:green", "tab:orange", "tab:cyan", "tab:brown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--model", default="demo", help="directory of a demo model (default: the embedded one)")
    parser.add_argument("--questions", type=int, help="questions of each kind (default 100)")
    parser.add_argument("--passages", type=int, default=4, help="passages behind each question")
    parser.add_argument("--target", type=float, help="quality that alpha must keep (default 0.95 of full prefill's)")
    parser.add_argument("--plot", type=Path, help="write accuracy over recomputed share to this .svg or .png file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the tables, writes the plot."""
    questions = arguments.questions or (4 if arguments.quick else 100)
    model = load_model(arguments.model, dtype="float32")
    ways = QUICK_WAYS if arguments.quick else WAYS
    outcomes = measured(model, ways, questions, arguments.passages, "answer")
    trials = measured(model, (FULL, *ALPHAS), questions, arguments.passages, "choose alpha", is_validation=True)
    target = TARGET_OF_FULL * _quality(trials[0]) if arguments.target is None else arguments.target
    alpha = choose_alpha([AlphaTrial(t.way.alpha, t.mean_cfo, _quality(t)) for t in trials[1:]], target_quality=target)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(outcomes, f"{arguments.passages} passages, {questions} questions of each kind"))
    console.print(_alpha_table(trials))
    found = "none" if alpha is None else f"{alpha.alpha}"
    console.print(f"alpha of least mean CFO with at least {target:.1%} right (CacheCraft eq. 13): {found}")
    if arguments.plot:
        plot(outcomes, arguments.plot)
    return {
        "benchmark": "quality",
        **environment(),
        "shapes": {"passages": arguments.passages, "questions_per_kind": questions, "dtype": "float32"},
        "cases": [_figures(outcome) for outcome in outcomes],
        "guess_ratio": {kind: outcomes[0].scores[kind].guess_ratio for kind in KINDS},
        "alpha": {
            "trials": [_figures(trial) for trial in trials],
            "target": target,
            "chosen": None if alpha is None else alpha.alpha,
        },
    }


def measured(
    model: LoadedModel,
    ways: Sequence[Way],
    questions: int,
    passages: int,
    description: str,
    *,
    is_validation: bool = False,
) -> list[Outcome]:
    """`measure_ways` with a progress bar and stores in a directory that goes away."""
    with tempfile.TemporaryDirectory() as directory, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=None)
        return measure_ways(
            model,
            ways,
            Path(directory),
            num_questions=questions,
            num_passages=passages,
            is_validation=is_validation,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def series(way: Way) -> str:
    """The way in words, without its share."""
    layers = "" if way.ranking_layers is None else f" ranked by layers {', '.join(map(str, way.ranking_layers))}"
    return NAMES[way.strategy] + layers


def label(way: Way) -> str:
    """The way in words."""
    if way.cached is None:
        return "full prefill"
    name = series(way)
    if way.strategy == "reuse":
        return f"{name}, passages computed {way.cached}"
    return f"{name}, {way.recompute_ratio:.0%}" if way.recompute_ratio is not None else f"{name}, alpha {way.alpha}"


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Accuracy of every way per kind, guessing last."""
    out = Table("way", "computed", *KINDS, title=title)
    for outcome in outcomes:
        cells = [f"{outcome.scores[kind].accuracy_ratio:.1%}" for kind in KINDS]
        out.add_row(label(outcome.way), f"{outcome.computed_ratio:.1%}", *cells)
    out.add_row("best guess", "", *[f"{outcomes[0].scores[kind].guess_ratio:.1%}" for kind in KINDS])
    return out


def _alpha_table(trials: Sequence[Outcome]) -> Table:
    out = Table("alpha", "mean CFO", "right", title="validation towns")
    for trial in trials:
        name = "full prefill" if trial.way.cached is None else f"{trial.way.alpha}"
        out.add_row(name, f"{trial.mean_cfo:.3f}", f"{_quality(trial):.1%}")
    return out


def _quality(outcome: Outcome) -> float:
    return sum(score.accuracy_ratio for score in outcome.scores.values()) / len(outcome.scores)


def _figures(outcome: Outcome) -> dict[str, Any]:
    way = outcome.way
    return {
        "strategy": way.strategy,
        "cached": way.cached,
        "ratio": way.recompute_ratio,
        "ranking_layers": way.ranking_layers,
        "alpha": way.alpha,
        "computed_share": outcome.computed_ratio,
        "mean_cfo": outcome.mean_cfo,
        "accuracy": {kind: score.accuracy_ratio for kind, score in outcome.scores.items()},
    }


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Accuracy over the recomputed share, one panel per kind; the format follows the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ccjax"  # the same bytes for the same figures
    from matplotlib import pyplot

    naive = {outcome.way.cached: outcome for outcome in outcomes if outcome.way.strategy == "reuse"}
    full = next(outcome for outcome in outcomes if outcome.way.cached is None)
    figure, panels = pyplot.subplots(1, len(KINDS), figsize=(13, 3.4), sharey=True, layout="constrained")
    for panel, kind in zip(panels, KINDS, strict=True):
        panel.axhline(full.scores[kind].accuracy_ratio * 100, color="black", linewidth=1, label="full prefill")
        guess = full.scores[kind].guess_ratio * 100
        panel.axhline(guess, color="grey", linewidth=1, linestyle=":", label="best guess")
        alone = naive["alone"].scores[kind].accuracy_ratio * 100
        panel.plot(0, alone, "x", color="tab:red", label="naive reuse, computed alone", clip_on=False)
        selective = [outcome for outcome in outcomes if outcome.way.recompute_ratio is not None]
        for name, colour in zip(dict.fromkeys(series(one.way) for one in selective), COLOURS, strict=False):
            points = [naive["behind others"], *(one for one in selective if series(one.way) == name)]
            shares = [outcome.computed_ratio * 100 for outcome in points]
            ratios = [outcome.scores[kind].accuracy_ratio * 100 for outcome in points]
            panel.plot(shares, ratios, "o-", color=colour, label=name)
        panel.set(title=kind.replace("_", " "), xlabel="computed passage tokens, %", ylim=(0, 102), xlim=(-2, 54))
    panels[0].set_ylabel("right answers, %")
    panels[-1].legend(fontsize="small", loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
