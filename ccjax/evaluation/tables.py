"""Shows the figures of an evaluation: tables for the terminal and for a page, and the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:cyan", "tab:olive")
_AGAINST_FULL = (
    "way",
    "computed",
    "TTFT",
    "answer's KL",
    "likeliest token",
    "same answer",
    "first-token KL",
    "NLL of right answer",
)
_AGAINST_GOLD = ("way", "right in text", "of full", "exact match", "F1", "Jaccard", "ROUGE-L")
_STATES = {
    "empty": "nothing was computed before",
    "alone": "passages computed alone",
    "prepared": "passages prepared",
    "seen": "an earlier prompt seen",
}

Rows = tuple[str, Sequence[str], list[list[str]]]
"""Title, head, cells."""


def rich_tables(result: Mapping[str, Any]) -> list[Table]:
    """The tables of an evaluation."""
    tables = []
    for title, head, rows in _tables(result):
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def markdown(result: Mapping[str, Any], title: str, picture: Path | None) -> str:
    """The same as a page, with the picture in it."""
    about, versions = result["evaluation"], result["versions"]
    prompt = f"system prompt `{about['prompt']}`, " if about["prompt"] else ""
    lines = [f"# {title}", ""]
    lines += [
        f"Model `{about['model']}`, questions `{Path(about['questions']).name}` ({about['num_questions']}), {prompt}"
        f"greedy answers of up to {about['max_tokens']} tokens, {about['dtype']}. {result['machine']} "
        f"({result['device']}), jax {versions['jax']}, {result['date']}.",
        "",
    ]
    for name, head, rows in _tables(result):
        lines += [f"## {name}", "", _line(head), "|" + "---|" * len(head)]
        lines += [*map(_line, rows), ""]
    if picture is not None:
        lines += [f"![quality over the share of passage tokens that were computed]({picture.name})", ""]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _tables(result: Mapping[str, Any]) -> list[Rows]:
    """For each state of the store against full prefill, against right answers and by kind of question; the default
    options come first, then full prefill."""
    full, *others = result["ways"]
    found: list[Rows] = []
    for state in dict.fromkeys(way["state"] for way in others):
        own = [way for way in others if way["state"] == state]
        ways = sorted([full, *own], key=lambda way: way["way"] != "default")
        title = _STATES[state].capitalize()
        found.append((title, _AGAINST_FULL, [_against_full(way) for way in ways]))
        if full["gold"]:
            found.append((f"{title}: right answers", _AGAINST_GOLD, [_against_gold(way) for way in ways]))
        kinds = full["kinds"]
        if len(kinds) > 1:
            rows = [[way["way"], _share(way["computed_share"]), *map(_kind, way["kinds"].values())] for way in ways]
            if all(one["guess"] is not None for one in kinds.values()):
                rows.append(["best guess", "", *[_share(one["guess"]) for one in kinds.values()]])
            found.append((f"{title}: exact match by kind of question", ("way", "computed", *kinds), rows))
    return found


def _against_full(way: Mapping[str, Any]) -> list[str]:
    forced = way["forced"]
    cells = [way["way"], _share(way["computed_share"]), f"{way['ttft_s'] * 1e3:.0f} ms"]
    nll = f"{forced['nll']['mean']:.3f}" if forced and forced["nll"] else ""
    if way["strategy"] == "full":  # against itself
        return [*cells, "", "", "", "", nll]
    if forced and forced["nll"]:
        nll += f", {_number(forced['nll_difference'], '+.3f')}"
    cells += [_number(forced["kl"]), _percent(forced["agreement"])] if forced else ["", ""]
    return [*cells, _percent(way["same_share"]), _number(way["first_kl"]), nll]


def _against_gold(way: Mapping[str, Any]) -> list[str]:
    gold, of_full = way["gold"], way["of_full"]
    kept = "" if of_full is None or way["strategy"] == "full" else _percent(of_full)
    scores = [_percent(gold[name]) for name in ("exact_match", "f1", "jaccard", "rouge_l")]
    return [way["way"], _percent(gold["contains"]), kept, *scores]


def _number(interval: Mapping[str, float], form: str = ".3g") -> str:
    mean, low, high = (format(interval[name], form) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _kind(one: Mapping[str, Any]) -> str:
    return "" if one["exact_match"] is None else _percent(one["exact_match"])


def _percent(interval: Mapping[str, float]) -> str:
    mean, low, high = (100.0 * interval[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def _share(value: float) -> str:
    return f"{value:.1%}"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Quality over computed tokens with intervals, a curve for each strategy and a panel for each kind of question; the
    format follows the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ccjax"  # the same bytes for the same figures
    from matplotlib import pyplot

    full, *rest = result["ways"]
    kinds = list(full["kinds"]) or [""]
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(2.4 + 3.4 * len(kinds), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    has_states = len({way["state"] for way in rest}) > 1
    series: dict[str, list[Mapping[str, Any]]] = {}
    for way in rest:
        name = f"{way['series']}, {way['state']}" if has_states else way["series"]
        series.setdefault(name, []).append(way)
    for panel, kind in zip(panels[0], kinds, strict=True):
        panel.axhline(100.0 * _score(full, kind)["mean"], color="black", linewidth=1, label="full prefill")
        guess = full["kinds"][kind]["guess"] if kind else None
        if guess is not None:
            panel.axhline(100.0 * guess, color="grey", linewidth=1, linestyle=":", label="best guess")
        for number, (name, own) in enumerate(series.items()):
            scores = [_score(way, kind) for way in own]
            means = [100.0 * score["mean"] for score in scores]
            below = [100.0 * (score["mean"] - score["low"]) for score in scores]
            above = [100.0 * (score["high"] - score["mean"]) for score in scores]
            panel.errorbar(
                [100.0 * way["computed_share"] for way in own],
                means,
                yerr=(below, above),
                fmt="o-" if len(own) > 1 else "x",
                color=COLOURS[number % len(COLOURS)],
                markersize=3,
                linewidth=1,
                elinewidth=0.5,
                label=name,
            )
        panel.set(title=kind.replace("_", " "), xlabel="computed passage tokens, %", ylim=(0, 102))
    panels[0][0].set_ylabel("right answers, %" if full["gold"] else "answers of full prefill, %")
    panels[0][-1].legend(fontsize="x-small", loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _score(way: Mapping[str, Any], kind: str) -> Mapping[str, float]:
    if kind and way["kinds"][kind]["exact_match"] is not None:
        return way["kinds"][kind]["exact_match"]
    return way["gold"]["exact_match"] if way["gold"] else way["same_share"]
