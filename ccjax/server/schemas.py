"""Request bodies: their fields and types, and their translation to engine requests.

Types are checked here, ranges by the engine's own `SamplingParams` and `Request`. Unknown fields are ignored, as
OpenAI-compatible servers do; but a known field that would change the answer and is not supported is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ccjax.engine import MOST_ANSWERS, Request, SamplingParams
from ccjax.errors import RequestError
from ccjax.retrieval.filters import parse_filter
from ccjax.server.settings import LARGEST_TOP_K
from ccjax.text import has_context
from ccjax.types import Document, ReuseMode, document_from_mapping

LONGEST_SALT = 256

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (-1, 0),
    "min_p": (0,),
}
"""Unsupported fields of OpenAI's or vLLM's API, with the values besides null under which they have no effect."""


def _stop(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise ValueError("wanted a string or a list of strings")


def _retrieval(value: Any) -> Any:
    if isinstance(value, bool | dict | None):
        return {} if value is True else value
    raise ValueError('wanted false, true or {"top_k": number, "filters": object}')


def _filters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        parse_filter(value)
    return value


def _prompt(value: Any) -> Any:
    """One prompt: a text or token ids, possibly alone in a list, as OpenAI's clients may send it."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise ValueError("wanted one text, or one list of token ids")


class Body(BaseModel):
    """Base of all bodies: JSON types are never converted."""

    model_config = ConfigDict(strict=True, extra="allow")


class RetrievalIn(Body):
    """How to search the server's own documents."""

    top_k: int | None = Field(None, ge=1, le=LARGEST_TOP_K, description="passages to retrieve")
    filters: Annotated[dict[str, Any] | None, AfterValidator(_filters)] = Field(
        None, description="filter for the documents' metadata, in the format of OpenAI's file search"
    )


class DocumentIn(Body):
    """A passage sent by the client."""

    text: str
    id: str | int | None = None
    title: str | None = None
    version: str | int | None = None


class StreamOptions(Body):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None


class Generation(Body):
    """Fields common to chats and plain completions."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(None, description="0, the default, is greedy")
    top_p: float | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=str | list[str] | None)] = ()
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, description=f"answers to the prompt, at most {MOST_ANSWERS}; by default one")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: list[DocumentIn] | None = Field(None, description="passages in prompt order; none are retrieved then")
    retrieval: Annotated[
        RetrievalIn | Literal[False] | None,
        BeforeValidator(_retrieval, json_schema_input_type=RetrievalIn | bool | None),
    ] = Field(None, description="search the server's documents; by default if no message brings passages")
    reuse: str | None = Field(None, description="off, exact, bounded or fast")
    quality_target: float | None = Field(None, description="share of full prefill's answers that reuse is to keep")
    truncate: bool | None = Field(None, description="drop passages from the end instead of refusing a long prompt")
    cache_salt: str | None = Field(
        None, max_length=LONGEST_SALT, description="KV cached under another salt is not reused"
    )
    priority: int | None = Field(None, description="lower is sooner; 0 is the default")
    user: str | None = Field(None, description="the user: concurrent users are served fairly")
    safety_identifier: str | None = Field(None, description="the same, if there is no user")
    timeout_s: float | None = Field(None, description="seconds after which the request ends with 504")
    trace: bool | None = Field(None, description="report token by token what was reused, and where the time went")
    ignore_eos: bool | None = Field(None, description="continue after an end-of-text token, to the requested length")

    def query(self) -> str | None:
        """The text to search passages by; None if the request has none."""
        raise NotImplementedError

    def texts(self) -> Iterator[str]:
        """The texts that a client may have put retrieved context into."""
        raise NotImplementedError

    def searches(self) -> bool:
        """True if the server's own documents are to be searched: on request, or if the client brings no context."""
        if self.documents is not None or self.retrieval is False:
            return False
        return self.retrieval is not None or not any(has_context(text) for text in self.texts())

    def prompt_fields(self) -> dict[str, Any]:
        """The fields of the engine's `Request` that hold the question."""
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Number of alternatives to report for each token; None reports nothing."""
        raise NotImplementedError

    def answer_limit(self) -> int | None:
        """Longest answer in tokens; None continues to the end of the context."""
        raise NotImplementedError

    def argument_names(self) -> dict[str, str]:
        """Engine argument -> field of this body, if they differ."""
        flow = "user" if self.user else "safety_identifier"
        return {"max_new_tokens": "max_tokens", "flow": flow} | ({"prompt": "documents"} if self.documents else {})

    @property
    def flow(self) -> str:
        """The user named in the body; all requests without one count as one user."""
        return self.user or self.safety_identifier or ""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def own_documents(self) -> tuple[Document, ...] | None:
        """The passages in the body; None if it has no such field.

        Raises:
          RequestError: one has a blank text.
        """
        if self.documents is None:
            return None
        return tuple(_document(number, value) for number, value in enumerate(self.documents))

    def to_request(
        self,
        documents: Sequence[Document],
        *,
        reuse: ReuseMode,
        timeout_s: float | None,
        request_id: str,
        cache_salt: str = "",
        flow: str | None = None,
    ) -> Request:
        """The engine's request, with `documents` as passages; `reuse` and `timeout_s` are defaults if the body names
        none, `cache_salt` and `flow` always apply.

        Raises:
          RequestError: a value is out of range or not supported.
        """
        self._refuse_unsupported()
        limit = self.answer_limit()
        sampling = SamplingParams(
            max_new_tokens=limit,
            temperature=self.temperature if self.temperature is not None else 0.0,
            top_p=self.top_p if self.top_p is not None else 1.0,
            stop=self.stop,
            seed=None if self.seed is None else self.seed % 2**64,
            logprobs=self.num_logprobs(),
            ignore_eos=bool(self.ignore_eos),
            n=self.n if self.n is not None else 1,
        )
        return Request(
            **self.prompt_fields(),
            documents=documents,
            sampling=sampling,
            reuse=self.reuse or reuse,  # type: ignore[arg-type]  # checked by Request
            # A client without passages of its own did not choose the lengths of those that were found.
            truncate=self.truncate if self.truncate is not None else self.documents is None,
            request_id=request_id,
            priority=self.priority or 0,
            flow=self.flow if flow is None else flow,
            cache_salt=cache_salt,
            quality_target=self.quality_target,
            timeout_s=self.timeout_s if self.timeout_s is not None else timeout_s,
            trace=bool(self.trace),
        )

    def _refuse_unsupported(self) -> None:
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name)
            if neutral is None or value is None:
                continue
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
                shown = " or ".join(repr(other) for other in neutral)
                raise RequestError(name, f"not supported by this server: wanted {shown}, got {_short(value)}")


class ChatBody(Generation):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def query(self) -> str | None:
        """Text of the last user message."""
        texts = [_text_of(message) for message in self.messages if message.get("role") == "user"]
        return texts[-1] if texts and texts[-1].strip() else None

    def texts(self) -> Iterator[str]:
        """Of every message but the assistant's."""
        return (_text_of(message) for message in self.messages if message.get("role") != "assistant")

    def prompt_fields(self) -> dict[str, Any]:
        """The messages verbatim: the engine checks them."""
        return {"messages": self.messages}

    def num_logprobs(self) -> int | None:
        """`top_logprobs` if `logprobs` is on."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "wanted only together with logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def answer_limit(self) -> int | None:
        """`max_completion_tokens`, or its older name `max_tokens`."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def argument_names(self) -> dict[str, str]:
        """As `Generation`; the engine's "prompt" is this body's messages."""
        names = {"prompt": "messages"} | super().argument_names()
        if self.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        return names


class CompletionBody(Generation):
    """Body of /v1/completions."""

    prompt: Annotated[
        str | tuple[int, ...], BeforeValidator(_prompt, json_schema_input_type=str | list[str] | list[int])
    ]
    logprobs: int | None = Field(None, ge=0, le=20)

    def query(self) -> str | None:
        """The prompt, if it is a text."""
        return self.prompt if isinstance(self.prompt, str) and self.prompt.strip() else None

    def texts(self) -> Iterator[str]:
        """The prompt, if it is a text."""
        return iter([self.prompt] if isinstance(self.prompt, str) else [])

    def prompt_fields(self) -> dict[str, Any]:
        """A text, or a question of token ids behind an empty system prompt.

        Raises:
          RequestError: token ids together with documents.
        """
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        for name in ("documents", "retrieval"):
            if getattr(self, name):
                raise RequestError(name, "wanted none behind a prompt of token ids; send the prompt as text")
        return {"segments": ((), self.prompt)}

    def num_logprobs(self) -> int | None:
        """OpenAI's completions API has the number itself."""
        return self.logprobs

    def answer_limit(self) -> int | None:
        """`max_tokens`; its default is OpenAI's 16."""
        return self.max_tokens if self.max_tokens is not None else 16

    def argument_names(self) -> dict[str, str]:
        """As `Generation`; a prompt of token ids is the engine's second segment."""
        return super().argument_names() | {"segments[1]": "prompt"}


class PinBody(Body):
    """Body of PUT /v1/cache/pins/ID."""

    ttl_s: float = Field(3600.0, description="seconds that the pin lasts")
    host: bool = Field(False, description="also keep it in host memory, if it is there")


class WarmBody(Body):
    """Body of POST /v1/cache/warm."""

    documents: list[DocumentIn] | None = Field(None, description="passages in the wording that requests will have")
    document_ids: list[str] | Literal["all"] | None = Field(None, description="documents of the server's own")
    system_prompt: str | None = Field(None, description="of later requests, if they have their own")
    at_once: bool = Field(False, description="also while requests run, instead of in idle time only")
    tenant: str | None = Field(None, description="tenant of the later requests, from the API key file")
    cache_salt: str | None = Field(None, max_length=LONGEST_SALT, description="of later requests")

    def own_documents(self) -> tuple[Document, ...]:
        """The passages in the body."""
        return tuple(_document(number, value) for number, value in enumerate(self.documents or ()))


class TokenizeBody(Body):
    """Body of /tokenize: a text, or messages with documents, for which only the number of tokens is returned."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    documents: Annotated[list[DocumentIn] | None, WithJsonSchema({"type": "array"})] = None
    add_special_tokens: bool = True

    def own_documents(self) -> tuple[Document, ...]:
        """The passages in the body."""
        return tuple(_document(number, value) for number, value in enumerate(self.documents or ()))


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; "" if it has none."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _document(number: int, value: DocumentIn) -> Document:
    try:
        return document_from_mapping(value.model_dump(), argument=f"documents[{number}]")
    except ValueError as error:
        argument, _, message = str(error).partition(": ")
        raise RequestError(argument, message) from error


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
