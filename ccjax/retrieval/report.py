"""What an update of the index changed, and what it could not use."""

from __future__ import annotations

import collections
import dataclasses
import logging

_MOST_TOLD = 20
"""Problems that are logged one by one at each refresh."""
UNSUPPORTED = "unsupported file type"
_OTHER = "cannot be parsed"
_KINDS = (
    *("cannot be read", "is empty all at once", "the name is not UTF-8", "a link out of the directory"),
    *("not a regular file", "the file is empty", "too large", "contains NUL bytes", "is not text in any encoding"),
    *("no text", "no message", "not a document", "not JSON", "protected", "refused", "reading", "chunk_tokens"),
    *("broken PDF", "broken table", "broken archive", "broken book", "unsupported suffix"),
)
"""Beginnings of reasons: labels of a metric. Reasons besides these, of libraries, count as `_OTHER`."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RefreshReport:
    """Result of an index update: document ids in order, and (path, reason) of what could not be used.

    A document that was served before and fails now is in both `removed` and `failed`. Files of other types than those
    that are read are only counted: `unsupported` holds (suffix, files), most first. `rebuilt` is the reason why a
    saved index was not used, or None. `num_documents` were searchable then.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    unsupported: tuple[tuple[str, int], ...] = ()
    rebuilt: str | None = None
    num_documents: int = dataclasses.field(default=0, compare=False)

    @property
    def skipped(self) -> dict[str, int]:
        """How many files, lines and directories could not be used, by kind of reason (one of a fixed few), most
        first."""
        kinds = collections.Counter(next(filter(reason.startswith, _KINDS), _OTHER) for _, reason in self.failed)
        if self.unsupported:
            kinds[UNSUPPORTED] = sum(count for _, count in self.unsupported)
        return dict(kinds.most_common())

    def skipped_text(self) -> str:
        """`skipped` as the end of a sentence, with the suffixes of unsupported files; "" if nothing was."""
        told = []
        for kind, count in self.skipped.items():
            suffixes = ", ".join(f"{suffix or 'none'} {number}" for suffix, number in self.unsupported[:_MOST_TOLD])
            told.append(f"{count} {kind}" + (f" ({suffixes})" if kind == UNSUPPORTED else ""))
        return f"; skipped {'; '.join(told)}" if told else ""

    def log_new(self, before: RefreshReport) -> None:
        """Logs the problems that `before` did not have: those of files one by one, most of them as a number, and the
        suffixes of unsupported files in one line."""
        known, suffixes = {*before.failed}, {suffix for suffix, _ in before.unsupported}
        failed = [problem for problem in dict.fromkeys(self.failed) if problem not in known]
        for path, reason in failed[:_MOST_TOLD]:
            _log.warning("skipped %s: %s", path, reason)
        if len(failed) > _MOST_TOLD:
            more = len(failed) - _MOST_TOLD
            _log.warning("skipped %d more; report.failed and GET /v1/documents/problems have all", more)
        if new := [suffix or "none" for suffix, _ in self.unsupported if suffix not in suffixes]:
            _log.warning("skipped files of types that are not read: %s", ", ".join(new[:_MOST_TOLD]))
