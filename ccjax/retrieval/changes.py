"""Differences between a directory of documents and its index."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ccjax.retrieval.jsonl as jsonl
from ccjax.retrieval.catalog import IndexedDocument
from ccjax.retrieval.documents import DocumentError, LoadedDocument, is_supported, parse_document, read_document
from ccjax.retrieval.machine_text import without_machine_text
from ccjax.retrieval.scan import find_files

Split = Callable[[LoadedDocument], tuple[str, ...]]
"""Splits a document into passages; ValueError if that is impossible."""
_MOST_REASON_CHARS = 400
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class IndexChanges:
    """Updates to apply to an index. Document ids are in order.

    Attributes:
      new: documents to add, new or changed.
      changed: ids of those of `new` that the index holds in another version.
      removed: ids to delete.
      digests: digests of sources to store once all of `new` is added, None to forget one.
      problems: files and lines that could not be used.
      unsupported: files of types that are not read, by suffix.
      left_out: characters of base64, hex and minified code that are in no passage of `new`, by file.
    """

    new: list[IndexedDocument] = dataclasses.field(default_factory=list)
    changed: list[str] = dataclasses.field(default_factory=list)
    removed: list[str] = dataclasses.field(default_factory=list)
    digests: dict[str, str | None] = dataclasses.field(default_factory=dict)
    problems: list[DocumentError] = dataclasses.field(default_factory=list)
    unsupported: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)


def find_changes(
    docs_dir: Path,
    versions: Mapping[str, tuple[str, str]],
    digests: Mapping[str, str],
    split: Split,
    *,
    skip: Path | None,
    strict: bool,
    max_file_bytes: int,
    exclude: Sequence[str] = (),
    outside_links: bool = False,
    progress: Callable[[int, int], None],
) -> IndexChanges:
    """Finds the changes since the index was built. Every file is read and hashed; those with a known hash are not
    parsed. What cannot be read now is not deleted: the documents of such files and directories stay as they are.

    Args:
      versions: (version, source) of the documents in the index, by id.
      digests: of collections that the index holds completely.
      skip: a directory to leave out.
      strict: raise for the first file that cannot be used.
      max_file_bytes: larger files, or lines of collections, cannot be used.
      exclude, outside_links: see `find_files`.
      progress: called with the number of files done and of all files.

    Raises:
      DocumentError: with `strict`.
    """
    changes = IndexChanges()
    finder = _Finder(changes, versions, digests, split, max_file_bytes, strict)
    files, failed = find_files(docs_dir, skip=skip, exclude=exclude, outside_links=outside_links)
    for path, reason in failed:
        finder.report(DocumentError(path, reason))
        if reason.startswith("cannot be listed"):
            finder.keep_below(Path(path).relative_to(docs_dir).as_posix())
    if versions and not files and not failed:
        # A directory whose last file was deleted looks like one that is not mounted, or that is being replaced.
        finder.report(DocumentError(docs_dir, "is empty all at once; its index is kept until it has a document"))
        finder.keep_below(".")
    for done, (name, path) in enumerate(files.items()):
        progress(done, len(files))
        if path.suffix.lower() == jsonl.SUFFIX:
            finder.collection(name, path)
        else:
            finder.file(name, path)
    progress(len(files), len(files))
    changes.removed = [document_id for document_id in versions if document_id not in finder.present]
    kept = {versions[document_id][1] for document_id in finder.present if document_id in versions}
    changes.digests |= {source: None for source in digests if source not in files and source not in kept}
    return changes


class _Finder:
    def __init__(
        self,
        changes: IndexChanges,
        versions: Mapping[str, tuple[str, str]],
        digests: Mapping[str, str],
        split: Split,
        max_file_bytes: int,
        strict: bool,
    ) -> None:
        self.present: set[str] = set()
        self._changes, self._versions, self._digests, self._split = changes, versions, digests, split
        self._max_file_bytes, self._strict = max_file_bytes, strict
        self._of_source: dict[str, list[str]] | None = None

    def report(self, problem: DocumentError) -> None:
        if self._strict:
            raise problem
        self._changes.problems.append(problem)

    def keep_below(self, name: str) -> None:
        """Keeps the indexed documents of a file or directory, given relative to the documents directory (`.`)."""
        for document_id, (_, source) in self._versions.items():
            if name == "." or source == name or source.startswith(f"{name}/"):
                self.present.add(document_id)

    @contextlib.contextmanager
    def _reporting(self, path: str | Path, name: str = "") -> Iterator[None]:
        """Reports any problem with a file, or with one document of it, so that the others are still read. Parsers raise
        more than they document (`RecursionError`, `OverflowError`, ...)."""
        try:
            yield
        except DocumentError as problem:
            cause = problem.__context__
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                self.keep_below(name)
            self.report(problem)
        except Exception as error:
            _log.debug("%s", path, exc_info=True)
            self.report(DocumentError(path, " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_REASON_CHARS]))

    def file(self, name: str, path: Path) -> None:
        if not self._strict and not is_supported(path) and os.path.isfile(path):
            self._changes.unsupported[path.suffix.lower()] += 1
            return
        with self._reporting(path, name):
            data = read_document(path, max_file_bytes=self._max_file_bytes)
            version = hashlib.sha256(data).hexdigest()
            if not self._is_known(name, version):
                self._take(name, name, version, path, parse_document(path, data))

    def collection(self, name: str, path: Path) -> None:
        with self._reporting(path, name):
            digest = jsonl.digest(path)
            if self._digests.get(name) == digest:
                self.present.update(self._documents_of(name))
                return
            num_problems = len(self._changes.problems)
            for line in jsonl.read_lines(path, name, max_line_bytes=self._max_file_bytes):
                with self._reporting(path if isinstance(line, DocumentError) else f"{path}: {line.document_id}"):
                    self._take_line(name, path, line)
            if len(self._changes.problems) == num_problems:  # else they are reported again next time
                self._changes.digests[name] = digest
            elif name in self._digests:
                self._changes.digests[name] = None

    def _take_line(self, name: str, path: Path, line: jsonl.CollectionLine | DocumentError) -> None:
        if isinstance(line, DocumentError):
            raise line
        if line.document_id in self.present:
            raise DocumentError(path, f"_id: wanted every one once, got {line.document_id!r} again")
        if not self._is_known(line.document_id, line.version):
            self._take(line.document_id, name, line.version, path, line.document)

    def _is_known(self, document_id: str, version: str) -> bool:
        """Whether the index holds this version."""
        if self._versions.get(document_id, ("",))[0] != version:
            return False
        self.present.add(document_id)
        return True

    def _take(self, document_id: str, source: str, version: str, path: Path, loaded: LoadedDocument) -> None:
        text, num_left_out = without_machine_text(loaded.text)
        if not text.strip():
            raise DocumentError(path, "no text besides base64, hex or minified code")
        try:
            passages = self._split(dataclasses.replace(loaded, text=text))
        except ValueError as error:
            raise DocumentError(path, str(error)) from None
        for note in loaded.notes:
            _log.warning("%s: %s", path, note)
        if num_left_out:
            self._changes.left_out[str(path)] = self._changes.left_out.get(str(path), 0) + num_left_out
        self.present.add(document_id)
        if document_id in self._versions:
            self._changes.changed.append(document_id)
        document = IndexedDocument(document_id, loaded.title, version, passages, source, loaded.metadata)
        self._changes.new.append(document)

    def _documents_of(self, source: str) -> list[str]:
        if self._of_source is None:
            self._of_source = {}
            for document_id, (_, own) in self._versions.items():
                self._of_source.setdefault(own, []).append(document_id)
        return self._of_source.get(source, [])
