"""Shows the figures of an evaluation: tables for the terminal and for a page, and the plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ccjax.evaluation.pages import Rows, interval, markdown_table, plot_file, rich_table

COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:cyan", "tab:olive")
_AGAINST_FULL = ("way", "computed", "TTFT", "answer's KL", "likeliest token", "same answer", "first-token KL")
_AGAINST_FULL += ("NLL of right answer",)
_AGAINST_GOLD = ("way", "right in text", "of full", "exact match", "F1", "Jaccard", "ROUGE-L")
_STATES = {
    "empty": "nothing was computed before",
    "alone": "passages computed alone",
    "prepared": "passages prepared",
    "seen": "an earlier prompt seen",
    "idle": "an earlier prompt seen, then idle time",
}


def rich_tables(result: Mapping[str, Any]) -> list[Table]:
    """The tables of an evaluation."""
    return [rich_table(head, rows, title) for title, head, rows in _tables(result)]


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
        lines += [f"## {name}", "", markdown_table(head, rows), ""]
    if picture is not None:
        lines += [f"![quality over the share of passage tokens that were computed]({picture.name})", ""]
    return "\n".join(lines) + "\n"


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
            if all(kind["guess"] is not None for kind in kinds.values()):
                rows.append(["best guess", "", *[_share(kind["guess"]) for kind in kinds.values()]])
            found.append((f"{title}: exact match by kind of question", ("way", "computed", *kinds), rows))
    return found


def _against_full(way: Mapping[str, Any]) -> list[str]:
    forced = way["forced"]
    cells = [way["way"], _share(way["computed_share"]), f"{way['ttft_s'] * 1e3:.0f} ms"]
    nll = f"{forced['nll']['mean']:.3f}" if forced and forced["nll"] else ""
    if way["strategy"] == "full":  # against itself
        return [*cells, "", "", "", "", nll]
    if forced and forced["nll"]:
        nll += f", {interval(forced['nll_difference'], '+.3f')}"
    cells += [interval(forced["kl"], ".3g"), _percent(forced["agreement"])] if forced else ["", ""]
    return [*cells, _percent(way["same_share"]), interval(way["first_kl"], ".3g"), nll]


def _against_gold(way: Mapping[str, Any]) -> list[str]:
    gold, of_full = way["gold"], way["of_full"]
    kept = "" if of_full is None or way["strategy"] == "full" else _percent(of_full)
    scores = [_percent(gold[name]) for name in ("exact_match", "f1", "jaccard", "rouge_l")]
    return [way["way"], _percent(gold["contains"]), kept, *scores]


def _kind(kind: Mapping[str, Any]) -> str:
    return "" if kind["exact_match"] is None else _percent(kind["exact_match"])


def _percent(found: Mapping[str, float]) -> str:
    return interval(found, ".1f", 100.0)


def _share(value: float) -> str:
    return f"{value:.1%}"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Quality over computed tokens with intervals, a curve for each strategy and a panel for each kind of question; the
    format follows the file's ending."""
    full, *rest = result["ways"]
    kinds = list(full["kinds"]) or [""]
    has_states = len({way["state"] for way in rest}) > 1
    series: dict[str, list[Mapping[str, Any]]] = {}
    for way in rest:
        name = f"{way['series']}, {way['state']}" if has_states else way["series"]
        series.setdefault(name, []).append(way)
    with plot_file(path, 1, len(kinds), (2.4 + 3.4 * len(kinds), 3.6), sharey=True) as panels:
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


def _score(way: Mapping[str, Any], kind: str) -> Mapping[str, float]:
    if kind and way["kinds"][kind]["exact_match"] is not None:
        return way["kinds"][kind]["exact_match"]
    return way["gold"]["exact_match"] if way["gold"] else way["same_share"]
