"""Grammars that answers must match: which tokens may come next, by llguidance.

Masks are computed on worker threads, outside of the interpreter's lock, so that the device can run a step meanwhile.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING

from ccjax.errors import RequestError
from ccjax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ARGUMENT = "constraint"
"""The argument that errors name."""
_MOST_COMPILED = 64
_LONGEST_REASON = 500
_LONGEST_TOKEN_BYTES = 1000
"""llguidance panics over longer ones; a few vocabularies have some, of spaces alone. No grammar allows them."""


class Grammars:
    """Compiles grammars for the vocabulary of one model. Thread-safe.

    The vocabulary is read, and llguidance imported, when the first grammar comes.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], vocab_size: int) -> None:
        """
        Args:
          eos_ids: the tokens that end an answer; allowed where the grammar may end.
          vocab_size: number of the model's logits.
        """
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, eos_ids, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: collections.OrderedDict[str, LLMatcher] = collections.OrderedDict()
        self._building, self._lock = threading.Lock(), threading.Lock()
        num_threads = max(1, min(8, (os.cpu_count() or 2) // 2))
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="ccjax-masks")

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the start of an answer.

        Args:
          grammar: in llguidance's dialect of Lark, or in llama.cpp's GBNF.

        Raises:
          RequestError: the grammar cannot be compiled, or the model has no token that ends an answer.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                if len(self._compiled) > _MOST_COMPILED:
                    self._compiled.popitem(last=False)
        return Matcher(compiled, self._threads, 4 * -(-self._vocab_size // 32))

    def close(self) -> None:
        """Ends the worker threads."""
        self._threads.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        import llguidance
        import llguidance.gbnf_to_lark

        try:
            lark = llguidance.gbnf_to_lark.any_to_lark(grammar)
        except Exception as error:  # its parser raises bare exceptions, too
            raise _refusal(f"neither Lark, which has a rule 'start', nor GBNF: {error}") from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        compiled = llguidance.LLMatcher(self._read_vocabulary(), lark, log_level=0, limits=limits)
        if compiled.is_error():
            raise _refusal(compiled.get_error())
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._building:
            if self._vocabulary is None:
                eos_ids = sorted(token_id for token_id in self._eos_ids if token_id < self._vocab_size)
                if not eos_ids:
                    raise RequestError(ARGUMENT, "wanted none: this model has no token that ends an answer")
                table = _TokenTable(self._tokenizer, eos_ids, self._vocab_size)
                self._vocabulary = LLTokenizer(table, eos_token=eos_ids)  # pyright: ignore[reportArgumentType]
            return self._vocabulary


class Matcher:
    """Follows one answer through its grammar; `begin` starts another answer. Used by one thread at a time.

    Attributes:
      is_complete: nothing but an end-of-text token may follow.
    """

    def __init__(self, state: LLMatcher, threads: concurrent.futures.Executor, num_bytes: int) -> None:
        """`state` is copied by `begin`, never changed. `num_bytes` is the size of a mask: llguidance's own has a word
        more where the vocabulary fills the last one."""
        self._state, self._threads, self._num_bytes = state, threads, num_bytes
        self._mask: concurrent.futures.Future[bytes] | None = None
        self._error: str | None = None
        self.is_complete = False

    def begin(self) -> Matcher:
        """A matcher of its own for a new answer; its first mask is being computed."""
        matcher = Matcher(self._state.deep_copy(), self._threads, self._num_bytes)
        matcher._mask = self._threads.submit(matcher._compute)
        return matcher

    def mask(self) -> bytes:
        """The tokens that may come next: one bit for each, lowest first, in words of 32 bits. Waits for the worker that
        computes it. If that failed, only the end is allowed, and `push` raises."""
        assert self._mask is not None
        return self._mask.result()

    def push(self, token_id: int) -> None:
        """Takes the next token of the answer, after `mask`.

        Raises:
          RequestError: the grammar is too complex to be followed here.
          RuntimeError: the token is not allowed.
        """
        if self._error is not None:
            raise _refusal(self._error)
        if not self.mask()[token_id // 8] >> token_id % 8 & 1:
            raise RuntimeError(f"token {token_id} is not in the grammar")
        if not self._state.consume_token(token_id):
            raise _refusal(self._state.get_error())
        self.is_complete = self._state.is_stopped()
        if not self.is_complete:
            self._mask = self._threads.submit(self._compute)

    def _compute(self) -> bytes:
        mask = self._state.compute_bitmask()
        if self._state.is_error():
            self._error = self._state.get_error()
        return mask[: self._num_bytes]


class _TokenTable:
    """A vocabulary in the form that `LLTokenizer` takes (`llguidance.TokenizerWrapper`)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_ids: list[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.tokens = [token if len(token) <= _LONGEST_TOKEN_BYTES else b"" for token in tokens]
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted({*eos_ids, *(one for one in tokenizer.special_ids if one < vocab_size)})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, allow_special=False)


def _refusal(reason: str) -> RequestError:
    reason = " ".join(reason.split())
    return RequestError(ARGUMENT, f"wanted one that llguidance can follow, got: {reason[:_LONGEST_REASON]}")
