"""The fields of request bodies that say how answers are sampled: OpenAI's, and vLLM's further ones."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ccjax.engine import MOST_ANSWERS
from ccjax.errors import RequestError

SAMPLING_NAMES = {"include_stop": "include_stop_str_in_output"}
"""Field of `SamplingParams` -> field of the API, if they differ."""
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


def _stop(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise ValueError("wanted a string or a list of strings")


class SamplingFields(BaseModel):
    """How the answer is sampled; ranges are those of `SamplingParams`."""

    model_config = ConfigDict(strict=True, extra="allow")

    temperature: float | None = Field(None, description="0, the default, is greedy")
    top_p: float | None = None
    top_k: int | None = Field(None, description="sample among so many likeliest tokens; 0 or -1 for all")
    min_p: float | None = Field(None, description="sample among tokens at least this share as likely as the likeliest")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, description="of tokens in prompt or answer; 1 for none")
    logit_bias: dict[str, float] | None = Field(None, description="token id -> number added to its logit")
    min_tokens: int | None = Field(None, description="the answer ends after this many tokens at the earliest")
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=str | list[str] | None)] = ()
    stop_token_ids: list[int] | None = Field(None, description="tokens that end the answer")
    include_stop_str_in_output: bool | None = Field(None, description="keep what ended the answer in it")
    bad_words: list[str] | None = Field(None, description="texts that the answer does not have")
    allowed_token_ids: list[int] | None = Field(None, description="the only tokens that are sampled")
    skip_special_tokens: bool | None = Field(None, description="false to keep special tokens in the text")
    prompt_logprobs: int | None = Field(None, description="also of the prompt, all of which is computed then")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, description=f"answers to the prompt, at most {MOST_ANSWERS}; by default one")
    ignore_eos: bool | None = Field(None, description="continue after an end-of-text token, to the requested length")

    def sampling_fields(self) -> dict[str, Any]:
        """The arguments of `SamplingParams` that are given.

        Raises:
          RequestError: a key of `logit_bias` is no token id.
        """
        names = {field: name for name, field in SAMPLING_NAMES.items()}
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        found = {names.get(name, name): value for name, value in given.items() if value is not None}
        found |= {name: tuple(found[name]) for name in _LISTS if name in found}
        if "seed" in found:
            found["seed"] %= 2**64
        if "logit_bias" in found:
            found["logit_bias"] = {_token_id(token): bias for token, bias in found["logit_bias"].items()}
        return found


def _token_id(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise RequestError("logit_bias", f"wanted token ids as keys, got {text!r:.80}")
    return int(text)
