"""Results of a simulation run: times by request, tokens by origin."""

from __future__ import annotations

from typing import Any

import numpy as np

from ccjax.store.tickets import LoadTicket
from ccjax.store.usage import DEVICE, DISK, HOST
from scripts.simulation.cache import Planned
from scripts.simulation.workload import Workload

TIERS = (DEVICE, HOST, DISK)


class SimulationResults:
    """Figures of each request, in the order of arrival.

    Attributes:
      ttft_s, latency_s: [n] from arrival to the first and to the last token; NaN until then, and if refused.
      computed, recomputed, prompt: [n] tokens that ran through the model, those among them that belong to reused
        passages, and all tokens of the prompt.
      hits, documents: [n] reused passages, and all passages.
      tier_tokens: tier -> [n] tokens of reused passages from it, including recomputed ones.
      replica: [n] the replica that answered.
    """

    def __init__(self, num_requests: int) -> None:
        self.ttft_s = np.full(num_requests, np.nan)
        self.latency_s = np.full(num_requests, np.nan)
        self.computed, self.recomputed, self.prompt, self.hits, self.documents, self.replica = (
            np.zeros(num_requests, np.int32) for _ in range(6)
        )
        self.tier_tokens = {tier: np.zeros(num_requests, np.int32) for tier in TIERS}
        self.num_refused = self.num_preempted = self.num_packs = self.num_decode_steps = 0
        self.busy_s = 0.0
        self.end_s = 0.0

    def note_prefill(self, number: int, planned: Planned, ticket: LoadTicket) -> None:
        """Records that a request has its first token."""
        self.computed[number] = planned.computed
        self.recomputed[number] = planned.recomputed
        self.prompt[number] = planned.num_tokens
        self.hits[number] = planned.num_hits
        self.documents[number] = planned.num_documents
        if ticket.tiers:
            for segment in planned.plan.segments:
                if segment.variant_id is not None and segment.role == "document":
                    tier = ticket.tiers.get(segment.variant_id)
                    if tier is not None:
                        self.tier_tokens[tier][number] += segment.num_tokens

    def figures(self, workload: Workload, *, warmup: int = 0) -> dict[str, Any]:
        """Plain JSON values over the requests after the first `warmup`.

        Throughput counts answers from the end of the first counted one to the end of the last: under overload this is
        the capacity of the replicas.
        """
        counted = slice(warmup, None)
        ttft, latency = self.ttft_s[counted], self.latency_s[counted]
        done = ~np.isnan(latency)
        prompt = int(self.prompt[counted].sum())
        documents = int(self.documents[counted].sum())
        ends = (workload.arrival_s[counted] + latency)[done]
        seconds = float(np.ptp(ends)) if len(ends) else 0.0
        reused = {tier: int(tokens[counted].sum()) for tier, tokens in self.tier_tokens.items()}
        return {
            "requests": len(ttft),
            "answered": int(done.sum()),
            "refused": self.num_refused,
            "preempted": self.num_preempted,
            "rate": (len(ttft) - 1) / span if (span := float(np.ptp(workload.arrival_s[counted]))) else None,
            "ttft_s": _spread(ttft),
            "latency_s": _spread(latency),
            "throughput": (len(ends) - 1) / seconds if seconds else None,
            "tokens": {
                "prompt": prompt,
                "computed": int(self.computed[counted].sum()),
                "recomputed": int(self.recomputed[counted].sum()),
                "reused_by_tier": reused,
            },
            "computed_share": int(self.computed[counted].sum()) / prompt if prompt else None,
            "hit_ratio": int(self.hits[counted].sum()) / documents if documents else None,
            "tier_share": {tier: tokens / prompt if prompt else None for tier, tokens in reused.items()},
            "packs": self.num_packs,
            "decode_steps": self.num_decode_steps,
            "busy_share": self.busy_s / self.end_s if self.end_s else None,
            "virtual_s": self.end_s,
        }


def _spread(seconds: np.ndarray) -> dict[str, float] | None:
    found = seconds[~np.isnan(seconds)]
    if not len(found):
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(found, (50, 90, 99)))
    return {"mean": float(found.mean()), "p50": p50, "p90": p90, "p99": p99}
