"""Input and output of the engine: requests, responses, stream deltas and traces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ccjax.errors import RequestError
from ccjax.sampling import SamplingParams
from ccjax.types import (
    LONGEST_ID,
    REUSE_MODES,
    ComputeCause,
    Document,
    Rendering,
    ReuseMode,
    ReuseReport,
    SegmentAction,
    SegmentRole,
    document_from_mapping,
)

FinishReason = Literal["stop", "length"]
SpanKind = Literal["load", "layer"]
MOST_PRIORITY = 1000
"""Priorities range from minus this to this. The bound prevents clients from outbidding each other without end."""
LONGEST_FLOW = 256


@dataclasses.dataclass(frozen=True)
class Request:
    """One question with its passages. Exactly one of `messages`, `prompt` and `segments` is set.

    Attributes:
      messages: chat turns `{"role", "content"}`, also with `tool_calls` or of role "tool", as in OpenAI's API; passages
        are inserted at the start of the first user turn.
      tools: definitions of the tools that a chat may call, as in OpenAI's API.
      prompt: plain text without chat template; passages are inserted before it.
      segments: for callers that tokenize themselves: lists of token ids (the system prompt, which may be empty,
        passages, the question), or pairs of a role (`SegmentRole`) and such a list, in any order, with a question or
        text at the end.
      documents: passages in prompt order, each a unit of caching; mappings are converted. None with `segments`.
      truncate: drop passages from the end until the prompt fits, instead of rejecting the request.
      priority: lower numbers are served first, as in vLLM; requests of higher numbers wait and may be preempted.
      flow: the client; requests of one priority are scheduled fairly between flows, by computed tokens.
      quality_target: share of full prefill's answers to keep, 0 to 1, if reuse was calibrated
        (`ccjax.policy.contract`); None for the calibration's own.
      timeout_s: seconds from `Engine.submit` after which the request, in whatever state, ends with DeadlineError; None
        for no limit.
      cache_salt: requests with different salts never share chunks, in any tier. "" is the salt of requests that set
        none.
      rendering: how the chat template writes `messages`.
      truncate_prompt_tokens: keep so many last tokens of the prompt; -1 for as many as fit with the answer. None keeps
        all.
      trace: include in the response what was reused, token by token, and where the time was spent.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    segments: Sequence[Sequence[int] | tuple[SegmentRole, Sequence[int]]] | None = None
    documents: Sequence[Document] = ()
    sampling: SamplingParams = SamplingParams()
    reuse: ReuseMode = "bounded"
    truncate: bool = False
    request_id: str = ""
    priority: int = 0
    flow: str = ""
    quality_target: float | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    trace: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    rendering: Rendering = Rendering()
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        kept = self.truncate_prompt_tokens
        if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or not (kept > 0 or kept == -1)):
            raise RequestError("truncate_prompt_tokens", f"wanted a positive number or -1, got {kept!r:.80}")
        if self.tools and self.messages is None:
            raise RequestError("tools", "wanted none without messages")
        if not isinstance(self.cache_salt, str):
            raise RequestError("cache_salt", f"wanted a string, got {type(self.cache_salt).__name__}")
        if sum(value is not None for value in (self.messages, self.prompt, self.segments)) != 1:
            raise RequestError("messages", "wanted exactly one of messages, prompt and segments")
        object.__setattr__(self, "documents", documents_from(self.documents))
        if self.documents and self.segments is not None:
            raise RequestError("documents", f"wanted none with segments, which have them, got {len(self.documents)}")
        if self.reuse not in REUSE_MODES:
            raise RequestError("reuse", f"wanted one of {REUSE_MODES}, got {self.reuse!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > MOST_PRIORITY:
            message = f"wanted an integer from -{MOST_PRIORITY} to {MOST_PRIORITY}, got {self.priority!r}"
            raise RequestError("priority", message)
        if not isinstance(self.flow, str) or len(self.flow) > LONGEST_FLOW:
            raise RequestError("flow", f"wanted a string of at most {LONGEST_FLOW} characters, got {self.flow!r:.80}")
        if not isinstance(self.trace, bool):
            raise RequestError("trace", f"wanted true or false, got {self.trace!r}")
        if self.timeout_s is not None and not (_is_number(self.timeout_s) and 0.0 < self.timeout_s < math.inf):
            raise RequestError("timeout_s", f"wanted a positive number of seconds, got {self.timeout_s!r}")
        target = self.quality_target
        if target is not None and not (_is_number(target) and 0.0 <= target <= 1.0):
            raise RequestError("quality_target", f"wanted a number from 0 to 1, got {target!r}")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability, and the likeliest ones (token id, bytes, log-probability).

    `token` are the bytes that the token stands for, which may be a part of a character; a special token's are its name.
    `rank` is known of the tokens of a prompt: 1 for the likeliest one. `is_shown` is false for special tokens that are
    left out of the text.
    """

    token_id: int
    token: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    rank: int | None = None
    is_shown: bool = True

    @property
    def text(self) -> str:
        """The bytes as text; what is not UTF-8 becomes U+FFFD."""
        return self.token.decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the answers to a prompt; the fields are those of `Response`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    first_logits: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The load or the computation of one layer, from `start_s` to `end_s` of `time.perf_counter`."""

    kind: SpanKind
    layer: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentTrace:
    """One segment of the prompt; fields shared with `DocumentReuse` have the same meaning, also for the question.

    Attributes:
      start: offset of the first token in the prompt.
      cci: CacheCraft eq. 11 of the reused variant, in [0.5, 1]; None if nothing was reused.
      recomputed_offsets: ascending in-chunk offsets of the recomputed tokens.
      recomputed_layers: number of layers that all of these ran through; fewer than the model has if a focus cut, or a
        small deviation, dropped some of them earlier. 0 if none were recomputed.
    """

    role: SegmentRole
    action: SegmentAction
    start: int
    token_ids: tuple[int, ...]
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    recomputed_offsets: tuple[int, ...] = ()
    recomputed_layers: int = 0
    tier: str | None = None
    cfo: float | None = None
    cci: float | None = None
    exact: bool = True
    focused: bool | None = None
    document_id: str | None = None
    title: str | None = None
    cause: ComputeCause | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTrace:
    """The course of a request; times are those of `time.perf_counter`.

    Attributes:
      segments: in prompt order.
      num_layers: number of layers of the model.
      arrived_s, started_s: when the request was submitted, and when it left the queue.
      token_s: when each token of all answers was sampled; the first one ends the prefill.
      spans: loads of layers, and the layers computed meanwhile; a retry adds further spans.
      full_prefill_s: estimated seconds for computing the whole prompt; None before anything was measured.
      has_new_sizes: a step ran at a size for the first time, so part of the time may be compilation.
    """

    segments: tuple[SegmentTrace, ...]
    num_layers: int
    arrived_s: float
    started_s: float
    token_s: tuple[float, ...]
    spans: tuple[Span, ...]
    full_prefill_s: float | None
    has_new_sizes: bool


@dataclasses.dataclass(frozen=True)
class Response:
    """The whole answer; of several answers the first, with the rest in `others`.

    Attributes:
      text: decoded answer without stop strings; "" if the model has no tokenizer.
      token_ids: sampled tokens without the end-of-turn token.
      reuse: what was reused and what it cost.
      ttft_s: seconds to the first token: assembling the prompt, then from admission on; without time in the queue.
      total_s: the same to the last token of all answers.
      others: the answers besides the first.
      first_logits: [V] float32, logits that the first token was sampled from, if requested.
      prompt_logprobs: of each token of the prompt, if requested; NaN for the first one.
      prompt_logits: [n, V] float32, logits after each of the last n tokens of the prompt, if requested.
      stop_reason: as in vLLM, the stop string or token of `stop_token_ids` that ended the answer; None for any other
        end.
      trace: the trace, if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reuse: ReuseReport
    num_prompt_tokens: int
    ttft_s: float
    total_s: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    others: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    first_logits: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    prompt_logits: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    stop_reason: str | int | None = None
    trace: RequestTrace | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All requested answers."""
        told = self.logprobs, self.first_logits, self.prompt_logprobs, self.stop_reason
        first = Choice(self.text, self.token_ids, self.finish_reason, *told)
        return (first, *self.others)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclasses.dataclass(frozen=True)
class Delta:
    """Text and tokens of an answer since its previous delta in the stream.

    Attributes:
      index: index of the answer.
      finish_reason: set only on the last delta of each answer; `stop_reason`, as in `Response`, likewise.
      prompt_logprobs: set only on the first delta of each answer, if requested.
      response: set only on the last delta of the stream.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    response: Response | None = None
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def stops_from(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; a single string counts as one stop string."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def documents_from(values: Sequence[Document | Mapping[str, Any]]) -> tuple[Document, ...]:
    """Converts `Document`s and mappings to documents; raises RequestError that names any other value."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError("documents", f"wanted a list of documents, got {type(values).__name__}")
    return tuple(_as_document(number, value) for number, value in enumerate(values))


def _as_document(number: int, value: Document | Mapping[str, Any]) -> Document:
    if isinstance(value, Document):
        for name, text in (("id", value.id), ("version", value.version)):
            if text is not None and not 0 < len(text) <= LONGEST_ID:
                message = f"wanted 1 to {LONGEST_ID} characters, got {len(text)}"
                raise RequestError(f"documents[{number}].{name}", message)
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"documents[{number}]", f"wanted a mapping with 'text', got {type(value).__name__}")
    try:
        return document_from_mapping(value, argument=f"documents[{number}]")
    except ValueError as error:
        argument, _, message = str(error).partition(": ")
        raise RequestError(argument, message) from error
