"""/tokenize and /detokenize, as vLLM has them: the ids of a text or a prompt, and the text of ids."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from ccjax.engine import Engine, Request
from ccjax.errors import RequestError
from ccjax.server.errors import field_names
from ccjax.server.fields import DETOKENIZE, TOKENIZE, refuse_unsupported
from ccjax.server.schemas import Body, DocumentIn, RenderingFields, documents_of
from ccjax.text import Tokenizer


class TokenizeBody(RenderingFields):
    """Body of /tokenize: a text, or messages with documents."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    documents: list[DocumentIn] | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="functions, as in chats")
    add_special_tokens: bool | None = Field(None, description="begin a text with that token; by default true")
    return_token_strs: bool | None = Field(None, description="also return the text of each token")


class DetokenizeBody(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


async def tokenize(engine: Engine, body: TokenizeBody) -> dict[str, Any]:
    """vLLM's response of /tokenize.

    Raises:
      ApiError, RequestError: a field is wrong; the error names it.
    """
    refuse_unsupported(body.model_extra, TOKENIZE)
    if body.messages is not None and body.add_special_tokens:
        raise RequestError("add_special_tokens", "wanted none beside messages, whose template writes them")
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt", "wanted exactly one of prompt and messages")
    tokenizer = _tokenizer(engine)
    if body.messages is None:
        assert body.prompt is not None
        if body.documents:
            raise RequestError("documents", "wanted none beside prompt, only beside messages")
        tokens = await asyncio.to_thread(_encode, tokenizer, body.prompt, body.add_special_tokens is not False)
    else:
        documents = documents_of(body.documents)
        request = Request(
            messages=body.messages, documents=documents, tools=body.tools or (), rendering=body.rendering()
        )
        with field_names({"prompt": "messages"}):
            prompt = await asyncio.to_thread(engine.assemble, request, answer=False)
        tokens = prompt.token_ids.tolist()
    texts = None
    if body.return_token_strs:
        texts = await asyncio.to_thread(lambda: [tokenizer.decode([token], skip_special=False) for token in tokens])
    return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": texts}


async def detokenize(engine: Engine, body: DetokenizeBody) -> dict[str, Any]:
    """vLLM's response of /detokenize; special tokens are shown by their names.

    Raises:
      RequestError: a token is outside the vocabulary.
    """
    refuse_unsupported(body.model_extra, DETOKENIZE)
    tokenizer, size = _tokenizer(engine), engine.model_config.vocab_size
    return {"prompt": await asyncio.to_thread(_decode, tokenizer, body.tokens, size)}


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise RequestError("model", "wanted a model with tokenizer files for text; this one takes token ids only")
    return engine.tokenizer


def _decode(tokenizer: Tokenizer, tokens: list[int], vocab_size: int) -> str:
    for place, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(f"tokens[{place}]", f"wanted a token from 0 to {vocab_size - 1}, got {token}")
    return tokenizer.decode(tokens, skip_special=False)


def _encode(tokenizer: Tokenizer, prompt: str, add_special_tokens: bool) -> list[int]:
    bos = [tokenizer.bos_id] if add_special_tokens and tokenizer.bos_id is not None else []
    return bos + tokenizer.encode(prompt, allow_special=False)
