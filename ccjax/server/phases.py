"""Phases of a request, from its arrival to its last token."""

from __future__ import annotations

from collections.abc import Iterator

PHASES = ("retrieval", "preparation", "queue", "prefill", "decode")
"""They follow each other without gaps."""


def phases(*borders_s: float | None) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of each finished phase.

    Args:
      borders_s: the arrival and the end of each phase, None from the first unfinished one on. An answer that began
        during the search (RAGCache sec. 5.3) may have left the queue before it was submitted: overlaps count to the
        earlier phase.
    """
    latest_s = None
    for name, border_s in zip(("", *PHASES), borders_s, strict=True):
        if border_s is None:
            return
        if latest_s is not None:
            yield name, latest_s, max(latest_s, border_s)
        latest_s = border_s if latest_s is None else max(latest_s, border_s)
