"""Computes passages ahead of the questions about them, on request and in idle time."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.exclusive import Exclusive
from ccjax.cache.planned_prefill import Prefilled
from ccjax.cache.prefill_capture import PrefillCapture
from ccjax.cache.variants import VariantIndex
from ccjax.prompts import Prompt
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.runner.plan_rows import computed_offsets
from ccjax.types import Document, ReuseMode, VariantId

logger = logging.getLogger(__name__)

WarmStatus = Literal["present", "computed", "no_room"]
_WARM_STATUSES: tuple[WarmStatus, ...] = ("present", "computed", "no_room")


@dataclasses.dataclass(frozen=True, slots=True)
class WarmedDocument:
    """The result for one document: its variants were stored before, some were computed, or some found no room."""

    document_id: str | None
    version: str | None
    num_tokens: int
    status: WarmStatus


class Warming:
    """Documents to warm, with the progress so far; `done` grows document by document.

    Args:
      prompts: for each document, one prompt per variant: its last chunk is the document, the chunks before it are the
        variant's prefix.
      compares: measure the deviation of a document's KV behind others from its KV alone, if both are stored.

    Attributes:
      is_urgent: its prefills are queued like clients' requests, not behind all of them.
      erasures: the erasures that applied to the next variant when it was found missing; one more, and it is not stored.
      kept: variants that must not be evicted for those still to come.
    """

    def __init__(
        self, documents: Sequence[Document], prompts: Sequence[Sequence[Prompt]], *, compares: bool = False
    ) -> None:
        self.total = len(documents)
        self.compares = compares
        self.is_urgent = False
        self.erasures: frozenset[str] = frozenset()
        self.kept: set[VariantId] = set()
        self.prompts = tuple(prompt for some in prompts for prompt in some)
        self.done: list[WarmedDocument] = []
        self._left = collections.deque(
            (document, prompt, prompt is some[-1])
            for document, some in zip(documents, prompts, strict=True)
            for prompt in some
        )
        self._worst: WarmStatus = "present"

    @property
    def next_prompt(self) -> Prompt:
        """The prompt of the next variant; there is one unless `is_finished`."""
        return self._left[0][1]

    @property
    def is_finished(self) -> bool:
        """True once every document has a result."""
        return not self._left

    def pass_over(self, status: WarmStatus, held: VariantId | None) -> None:
        """Ends the next variant; `held` is its id if it is stored."""
        document, prompt, is_last = self._left.popleft()
        if held is not None:
            self.kept.add(held)
        if _WARM_STATUSES.index(status) > _WARM_STATUSES.index(self._worst):
            self._worst = status
        if is_last:
            name = document.source_id or document.id
            num_tokens = len(prompt.chunks[-1].token_ids)
            self.done.append(WarmedDocument(name, document.version, num_tokens, self._worst))
            self._worst = "present"


class RunPrefill(Protocol):
    """Prefills a prompt in the batch loop and waits for it; `keep` is called while the reused variants are pinned.

    Raises:
      PrefillCancelledError: `is_cancelled` returned True; `keep` was not called.
    """

    def __call__(
        self,
        prompt: Prompt,
        mode: ReuseMode,
        keep: Callable[[Prefilled], None],
        *,
        is_urgent: bool,
        is_cancelled: IsCancelled | None,
    ) -> object: ...


class PassageWarmer:
    """Computes the variants of a `Warming`, and the passages that requests left for idle time.

    `warm_one`, `compute` and `prepare_one` wait for prefills in the batch loop; the others need exclusive access.
    """

    def __init__(
        self,
        capture: PrefillCapture,
        run_prefill: RunPrefill,
        variants: VariantIndex,
        frame: PassageFrame,
        exclusive: Exclusive,
        *,
        max_model_len: int,
    ) -> None:
        self.frame = frame
        self._registry = variants.documents
        self._max_model_len = max_model_len
        self._capture = capture
        self._run_prefill = run_prefill
        self._variants = variants
        self._exclusive = exclusive
        self._is_preparing = False

    def warm_one(self, warming: Warming, is_cancelled: IsCancelled | None) -> None:
        """Computes and stores the next variant of a warming, unless it is stored.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True; the variant remains to be computed.
        """
        prompt = warming.next_prompt
        with self._exclusive():
            if not self.needs_computing(warming):
                self.pass_over(warming, "present")
                return
        self.compute(warming, is_cancelled)
        with self._exclusive():
            self.pass_over(warming, "no_room" if self.held_id(prompt) is None else "computed")

    def needs_computing(self, warming: Warming) -> bool:
        """False if the next variant is stored. Call it right before `compute`."""
        prompt = warming.next_prompt
        if self.held_id(prompt) is not None:
            self._registry.learn(prompt.chunks)
            return False
        warming.erasures = self._erasures_of(prompt)
        return True

    def compute(self, warming: Warming, is_cancelled: IsCancelled | None, *, wait: bool = False) -> int:
        """Computes the next variant and stores it if there is room; returns how many tokens were computed.

        Of a prompt with other documents before the last one, only the last is stored, and the passages of the frame:
        their KV is computed once and reused exactly. A document that was erased since `needs_computing` is not stored.

        Args:
          wait: as in `PrefillCapture.store_new`.

        Raises:
          PrefillCancelledError: as `warm_one`.
        """
        prompt = warming.next_prompt
        alone = Prompt.of_chunks((*prompt.instructions, prompt.cached[-1]))
        is_alone = prompt.cached == alone.cached
        only_last = not is_alone and not self.frame.stands_in(prompt)
        num_computed = 0

        def keep(prefilled: Prefilled) -> None:
            nonlocal num_computed
            num_computed = len(computed_offsets(prefilled.plan))
            if self._erasures_of(prompt) - warming.erasures:
                return
            other = None
            if warming.compares:
                other_id = self.held_id(alone if not is_alone else self.frame.around(alone) or alone)
                other = None if other_id is None else self._capture.stored_kv(other_id)
            self._capture.store_new(prefilled, warming.kept, other, only_last=only_last, wait=wait)

        self._run_prefill(prompt, "exact", keep, is_urgent=warming.is_urgent, is_cancelled=is_cancelled)
        return num_computed

    def pass_over(self, warming: Warming, status: WarmStatus) -> None:
        """Ends the next variant of a warming with this status."""
        warming.pass_over(status, self.held_id(warming.next_prompt))

    def held_id(self, prompt: Prompt) -> VariantId | None:
        """The exact variant of a prompt's last chunk behind the chunks before it, if it is stored."""
        *before, last = (chunk.chunk_id for chunk in prompt.chunks)
        for meta in self._variants.of_chunks({last}).get(last, ()):
            if meta.fidelity == "exact" and meta.prefix_ids == tuple(before):
                return meta.variant_id
        return None

    def num_unprepared(self, *, only_reused: bool) -> int:
        """How many passages `prepare_one` still has to prepare, with the one in progress."""
        return self._capture.unprepared.count(only_reused=only_reused) + self._is_preparing

    def prepare_one(self, is_cancelled: IsCancelled | None, *, only_reused: bool) -> bool:
        """Computes the next of `PrefillCapture.unprepared` as `Engine.documents.warm` does; False if there is none, the
        engine is in use, or `is_cancelled` returned True first. A passage that fails is logged and not tried again.

        Args:
          only_reused: leave out passages that no request reused.
        """
        with self._exclusive(wait=False) as is_ours:
            found = self._next_to_prepare(only_reused) if is_ours else None
            self._is_preparing = found is not None
        if found is None:
            return False
        alone, was_reused, warming = found
        try:
            while not warming.is_finished:
                self.compute(warming, is_cancelled)
                with self._exclusive():
                    self.pass_over(warming, "computed")
        except PrefillCancelledError:
            with self._exclusive():
                if not self._erasures_of(warming.next_prompt) - warming.erasures:
                    self._capture.unprepared.note(alone, was_reused=was_reused)
            return False
        except Exception:  # one passage must not keep the others from being prepared
            logger.exception("passage %s: could not be prepared", alone.chunks[-1].chunk_id)
        finally:
            self._is_preparing = False
        return True

    def _next_to_prepare(self, only_reused: bool) -> tuple[Prompt, bool, Warming] | None:
        """A passage as `UnpreparedPassages.pop` returns it, and a warming of its variants that are not stored. An
        erasure from now on applies to all of them."""
        while found := self._capture.unprepared.pop(only_reused=only_reused):
            alone, was_reused = found
            framed = self.frame.around(alone)
            if framed is None or framed.num_tokens > self._max_model_len:
                continue
            missing = [prompt for prompt in (alone, framed) if self.held_id(prompt) is None]
            if missing:
                warming = Warming([Document("")], [missing], compares=True)
                warming.erasures = self._erasures_of(framed)
                return alone, was_reused, warming
        return None

    def _erasures_of(self, prompt: Prompt) -> frozenset[str]:
        chunk_ids = frozenset(chunk.chunk_id for chunk in prompt.chunks)
        return self._registry.after(prompt.chunks[-1].chunk_id, chunk_ids)
