"""An evaluation of many questions, some at a time: stores stay small, and an interrupted one is resumed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ccjax.evaluation.measure import Answered, Forced, WayResults, measure, num_steps
from ccjax.evaluation.questions import QAQuestion
from ccjax.evaluation.states import State
from ccjax.evaluation.ways import Way
from ccjax.loading.model import LoadedModel

QUESTIONS_PER_PART = 20


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
                resume.add(kept)
        results = [
            dataclasses.replace(new, answers=(*old.answers, *new.answers))
            for old, new in zip(results or [dataclasses.replace(one, answers=()) for one in kept], kept, strict=True)
        ]
    return results


class ResultsFile:
    """Results of some questions at a time: a JSONL file whose first line describes the measurement.

    Args:
      path: created if absent; an incomplete last line is dropped.
      measured: all that results depend on, as JSON types.

    Raises:
      ValueError: the file has results of another measurement, or another format; names what differs.
      OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, measured: Mapping[str, Any]) -> None:
        self._path = path
        self._kept: list[list[dict[str, Any]]] = []
        wanted = json.loads(json.dumps(measured))
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if lines:
            self._check(lines[0], wanted)
            self._kept = [json.loads(line) for line in whole[1:]]
        path.write_text("".join(whole) or json.dumps(wanted) + "\n", "utf-8")

    def _check(self, line: str, wanted: dict[str, Any]) -> None:
        try:
            found = json.loads(line)
            differing = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"resume: wanted a file of an earlier evaluation, got {self._path}") from error
        if differing:
            name = differing[0]
            raise ValueError(
                f"resume: wanted results with {name} {wanted.get(name)!r} in {self._path}, got {found.get(name)!r}"
            )

    def part(self, index: int, questions: Sequence[QAQuestion]) -> list[WayResults] | None:
        """The results of these questions, full prefill's first; None if they are not measured yet."""
        if index >= len(self._kept):
            return None
        return [
            WayResults(
                Way(**{**row["way"], "ranking_layers": _tuple(row["way"]["ranking_layers"])}),
                tuple(_answered(answer, one) for answer, one in zip(row["answers"], questions, strict=True)),
                row["state"],
            )
            for row in self._kept[index]
        ]

    def add(self, results: Sequence[WayResults]) -> None:
        """Adds the next part."""
        rows = [
            {
                "way": dataclasses.asdict(one.way),
                "state": one.state,
                "answers": [_row(answer) for answer in one.answers],
            }
            for one in results
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows) + "\n")
        self._kept.append(rows)


def _tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _row(answered: Answered) -> dict[str, Any]:
    row = dataclasses.asdict(answered)
    del row["question"]
    return row


def _answered(row: Mapping[str, Any], question: QAQuestion) -> Answered:
    forced = None if row["forced"] is None else Forced(**row["forced"])
    return Answered(**{**row, "question": question, "token_ids": tuple(row["token_ids"]), "forced": forced})
