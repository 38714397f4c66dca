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
from typing import Any

from ccjax.cache.documents.warming import Warming
from ccjax.cache.prefill_planner import PrefillPlanner
from ccjax.cache.variants import VariantIndex
from ccjax.errors import RequestError
from ccjax.policy.capture import make_variant_id
from ccjax.policy.settings import PlannerSettings
from ccjax.prompts import Prompt, chunk_id, tenant_of
from ccjax.types import Chunk, Document, ReuseMode, VariantId

_VERSION = 2
_TENANT = re.compile(r"([0-9a-f]{32})?")
_FROM_DOCUMENT = ("document_id", "version", "title", "source_id")


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Chunks to compute one behind the other and to store.

    Attributes:
      chunks: in prompt order, the system prompt first if there is one.
    """

    chunks: tuple[Chunk, ...]
    has_system: bool

    @property
    def key(self) -> VariantId:
        """The id of the last chunk's variant; equal for all requests that need it."""
        *before, last = (chunk.chunk_id for chunk in self.chunks)
        return make_variant_id(last, before, "exact")

    def encode(self) -> bytes:
        """JSON that `decode` reads."""
        chunks = [
            {"token_ids": list(chunk.token_ids)} | {name: getattr(chunk, name) for name in _FROM_DOCUMENT}
            for chunk in self.chunks
        ]
        tenant = tenant_of(self.chunks[0].chunk_id) if self.chunks else ""
        value = {"version": _VERSION, "has_system": self.has_system, "tenant": tenant, "chunks": chunks}
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
            chunks = tuple(_chunk(chunk, value["tenant"]) for chunk in value["chunks"])
            return PrefillOrder(chunks, value["has_system"] is True)
        except (KeyError, TypeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"order: malformed: {error!r}") from error

    def warming(self, *, max_model_len: int, vocab_size: int) -> Warming:
        """A warming that computes the order's passages, each behind those before it.

        Raises:
          RequestError: the order does not fit this model.
        """
        passages = self.chunks[self.has_system :]
        if not passages or not all(chunk.token_ids for chunk in self.chunks):
            raise RequestError("order", "wanted at least one passage, and no empty chunk")
        num_tokens = sum(len(chunk.token_ids) for chunk in self.chunks)
        if num_tokens >= max_model_len:
            raise RequestError("order", f"wanted less than {max_model_len} tokens (max_model_len), got {num_tokens}")
        if not all(0 <= token < vocab_size for chunk in self.chunks for token in chunk.token_ids):
            raise RequestError("order", f"wanted token ids from 0 to {vocab_size - 1}")
        ends = range(int(self.has_system) + 1, len(self.chunks) + 1)
        # One token in place of a question, which every prefill ends with.
        prompts = [Prompt(self.chunks[:end], self.has_system, self.chunks[end - 1].token_ids[-1:], 1) for end in ends]
        return Warming([_document(chunk) for chunk in passages], [(prompt,) for prompt in prompts])


def order_for(
    planner: PrefillPlanner, variants: VariantIndex, prompt: Prompt, mode: ReuseMode, settings: PlannerSettings
) -> PrefillOrder | None:
    """The passages that a request would have to compute if it ran now, None if there are none; may be called beside a
    running prefill.

    The order has the passages up to the last missing one, in prompt order (the paper's group of k documents), whatever
    the mode: behind its own prefix a passage is reused unchanged, while one computed behind the system prompt alone has
    the highest CFO behind other passages (CacheCraft eq. 12 with beta' = 0).
    """
    if mode == "off":
        return None
    plan = planner.plan(prompt, mode, planner.usable(prompt, known=variants.peek), settings)
    first = int(prompt.has_system)
    missing = [index for index in range(first, len(prompt.chunks)) if plan.segments[index].action == "compute"]
    return PrefillOrder(prompt.chunks[: missing[-1] + 1], prompt.has_system) if missing else None


def _document(chunk: Chunk) -> Document:
    return Document("", chunk.document_id, chunk.title, chunk.version, source_id=chunk.source_id)


def _chunk(value: dict[str, Any], tenant: str) -> Chunk:
    token_ids: Sequence[Any] = value["token_ids"]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in token_ids):
        raise ValueError("order: wanted token ids that are integers")
    texts = {name: value[name] for name in _FROM_DOCUMENT}
    if not all(text is None or isinstance(text, str) for text in texts.values()):
        raise ValueError("order: wanted texts")
    return Chunk(chunk_id(token_ids, tenant), tuple(token_ids), **texts)
