"""Warming as part of a job that several processes on one store share: leases decide who computes what, and a variant
counts as computed only once it is on disk."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Literal

from ccjax.cache.exclusive import Exclusive
from ccjax.cache.rates import Rates
from ccjax.cache.variants import VariantIndex
from ccjax.cache.warming.passages import PassageWarmer, Warming, WarmStatus
from ccjax.policy.capture import make_variant_id
from ccjax.policy.loading import claim_s
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.store.tiered import TieredStore
from ccjax.store.usage import DISK
from ccjax.types import Chunk, VariantId

logger = logging.getLogger(__name__)

LEAST_CLAIM_S = 10.0
"""The first prefill of a size may have to be compiled, which the measured rates do not include."""

SharedStatus = Literal["present", "computed", "elsewhere", "no_room", "unwritten", "failed"]


@dataclasses.dataclass(frozen=True, slots=True)
class SharedVariant:
    """The result for one document of a shared warming.

    Attributes:
      status: stored before; computed here and on disk; being computed by another process; no tier had room; the disk
        refused it; or computing raised.
      computed_tokens: tokens that ran through the model for it, those of the variant it was compared with included.
      num_bytes: bytes on disk, record included; 0 unless it was computed.
      reason: why it is not stored; empty if it is.
    """

    status: SharedStatus
    computed_tokens: int = 0
    num_bytes: int = 0
    reason: str = ""


class SharedWarming:
    """One warming; `run` once."""

    def __init__(
        self,
        warmer: PassageWarmer,
        variants: VariantIndex,
        store: TieredStore,
        rates: Rates,
        warming: Warming,
        exclusive: Exclusive,
    ) -> None:
        if store.claims is None:
            raise ValueError("store: wanted an engine with a store that outlasts it, to share work on")
        self._warmer = warmer
        self._variants = variants
        self._store = store
        self._rates = rates
        self._warming = warming
        self._exclusive = exclusive
        self._claims = store.claims
        self._claimed: tuple[str, ...] = ()
        self._elsewhere: frozenset[str] = frozenset()

    def run(self, is_cancelled: IsCancelled | None = None) -> tuple[SharedVariant, ...]:
        """Processes all documents and waits for the disk; the result leaves out those after `is_cancelled` returned
        True."""
        results: list[tuple[VariantId, SharedVariant]] = []
        try:
            with self._exclusive():
                self._agree()
            while not self._warming.is_finished:
                results.append(self._next(is_cancelled))
        except PrefillCancelledError:
            pass
        finally:
            self._claims.release(self._claimed)
        self._store.flush()
        with self._exclusive():
            return tuple(self._confirmed(*result) for result in results)

    def _agree(self) -> None:
        """Claims what is missing and adopts what other processes stored meanwhile: a claim that was released may mean
        that the variant is stored."""
        prompts = [prompt for prompt in self._warming.prompts if self._warmer.held_id(prompt) is None]
        wanted = list(dict.fromkeys(_variant_id(prompt.chunks) for prompt in prompts))
        if not wanted:
            return
        taken = self._claims.taken(wanted)
        num_tokens = sum(prompt.num_tokens for prompt in prompts)
        seconds = max(LEAST_CLAIM_S, claim_s(num_tokens, self._rates.seconds_per_token))
        free = [key for key in wanted if key not in taken and not self._claims.holds(key)]
        self._claimed = self._claims.claim(free, seconds)
        arrived = self._claims.committed(wanted)
        heads = {_variant_id(prompt.chunks[:end]) for prompt in prompts for end in range(1, len(prompt.chunks))}
        behind = self._claims.committed(sorted(key for key in heads.difference(wanted) if key not in self._variants))
        self._variants.apply_changes((*arrived, *behind), ())
        # A variant lost in a race is left to the winner, with all later ones, which it may be about to claim. If the
        # disk does not respond, nothing counts as claimed elsewhere.
        if not self._claims.is_failing:
            self._elsewhere = frozenset(key for key in wanted if not self._claims.holds(key))

    def _next(self, is_cancelled: IsCancelled | None) -> tuple[VariantId, SharedVariant]:
        prompt = self._warming.next_prompt
        variant_id = _variant_id(prompt.chunks)
        status: WarmStatus = "present"
        result = SharedVariant("present")
        with self._exclusive():
            is_held = not self._warmer.needs_computing(self._warming)
        if variant_id in self._elsewhere and not is_held:
            result = SharedVariant("elsewhere", reason="another process computes it")
        elif not is_held:
            try:
                num_tokens = self._warmer.compute(self._warming, is_cancelled, wait=True)
                with self._exclusive():
                    status = "no_room" if self._warmer.held_id(prompt) is None else "computed"
                why = "the store has no room for it" if status == "no_room" else ""
                result = SharedVariant(status, num_tokens, reason=why)
            except PrefillCancelledError:
                raise
            except Exception as error:  # one document's failure must not affect the others
                logger.warning("a document could not be computed: %r", error)
                result = SharedVariant("failed", reason=f"{type(error).__name__}: {error}")
            finally:
                self._claims.release((variant_id,))
        with self._exclusive():
            self._warmer.pass_over(self._warming, status)
        return variant_id, result

    def _confirmed(self, variant_id: VariantId, result: SharedVariant) -> SharedVariant:
        """The result after the disk's queue was flushed."""
        if result.status != "computed":
            return result
        num_bytes = self._store.charge_bytes(DISK, variant_id)
        if num_bytes is None:
            self._variants.discard(variant_id)  # a copy in memory must not count as stored
            return dataclasses.replace(result, status="unwritten", reason="the store did not take it")
        return dataclasses.replace(result, num_bytes=num_bytes)


def _variant_id(chunks: Sequence[Chunk]) -> VariantId:
    """The id of the exact variant of the last chunk behind the others."""
    *before, last = (chunk.chunk_id for chunk in chunks)
    return make_variant_id(last, before, "exact")
