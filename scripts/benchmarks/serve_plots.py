"""Plots of the serving benchmark: TTFT and throughput over the request rate, and how far apart tokens come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.serve_client import RequestRecord
from scripts.benchmarks.serve_figures import itl_s

COLOURS = {"full": "tab:red", "prefix": "tab:orange", "cachecraft": "tab:blue"}


def plot(
    cases: Sequence[tuple[Mapping[str, Any], Sequence[RequestRecord]]],
    comparison: Mapping[str, Any] | None,
    folder: Path,
) -> None:
    """Writes rates.svg and itl.svg to `folder`, which is made if need be.

    Args:
      cases: row and records of every run.
      comparison: ITLs are drawn at its rate, else at the lowest one.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ccjax"  # the same bytes for the same figures
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    opened = sorted((case for case in cases if case[0]["rate"] is not None), key=lambda case: case[0]["rate"])
    strategies = list(dict.fromkeys(row["strategy"] for row, _ in cases))
    colours = {name: COLOURS.get(name, f"C{number}") for number, name in enumerate(strategies)}

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name in strategies:
        rows = [row for row, _ in opened if row["strategy"] == name and row["completed"]]
        rates = [row["rate"] for row in rows]
        for key, style in (("p50", "o--"), ("p99", "o-")):
            times = [row["ttft_ms"][key] / 1e3 for row in rows]
            left.plot(rates, times, style, color=colours[name], label=f"{name}, {key}")
        right.plot(rates, [row["request_throughput"] for row in rows], "o-", color=colours[name], label=name)
    ends = [opened[0][0]["rate"], opened[-1][0]["rate"]] if opened else [0.0, 1.0]
    right.plot(ends, ends, ":", color="grey", label="as many as arrive")
    left.set(xlabel="requests a second", ylabel="TTFT, s", yscale="log")
    right.set(xlabel="requests a second", ylabel="answers a second")
    for panel in (left, right):
        panel.legend(fontsize="small")
    _save(figure, folder / "rates.svg")

    figure, panel = pyplot.subplots(figsize=(5.5, 4), layout="constrained")
    rate = comparison["rate"] if comparison is not None else ends[0]
    for row, records in opened:
        gaps = np.sort([gap * 1e3 for record in records if record.status == "ok" for gap in itl_s(record)])
        if row["rate"] == rate and row["load"] == "open" and gaps.size:
            panel.step(
                gaps,
                np.arange(1, gaps.size + 1) / gaps.size,
                color=colours[row["strategy"]],
                where="post",
                label=row["strategy"],
            )
    panel.set(xlabel="time between tokens (ITL), ms", ylabel="share", xscale="log", ylim=(0, 1.02))
    panel.set_title(f"{rate:.3g} requests a second", fontsize="medium")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small", loc="lower right")
    _save(figure, folder / "itl.svg")
    pyplot.close("all")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
