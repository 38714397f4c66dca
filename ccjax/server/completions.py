"""/v1/completions: its body, with one prompt or several, and the answers to several as one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from ccjax.engine import Delta, Response
from ccjax.errors import RequestError
from ccjax.server.fields import COMPLETIONS
from ccjax.server.schemas import Generation
from ccjax.server.worker import Job
from ccjax.text import Tokenizer
from ccjax.types import ReuseReport

MOST_PROMPTS = 256
"""Most prompts of one request."""
Prompt = str | tuple[int, ...]
_SUMMED = (
    "prompt_tokens computed_tokens recomputed_tokens reused_tokens loaded_bytes preloaded_bytes load_wait_s plan_s "
    "prefill_s load_s failed_loads given_up_loads"
).split()


def _prompts(value: Any) -> Any:
    """The prompts, each a text or token ids."""
    is_one = isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))
    given = [value] if is_one else value
    if not isinstance(given, list) or not given or len(given) > MOST_PROMPTS:
        raise ValueError(f"wanted a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either")
    for prompt in given:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        ):
            raise ValueError("wanted texts or lists of token ids")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in given)


class CompletionBody(Generation):
    """Body of /v1/completions."""

    path: ClassVar[str] = COMPLETIONS

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = Field(None, description="the prompt before the answer; with max_tokens 0 alone")

    def parts(self) -> Sequence[CompletionBody]:
        """Bodies with one prompt each."""
        return [self.model_copy(update={"prompt": (prompt,)}) for prompt in self.prompt]

    def query(self) -> str | None:
        """The prompt, if there is one and it is a text."""
        first = self.prompt[0]
        return first if len(self.prompt) == 1 and isinstance(first, str) and first.strip() else None

    def texts(self) -> Iterator[str]:
        """The prompts that are texts."""
        return (prompt for prompt in self.prompt if isinstance(prompt, str))

    def searches(self) -> bool:
        """As `Generation`; an echo is of the prompt alone."""
        return not self.echo and super().searches()

    def prompt_fields(self) -> dict[str, Any]:
        """A text, or a question of token ids behind an empty system prompt.

        Raises:
          RequestError: token ids or echo together with documents.
        """
        first = self.prompt[0]
        for name in ("documents", "retrieval"):
            if getattr(self, name) and (self.echo or not isinstance(first, str)):
                reason = "beside echo" if self.echo else "behind a prompt of token ids; send the prompt as text"
                raise RequestError(name, f"wanted none {reason}")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens", "wanted none beside echo")
        return {"prompt": first} if isinstance(first, str) else {"segments": ((), first)}

    def sampling_fields(self) -> dict[str, Any]:
        """As `SamplingFields`; with `echo`, log-probabilities are also those of the prompt."""
        found = super().sampling_fields()
        if self.echo and self.logprobs is not None:
            found["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return found

    def num_logprobs(self) -> int | None:
        """OpenAI's completions API has the number itself."""
        return self.logprobs

    @property
    def has_answer(self) -> bool:
        """False if only the prompt is asked about: then one token is sampled, and dropped."""
        return self.max_tokens != 0 or not (self.echo or self.prompt_logprobs is not None)

    def answer_limit(self) -> int | None:
        """`max_tokens`; its default is OpenAI's 16."""
        return 1 if not self.has_answer else 16 if self.max_tokens is None else self.max_tokens

    def argument_names(self) -> dict[str, str]:
        """As `Generation`; a prompt of token ids is the engine's second segment."""
        return super().argument_names() | {"segments[1]": "prompt"}

    def echoes(self, tokenizer: Tokenizer | None) -> list[str]:
        """The text before the answers to each prompt."""
        if not self.echo:
            return ["" for _ in self.prompt]
        skip = self.skip_special_tokens is not False

        def decoded(ids: tuple[int, ...]) -> str:
            return "" if tokenizer is None else tokenizer.decode(ids, skip_special=skip)

        return [prompt if isinstance(prompt, str) else decoded(prompt) for prompt in self.prompt]


class JoinedJobs(Job):
    """The jobs of several prompts as one, whose answers are those of the first prompt, then those of the next one."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(jobs[0].request, jobs[0]._worker)
        self._jobs = jobs
        self.submitted_s, self.arrived_s, self.found_s = jobs[0].submitted_s, jobs[0].arrived_s, jobs[0].found_s

    async def deltas(self, pause_s: float | None = None) -> AsyncIterator[Delta | None]:
        """As `Job.deltas`; the last one has a response with all answers."""
        events: asyncio.Queue[tuple[int, Delta | None | Exception]] = asyncio.Queue()

        async def read(number: int, job: Job) -> None:
            try:
                async for delta in job.deltas(pause_s):
                    await events.put((number, delta))
            except Exception as error:
                await events.put((number, error))

        readers = [asyncio.create_task(read(number, job)) for number, job in enumerate(self._jobs)]
        try:
            responses: list[Response | None] = [None for _ in self._jobs]
            while None in responses:
                number, event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    yield None
                    continue
                responses[number] = event.response
                self._follow()
                joined = None
                if None not in responses:
                    joined = self.response = _joined([one for one in responses if one is not None])
                index = number * self.request.sampling.n + event.index
                yield dataclasses.replace(event, index=index, response=joined)
        finally:
            for reader in readers:
                reader.cancel()

    def cancel(self) -> None:
        """Cancels all of them."""
        for job in self._jobs:
            job.cancel()

    def _follow(self) -> None:
        started = [job.started_s for job in self._jobs if job.started_s is not None]
        first = [job.first_delta_s for job in self._jobs if job.first_delta_s is not None]
        ended = [job.ended_s for job in self._jobs if job.ended_s is not None]
        self.started_s, self.first_delta_s = min(started, default=None), min(first, default=None)
        self.ended_s = max(ended, default=None)


def _joined(responses: Sequence[Response]) -> Response:
    """One response with the answers to all prompts."""
    first, *others = [choice for response in responses for choice in response.choices]
    return dataclasses.replace(
        responses[0],
        text=first.text,
        others=tuple(others),
        num_prompt_tokens=sum(response.num_prompt_tokens for response in responses),
        total_s=max(response.total_s for response in responses),
        reuse=_joined_reports([response.reuse for response in responses]),
    )


def _joined_reports(reports: Sequence[ReuseReport]) -> ReuseReport:
    """The reuse in several prompts: sums, and all documents."""
    sums = {name: sum(getattr(report, name) for report in reports) for name in _SUMMED}
    return dataclasses.replace(
        reports[0],
        **sums,
        computed_share=sum(report.computed_share * report.prompt_tokens for report in reports) / sums["prompt_tokens"],
        exact=all(report.exact for report in reports),
        per_document=tuple(part for report in reports for part in report.per_document),
    )
