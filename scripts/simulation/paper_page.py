"""The papers' experiments as tables, next to the papers' own figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ccjax.evaluation.pages import markdown_table
from scripts.simulation.paper import CRAFT_30, CRAFT_39, DEFAULT, FULL, NAIVE, PREFIX, RAGCACHE, SGLANG, VLLM, Row

_SATURATED = 5.0
"""A system is saturated if its mean TTFT is this many times that at the lowest rate (RAGCache's throughput)."""
HEADING = "## The papers' experiments"
Found = Mapping[str, Any]


def write(found: Found, path: Path, took_s: float, size: str) -> None:
    """Replaces the part of the page from `HEADING` on by the tables."""
    before = path.read_text("utf-8").partition(HEADING)[0] if path.exists() else "# The simulator\n\n"
    path.write_text(before + page(found, took_s, size), encoding="utf-8")


def page(found: Found, took_s: float, size: str) -> str:
    """The part from `HEADING` on."""
    parts = [
        HEADING,
        f"`make simulate-paper`, {size}, {took_s:.0f} s on a CPU. Hardware is from data sheets, loads and budgets from "
        "the papers. The workloads are random: popularity and lengths are our choice, to fit the papers' descriptions, "
        "and the A10G's efficiency is read off RAGCache's fig. 3. Beyond saturation TTFT grows with the length of a "
        "run, so only the order of systems is meaningful there.",
        *_craft_22(found["craft_22"]),
        *_craft_23(found["craft_23a"], found["craft_23bcd"]),
        *_craft_24(found["craft_24_25"]),
        *_ragcache_15(found["ragcache_15"]),
    ]
    return "\n\n".join(parts) + "\n"


def by(rows: Sequence[Row], *keys: str) -> dict[tuple, dict[str, Row]]:
    """Rows by these keys, then by system."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["system"]] = row
    return found


def _mean(row: Row, key: str = "ttft_s") -> float:
    return row[key]["mean"]


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else ""


def _span(values: Iterable[float]) -> str:
    values = [value for value in values if math.isfinite(value)]
    return f"{min(values):.2f} to {max(values):.2f}" if values else "none"


def _is_saturated(row: Row, rows: Sequence[Row], *keys: str) -> bool:
    """Whether the system of a row is saturated, relative to the lowest rate of the rows that agree in `keys`."""
    own = [one for one in rows if all(one[key] == row[key] for key in ("system", *keys))]
    return _mean(row) > _SATURATED * _mean(min(own, key=lambda one: one["rate"]))


def _craft_22(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (model, load), group in by(rows, "model", "load").items():
        full = group[FULL.name]
        cells = [model, str(load)]
        for name in (DEFAULT.name, FULL.name, PREFIX.name, NAIVE.name, CRAFT_30.name):
            cells.append(f"{60 * group[name]['throughput']:.0f} / {_mean(group[name], 'latency_s'):.2f} s")
        for name in (DEFAULT.name, NAIVE.name, CRAFT_30.name):
            one = group[name]
            cells.append(
                f"{_ratio(one['throughput'], full['throughput'])} / "
                f"{_ratio(_mean(full, 'latency_s'), _mean(one, 'latency_s'))}"
            )
        lines.append(cells)
    head = ("model", "queries a minute", "default options", "full prefill", "prefix", "none recomputed", "30 %")
    head += ("gain, default", "gain, none", "gain, 30 %")
    return [
        "### Cache-Craft fig. 22: throughput and response latency",
        "Answers a minute / mean latency; gains over full prefill, throughput / latency. The default options of ccjax "
        "come first: they recompute at most 15 %.",
        markdown_table(head, lines),
        "Paper, 8B at 240 and 70B at 120 a minute: 1.9 / 3.3 and 2.0 / 3.3 with nothing recomputed, 1.6 / 2.1 and 1.6 "
        "/ 2.0 with 30 %. As in the paper, reuse wins, by more at higher load; the sizes of the gains differ. Latency "
        "gains at full load grow with the length of the run, and show only that full prefill is overloaded.",
    ]


def _craft_23(lengths: Sequence[Row], batches: Sequence[Row]) -> list[str]:
    rows = []
    for one in lengths:
        prefix, craft = one["ttft_s"][PREFIX.name], one["ttft_s"][CRAFT_39.name]
        rows.append((one["tokens"], str(one["requests"]), f"{prefix:.3f} s", f"{craft:.3f} s", _ratio(prefix, craft)))
    cases = [
        (
            f"{one['panel']}: {one['model']}, {one['devices']} A100",
            f"{one['tokens']:,} x {one['batch']}",
            f"{one['full_s']:.2f} s",
            f"{one['prefix_s']:.2f} s",
            f"{one['craft_s']:.2f} s",
            _ratio(one["full_s"], one["craft_s"]),
        )
        for one in batches
    ]
    return [
        "### Cache-Craft fig. 23: TTFT by length, model and batch",
        "a: requests far apart, 39 % of each passage recomputed behind another prefix, against prefix caching.",
        markdown_table(("input tokens", "requests", "prefix", "Cache-Craft", "gain"), rows),
        "Paper: about 2.5 on average, at 18 % of tokens behind exact prefixes.",
        "b to d: a batch at 25 % recomputed (60 % cached for prefix caching, as in the paper); costs alone.",
        markdown_table(("panel", "tokens x batch", "full", "prefix", "Cache-Craft", "gain over full"), cases),
        "Paper: 1.6 (8B) and 2.3 (70B) in b, 1.7 at 16,000 tokens in c. Ours are well above: a roofline gives close "
        "to 1 / 0.25, since it has only the products; the paper does not say what its implementation adds.",
    ]


def _craft_24(found: Found) -> list[str]:
    prefix, craft = (next(one for one in found["systems"] if one["system"] == s.name) for s in (PREFIX, CRAFT_30))
    rows = [
        (
            one["system"],
            f"{_mean(one):.3f} s",
            f"{one['ttft_s']['p99']:.3f} s",
            f"{one['computed_share']:.1%}",
            f"{one['hit_ratio']:.1%}",
            f"{one['all_hit_share']:.1%}",
        )
        for one in (prefix, craft)
    ]
    variants = found["variants"]
    return [
        "### Cache-Craft fig. 24 and 25: a trace, and what it leaves in the store",
        markdown_table(("system", "mean TTFT", "p99", "tokens computed", "passages reused", "all five reused"), rows),
        f"p99 is {_ratio(prefix['ttft_s']['p99'], craft['ttft_s']['p99'])} times lower than with prefix caching (paper "
        f"3), {1 - craft['computed_share'] / prefix['computed_share']:.0%} fewer tokens are computed (paper 51 %). At "
        f"the end all {len(variants)} chunks (the paper's number, chosen by us) are stored in {sum(variants)} "
        f"variants: at most {variants[0]} of a chunk (paper 11), {variants[len(variants) // 2]} in the median.",
    ]


def _ragcache_15(rows: Sequence[Row]) -> list[str]:
    lines = []
    gains: dict[str, list[float]] = {VLLM.name: [], SGLANG.name: []}
    most: dict[tuple, dict[str, float]] = {}
    for (model, dataset, rate), group in by(rows, "model", "dataset", "rate").items():
        own = _mean(group[RAGCACHE.name])
        cells = [model, dataset, str(rate)]
        cells += [f"{_mean(group[name]):.2f} s" for name in (VLLM.name, SGLANG.name, RAGCACHE.name)]
        cells.append(f"{group[RAGCACHE.name]['hit_ratio']:.0%}")
        is_free = {name: not _is_saturated(row, rows, "model", "dataset") for name, row in group.items()}
        for name, found in gains.items():
            cells.append(_ratio(_mean(group[name]), own))
            if is_free[name] and is_free[RAGCACHE.name]:
                found.append(_mean(group[name]) / own)
        lines.append(cells)
        highest = most.setdefault((model, dataset), {})
        highest |= {name: max(highest.get(name, 0.0), rate) for name, free in is_free.items() if free}
    throughput = [one[RAGCACHE.name] / one[VLLM.name] for one in most.values()]
    head = ("model", "dataset", "rate", "vLLM", "SGLang", "RAGCache", "hits", "over vLLM", "over SGLang")
    return [
        "### RAGCache fig. 15: mean TTFT by rate",
        markdown_table(head, lines),
        f"Where neither is saturated RAGCache is {_span(gains[VLLM.name])} times faster than vLLM (paper 1.2 to 4) and "
        f"{_span(gains[SGLANG.name])} than SGLang (paper 1.1 to 3.5). The highest tested rate with a TTFT below "
        f"{_SATURATED:.0f} times that at the lowest rate is {_span(throughput)} times vLLM's (paper 1.3 to 2.1). "
        "Llama2-7B's KV takes four times the bytes, so it has fewer hits and less gain, as in the paper.",
    ]
