"""What a queued request will have to compute, as an order that any process on the store may execute: Shared RAG-DCache
sec. III-B, the KV Cache Generator.

An order is a hint. It names chunks and the chunks before them; whether they are still missing, or being computed by
another process, is checked when it is executed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, get_args

from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.variants import VariantIndex
from ccjax.cache.warming.passages import Warming
from ccjax.errors import RequestError
from ccjax.policy.capture import make_variant_id
from ccjax.policy.contract import ReuseContract
from ccjax.prompts import Prompt, chunk_id, tenant_of
from ccjax.types import REUSED_ANYWHERE, Chunk, Document, Segment, SegmentRole, VariantId

_VERSION = 3
_TENANT = re.compile(r"([0-9a-f]{32})?")
_FROM_DOCUMENT = ("document_id", "version", "title", "source_id")


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Segments to compute one behind the other and to store, in prompt order."""

    segments: tuple[Segment, ...]

    @property
    def key(self) -> VariantId:
        """The id of the last chunk's variant; equal for all requests that need it."""
        *before, last = (segment.chunk.chunk_id for segment in self.segments)
        return make_variant_id(last, before, "exact")

    def encode(self) -> bytes:
        """JSON that `decode` reads."""
        segments = [
            {"role": segment.role, "token_ids": list(segment.chunk.token_ids)}
            | {name: getattr(segment.chunk, name) for name in _FROM_DOCUMENT}
            for segment in self.segments
        ]
        tenant = tenant_of(self.segments[0].chunk.chunk_id) if self.segments else ""
        value = {"version": _VERSION, "tenant": tenant, "segments": segments}
        return json.dumps(value).encode()

    @staticmethod
    def decode(raw: bytes) -> PrefillOrder:
        """Reads what `encode` returned.

        Raises:
          ValueError: not an order, or one of another version of the format.
        """
        try:
            value = json.loads(raw)
            if value["version"] != _VERSION:
                raise ValueError(f"order: wanted version {_VERSION}, got {value['version']!r}")
            if not isinstance(value["tenant"], str) or not _TENANT.fullmatch(value["tenant"]):
                raise ValueError(f"order: wanted a tenant's tag or none, got {value['tenant']!r:.80}")
            return PrefillOrder(tuple(_segment(segment, value["tenant"]) for segment in value["segments"]))
        except (KeyError, TypeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"order: malformed: {error!r}") from error

    def warming(self, *, max_model_len: int, vocab_size: int) -> Warming:
        """A warming that computes the order's passages, each behind those before it.

        Raises:
          RequestError: the order does not fit this model.
        """
        chunks = [segment.chunk for segment in self.segments]
        ends = [end for end, segment in enumerate(self.segments, 1) if segment.role in REUSED_ANYWHERE]
        if not ends or not all(chunk.token_ids for chunk in chunks):
            raise RequestError("order", "wanted at least one passage, and no empty chunk")
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if num_tokens >= max_model_len:
            raise RequestError("order", f"wanted less than {max_model_len} tokens (max_model_len), got {num_tokens}")
        if not all(0 <= token < vocab_size for chunk in chunks for token in chunk.token_ids):
            raise RequestError("order", f"wanted token ids from 0 to {vocab_size - 1}")
        prompts = [(Prompt.of_chunks(self.segments[:end]),) for end in ends]
        return Warming([_document(chunks[end - 1]) for end in ends], prompts)


def order_for(
    planner: PrefillPlanner, variants: VariantIndex, prompt: Prompt, contract: ReuseContract
) -> PrefillOrder | None:
    """The passages that a request would have to compute if it ran now, None if there are none; may be called beside a
    running prefill.

    The order has the passages up to the last missing one, in prompt order (the paper's group of k documents), whatever
    the mode: behind its own prefix a passage is reused unchanged, while one computed behind the system prompt alone has
    the highest CFO behind other passages (CacheCraft eq. 12 with beta' = 0).
    """
    if contract.mode == "off":
        return None
    plan = planner.plan(prompt, contract.mode, planner.usable(prompt, known=variants.peek), contract.settings)
    missing = [
        index
        for index, segment in enumerate(plan.segments)
        if segment.role in REUSED_ANYWHERE and segment.action == "compute"
    ]
    return PrefillOrder(prompt.segments[: missing[-1] + 1]) if missing else None


def _document(chunk: Chunk) -> Document:
    return Document("", chunk.document_id, chunk.title, chunk.version, source_id=chunk.source_id)


def _segment(value: dict[str, Any], tenant: str) -> Segment:
    token_ids: Sequence[Any] = value["token_ids"]
    if value["role"] not in get_args(SegmentRole):
        raise ValueError(f"order: wanted a role of a cached segment, got {value['role']!r:.80}")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in token_ids):
        raise ValueError("order: wanted token ids that are integers")
    texts = {name: value[name] for name in _FROM_DOCUMENT}
    if not all(text is None or isinstance(text, str) for text in texts.values()):
        raise ValueError("order: wanted texts")
    return Segment(value["role"], Chunk(chunk_id(token_ids, tenant), tuple(token_ids), **texts))
