"""Documents as units of the cache: warm, invalidate, erase, list, in every tier and variant.

An erasure is noted before anything is deleted and stays noted until all is: what a disk refuses to delete is tried
again at every `tend`, also by the next process.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from ccjax.cache.cached_prefill import CachedPrefill, Prefilled
from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.documents.registry import Erasure, Link, Origin
from ccjax.cache.exclusive import Exclusive
from ccjax.cache.variant_records import origin_of_record
from ccjax.cache.variants import VariantIndex
from ccjax.errors import EraseIncompleteError
from ccjax.prompts import Prompt
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.runner.plan_rows import computed_offsets
from ccjax.store.spec import ShardRecord
from ccjax.store.tiered import TieredStore
from ccjax.types import Chunk, ChunkId, Document, ReuseMode, VariantId

logger = logging.getLogger(__name__)

_TEND_INTERVAL_S = 600.0
_ERASE_PAUSES_S = (0.05, 0.1, 0.2)  # others hear of an erasure within some looks at the index


@dataclasses.dataclass(frozen=True, slots=True)
class CachedDocument:
    """One version of a document and what is cached of it.

    Attributes:
      chunks, variants: how many; a chunk is one wording of a passage, a variant its KV behind one prefix.
      num_bytes: tier -> bytes of KV. What two documents share counts for both.
      frequency_reuse: CacheCraft sec. 3.3 `f_r`, summed over the variants.
      last_used: when this process last had it in a request, seconds since the epoch; None if it never had.
      pinned_until: None where it is not pinned.
      erasing: it is not used any more, but not all of it could be deleted yet.
    """

    document_id: str
    version: str | None
    chunks: int
    variants: int
    num_bytes: dict[str, int]
    frequency_reuse: float
    last_used: float | None
    pinned_until: float | None
    erasing: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """What an invalidation or an erasure took away.

    Attributes:
      chunks: of the document that no other document has. kept_chunks: that another one has, too, so they stay.
      variants: chunk variants that are gone from every tier. num_bytes: tier -> bytes of KV that they took.
    """

    document_id: str
    version: str | None
    chunks: int
    kept_chunks: int
    variants: int
    num_bytes: dict[str, int]


WarmStatus = Literal["present", "computed", "no_room"]
_WARM_STATUSES: tuple[WarmStatus, ...] = ("present", "computed", "no_room")


@dataclasses.dataclass(frozen=True, slots=True)
class WarmedDocument:
    """A document that was to be warmed: its variants were there already, some were computed, or found no room."""

    document_id: str | None
    version: str | None
    num_tokens: int
    status: WarmStatus


class Warming:
    """Documents to warm, and how far that is; `done` grows document by document.

    Args:
      prompts: of each document, one for each variant of it: the last chunk is the document, what stands before it is
        its prefix.
      compares: how far a document's KV behind others deviates from its KV alone is measured, where both are there.

    Attributes:
      is_urgent: its prefills are queued like the requests of clients, not behind all of them.
    """

    def __init__(
        self, documents: Sequence[Document], prompts: Sequence[Sequence[Prompt]], *, compares: bool = False
    ) -> None:
        self.total = len(documents)
        self.compares = compares
        self.is_urgent = False
        self.prompts = tuple(prompt for some in prompts for prompt in some)
        self.done: list[WarmedDocument] = []
        self._left = collections.deque(
            (document, prompt, prompt is some[-1])
            for document, some in zip(documents, prompts, strict=True)
            for prompt in some
        )
        self._worst: WarmStatus = "present"
        self._erasures: frozenset[str] = frozenset()
        self._kept: set[VariantId] = set()

    @property
    def next_prompt(self) -> Prompt:
        """That of the next variant; there is one unless `is_finished`."""
        return self._left[0][1]

    @property
    def is_finished(self) -> bool:
        """True once every document was dealt with."""
        return not self._left

    def _pass_over(self, status: WarmStatus, held: VariantId | None) -> None:
        document, prompt, is_last = self._left.popleft()
        if held is not None:
            self._kept.add(held)
        if _WARM_STATUSES.index(status) > _WARM_STATUSES.index(self._worst):
            self._worst = status
        if is_last:
            name = document.source_id or document.id
            num_tokens = len(prompt.chunks[-1].token_ids)
            self.done.append(WarmedDocument(name, document.version, num_tokens, self._worst))
            self._worst = "present"


class RunPrefill(Protocol):
    """Prefills a prompt in the batch loop and waits for that; `keep` is called while what it reused is pinned.

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


class DocumentCache:
    """Works on one engine's variants. `warm_one`, `compute` and `prepare_one` wait for prefills in the batch loop; all
    else wants the engine for itself (`Exclusive`).

    Whatever has to do with erasures asks where each variant's KV came from, so it reads the records of all variants
    that no request asked for yet: some 50 us each.
    """

    def __init__(
        self,
        prefill: CachedPrefill,
        run_prefill: RunPrefill,
        variants: VariantIndex,
        store: TieredStore,
        frame: PassageFrame,
        exclusive: Exclusive,
        *,
        max_model_len: int,
    ) -> None:
        self.registry = variants.documents
        self._max_model_len = max_model_len
        self.frame = frame
        self._prefill = prefill
        self._run_prefill = run_prefill
        self._variants = variants
        self._store = store
        self._exclusive = exclusive
        self._next_tend = 0.0

    def warm_one(self, warming: Warming, is_cancelled: IsCancelled | None) -> None:
        """Computes and stores the next variant of a warming, unless it is there.

        Raises:
          PrefillCancelledError: `is_cancelled` returned True; the variant is still to be done.
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
        """False if the next variant is held. To be called right before `compute`, with exclusive access."""
        prompt = warming.next_prompt
        if self.held_id(prompt) is not None:
            self.registry.learn(prompt.chunks)
            return False
        warming._erasures = self._erasures_of(prompt)
        return True

    def _erasures_of(self, prompt: Prompt) -> frozenset[str]:
        chunk_ids = frozenset(chunk.chunk_id for chunk in prompt.chunks)
        return self.registry.after(prompt.chunks[-1].chunk_id, chunk_ids)

    def compute(self, warming: Warming, is_cancelled: IsCancelled | None, *, wait: bool = False) -> int:
        """Computes the next variant and stores it where there is room; how many tokens were computed.

        Of a prompt with other documents before it, only the last one is stored, and those of the frame: their KV is
        computed once and reused exactly. What was erased since `needs_computing` is not stored. `wait` as
        `CachedPrefill.store_new`.

        Raises:
          PrefillCancelledError: as `warm_one`.
        """
        prompt = warming.next_prompt
        is_alone = len(prompt.chunks) == 1 + prompt.has_system
        only_last = not is_alone and not self.frame.stands_in(prompt)
        num_computed = 0

        def keep(prefilled: Prefilled) -> None:
            nonlocal num_computed
            num_computed = len(computed_offsets(prefilled.plan))
            if self._erasures_of(prompt) - warming._erasures:
                return
            other = None
            if warming.compares and not is_alone:
                alone_id = self.held_id(dataclasses.replace(prompt, chunks=_without_others(prompt)))
                other = None if alone_id is None else self._prefill.stored_kv(alone_id)
            self._prefill.store_new(prefilled, warming._kept, other, only_last=only_last, wait=wait)

        self._run_prefill(prompt, "exact", keep, is_urgent=warming.is_urgent, is_cancelled=is_cancelled)
        return num_computed

    def prepare_one(self, is_cancelled: IsCancelled | None, *, only_reused: bool) -> bool:
        """Computes the next of `CachedPrefill.unprepared` as `Engine.documents.warm` does; False if there is none, the
        engine is in use, or `is_cancelled` returned True first.

        Args:
          only_reused: leave out passages that no request reused.
        """
        with self._exclusive(wait=False) as is_ours:
            found = self._next_to_prepare(only_reused) if is_ours else None
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
                if not self._erasures_of(warming.next_prompt) - warming._erasures:
                    self._prefill.unprepared.note(alone, was_reused=was_reused)
            return False
        return True

    def _next_to_prepare(self, only_reused: bool) -> tuple[Prompt, bool, Warming] | None:
        """A passage as `UnpreparedPassages.pop` returns it, and the warming of those of its variants that are not held.
        It counts as erased if it is from now on, whichever of them is being computed then."""
        while found := self._prefill.unprepared.pop(only_reused=only_reused):
            alone, was_reused = found
            framed = self.frame.around(alone)
            if framed is None or framed.num_tokens > self._max_model_len:
                continue
            missing = [prompt for prompt in (alone, framed) if self.held_id(prompt) is None]
            if missing:
                warming = Warming([Document("")], [missing], compares=True)
                warming._erasures = self._erasures_of(framed)
                return alone, was_reused, warming
        return None

    def pass_over(self, warming: Warming, status: WarmStatus) -> None:
        """Ends the next variant of a warming, which came to that."""
        warming._pass_over(status, self.held_id(warming.next_prompt))

    def remove(self, document_id: str, version: str | None, *, whole: bool, keep: Sequence[Chunk] = ()) -> Removal:
        """Takes a document's variants out of use and out of every tier, except those of chunks in `keep`, which belong
        to another version of it.

        Args:
          whole: also what was computed while looking at it, and what lies on disk uncommitted.

        Raises:
          RequestError, UnknownDocumentError: as `DocumentRegistry.select`.
          EraseIncompleteError: not everything could be deleted, or noted; nothing of it is used any more.
        """
        self.apply_all()
        self._variants.look_into_all()  # before the erasure begins, after which what it takes would only be dropped
        stays = self.registry.learn([chunk for chunk in keep if self.registry.knows(chunk.chunk_id)])
        links = {name: link for name, link in self.registry.select(document_id, version).items() if name not in stays}
        chunk_ids = self.registry.without_others(links)
        kept = {link.chunk_id for link in links.values()} - chunk_ids
        erasure = self.registry.begin(chunk_ids, list(links), whole=whole)
        failure = ""
        try:
            self.registry.note(erasure)
        except OSError as error:
            failure = f"the order itself could not be noted, a crash would forget it: {error}"
        variants, num_bytes, remaining = self._carry_out(erasure)
        if failure:
            remaining = (failure, *remaining)
        elif not remaining:
            remaining = self._finish(erasure)
        if remaining:
            raise EraseIncompleteError(
                f"document {document_id!r}: {len(remaining)} objects could not be deleted or noted yet; nothing of it "
                "is used any more, and the rest is tried again",
                remaining,
            )
        return Removal(document_id, version, len(chunk_ids), len(kept), variants, num_bytes)

    def needs_tending(self) -> bool:
        """True when `tend` has something to do."""
        return bool(self.registry.unfinished()) or self.registry.clock() >= self._next_tend

    def tend(self) -> None:
        """Tries again what could not be deleted, and drops notes that have served."""
        self._next_tend = self.registry.clock() + _TEND_INTERVAL_S
        self.tend_erasures()
        try:
            self.registry.drop_expired_pins()
            # A variant's own chunk is known without its record, so all are only read where some link may really go.
            held = self._variants.chunk_ids()
            passing = {name: chunk for name, chunk in self.registry.passing().items() if chunk not in held}
            seen = self._variants.seen() if passing else frozenset()
            self.registry.forget_links([name for name, chunk in passing.items() if chunk not in seen])
        except OSError as error:
            logger.warning("documents: notes that have served cannot be deleted: %s", error)

    def tend_erasures(self) -> None:
        """The part of `tend` that cannot wait, for engines that open; does nothing where nothing was erased."""
        for erasure in self.registry.unfinished():
            try:
                self.registry.note(erasure)
            except OSError:
                continue
            if not self._carry_out(erasure)[2]:
                self._finish(erasure)
        for erasure in self.registry.outdated():
            if not self._carry_out(erasure)[2]:  # once more: others may have stored something since
                self._forget(erasure)

    def fetch(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        """What other processes noted, for `apply_changes`; reads the disk and changes nothing. Empty while it does not
        answer."""
        try:
            return self.registry.fetch()
        except OSError as error:
            logger.debug("documents: cannot read what other processes noted: %s", error)
            return {}, ()

    def apply_changes(self, added: Mapping[str, Mapping[str, Any]], removed: Sequence[str]) -> None:
        """Applies what `fetch` returned: drops what other processes erased from every tier, memory included."""
        if self.registry.apply_changes(added, removed):
            self._variants.discard_erased()
            self._drop_unprepared()

    def list(self, document_id: str | None = None, version: str | None = None) -> tuple[CachedDocument, ...]:
        """What is cached, by document and version. Reads the records of their variants that no request asked for yet.

        Raises:
          RequestError, UnknownDocumentError: as `DocumentRegistry.select`.
        """
        links = dict(self.registry.links()) if document_id is None else self.registry.select(document_id, version)
        by_version: dict[tuple[str, str | None], list[tuple[str, Link]]] = collections.defaultdict(list)
        for name, link in links.items():
            by_version[link.document_id, link.version].append((name, link))
        going = {name for erasure in self.registry.unfinished() for name in erasure.links}
        order = sorted(by_version, key=lambda key: (key[0], key[1] is not None, key[1] or ""))
        return tuple(self._describe(*key, by_version[key], going) for key in order)

    def _describe(
        self, document_id: str, version: str | None, links: Sequence[tuple[str, Link]], going: Collection[str]
    ) -> CachedDocument:
        chunk_ids = {link.chunk_id for _, link in links}
        metas = [meta for found in self._variants.of_chunks(chunk_ids).values() for meta in found]
        num_bytes = dict.fromkeys(self._store.usage(), 0)
        for meta in metas:
            for tier in self._store.tiers_of(meta.variant_id):
                num_bytes[tier] += meta.num_bytes
        used = [at for chunk in chunk_ids if (at := self.registry.last_used(chunk)) is not None]
        pins = [
            pin.until
            for pin in self.registry.pins()
            if any(link.is_of(pin.document_id, pin.version) for _, link in links)
        ]
        return CachedDocument(
            document_id=document_id,
            version=version,
            chunks=len(chunk_ids),
            variants=len(metas),
            num_bytes=num_bytes,
            frequency_reuse=sum(meta.frequency_reuse for meta in metas),
            last_used=max(used, default=None),
            pinned_until=max(pins, default=None),
            erasing=any(name in going for name, _ in links),
        )

    def held_id(self, prompt: Prompt) -> VariantId | None:
        """The exact variant that warming a prompt's last chunk is about, if it is held."""
        *before, last = (chunk.chunk_id for chunk in prompt.chunks)
        for meta in self._variants.of_chunks({last}).get(last, ()):
            if meta.fidelity == "exact" and meta.prefix_ids == tuple(before):
                return meta.variant_id
        return None

    def apply_all(self) -> None:
        """Learns what other processes noted and stored, as far as the disk answers."""
        self.apply_changes(*self.fetch())
        self._store.refresh()
        self._reconcile()

    def _reconcile(self) -> None:
        gone = [variant_id for variant_id in self._variants.ids() if self._store.tier_of(variant_id) is None]
        stored = (one.variant_id for one in self._store.summaries())
        self._variants.apply_changes([key for key in stored if key not in self._variants], gone)

    def _carry_out(self, erasure: Erasure) -> tuple[int, dict[str, int], tuple[str, ...]]:
        """Deletes what an erasure takes: number of variants, their bytes by tier, and what could not be deleted. Such
        as were not looked into before the erasure began are deleted and not counted."""
        self._drop_unprepared()
        held = [meta for meta in self._variants if erasure.takes(meta.chunk_id, self._variants.origin(meta))]
        num_bytes = dict.fromkeys(self._store.usage(), 0)
        for meta in held:
            for tier in self._store.tiers_of(meta.variant_id):
                num_bytes[tier] += meta.num_bytes
        condemned = {str(meta.variant_id) for meta in held}
        condemned |= self._taken_by(erasure)  # of an earlier attempt: no longer in the index
        try:
            remaining = self._erase(erasure, condemned)
        except OSError as error:
            remaining = (f"the disk cannot be listed: {error}",)
        for meta in held:
            self._variants.forget(meta.variant_id)
        self._reconcile()
        self._variants.save_hints()
        return len(held), num_bytes, remaining

    def _drop_unprepared(self) -> None:
        """Forgets the erased ones of the passages that `prepare_one` would compute."""
        self._prefill.unprepared.drop(lambda one: self.registry.is_erased(one, Origin(frozenset({one}))))

    def _erase(self, erasure: Erasure, condemned: set[str]) -> tuple[str, ...]:
        """Deletes these variants, and what more of the erasure's it finds on disk: others write until they have heard
        of it, and an earlier attempt may have failed. Returns what could not be deleted. Raises OSError: the disk
        cannot be listed."""

        def condemns(record: ShardRecord) -> bool:  # others who have heard of it compute the same variants anew
            return _takes(erasure, record)

        for pause_s in (*_ERASE_PAUSES_S, 0.0):
            self._store.request_relisting()
            uncommitted = erasure.whole and not erasure.is_done
            remaining = self._store.erase(sorted(condemned), uncommitted=uncommitted, condemns=condemns)
            found = self._taken_by(erasure)
            if remaining or not found:
                break
            condemned = condemned | found
            time.sleep(pause_s)
        return (*remaining, *sorted(found))

    def _taken_by(self, erasure: Erasure) -> set[str]:
        """Variants in the store that an erasure takes; reads all records."""
        return {record.variant_id for record in self._store.records() if _takes(erasure, record)}

    def _forget(self, erasure: Erasure) -> None:
        try:
            self.registry.forget(erasure)
        except OSError as error:
            logger.warning("documents: the note of an erasure cannot be deleted: %s", error)

    def _finish(self, erasure: Erasure) -> tuple[str, ...]:
        """Ends an erasure that left nothing behind; what of its notes could not be deleted."""
        try:
            self.registry.finish(erasure)
        except OSError as error:
            return (f"its notes: {error}",)
        self._store.request_relisting()  # that it is over: the notes of the document are gone
        return ()


def _takes(erasure: Erasure, record: ShardRecord) -> bool:
    return erasure.takes(ChunkId(record.chunk_id), origin_of_record(record))


def _without_others(prompt: Prompt) -> tuple[Chunk, ...]:
    """The system prompt, if any, and the last document."""
    return (*prompt.chunks[: int(prompt.has_system)], prompt.chunks[-1])
