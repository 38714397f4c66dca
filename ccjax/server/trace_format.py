"""A request's trace as JSON: the text of each token, times counted from its arrival."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ccjax.engine import RequestTrace
from ccjax.requests import SegmentTrace
from ccjax.server.phases import phases
from ccjax.text import IncrementalDecoder, Tokenizer


def trace_json(
    trace: RequestTrace, tokenizer: Tokenizer | None, *, arrived_s: float, found_s: float, submitted_s: float
) -> dict[str, Any]:
    """The trace of a request for the API; all times in seconds since `arrived_s`.

    `phases` follow each other without gaps, from the arrival to the last token. `loads` and `layers` are the concurrent
    activities of the prefill. `full_prefill_ttft_s` estimates the time to first token of a full prefill, at the rate
    measured so far; null while there is none.

    Args:
      tokenizer: None gives tokens without text.
      arrived_s, found_s, submitted_s: `time.perf_counter` when the request arrived, its passages were found, and it was
        queued.
    """
    ends = (found_s, submitted_s, trace.started_s, trace.token_s[0], trace.token_s[-1])
    told = list(phases(0.0, *(end - arrived_s for end in ends)))
    (_, started_s, ttft_s), (_, _, total_s) = told[3:]
    spans = {
        kind: [
            {"layer": span.layer, "start_s": span.start_s - arrived_s, "end_s": span.end_s - arrived_s}
            for span in trace.spans
            if span.kind == kind
        ]
        for kind in ("load", "layer")
    }
    estimate_s = trace.full_prefill_s
    return {
        "ttft_s": ttft_s,
        "total_s": total_s,
        "full_prefill_ttft_s": None if estimate_s is None else started_s + estimate_s,
        "compiled": trace.has_new_sizes,
        "phases": [{"name": name, "start_s": start, "end_s": end} for name, start, end in told],
        "loads": spans["load"],
        "layers": spans["layer"],
        "num_layers": trace.num_layers,
        "token_s": [at_s - arrived_s for at_s in trace.token_s],
        "segments": [_segment(segment, tokenizer) for segment in trace.segments],
    }


def _segment(segment: SegmentTrace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    told = {field.name: getattr(segment, field.name) for field in dataclasses.fields(segment)}
    token_ids = told.pop("token_ids")
    return told | {"num_tokens": len(token_ids), "tokens": token_texts(token_ids, tokenizer)}


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """What each token adds to the text of a segment; joined they are that text.

    A token that ends in the middle of a character adds nothing, nor does one without text, such as a border between
    turns; the token that completes a character adds all of it.
    """
    if tokenizer is None:
        return [""] * len(token_ids)
    decoder = IncrementalDecoder(tokenizer)
    texts = [decoder.push(token_id) for token_id in token_ids]
    if texts:
        texts[-1] += decoder.flush()
    return texts
