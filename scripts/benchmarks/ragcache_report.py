"""Report of the RAGCache benchmark: tables for the terminal and for a page, and summaries compared with the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ccjax.evaluation import pages
from ccjax.evaluation.pages import Rows, interval, markdown_table
from scripts.benchmarks.common import source
from scripts.benchmarks.ragcache_policies import POLICIES, REFERENCE

Figures = Mapping[str, Any]

PAPERS_HITS = {"gdsf": "1.02 to 1.32", "lru": "1.06 to 1.62", "lfu": "1.06 to 1.75"}
ORDER_TARGET = 1.2
SEARCH_TARGET, FULL_SEARCH_TARGET = 1.5, 4.0
DECISION_TARGET_MS = 1.0
_PARTS = {
    "plan": "match in the tree, plan",
    "uses": "uses",
    "insert": "insertion with eviction",
    "schedule": "scheduler",
    "total": "all of these",
    "window": "replanning the queue",
}


def show(result: Figures) -> None:
    """Prints every table with its summaries."""
    for _, title, tables, lines in _sections(result):
        for name, head, rows in tables:
            pages.show(head, rows, f"{title}: {name}", lines if name == tables[-1][0] else ())


def part(name: str) -> str:
    """The name of a part in the page's markers."""
    return f"bench.py ragcache, {name}"


def page_parts(result: Figures) -> dict[str, str]:
    """The measured parts of docs/ragcache.md by their names."""
    found = {}
    for name, _, tables, says in _sections(result):
        shown = [source(result, {} if name == "scheduling" else result["shapes"], result[name])]
        for title, head, rows in tables:
            shown += [f"{title}:", markdown_table(head, rows)]
        found[part(name)] = "\n\n".join([*shown, "\n".join(f"- {line}" for line in says)])
    return found


Section = tuple[str, str, Sequence[Rows], Sequence[str]]
"""Part, title, tables, summaries."""


def _sections(result: Figures) -> Iterator[Section]:
    if "policies" in result:
        yield _policies(result["policies"]["cases"])
    if "order" in result:
        yield _order(result["order"])
    if "speculation" in result:
        yield _speculation(result["speculation"])
    if "scheduling" in result:
        yield _scheduling(result["scheduling"])


def _policies(cases: Sequence[Figures]) -> Section:
    head = ("strategy", "budget", *POLICIES)
    tables = [
        ("Hit rate, %", head, _by_policy(cases, lambda case: f"{100 * case['hit_ratio']:.1f}")),
        ("Mean TTFT, ms (95 % interval)", head, _by_policy(cases, lambda case: interval(case["ttft_ms"], ".1f"))),
        ("TTFT over that with PGDSF, same requests", head, _by_policy(cases, _over_reference)),
    ]
    strategies = list(dict.fromkeys(case["strategy"] for case in cases))
    return "policies", "Eviction policies", tables, [line for name in strategies for line in policy_lines(cases, name)]


def _by_policy(cases: Sequence[Figures], cell: Any) -> list[list[str]]:
    keys = dict.fromkeys((case["strategy"], case["budget_share"]) for case in cases)
    found = {(case["strategy"], case["budget_share"], case["policy"]): case for case in cases}
    return [[key[0], _share(key[1]), *(cell(found[*key, policy]) for policy in POLICIES)] for key in keys]


def _over_reference(case: Figures) -> str:
    return interval(case["ttft_over_pgdsf"], ".3f")


def policy_lines(cases: Sequence[Figures], strategy: str) -> list[str]:
    """At how many budgets PGDSF has most hits, their ratios to the others', and significant differences in TTFT."""
    own = [case for case in cases if case["strategy"] == strategy]
    hits: dict[float, dict[str, int]] = {}
    for case in own:
        hits.setdefault(case["budget_share"], {})[case["policy"]] = case["hits"]
    most = sum(values[REFERENCE] == max(values.values()) for values in hits.values())
    lines = [f"{strategy}: no policy has more hits than PGDSF at {most} of {len(hits)} budgets."]
    spans, times = [], []
    for policy in POLICIES[1:]:
        ratios = [values[REFERENCE] / values[policy] for values in hits.values() if values[policy]]
        paper = f", paper {PAPERS_HITS[policy]}" if policy in PAPERS_HITS else ""
        if ratios:
            spans.append(f"{min(ratios):.2f} to {max(ratios):.2f} times those of {policy}{paper}")
        against = [case["ttft_over_pgdsf"] for case in own if case["policy"] == policy]
        higher, lower = sum(ratio["low"] > 1.0 for ratio in against), sum(ratio["high"] < 1.0 for ratio in against)
        times.append(f"{policy} higher at {higher}, lower at {lower}")
    if spans:
        lines.append(f"{strategy}: PGDSF's hits are {'; '.join(spans)}.")
    lines.append(f"{strategy}: budgets with a mean TTFT significantly different from PGDSF's: {'; '.join(times)}.")
    return lines


def _order(order: Figures) -> Section:
    head = ("workload", "strategy", "budget", "hits", "arrivals a second", "mean off", "mean on", "mean gain")
    head += ("of all rounds", "p99 off", "p99 on", "p99 gain")
    rows = []
    for case in order["cases"]:
        hits = f"{case['off']['hit_ratio']:.0%}"
        cells = [case["workload"], case["strategy"], _share(case["budget_share"]), hits, f"{case['rate']:.1f}"]
        for name in ("mean", "p99"):
            cells += [f"{case[way]['ttft_ms'][name]:.0f}" for way in ("off", "on")] + [f"{case[f'{name}_gain']:.2f}"]
            if name == "mean":
                cells.append(f"{min(case['mean_gains']):.2f}-{max(case['mean_gains']):.2f}")
        rows.append(cells)
    lines = [
        f"{workload}: {order_line([case for case in order['cases'] if case['workload'] == workload])}"
        for workload in dict.fromkeys(case["workload"] for case in order["cases"])
    ]
    return "order", "Cache-aware order", [("TTFT from arrival, ms", head, rows)], lines


def order_line(cases: Sequence[Figures]) -> str:
    """The range of gains in mean TTFT, and the number of runs that reach the target."""
    gains = [case["mean_gain"] for case in cases]
    reached = sum(gain >= ORDER_TARGET for gain in gains)
    return (
        f"Mean TTFT is {min(gains):.2f} to {max(gains):.2f} times lower with the order on (paper 1.2 to 2.1); at least "
        f"{ORDER_TARGET} times in {reached} of {len(gains)} runs."
    )


def _speculation(found: Figures) -> Section:
    head = ("searched", "off, ms", "on, ms", "gain", "known early", "right", "wrong a request", "TTFT off", "TTFT on")
    rows = [
        [
            _share(case["search_ratio"]),
            interval(case["search_ms"], ".1f"),
            interval(case["exposed_ms"], ".1f"),
            interval(case["gain"], ".2f"),
            f"{case['known_ms']:.1f} ms, {_share(case['known_early_share'])}",
            _share(case["right_share"]),
            f"{case['wrong_per_request']:.2f}",
            *(interval(case["ttft_ms"][way], ".0f") for way in ("off", "on")),
        ]
        for case in found["cases"]
    ]
    title = "Search time that no answer overlaps with (95 % interval)"
    says = speculation_lines(found["cases"])
    return "speculation", "Answers that begin during the search", [(title, head, rows)], says


def speculation_lines(cases: Sequence[Figures]) -> list[str]:
    """The reduction of the exposed search time compared with the targets."""
    gains = {case["search_ratio"]: case["gain"]["mean"] for case in cases if case["gain"] is not None}
    reached = sum(gain >= SEARCH_TARGET for gain in gains.values())
    lines = [
        f"The exposed search time is {min(gains.values()):.2f} to {max(gains.values()):.2f} times shorter (paper 1.5 "
        f"to 4.3); at least {SEARCH_TARGET} times at {reached} of {len(gains)} ratios."
    ]
    if 1.0 in gains:
        verdict = "reached" if gains[1.0] >= FULL_SEARCH_TARGET else "missed"
        lines.append(f"With all clusters, {gains[1.0]:.2f} times: the target of {FULL_SEARCH_TARGET:g} is {verdict}.")
    return lines


def _scheduling(found: Figures) -> Section:
    head = ("decision", "mean, ms", "p99, ms", "processor, mean ms")
    rows = [
        [_PARTS[case["part"]], *(f"{case[name]:.3f}" for name in ("mean_ms", "p99_ms", "mean_cpu_ms"))]
        for case in found["cases"]
    ]
    return "scheduling", "Time for decisions", [("Per request", head, rows)], [scheduling_line(found["cases"])]


def scheduling_line(cases: Sequence[Figures]) -> str:
    """Whether the decisions for a request stay below the bound."""
    (total,) = (case for case in cases if case["part"] == "total")
    verdict = "below" if total["mean_ms"] < DECISION_TARGET_MS else "not below"
    return (
        f"All decisions for a request take {total['mean_ms']:.3f} ms on average, p99 {total['p99_ms']:.3f} ms: on "
        f"average {verdict} {DECISION_TARGET_MS:g} ms (paper 0.872 to 0.906 ms)."
    )


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"
