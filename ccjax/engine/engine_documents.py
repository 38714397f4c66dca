"""Operations on the documents in an engine's cache: `Engine.documents`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ccjax.cache.chunk_cache import ChunkCache
from ccjax.cache.document_registry import Pin, check_id
from ccjax.cache.documents.document_cache import CachedDocument, Removal
from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.documents.pruning import Pruned, prune
from ccjax.cache.exclusive import Exclusive
from ccjax.cache.warming.passages import PassageWarmer, WarmedDocument, Warming
from ccjax.cache.warming.shared import SharedVariant, SharedWarming
from ccjax.config import EngineConfig
from ccjax.errors import ContextLengthError, ReadOnlyError, RequestError
from ccjax.policy.strategies import get_strategy
from ccjax.prompts import Prompt, as_chunk
from ccjax.requests import Request, SamplingParams, documents_from
from ccjax.runner.cancellation import IsCancelled, PrefillCancelledError
from ccjax.text import PromptBuilder
from ccjax.types import Chunk, ChunkId, Document


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentCounts:
    """Current counts: cached documents (each version counts), pins, and erasures that are not complete yet."""

    documents: int
    pins: int
    unfinished_erasures: int


class EngineDocuments:
    """Warms, pins, invalidates, erases and lists documents. Thread-safe.

    A document is named by its own `id` or by that of one of its passages; `version` None means all versions.
    """

    def __init__(
        self,
        config: EngineConfig,
        chunks: ChunkCache,
        warmer: PassageWarmer,
        builder: PromptBuilder | None,
        assemble: Callable[[Request], Prompt],
        exclusive: Exclusive,
        *,
        max_model_len: int,
    ) -> None:
        """
        Args:
          builder: None if the model has no tokenizer.
          assemble: builds the prompt of a request without an answer.
        """
        self._config = config
        self._documents = chunks.documents
        self._warmer = warmer
        self._pins = chunks.pins
        self._variants = chunks.variants
        self._store = chunks.store
        self._rates = chunks.rates
        self._builder = builder
        self._assemble = assemble
        self._exclusive = exclusive
        self._max_model_len = max_model_len

    def warm(
        self,
        documents: Sequence[Document | Mapping[str, Any]],
        *,
        system_prompt: str | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> tuple[WarmedDocument, ...]:
        """Computes and stores documents before any question, formatted as in requests: each behind the system prompt
        alone, for prompts in which it comes first, and behind the frame (`EngineConfig.frame`), for reuse behind other
        passages. Other requests may run between two prefills.

        Args:
          system_prompt: the system prompt of future requests, if they bring their own.
          is_cancelled: called before every layer; once it returns True, only the documents done so far are returned.

        Raises:
          RequestError, ContextLengthError: a document is invalid or too long; nothing was computed.
          ReadOnlyError: the engine is `read_only` or of strategy `full`.
        """
        warming = self.begin_warming(documents, system_prompt=system_prompt)
        warming.is_urgent = True
        while not warming.is_finished and self.warm_one(warming, is_cancelled=is_cancelled):
            pass
        return tuple(warming.done)

    def begin_warming(
        self,
        documents: Sequence[Document | Mapping[str, Any]],
        *,
        behind: Sequence[Sequence[Document | Mapping[str, Any]]] | None = None,
        system_prompt: str | None = None,
        cache_salt: str = "",
    ) -> Warming:
        """Prepares a warming, as `warm` does, for callers that advance it with `warm_one` in idle time; raises as
        `warm`.

        Args:
          behind: for each document, the documents (possibly none) between the system prompt and it; only this variant
            is computed. None for the variants that `warm` computes.
          cache_salt: `Request.cache_salt` of future requests; only these can reuse the result.
        """
        self._check_writable()
        checked = documents_from(documents)
        if not checked:
            raise RequestError("documents", "wanted at least one document, got none")
        if behind is not None and len(behind) != len(checked):
            raise RequestError("behind", f"wanted one list for each of {len(checked)} documents, got {len(behind)}")
        prompts = []
        for number, document in enumerate(checked):
            before = () if behind is None else documents_from(behind[number])
            try:
                prompt = self._warm_prompt([*before, document], system_prompt, cache_salt)
            except ContextLengthError as error:
                message = str(error).removeprefix(f"{error.argument}: ").partition(";")[0]
                raise ContextLengthError(f"documents[{number}]", message) from error
            prompt = Prompt.of_chunks((*prompt.instructions, *prompt.documents))
            framed = self.frame.around(prompt) if behind is None else None
            fits = framed is not None and framed.num_tokens <= self._max_model_len
            prompts.append((prompt, framed) if framed is not None and fits else (prompt,))
        return Warming(checked, prompts, compares="deviations" in get_strategy(self._config.strategy).needs)

    @property
    def frame(self) -> PassageFrame:
        """The frame behind which passages are prepared."""
        return self._warmer.frame

    def _warm_prompt(self, documents: Sequence[Document], system_prompt: str | None, cache_salt: str = "") -> Prompt:
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        messages = [*system, {"role": "user", "content": "?"}]
        sampling = SamplingParams(max_new_tokens=None)
        request = Request(messages=messages, documents=documents, sampling=sampling, cache_salt=cache_salt)
        return self._assemble(request)

    def passage_chunks(self, documents: Sequence[Document | Mapping[str, Any]]) -> tuple[Chunk, ...]:
        """Tokenizes the documents as in prompts; computes no KV.

        Raises:
          RequestError: a document is invalid, or the model has no tokenizer.
        """
        if self._builder is None:
            raise RequestError("model", "wanted a model with tokenizer files for text; this one takes token ids only")
        return tuple(as_chunk(self._builder.document_ids(document), document) for document in documents_from(documents))

    def prompt_overhead(self, *, system_prompt: str | None = None) -> tuple[Chunk | None, int]:
        """Returns the chunk of the system prompt that warmed documents are behind (None without one), and the number of
        tokens that a prompt has besides its documents, which count towards `max_model_len`."""
        prompt = self._warm_prompt([Document("?")], system_prompt)
        system = next((segment.chunk for segment in prompt.instructions), None)
        return system, prompt.num_tokens - len(prompt.chunks[-1].token_ids)

    def warm_shared(
        self,
        documents: Sequence[Document | Mapping[str, Any]],
        *,
        behind: Sequence[Sequence[Document | Mapping[str, Any]]] = (),
        system_prompt: str | None = None,
        is_cancelled: IsCancelled | None = None,
    ) -> tuple[SharedVariant, ...]:
        """Computes one variant of each document, in a job shared with other processes on the same store: variants that
        another process is computing are left to it, and what was computed is on disk when this returns. Arguments as
        for `begin_warming`; without `behind`, each document is directly behind the system prompt.

        Raises:
          RequestError, ContextLengthError, ReadOnlyError: as `warm`.
          ValueError: the engine has no store.
        """
        warming = self.begin_warming(documents, behind=behind or [()] * len(documents), system_prompt=system_prompt)
        warming.is_urgent = True
        shared = SharedWarming(self._warmer, self._variants, self._store, self._rates, warming, self._exclusive)
        return shared.run(is_cancelled)

    def note_passages(self, chunks: Sequence[Chunk]) -> None:
        """Records which documents chunks with stored variants belong to, so that they can be erased by document id.

        Raises:
          ReadOnlyError: as `warm`.
        """
        self._check_writable()
        with self._exclusive():
            self._documents.registry.learn(chunks)

    def prune(self, keep: Collection[ChunkId]) -> Pruned:
        """Removes the variants of all indexed passages that are neither pinned nor in `keep`, and all variants whose
        computation attended to one (`ccjax.cache.documents.pruning`).

        Raises:
          ReadOnlyError: as `warm`.
          OSError: the disk cannot be listed, or a note cannot be deleted.
        """
        self._check_writable()
        with self._exclusive():
            self._documents.apply_all()
            return prune(self._variants, self._documents.registry, self._store, keep)

    def warm_one(self, warming: Warming, *, is_cancelled: IsCancelled | None = None) -> bool:
        """Processes the next variant of a warming; returns False if `is_cancelled` returned True first."""
        try:
            self._warmer.warm_one(warming, is_cancelled)
        except PrefillCancelledError:
            return False
        return True

    def pin(self, document_id: str, version: str | None = None, *, ttl_s: float = 3600.0, host: bool = False) -> Pin:
        """Protects a document's present and future variants from eviction from the lowest tier that holds them, for
        `ttl_s` seconds. Replaces a pin of the same document and version. With a disk tier, pins survive a restart.

        Args:
          host: also protect variants in host memory from eviction.

        Raises:
          RequestError: an argument is of the wrong type or out of range.
          UnknownDocumentError: nothing of the document is cached.
          PinLimitError: `pin_share` of a budget is exceeded; nothing changed.
          ReadOnlyError: the engine is `read_only` or of strategy `full`.
          OSError: the pin could not be written to disk; it is effective in this process only.
        """
        self._check_writable()
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not (math.isfinite(ttl_s) and ttl_s > 0):
            raise RequestError("ttl_s", f"wanted a positive number of seconds, got {ttl_s!r}")
        with self._exclusive():
            registry = self._documents.registry
            registry.select(document_id, version)
            pin = Pin(document_id, version, registry.clock() + ttl_s, bool(host))
            self._pins.check(pin)
            registry.pin(pin)
            return pin

    def unpin(self, document_id: str, version: str | None = None) -> bool:
        """Removes the pin of exactly this document and version; returns False if there was none.

        Raises:
          RequestError, ReadOnlyError, OSError: as `pin`.
        """
        self._check_writable()
        check_id("document_id", document_id)
        if version is not None:
            check_id("version", version)
        with self._exclusive():
            return self._documents.registry.unpin(document_id, version)

    def invalidate(
        self, document_id: str, version: str | None = None, *, keep: Sequence[Document | Mapping[str, Any]] = ()
    ) -> Removal:
        """Removes all variants of the document's text from every tier; no later request uses them. Text that another
        document (or version) also contains is kept. Reads the record of every variant: some 50 us each.

        KV of other passages computed behind the text is kept, too, and is repaired wherever it is used. Use `erase` to
        leave no trace of the text.

        Args:
          keep: passages that the document still contains; their cached variants are kept, under their version.

        Raises:
          RequestError, UnknownDocumentError, ReadOnlyError: as `pin`.
          EraseIncompleteError: not everything could be deleted yet.
        """
        self._check_writable()
        chunks = self.passage_chunks(keep) if keep else ()
        with self._exclusive():
            return self._documents.remove(document_id, version, whole=False, keep=chunks)

    def invalidate_old(self, keep: Mapping[str, Sequence[Document | Mapping[str, Any]]]) -> None:
        """As `invalidate` of every document in `keep` (document id -> passages that it still contains), but reads the
        records once, not once for each. Documents that are not cached are ignored.

        Raises:
          RequestError, ReadOnlyError, EraseIncompleteError: as `invalidate`.
        """
        self._check_writable()
        with self._exclusive():
            known = self._documents.registry.select_known(keep)
        chunks = {
            document_id: self.passage_chunks(keep[document_id]) if keep[document_id] else () for document_id in known
        }
        with self._exclusive():
            self._documents.remove_old(chunks)

    def erase(self, document_id: str, version: str | None = None) -> Removal:
        """As `invalidate`, but leaves nothing of the text or its KV in any tier that this process can reach: also
        deletes all variants whose computation attended to it, queued writes, quarantined objects, parts of interrupted
        writes and copies of records.

        Other processes on the same store drop their copies in memory at their next `refresh`, and this one then deletes
        what they stored meanwhile; a hash of the text is kept for an hour for that. Not covered: backups, snapshots and
        object versions that a bucket keeps, the documents directory and its index, logs.

        Raises:
          RequestError, UnknownDocumentError, ReadOnlyError: as `pin`.
          EraseIncompleteError: as `invalidate`; report it to the client that requested the erasure.
        """
        self._check_writable()
        with self._exclusive():
            return self._documents.remove(document_id, version, whole=True)

    def list(self, document_id: str | None = None, version: str | None = None) -> tuple[CachedDocument, ...]:
        """Lists what is cached by document and version, optionally of one document or version only. Reads the records
        of these variants that no request has needed yet: some 50 us each.

        Raises:
          RequestError, UnknownDocumentError: as `pin`.
        """
        with self._exclusive():
            return self._documents.list(document_id, version)

    @property
    def counts(self) -> DocumentCounts:
        """The current counts; does not wait for exclusive access."""
        registry = self._documents.registry
        versions = {(link.document_id, link.version) for _, link in registry.links()}
        return DocumentCounts(len(versions), len(registry.pins()), len(registry.unfinished()))

    def _check_writable(self) -> None:
        for name, refused in (
            ("read_only", self._config.read_only),
            ("strategy", not get_strategy(self._config.strategy).needs),
        ):
            if refused:
                raise ReadOnlyError(name, f"wanted an engine that stores chunks, this one has {name}={refused}")
