"""How answers are sampled: the parameters of a request, checked."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ccjax.errors import RequestError

MOST_ANSWERS = 16
"""Most answers to the prompt of one request."""
MOST_STOPS = 16
"""Most stop strings of one request."""

_WHITE_SPACE = r"\x20|\n[\x20\t]{0,32}"
"""Between the parts of a JSON answer: a space, or a new line with its indentation. Bounded, because a model that is not
sure what comes next may otherwise write white space without end."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer must match, from its first token to its last: a grammar.

    Attributes:
      grammar: in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), or
        in llama.cpp's GBNF.
    """

    grammar: str

    def __post_init__(self) -> None:
        if not isinstance(self.grammar, str) or not self.grammar.strip():
            raise RequestError("constraint", f"wanted a grammar, got {self.grammar!r:.80}")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> Constraint:
        """JSON that a schema accepts; without a schema, any JSON object. Properties come in the order of the schema."""
        if schema is None:
            schema = {"type": "object"}
        if not isinstance(schema, Mapping):
            raise RequestError("constraint", f"wanted a JSON schema, which is an object, got {schema!r:.80}")
        try:
            text = json.dumps({"x-guidance": {"whitespace_pattern": _WHITE_SPACE}, **schema})
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("constraint", f"wanted a JSON schema, got {error}") from error
        return cls(f"start: %json {text}")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Text that a regular expression in Rust's syntax matches as a whole; its digits and letters (\\d, \\w) are
        ASCII's, as in JSON schemas."""
        if not isinstance(pattern, str) or not pattern:
            raise RequestError("constraint", f"wanted a regular expression, got {pattern!r:.80}")
        escaped = re.sub(r"\\.|[/\n\r]", lambda part: _IN_PATTERN.get(part[0], part[0]), pattern)
        return cls(f"start: /{escaped}/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of some texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError("constraint", f"wanted a list of non-empty texts, got {texts!r:.80}")
        return cls("start: TEXT\nTEXT: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


_IN_PATTERN = {
    "/": r"\/",
    "\n": r"\n",
    "\r": r"\r",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9a-zA-Z_]",
    r"\W": "[^0-9a-zA-Z_]",
}
"""What is written otherwise between the slashes of Lark."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the answer is sampled, in vLLM's terms, which are OpenAI's where that has them; `temperature` 0 is greedy.

    The order is vLLM's: `allowed_token_ids` and `constraint`, `bad_words`, `min_tokens`, `logit_bias`, penalties,
    temperature, `min_p`, `top_k`, `top_p`. What rules out every token that is left has no effect.

    Attributes:
      stop: texts that end the answer; `include_stop` keeps what ended it, a text or a token, in the answer.
      logprobs: number of alternatives to report for each token; None reports nothing.
      ignore_eos: end-of-text tokens do not end the answer, so that it reaches its maximum length.
      n: number of answers to the prompt, sampled independently; the first one is the same as with `n` 1.
      first_logits: return the logits after the prompt.
      prompt_logits: return the logits after each of this many last tokens of the prompt, to score a given answer at its
        end.
      constraint: what the answer must match; an answer that reaches its maximum length first is cut.
      top_k: sample among so many likeliest tokens, with ties; 0 or -1 for all.
      min_p: sample among tokens at least this share as likely as the likeliest one.
      presence_penalty, frequency_penalty: taken from the logits of tokens in the answer, the second one for each
        occurrence.
      repetition_penalty: divides positive logits of tokens in prompt or answer, and multiplies negative ones.
      logit_bias: token id -> number from -100 to 100 that is added to its logit.
      min_tokens: the answer ends after this many tokens at the earliest.
      stop_token_ids: tokens that end the answer.
      bad_words: texts that the answer does not have, as far as their tokens alone make them.
      allowed_token_ids: the only tokens that are sampled; None for all.
      skip_special_tokens: leave special tokens out of the text.
      prompt_logprobs: as `logprobs` for the tokens of the prompt, all of which are computed (`reuse` is "off").
    """

    max_new_tokens: int | None = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    n: int = 1
    first_logits: bool = False
    prompt_logits: int = 0
    constraint: Constraint | None = None
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (least, wanted) in _INTEGERS.items():
            value: Any = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            _check(name, value, isinstance(value, int) and not isinstance(value, bool), "an integer")
            _check(name, value, isinstance(value, int) and value >= least, wanted)
        for name in ("ignore_eos", "first_logits", "include_stop", "skip_special_tokens"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            _check(name, value, _is_number(value), "a number")
            _check(name, value, low <= value <= high, f"a number from {low:g} to {high:g}")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1")
        _check("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty, "a number above 0")
        stops, words = _texts(self.stop), _texts(self.bad_words)
        is_right = stops is not None and all(stops) and len(stops) <= MOST_STOPS
        _check("stop", self.stop, is_right, f"a list of at most {MOST_STOPS} non-empty strings")
        is_right = words is not None and all(word.strip() for word in words)
        _check("bad_words", self.bad_words, is_right, "a list of non-empty strings")
        for name in ("logprobs", "prompt_logprobs"):
            _check(name, getattr(self, name), (getattr(self, name) or 0) <= 20, "0 to 20 alternatives")
        _check("n", self.n, self.n <= MOST_ANSWERS, f"1 to {MOST_ANSWERS} answers")
        most = math.inf if self.max_new_tokens is None else self.max_new_tokens
        _check("min_tokens", self.min_tokens, self.min_tokens <= most, f"at most {most}, the longest answer")
        for name, tokens in self.named_tokens().items():
            for token in tokens:
                is_right = isinstance(token, int) and not isinstance(token, bool) and token >= 0
                _check(name, token, is_right, "token ids")
        _check("allowed_token_ids", self.allowed_token_ids, self.allowed_token_ids != (), "at least one token id")
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, _is_number(bias) and -100 <= bias <= 100, "numbers from -100 to 100")
        if self.constraint is not None:
            _check("constraint", self.constraint, isinstance(self.constraint, Constraint), "a Constraint")
            wanted = "false beside a constraint, whose end is the answer's"
            _check("ignore_eos", self.ignore_eos, not self.ignore_eos, wanted)

    def named_tokens(self) -> Mapping[str, Sequence[int]]:
        """Argument -> the token ids in it."""
        tokens = {"logit_bias": tuple(self.logit_bias), "stop_token_ids": self.stop_token_ids}
        return tokens | {"allowed_token_ids": self.allowed_token_ids or ()}

    @property
    def has_penalties(self) -> bool:
        """True if what prompt or answer contain changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_adjusted(self) -> bool:
        """True if logits are changed before temperature and `top_p`, other than by masks."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
            or (self.temperature and (self.top_k > 0 or self.min_p))
        )


_OPTIONAL = ("max_new_tokens", "seed", "logprobs", "prompt_logprobs")
_INTEGERS = {
    "max_new_tokens": (1, "a positive integer"),
    "seed": (0, "a non-negative integer"),
    "logprobs": (0, "0 to 20 alternatives"),
    "prompt_logprobs": (0, "0 to 20 alternatives"),
    "n": (1, f"1 to {MOST_ANSWERS} answers"),
    "prompt_logits": (0, "a number of tokens"),
    "top_k": (-1, "a positive integer, or 0 or -1 for all tokens"),
    "min_tokens": (0, "a non-negative integer"),
}
"""Argument -> its least value, and words for what is wanted."""
_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (-math.inf, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (-math.inf, 100.0),
}
"""Argument -> its range."""


def _check(name: str, value: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise RequestError(name, f"wanted {wanted}, got {value!r:.80}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(value: Any) -> list[str] | None:
    """A list of strings; None for anything else."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list and all(isinstance(text, str) for text in value) else None
