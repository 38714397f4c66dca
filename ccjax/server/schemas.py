"""Request bodies: their fields and types, and their translation to engine requests.

Types are checked here, ranges by the engine's own `SamplingParams` and `Request`; `fields` has what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ccjax.engine import Request, SamplingParams
from ccjax.errors import RequestError
from ccjax.retrieval.filters import parse_filter
from ccjax.server.constraints import ConstraintFields
from ccjax.server.fields import CHAT, refuse_unsupported
from ccjax.server.sampling_fields import SAMPLING_NAMES, SamplingFields
from ccjax.server.settings import LARGEST_TOP_K
from ccjax.server.tool_use import ToolFields, ToolUse
from ccjax.text import CallForm, has_context
from ccjax.types import Document, Rendering, ReuseMode, document_from_mapping

LONGEST_SALT = 256
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _retrieval(value: Any) -> Any:
    is_known = not isinstance(value, dict) or value.keys() <= RetrievalIn.model_fields.keys()
    if isinstance(value, bool | dict | None) and is_known:
        return {} if value is True else value
    raise ValueError('wanted false, true or {"top_k": number, "filters": object}')


def _filters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        parse_filter(value)
    return value


class Body(BaseModel):
    """Base of all bodies: JSON types are never converted."""

    model_config = ConfigDict(strict=True, extra="allow")


class OwnBody(Body):
    """Base of bodies that no client of another API sends: names besides theirs are mistakes."""

    model_config = ConfigDict(extra="forbid")


class RetrievalIn(OwnBody):
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
    continuous_usage_stats: Literal[False] | None = Field(None, description="usage comes at the end")


class RenderingFields(Body):
    """How the chat template writes the messages."""

    add_generation_prompt: bool | None = Field(None, description="end with the beginning of an answer; by default true")
    continue_final_message: bool | None = Field(None, description="continue the last message, the assistant's")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the template")
    reasoning_effort: ReasoningEffort | None = Field(None, description="a variable of the template, too")

    def rendering(self) -> Rendering:
        """The fields as the engine takes them."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:  # as in vLLM
            variables = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
        return Rendering(begins, continues, variables | (self.chat_template_kwargs or {}))


class Generation(ConstraintFields, SamplingFields, Body):
    """Fields common to chats and plain completions.

    Attributes:
      path: of the endpoint.
    """

    path: ClassVar[str] = CHAT

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: list[DocumentIn] | None = Field(None, description="passages in prompt order; none are retrieved then")
    retrieval: Annotated[
        Annotated[RetrievalIn, Tag("RetrievalIn")] | Annotated[Literal[False] | None, Tag("[without]")],
        Discriminator(lambda value: "RetrievalIn" if isinstance(value, dict) else "[without]"),
        BeforeValidator(_retrieval, json_schema_input_type=RetrievalIn | bool | None),
    ] = Field(
        None,
        validation_alias=AliasChoices("retrieval", "retrieve"),
        description="search the server's documents; by default if no message brings passages",
    )
    reuse: str | None = Field(None, description="off, exact, bounded or fast")
    quality_target: float | None = Field(None, description="share of full prefill's answers that reuse is to keep")
    truncate: bool | None = Field(None, description="drop passages from the end instead of refusing a long prompt")
    truncate_prompt_tokens: int | None = Field(
        None, description="keep so many last tokens of the prompt; -1: what fits"
    )
    cache_salt: str | None = Field(
        None, max_length=LONGEST_SALT, description="KV cached under another salt is not reused"
    )
    priority: int | None = Field(None, description="lower is sooner; 0 is the default")
    user: str | None = Field(None, description="the user: concurrent users are served fairly")
    safety_identifier: str | None = Field(None, description="the same, if there is no user")
    timeout_s: float | None = Field(None, description="seconds after which the request ends with 504")
    trace: bool | None = Field(None, description="report token by token what was reused, and where the time went")

    def query(self) -> str | None:
        """The text to search passages by; None if the request has none."""
        raise NotImplementedError

    def earlier_query(self) -> str:
        """What was asked before `query`; "" for nothing."""
        return ""

    def conversation(self) -> str:
        """What the chat began with, the same in each of its turns; "" for no chat."""
        return ""

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

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None for none."""
        return None

    def parts(self) -> Sequence[Generation]:
        """Bodies with one prompt each."""
        return [self]

    def num_logprobs(self) -> int | None:
        """Number of alternatives to report for each token; None reports nothing."""
        raise NotImplementedError

    def answer_limit(self) -> int | None:
        """Longest answer in tokens; None continues to the end of the context."""
        raise NotImplementedError

    def argument_names(self) -> dict[str, str]:
        """Engine argument -> field of this body, if they differ."""
        flow = "user" if self.user else "safety_identifier"
        names = {"max_new_tokens": "max_tokens", "flow": flow} | SAMPLING_NAMES | self.constraint_names()
        return names | ({"prompt": "documents"} if self.documents else {})

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
        return documents_of(self.documents)

    def to_request(
        self,
        documents: Sequence[Document],
        *,
        reuse: ReuseMode,
        timeout_s: float | None,
        request_id: str,
        cache_salt: str = "",
        flow: str | None = None,
        call_form: CallForm = "hermes",
    ) -> Request:
        """The engine's request, with `documents` as passages; `reuse` and `timeout_s` are defaults if the body names
        none, `cache_salt` and `flow` always apply, and tools are called in `call_form`.

        Raises:
          RequestError: a value is out of range or not supported.
        """
        refuse_unsupported(self.model_extra, self.path)
        limit, use, constraint = self.answer_limit(), self.tool_use(), self.constraint()
        sampling = SamplingParams(
            max_new_tokens=limit,
            logprobs=self.num_logprobs(),
            constraint=constraint if use is None else use.constraint(call_form, constraint),
            **self.sampling_fields(),
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
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class ChatBody(ToolFields, RenderingFields, Generation):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def query(self) -> str | None:
        """Text of the last user message."""
        *_, last = ["", *self._user_texts()]
        return last if last.strip() else None

    def earlier_query(self) -> str:
        """Text of the user message before."""
        *_, before, _ = ["", "", *self._user_texts()]
        return before

    def conversation(self) -> str:
        """Text of the first user message."""
        return next(iter(self._user_texts()), "")

    def _user_texts(self) -> list[str]:
        return [_text_of(message) for message in self.messages if message.get("role") == "user"]

    def texts(self) -> Iterator[str]:
        """Of every message but the assistant's."""
        return (_text_of(message) for message in self.messages if message.get("role") != "assistant")

    def prompt_fields(self) -> dict[str, Any]:
        """The messages verbatim: the engine checks them."""
        use = self.tool_use()
        tools = () if use is None else use.tools
        return {"messages": self.messages, "tools": tools, "rendering": self.rendering()}

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None for none."""
        return self.checked_tool_use(has_constraint=bool(self.constraint_names()))

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
        names = {"prompt": "messages", "constraint": "tools"} | super().argument_names()
        if self.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        return names


class PinBody(OwnBody):
    """Body of PUT /v1/cache/pins/ID."""

    ttl_s: float = Field(3600.0, description="seconds that the pin lasts")
    host: bool = Field(False, description="also keep it in host memory, if it is there")


class WarmBody(OwnBody):
    """Body of POST /v1/cache/warm."""

    documents: list[DocumentIn] | None = Field(None, description="passages in the wording that requests will have")
    document_ids: list[str] | Literal["all"] | None = Field(None, description="documents of the server's own")
    system_prompt: str | None = Field(None, description="of later requests, if they have their own")
    at_once: bool = Field(False, description="also while requests run, instead of in idle time only")
    tenant: str | None = Field(None, description="tenant of the later requests, from the API key file")
    cache_salt: str | None = Field(None, max_length=LONGEST_SALT, description="of later requests")

    def own_documents(self) -> tuple[Document, ...]:
        """The passages in the body."""
        return documents_of(self.documents)


def documents_of(values: Sequence[DocumentIn] | None) -> tuple[Document, ...]:
    """The passages of a body.

    Raises:
      RequestError: one has a blank text.
    """
    return tuple(_document(number, value) for number, value in enumerate(values or ()))


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
