"""An evaluation of many questions, some at a time: stores stay small, and an interrupted one is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ccjax.evaluation.measure import Answered, Forced, WayResults, measure, num_steps
from ccjax.evaluation.questions import QAQuestion
from ccjax.evaluation.states import State
from ccjax.evaluation.ways import Way
from ccjax.loading.model import LoadedModel

QUESTIONS_PER_PART = 10


def measure_in_parts(
    model: LoadedModel,
    questions: Sequence[QAQuestion],
    ways: Sequence[Way],
    directory: Path,
    *,
    states: Sequence[State],
    resume: ResultsFile | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    **options: Any,
) -> list[WayResults]:
    """The results of `measure`, for `QUESTIONS_PER_PART` questions at a time.

    Args:
      resume: its parts are not measured again, and each new one is added.
      options: further arguments of `measure`.
    """
    parts = [questions[first : first + QUESTIONS_PER_PART] for first in range(0, len(questions), QUESTIONS_PER_PART)]
    sizes = [num_steps(part, ways, states) for part in parts]
    results: list[WayResults] = []
    for index, part in enumerate(parts):
        before = sum(sizes[:index])
        kept = resume.part(index, part) if resume is not None else None
        if kept is None:
            kept = measure(
                model,
                part,
                ways,
                directory,
                states=states,
                progress=lambda stage, done, _, before=before: progress(stage, before + done, sum(sizes)),
                **options,
            )
            if resume is not None:
                resume.add(part, kept)
        results = [
            dataclasses.replace(new, answers=(*old.answers, *new.answers))
            for old, new in zip(
                results or [dataclasses.replace(result, answers=()) for result in kept], kept, strict=True
            )
        ]
    return results


def read_measurement(path: Path) -> dict[str, Any]:
    """What a `ResultsFile` says, in its first line, that its results depend on.

    Raises:
      ValueError: it is none.
      OSError: the file cannot be read.
    """
    try:
        return dict(json.loads(path.read_text("utf-8").partition("\n")[0]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"resume: wanted a file of an earlier evaluation, got {path}") from error


class ResultsFile:
    """Results of some questions at a time: a JSONL file whose first line describes the measurement. A later run may ask
    more questions, if it begins with the same ones.

    Args:
      path: created if absent; an incomplete last line is dropped.
      measured: all that results depend on besides the questions, as JSON types.

    Raises:
      ValueError: the file has results of another measurement, or another format; names what differs.
      OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, measured: Mapping[str, Any]) -> None:
        self._path = path
        self._kept: list[dict[str, Any]] = []
        wanted = json.loads(json.dumps(measured))
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if lines:
            self._check(wanted)
            self._kept = [json.loads(line) for line in whole[1:]]
        self._first_line = whole[0] if whole else json.dumps(wanted) + "\n"
        self._write()

    def _check(self, wanted: dict[str, Any]) -> None:
        found = read_measurement(self._path)
        differing = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                f"resume: wanted results with {name} {wanted.get(name)!r} in {self._path}, got {found.get(name)!r}"
            )

    def part(self, index: int, questions: Sequence[QAQuestion]) -> list[WayResults] | None:
        """The results of these questions, full prefill's first; None if they are not all measured yet.

        Raises:
          ValueError: the file has results of other questions.
        """
        if index >= len(self._kept):
            return None
        wanted, kept = _digests(questions), self._kept[index]["questions"]
        if wanted[: len(kept)] != kept[: len(wanted)]:
            raise ValueError(f"resume: wanted results of the same questions in {self._path}, got those of others")
        if len(kept) < len(wanted):  # the last part of a run over fewer questions
            del self._kept[index:]
            self._write()
            return None
        return [
            WayResults(
                Way(**{**row["way"], "ranking_layers": _tuple(row["way"]["ranking_layers"])}),
                tuple(_answered(answer, question) for answer, question in zip(row["answers"], questions, strict=False)),
                row["state"],
            )
            for row in self._kept[index]["results"]
        ]

    def add(self, questions: Sequence[QAQuestion], results: Sequence[WayResults]) -> None:
        """Adds the next part."""
        rows = [
            {
                "way": dataclasses.asdict(result.way),
                "state": result.state,
                "answers": [_row(answer) for answer in result.answers],
            }
            for result in results
        ]
        self._kept.append({"questions": _digests(questions), "results": rows})
        self._write()

    def _write(self) -> None:
        lines = (json.dumps(part) + "\n" for part in self._kept)
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join([self._first_line, *lines]), "utf-8")
        partial.replace(self._path)


def _digests(questions: Sequence[QAQuestion]) -> list[str]:
    texts = (f"{question.text}\t{question.documents}\t{question.answers}" for question in questions)
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _row(answered: Answered) -> dict[str, Any]:
    row = dataclasses.asdict(answered)
    del row["question"]
    return row


def _answered(row: Mapping[str, Any], question: QAQuestion) -> Answered:
    forced = None if row["forced"] is None else Forced(**row["forced"])
    return Answered(**{**row, "question": question, "token_ids": tuple(row["token_ids"]), "forced": forced})
