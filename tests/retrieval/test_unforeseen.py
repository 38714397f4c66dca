"""A file or a line that breaks a parser in a way nobody foresaw is named once; the other documents are served."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ccjax.retrieval import changes
from ccjax.retrieval.documents import LoadedDocument, load_document, read_document
from tests.retrieval import opened

GOOD = "# Tides\n\nThe moon pulls the sea."
DEEP = "[" * 100_000
open_retriever = functools.partial(opened.open_retriever, chunk_tokens=40)


def front_matter(line: str) -> bytes:
    return f"---\n{line}\n---\n# Odd\n\nText about a quarry.".encode()


ODD = {
    "huge-number.md": front_matter("modulus: 0x" + "f" * 320),
    "very-huge-number.md": front_matter("modulus: 0x" + "f" * 9000),
    "huge-digits.md": front_matter("modulus: " + "9" * 5000),
    "no-date.md": front_matter("date: 2024-13-45"),
    "early-date.md": front_matter("date: 0000-00-00 00:00:00"),
    "no-number.md": front_matter("a: .inf\nb: .nan\nc: -.inf"),
    "anchors.md": front_matter("a: &a [*a]\nb: &b {c: *b}"),
    "key-anchors.md": front_matter("? &a {x: *a}\n: 1"),
    "surrogates.md": front_matter('a: "\\ud800"\n"\\udfff": b'),
    "deep.md": front_matter("a: " + DEEP),
    "tags.md": front_matter("a: !!python/object/apply:os.system [ls]\nb: !!binary ====\nc: !!int x"),
    "merge.md": front_matter("<<: 3"),
    "one-line.txt": b"a quarry " * 20_000,
    "no-blanks.txt": b"quarry" * 20_000,
    "nul.txt": b"a quarry\x00",
    "not-utf8.txt": b"a quarry \xff\xfe\xfa",
    "odd-length.txt": b"\xff\xfea quarry",
    "deep.html": b"<div>" * 3000 + b"a quarry",
    "codec.html": b'<meta charset="base64">a quarry',
    "codec2.html": b'<meta charset="idna">a quarry',
    "broken.pdf": b"%PDF-1.7\n1 0 obj\n<</Type/Catalog/Pages 1 0 R>>\nendobj\ntrailer<</Root 1 0 R>>",
    "empty.md": b"",
    "lines.jsonl": b"\n".join(
        line if isinstance(line, bytes) else json.dumps(line).encode()
        for line in (
            b'{"_id": "nan", "text": "about a quarry", "metadata": {"x": NaN, "y": Infinity}}',
            b'{"_id": "deep", "text": ' + DEEP.encode(),
            b'{"_id": "huge", "text": "about a quarry", "metadata": {"x": 1' + b"0" * 400 + b"}}",
            b'{"_id": "digits", "text": "about a quarry", "metadata": {"x": ' + b"9" * 5000 + b"}}",
            b'{"_id": "half", "text": "\\ud800", "title": "\\udfff", "metadata": {"\\ud800": "\\ud800"}}',
            b'{"_id": "\\ud800", "text": "about a quarry"}',
            b'{"_id": 1e400, "text": "about a quarry"}',
            b"\xff\xfe",
            b"\x00",
            {"_id": "last", "text": "Comets have tails."},
        )
    ),
}


@pytest.mark.parametrize("name", sorted(ODD))
def test_odd_file_is_read_or_reported(name: str, tmp_path: Path) -> None:
    (tmp_path / "tides.md").write_text(GOOD)
    (tmp_path / name).write_bytes(ODD[name])
    retriever = open_retriever(tmp_path)
    first = retriever.report
    assert retriever.search("moon", 1)[0].document_id == "tides.md"
    failed = [path for path, _ in first.failed]
    assert len(failed) == len(set(failed)) and all(name in path for path in failed)
    assert failed or any(name in path for path in first.added)
    retriever.refresh()
    (tmp_path / "comets.md").write_text("# Comets\n\nComets have tails.")
    assert retriever.refresh().added == ("comets.md",)
    if name == "lines.jsonl":
        assert retriever.has_document("lines.jsonl/last")


def test_unusable_front_matter_value_does_not_reject_the_document(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_bytes(front_matter("modulus: 0x" + "f" * 320 + "\nsize: 3"))
    assert load_document(path) == LoadedDocument("Odd", "Text about a quarry.", True, {"size": 3})


@pytest.mark.parametrize(
    "error", [OverflowError("no float"), KeyError("x"), RecursionError(), MemoryError(), Exception()]
)
@pytest.mark.parametrize("where", ["parse_document", "without_machine_text", "read_document"])
def test_any_error_is_reported_once_with_its_cause(
    where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.md").write_text("# Bad\n\nA quarry.")
    (tmp_path / "tides.md").write_text(GOOD)
    breaks(monkeypatch, where, error)
    with caplog.at_level(logging.WARNING):
        retriever = open_retriever(tmp_path)
    assert retriever.document_ids == ("tides.md",)
    ((path, reason),) = retriever.report.failed
    assert path == str(tmp_path / "bad.md") and type(error).__name__ in reason
    assert len([record for record in caplog.records if "bad.md" in record.getMessage()]) == 1


def test_error_in_one_line_does_not_affect_other_lines(tmp_path: Path) -> None:
    lines = [{"_id": "a", "text": "A quarry."}, {"_id": "b", "text": "The moon."}, {"_id": "c", "text": "A quarry."}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def count(text: str) -> int:
        if "moon" in text:
            raise LookupError(f"no such token: {object()}")
        return len(text.split())

    retriever = open_retriever(tmp_path, count_tokens=count)
    assert retriever.document_ids == ("c.jsonl/a", "c.jsonl/c")
    reason = "cannot be parsed: LookupError: no such token: <object>"  # without its address
    assert retriever.report.failed == ((f"{tmp_path / 'c.jsonl'}:2", reason),)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_process_exit_exceptions_are_not_swallowed(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.md").write_text("# Bad\n\nA quarry.")
    breaks(monkeypatch, "parse_document", error())
    with pytest.raises(error):
        open_retriever(tmp_path)


def breaks(monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException) -> None:
    """Raises where something of "bad.md" is handled."""
    proper: Callable[..., Any] = getattr(changes, where)

    def broken(what: Any, *rest: Any, **named: Any) -> Any:
        if "quarry" in str(what) or "bad.md" in str(what):
            raise error
        return proper(what, *rest, **named)

    monkeypatch.setattr(changes, where, broken)


def test_bad_links_and_vanishing_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tides.md").write_text(GOOD)
    (tmp_path / "loop.md").symlink_to("loop.md")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "around").symlink_to(tmp_path)
    (tmp_path / "nowhere.md").symlink_to("missing.md")
    os.mkfifo(tmp_path / "pipe.md")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.md").write_text("# Gone\n\nA quarry.")

    def vanishing(path: Path, **options: Any) -> bytes:
        if path.name == "gone.md":
            path.unlink()
        return read_document(path, **options)

    monkeypatch.setattr(changes, "read_document", vanishing)
    retriever = open_retriever(tmp_path)
    assert retriever.document_ids == ("tides.md",)
    names = [Path(path).name for path, _ in retriever.report.failed]
    assert sorted(names) == ["gone.md", "loop", "loop.md", "nowhere.md", "pipe.jsonl", "pipe.md"]


def test_removed_machine_text_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digits = os.urandom(1000).hex()
    (tmp_path / "key.md").write_text(f"# Key\n\nThe key of the quarry:\n\n{digits}\n")
    (tmp_path / "only.txt").write_text(digits)
    with caplog.at_level(logging.WARNING):
        retriever = open_retriever(tmp_path)
    assert [passage.text for passage in retriever.passages("key.md")] == ["Key\nThe key of the quarry:"]
    assert retriever.report.failed == ((str(tmp_path / "only.txt"), "no text besides base64, hex or minified code"),)
    assert "key.md: left out 2000 characters of base64, hex or minified code" in caplog.text
