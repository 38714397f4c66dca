"""Differences between a directory of documents and its index."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import ccjax.retrieval.jsonl as jsonl
from ccjax.config.documents import DocumentOptions
from ccjax.retrieval.catalog import IndexedDocument
from ccjax.retrieval.documents import (
    DocumentError,
    LoadedDocument,
    check_regular,
    is_supported,
    parse_document,
    read_document,
    reason_of,
)
from ccjax.retrieval.machine_text import without_machine_text
from ccjax.retrieval.report import RefreshReport
from ccjax.retrieval.scan import CANNOT_READ, find_files

Split = Callable[[LoadedDocument], tuple[str, ...]]
"""Splits a document into passages; ValueError if that is impossible."""
Refused = dict[str, tuple[str, list[tuple[str, str]]]]
"""By name: digests of files whose content, or part of it, could not be used, and (path, reason) to report."""
_MOUNT, _WITH_PROBLEMS = "mount", " with problems"
"""Digest of a directory below which another file system was mounted; behind that of a collection with lines that could
not be used."""
_log = logging.getLogger(__name__)


def find_changes(
    docs_dir: Path,
    versions: Mapping[str, tuple[str, str]],
    digests: Mapping[str, str],
    split: Split,
    options: DocumentOptions,
    refused: Refused,
    *,
    skip: Path | None,
    progress: Callable[[int, int], None],
) -> tuple[list[IndexedDocument], dict[str, str | None], RefreshReport]:
    """Finds the changes since the index was built. Every file is read and hashed; those with a known hash are not
    parsed. What cannot be read now is not deleted: the documents of such files and directories, and of file systems
    that are not mounted, stay as they are.

    Args:
      versions: (version, source) of the documents in the index, by id.
      digests: of collections that the index holds, and of what was mounted.
      refused: brought up to date. These are reported without being parsed again, which may take a minute each, until
        they change.
      skip: a directory to leave out.
      progress: called with the number of files done and of all files.

    Returns:
      (documents, digests, report): new and changed documents, and the digests of their sources to store once all are
      added, None to forget one.
    """
    finder = _Finder(versions, digests, split, options.max_file_bytes, refused)
    files, failed = find_files(docs_dir, skip=skip, exclude=options.docs_exclude, outside_links=options.docs_links)
    finder.failed += failed
    for path, reason in failed:
        if reason.startswith(CANNOT_READ):
            finder.keep_below(Path(path).relative_to(docs_dir).as_posix())
    directories = {
        str(parent) for name, path in files.items() if is_read(path) for parent in PurePosixPath(name).parents
    }
    mounts = {name for name in directories - {"."} if os.path.ismount(os.path.realpath(docs_dir / name))}
    known_mounts = {name for name, digest in digests.items() if digest == _MOUNT}
    if not directories and not versions.keys() <= finder.present:
        # A directory whose last document was deleted looks like one that is not mounted, or that is being replaced.
        finder.failed.append((str(docs_dir), "is empty all at once; its index is kept until it has a document"))
        finder.keep_below(".")
    else:
        for name in sorted(known_mounts - directories):
            if not os.path.ismount(os.path.realpath(docs_dir / name)):
                reason = f"{CANNOT_READ}: it is not mounted; its index is kept until it has a document"
                finder.failed.append((str(docs_dir / name), reason))
                finder.keep_below(name)
    for done, (name, path) in enumerate(files.items()):
        progress(done, len(files))
        if jsonl.is_collection(path):
            finder.collection(name, path)
        else:
            finder.file(name, path)
    progress(len(files), len(files))
    for name in refused.keys() - files.keys():
        del refused[name]
    kept = {versions[document_id][1] for document_id in finder.present if document_id in versions}
    kept |= {str(parent) for source in kept for parent in PurePosixPath(source).parents}
    kept = (kept - directories) | {*files} | mounts
    finder.digests |= dict.fromkeys(mounts - known_mounts, _MOUNT)
    forgotten = {name: None for name in digests if name not in kept}
    ids = [document.document_id for document in finder.new]
    report = RefreshReport(
        added=tuple(document_id for document_id in ids if document_id not in versions),
        changed=tuple(document_id for document_id in ids if document_id in versions),
        removed=tuple(document_id for document_id in versions if document_id not in finder.present),
        failed=tuple(finder.failed),
        unsupported=tuple(finder.unsupported.most_common()),
    )
    return finder.new, finder.digests | forgotten, report


def is_read(path: Path) -> bool:
    """Whether files with this name may hold documents."""
    return is_supported(path) or jsonl.is_collection(path)


class _Finder:
    def __init__(
        self,
        versions: Mapping[str, tuple[str, str]],
        digests: Mapping[str, str],
        split: Split,
        max_file_bytes: int,
        refused: Refused,
    ) -> None:
        self.new: list[IndexedDocument] = []
        self.digests: dict[str, str | None] = {}
        self.failed: list[tuple[str, str]] = []
        self.unsupported: collections.Counter[str] = collections.Counter()
        self.present: set[str] = set()
        self._versions, self._known_digests, self._split = versions, digests, split
        self._max_file_bytes, self._refused = max_file_bytes, refused
        self._may_go_well = False  # the next time, of what could not be used since this was set
        self._of_source: dict[str, list[str]] = {}
        for document_id, (_, source) in versions.items():
            self._of_source.setdefault(source, []).append(document_id)

    def keep_below(self, name: str) -> None:
        """Keeps the indexed documents of a file or directory, given relative to the documents directory (`.`)."""
        for document_id, (_, source) in self._versions.items():
            if name == "." or source == name or source.startswith(f"{name}/"):
                self.present.add(document_id)

    @contextlib.contextmanager
    def _reporting(self, place: str | Path, name: str = "") -> Iterator[None]:
        """Reports any problem with a file, or with one document of it, so that the others are still read. Parsers raise
        more than they document (`RecursionError`, `OverflowError`, ...)."""
        try:
            yield
        except Exception as error:
            cause = error.__context__ if isinstance(error, DocumentError) else error
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                self.keep_below(name)
            _log.debug("%s", place, exc_info=True)
            self._may_go_well |= not isinstance(error, ValueError | RecursionError)
            self.failed.append((str(place), reason_of(error)))

    def file(self, name: str, path: Path) -> None:
        if not is_supported(path) and os.path.isfile(path):
            self.unsupported[path.suffix.lower()] += 1
            return
        with self._reporting(path, name):
            data = read_document(path, max_file_bytes=self._max_file_bytes)
            version = hashlib.sha256(data).hexdigest()
            if self._is_known(name, version):
                return
            digest, problems = self._refused.pop(name, ("", []))
            if digest != version:
                try:
                    self._take(name, name, version, parse_document(path, data))
                    return
                except ValueError as error:
                    if isinstance(error.__context__, OSError):  # which may go well next time
                        raise
                    _log.debug("%s", path, exc_info=True)
                    problems = [(str(path), reason_of(error))]
            self._refused[name] = (version, problems)
            self.failed += problems

    def collection(self, name: str, path: Path) -> None:
        with self._reporting(path, name):
            check_regular(path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known, (refused, problems) = self._known_digests.get(name), self._refused.pop(name, ("", []))
            problems = problems if refused == digest else []
            if known == digest or problems and known == f"{digest}{_WITH_PROBLEMS}":
                self.present.update(self._of_source.get(name, []))
            else:
                num_failed, self._may_go_well = len(self.failed), False
                self._take_lines(name, path)
                problems = self.failed[num_failed:]
                del self.failed[num_failed:]
                self.digests[name] = f"{digest}{_WITH_PROBLEMS}" if problems else digest
                if self._may_go_well:
                    self.digests[name] = None
            if problems:
                self._refused[name] = (digest, problems)
                self.failed += problems

    def _take_lines(self, name: str, path: Path) -> None:
        for number, line in enumerate(jsonl.lines(path, self._max_file_bytes), 1):
            with self._reporting(f"{path}:{number}"):
                if line is None:
                    raise ValueError(f"too large: over the limit max_file_bytes={self._max_file_bytes}")
                if line:
                    self._take_line(name, line)

    def _take_line(self, name: str, line: bytes) -> None:
        document_id, loaded = jsonl.parse_line(line, name)
        if document_id in self.present:
            raise ValueError(f"not a document: _id: wanted every one once, got {document_id!r} again")
        version = hashlib.sha256(line).hexdigest()
        if not self._is_known(document_id, version):
            self._take(document_id, name, version, loaded)

    def _is_known(self, document_id: str, version: str) -> bool:
        """Whether the index holds this version."""
        if self._versions.get(document_id, ("",))[0] != version:
            return False
        self.present.add(document_id)
        return True

    def _take(self, document_id: str, source: str, version: str, loaded: LoadedDocument) -> None:
        text, num_left_out = without_machine_text(loaded.text)
        if not text.strip():
            raise ValueError("no text besides base64, hex or minified code")
        passages = self._split(dataclasses.replace(loaded, text=text))
        note = f"left out {num_left_out} characters of base64, hex or minified code" if num_left_out else ""
        for told in filter(None, (*loaded.notes, note)):
            _log.warning("%s: %s", document_id, told)
        self.present.add(document_id)
        self.new.append(IndexedDocument(document_id, loaded.title, version, passages, source, loaded.metadata))
