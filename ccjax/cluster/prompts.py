"""Extracts what the router needs from a request: its passages as chunks with their lengths, and its conversation."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Sequence
from typing import Any

from ccjax.assembly import assemble
from ccjax.cluster.calls import Call
from ccjax.errors import RequestError
from ccjax.policy.routing import PromptSummary
from ccjax.retrieval import Retriever
from ccjax.server import ServerSettings, own_documents
from ccjax.server.body import parse_body
from ccjax.server.completions import CompletionBody
from ccjax.server.errors import ApiError
from ccjax.server.keys import salt_of
from ccjax.server.responses import ResponsesBody
from ccjax.server.schemas import ChatBody, Generation
from ccjax.text import PromptBuilder
from ccjax.types import Document

logger = logging.getLogger(__name__)

_BODIES: dict[bytes, type[ChatBody | CompletionBody | ResponsesBody]] = {
    b"/v1/chat/completions": ChatBody,
    b"/v1/completions": CompletionBody,
    b"/v1/responses": ResponsesBody,
}
_NO_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Summary of a request before it reaches a replica.

    Attributes:
      prompt: for the router.
      passages: retrieved for it; None if nothing was searched.
      timeout_s: after which its answer is useless; None for never.
    """

    prompt: PromptSummary = PromptSummary()
    passages: tuple[Document, ...] | None = None
    timeout_s: float | None = None


class PromptReader:
    """Reads requests. Thread-safe.

    Args:
      builder: of the replicas' model; None for one without tokenizer files, whose requests are not parsed.
      retriever: of the replicas' documents; None if they have none.
      tenant_salt: of the replicas' engines.
    """

    def __init__(
        self,
        builder: PromptBuilder | None,
        retriever: Retriever | None,
        settings: ServerSettings,
        *,
        tenant_salt: str = "",
    ) -> None:
        self._builder = builder
        self._tenant_salt = tenant_salt
        self._retriever = retriever
        self._settings = settings

    @property
    def documents(self) -> dict[str, Any] | None:
        """How much of the replicas' documents is searchable; None without any."""
        return None if self._retriever is None else own_documents.index_summary(self._retriever)

    def read(self, call: Call, tenant: str = "") -> Seen:
        """Summary of a request; empty for other calls and for invalid requests, which the replica rejects."""
        body_type = _BODIES.get(call.path) if call.method == "POST" else None
        if body_type is None:
            return Seen()
        seen = Seen()
        try:
            parsed = parse_body(body_type, call.body)
            body = parsed.as_chat() if isinstance(parsed, ResponsesBody) else parsed
            seen = Seen(timeout_s=self._timeout_s(body))
            if self._builder is None:
                return seen
            found = self._search(body)
            summary = self._summary(self._builder, body, found or body.own_documents() or (), tenant)
            return dataclasses.replace(seen, prompt=summary, passages=found)
        except (ApiError, RequestError):
            return seen

    def _timeout_s(self, body: Generation) -> float | None:
        timeout_s = body.timeout_s if body.timeout_s is not None else self._settings.request_timeout_s
        return timeout_s if timeout_s is not None and math.isfinite(timeout_s) and timeout_s > 0 else None

    def _search(self, body: Generation) -> tuple[Document, ...] | None:
        if self._retriever is None or not body.searches():
            return None
        found = own_documents.search(self._retriever, body, self._settings)
        return None if found is None else tuple(found)

    def _summary(
        self, builder: PromptBuilder, body: Generation, documents: Sequence[Document], tenant: str
    ) -> PromptSummary:
        salt = "" if body.cache_salt == self._tenant_salt else body.cache_salt or ""
        request = body.to_request(
            documents, reuse="bounded", timeout_s=None, request_id="routing", cache_salt=salt_of(salt, tenant)
        )
        prompt = assemble(request, builder, max_model_len=_NO_LIMIT, vocab_size=_NO_LIMIT)
        chunks = tuple((chunk.chunk_id, len(chunk.token_ids)) for chunk in prompt.passages)
        earlier = sum(len(segment.chunk.token_ids) for segment in prompt.segments if segment.role == "text")
        earlier += max(prompt.segments[-1].borders, default=0)  # the last message begins there
        other = prompt.num_tokens - sum(length for _, length in chunks) - earlier
        return PromptSummary(chunks, other, _conversation_id(body, request.cache_salt), earlier)


def _conversation_id(body: Generation, salt: str) -> str:
    """Identifies a tenant's conversation by what it began with; "" for none."""
    begin = body.conversation()
    text = f"{salt}\0{begin}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest() if begin else ""
