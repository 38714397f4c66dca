"""Finds the stored runs of tokens that a prompt begins with, token by token.

A run is the KV of consecutive tokens of an earlier prompt or answer behind all that stood before them. It is stored as
a variant whose only prefix chunk stands for all earlier tokens (`run_prefix`). Runs are listed under the hashes of
their pages, so a prompt finds those that agree with its first tokens, whole or in part, whatever follows in either.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from ccjax.cache.chunk_tokens import ChunkTokens
from ccjax.prompts import Prompt, chunk_id, tenant_of
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.store.spec import ShardRecord
from ccjax.types import REUSED_ANYWHERE, ChunkId, ChunkSlice, ReuseMode, SegmentRole, VariantId, VariantMeta

_MOST_LISTED = 4
"""Runs listed under one page, the latest: prompts that begin alike share their first pages."""

_MOST_IN_PROMPT = 32
"""Runs that a prompt is cut behind; each begins a page of its own, and a request may need no more than are planned."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundRun:
    """A stored run and the number of its first tokens that agree with the prompt."""

    meta: VariantMeta
    num_tokens: int

    @property
    def role(self) -> SegmentRole:
        """Its role in the prompt."""
        return self.meta.roles[-1]

    def behind(self, prefix_ids: Sequence[ChunkId]) -> VariantMeta:
        """Its metadata, with the tokens before it as these chunks."""
        roles = ("text",) * len(prefix_ids)
        return dataclasses.replace(
            self.meta,
            prefix_ids=tuple(prefix_ids),
            inter_by_prefix=(0.0,) * len(prefix_ids),
            roles=(*roles, self.meta.roles[-1]),
        )


@dataclasses.dataclass(frozen=True)
class CutPrompt:
    """A prompt cut behind the stored runs that it begins with; its first segments are these runs."""

    prompt: Prompt
    runs: tuple[FoundRun, ...] = ()


def run_prefix(token_ids: np.ndarray, tenant: str) -> tuple[ChunkId, ...]:
    """The prefix of a run behind these tokens: one chunk of them all, none if there is none."""
    return (chunk_id(token_ids.tolist(), tenant),) if len(token_ids) else ()


def is_run(meta: VariantMeta) -> bool:
    """True for a variant that is a run: text of a prompt, or an answer, behind all earlier tokens as one chunk."""
    return len(meta.roles) <= 2 and set(meta.roles) <= {"text", "answer"} and meta.start is not None


def is_run_record(record: ShardRecord) -> bool:
    """True for the record of a run."""
    roles = record.meta.get("roles")
    return isinstance(roles, list) and len(roles) <= 2 and {*map(str, roles)} <= {"text", "answer"}


class PrefixRuns:
    """The runs of one engine's index of variants. Not thread-safe."""

    def __init__(self, tokens: ChunkTokens) -> None:
        self._tokens = tokens
        self._held: dict[VariantId, VariantMeta] = {}
        self._by_page: dict[bytes, tuple[VariantId, ...]] = {}
        self._by_end: dict[bytes, tuple[VariantId, ...]] = {}

    def note(self, meta: VariantMeta) -> None:
        """Lists a run whose token ids are known."""
        self._held[meta.variant_id] = meta
        for table, key in self._keys(meta):
            others = tuple(other for other in table.get(key, ()) if other != meta.variant_id)
            table[key] = (meta.variant_id, *others)[:_MOST_LISTED]

    def forget(self, meta: VariantMeta) -> None:
        """Undoes `note`, while the token ids are still known."""
        if self._held.pop(meta.variant_id, None) is None:
            return
        for table, key in self._keys(meta):
            others = tuple(other for other in table.get(key, ()) if other != meta.variant_id)
            if others:
                table[key] = others
            else:
                table.pop(key, None)

    def match(
        self, token_ids: np.ndarray, tenant: str, *, is_usable: Callable[[VariantMeta], bool] = lambda _: True
    ) -> list[FoundRun]:
        """The runs that the tokens [n] begin with, one behind the other, each the longest one there.

        A run of approximate KV that is no answer counts only as a whole: its tokens were chosen for its own question.
        """
        ids = np.ascontiguousarray(token_ids, "<i4")
        found: list[FoundRun] = []
        start = 0
        while run := self._longest(ids[start:], _seed(run_prefix(ids[:start], tenant), tenant), is_usable):
            found.append(run)
            start += run.num_tokens
        return found

    def cut(
        self,
        prompt: Prompt,
        mode: ReuseMode,
        num_last: int = 1,
        *,
        failed: Collection[str] = (),
        with_approximate: bool = True,
    ) -> CutPrompt:
        """The prompt behind the runs that it begins with, at most up to its `num_last` last tokens. A passage is not
        cut unless half of it is found, nor are instructions that passages were prepared behind. Decode does not compute
        bit for bit what a prefill does, so mode `exact` reuses no answer.

        Args:
          failed: variants that cannot be read.
          with_approximate: approximate runs count.
        """

        def is_usable(meta: VariantMeta) -> bool:
            if meta.variant_id in failed or (meta.fidelity != "exact" and not with_approximate):
                return False
            return mode != "exact" or (meta.fidelity == "exact" and meta.roles[-1] == "text")

        found = self.match(
            prompt.token_ids[:-num_last], tenant_of(prompt.segments[0].chunk.chunk_id), is_usable=is_usable
        )
        num_tokens = sum(run.num_tokens for run in found)
        start = 0
        for segment in prompt.segments:
            end = start + len(segment.chunk.token_ids)
            if start < num_tokens < (start + end) // 2 and segment.role in REUSED_ANYWHERE:
                num_tokens = start
            start = end
        runs: list[FoundRun] = []
        start = 0
        for run in found:
            run = dataclasses.replace(run, num_tokens=min(run.num_tokens, num_tokens - start))
            if (
                len(runs) == _MOST_IN_PROMPT
                or run.num_tokens <= 0
                or (run.num_tokens < run.meta.num_tokens and _is_indivisible(run.meta))
            ):
                break
            runs.append(run)
            start += run.num_tokens
        num_instructions = sum(len(segment.chunk.token_ids) for segment in prompt.instructions)
        if not runs or (start < num_instructions and prompt.passages):
            return CutPrompt(prompt)
        behind = prompt.behind((run.role, ChunkSlice(run.meta.chunk_id, 0), run.num_tokens) for run in runs)
        return CutPrompt(behind, tuple(runs))

    def _longest(self, ids: np.ndarray, seed: bytes, is_usable: Callable[[VariantMeta], bool]) -> FoundRun | None:
        best = None
        for page, key in enumerate(_page_keys(ids, seed), 1):
            for variant_id in (*self._by_end.get(key, ()), *self._by_page.get(key, ())):
                meta = self._held[variant_id]
                if not is_usable(meta):
                    continue
                num_tokens = page * PAGE_TOKENS + self._agreeing(meta, ids, page * PAGE_TOKENS)
                if num_tokens < meta.num_tokens and _is_indivisible(meta):
                    continue
                if best is None or num_tokens > best.num_tokens:
                    best = FoundRun(meta, num_tokens)
        if best is None:
            return None
        own = self._tokens.ids(best.meta.chunk_id)[: best.num_tokens]
        return best if np.array_equal(own, ids[: best.num_tokens]) else None  # else two pages have the same hash

    def _agreeing(self, meta: VariantMeta, ids: np.ndarray, first: int) -> int:
        """The number of tokens from `first` on that agree, less than a page."""
        own = self._tokens.ids(meta.chunk_id)[first : first + PAGE_TOKENS - 1]
        same = own[: len(ids) - first] == ids[first : first + len(own)]
        return len(same) if same.all() else int(same.argmin())

    def _keys(self, meta: VariantMeta) -> Iterator[tuple[dict[bytes, tuple[VariantId, ...]], bytes]]:
        seed = _seed(meta.prefix_ids, tenant_of(meta.chunk_id))
        keys = list(_page_keys(self._tokens.ids(meta.chunk_id), seed))
        if _is_indivisible(meta):
            return iter([(self._by_end, key) for key in keys[-1:]])
        return iter([(self._by_page, key) for key in keys])


def _is_indivisible(meta: VariantMeta) -> bool:
    return meta.fidelity == "approx" and meta.roles[-1] == "text"


def _seed(prefix: tuple[ChunkId, ...], tenant: str) -> bytes:
    return "/".join((tenant, *prefix)).encode()


def _page_keys(ids: np.ndarray, seed: bytes) -> Iterator[bytes]:
    """The hash of the first page, of the first two pages and so on."""
    digest = hashlib.blake2b(seed, digest_size=8)
    raw, size = ids.astype("<i4").tobytes(), 4 * PAGE_TOKENS
    for end in range(size, len(raw) + 1, size):
        digest.update(raw[end - size : end])
        yield digest.digest()
