"""The papers' experiments as tables, next to the papers' own figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ccjax.evaluation.pages import markdown_table
from scripts.simulation.paper import CRAFT_30, CRAFT_39, DEFAULT, FULL, NAIVE, PREFIX, RAGCACHE, SGLANG, VLLM, Row

_SATURATED = 5.0
"""A system is saturated if its mean TTFT is this many times that at the lowest rate (RAGCache's throughput)."""
Found = Mapping[str, Any]


def part(name: str) -> str:
    """The name of a figure, or of the `run`, in the page's markers."""
    return f"simulate.py, {name}"


def page_parts(found: Found, about: str) -> dict[str, str]:
    """The parts of docs/simulation.md by their names."""
    writers = {"craft_22": _craft_22, "craft_23a": _craft_23a, "craft_23bcd": _craft_23bcd}
    writers |= {"craft_24_25": _craft_24_25, "ragcache_15": _ragcache_15}
    return {part("run"): about, **{part(name): write(found[name]) for name, write in writers.items()}}


def by(rows: Sequence[Row], *keys: str) -> dict[tuple, dict[str, Row]]:
    """Rows by these keys, then by system."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["system"]] = row
    return found


def _mean(row: Row, key: str = "ttft_s") -> float:
    return row[key]["mean"]


def _ratio(value: float, other: float) -> str:
    return f"{value / other:.2f}" if other else ""


def _span(values: Iterable[float]) -> str:
    values = [value for value in values if math.isfinite(value)]
    return f"{min(values):.2f} to {max(values):.2f}" if values else "none"


def _is_saturated(row: Row, rows: Sequence[Row], *keys: str) -> bool:
    """Whether the system of a row is saturated, relative to the lowest rate of the rows that agree in `keys`."""
    own = [other for other in rows if all(other[key] == row[key] for key in ("system", *keys))]
    return _mean(row) > _SATURATED * _mean(min(own, key=lambda other: other["rate"]))


def _craft_22(rows: Sequence[Row]) -> str:
    lines = []
    for (model, load), group in by(rows, "model", "load").items():
        full = group[FULL.name]
        cells = [model, str(load)]
        for name in (DEFAULT.name, FULL.name, PREFIX.name, NAIVE.name, CRAFT_30.name):
            cells.append(f"{60 * group[name]['throughput']:.0f} / {_mean(group[name], 'latency_s'):.2f} s")
        for name in (DEFAULT.name, NAIVE.name, CRAFT_30.name):
            row = group[name]
            cells.append(
                f"{_ratio(row['throughput'], full['throughput'])} / "
                f"{_ratio(_mean(full, 'latency_s'), _mean(row, 'latency_s'))}"
            )
        lines.append(cells)
    head = ("model", "queries a minute", "default options", "full prefill", "prefix", "none recomputed", "30 %")
    head += ("gain, default", "gain, none", "gain, 30 %")
    return markdown_table(head, lines)


def _craft_23a(lengths: Sequence[Row]) -> str:
    rows = []
    for case in lengths:
        prefix, craft = case["ttft_s"][PREFIX.name], case["ttft_s"][CRAFT_39.name]
        rows.append((case["tokens"], str(case["requests"]), f"{prefix:.3f} s", f"{craft:.3f} s", _ratio(prefix, craft)))
    return markdown_table(("input tokens", "requests", "prefix", "Cache-Craft", "gain"), rows)


def _craft_23bcd(batches: Sequence[Row]) -> str:
    cases = [
        (
            f"{batch['panel']}: {batch['model']}, {batch['devices']} A100",
            f"{batch['tokens']:,} x {batch['batch']}",
            f"{batch['full_s']:.2f} s",
            f"{batch['prefix_s']:.2f} s",
            f"{batch['craft_s']:.2f} s",
            _ratio(batch["full_s"], batch["craft_s"]),
        )
        for batch in batches
    ]
    return markdown_table(("panel", "tokens x batch", "full", "prefix", "Cache-Craft", "gain over full"), cases)


def _craft_24_25(found: Found) -> str:
    prefix, craft = (next(row for row in found["systems"] if row["system"] == s.name) for s in (PREFIX, CRAFT_30))
    rows = [
        (
            row["system"],
            f"{_mean(row):.3f} s",
            f"{row['ttft_s']['p99']:.3f} s",
            f"{row['computed_share']:.1%}",
            f"{row['hit_ratio']:.1%}",
            f"{row['all_hit_share']:.1%}",
        )
        for row in (prefix, craft)
    ]
    variants = found["variants"]
    head = ("system", "mean TTFT", "p99", "tokens computed", "passages reused", "all five reused")
    return (
        f"{markdown_table(head, rows)}\n\n"
        f"p99 is {_ratio(prefix['ttft_s']['p99'], craft['ttft_s']['p99'])} times lower than with prefix caching (paper "
        f"3), {1 - craft['computed_share'] / prefix['computed_share']:.0%} fewer tokens are computed (paper 51 %). At "
        f"the end all {len(variants)} chunks (the paper's number, chosen by us) are stored in {sum(variants)} "
        f"variants: at most {variants[0]} of a chunk (paper 11), {variants[len(variants) // 2]} in the median."
    )


def _ragcache_15(rows: Sequence[Row]) -> str:
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
    throughput = [rates[RAGCACHE.name] / rates[VLLM.name] for rates in most.values()]
    head = ("model", "dataset", "rate", "vLLM", "SGLang", "RAGCache", "hits", "over vLLM", "over SGLang")
    return (
        f"{markdown_table(head, lines)}\n\n"
        f"Where neither is saturated RAGCache is {_span(gains[VLLM.name])} times faster than vLLM (paper 1.2 to 4) and "
        f"{_span(gains[SGLANG.name])} than SGLang (paper 1.1 to 3.5). The highest tested rate with a TTFT below "
        f"{_SATURATED:.0f} times that at the lowest rate is {_span(throughput)} times vLLM's (paper 1.3 to 2.1)."
    )
