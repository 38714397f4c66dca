"""Workload of the serving benchmark: questions with the passages of a real retrieval trace, and arrival times.

No public trace has both passages and arrival times, so the combination of recorded arrivals with these passages is
ours.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.common import BenchmarkError, existing, rows_of

RECORDINGS = {"azure": "azure_2023_conv.csv", "mooncake": "mooncake_conversation.jsonl"}


@dataclasses.dataclass(frozen=True)
class WorkloadPassage:
    """One retrieved passage; `id` is that of the trace."""

    id: int
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class WorkloadQuestion:
    """One request of the trace: a question and its passages, best first; `is_real` is False for artificial ones."""

    text: str
    passages: tuple[WorkloadPassage, ...]
    is_real: bool = True

    def body(self, *, max_tokens: int) -> dict[str, Any]:
        """Body of a streamed chat with exactly `max_tokens` tokens of answer."""
        return {
            "messages": [{"role": "user", "content": self.text}],
            "documents": [{"id": str(p.id), "title": p.title, "text": p.text} for p in self.passages],
            "max_tokens": max_tokens,
            "ignore_eos": True,  # random weights may end an answer anywhere
            "temperature": 0,
            "truncate": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def load_trace(data: Path, num_passages: int) -> list[WorkloadQuestion]:
    """All requests of MuSiQue's retrieval trace in its order, each with its first `num_passages` passages: the real
    question if it is known, else one that names the first passage's title (638 of 1,000).

    Raises:
      BenchmarkError: the trace is missing from `data`.
    """
    folder = data / "rag_trace"
    texts = rows_of(folder / "musique_docs.jsonl")
    passages = {row["id"]: WorkloadPassage(row["id"], row["title"], row["text"]) for row in texts}
    known = _known_questions(data / "qa" / "rag_top5_musique.jsonl")
    questions = []
    for row in rows_of(folder / "musique_trace.jsonl"):
        found = tuple(passages[number] for number in row["docs"])
        text = known.get(tuple(row["docs"]))
        own = text or f"What do the passages say about {found[0].title}?"
        questions.append(WorkloadQuestion(own, found[:num_passages], is_real=text is not None))
    return questions


def _known_questions(path: Path) -> dict[tuple[int, ...], str]:
    if not path.exists():
        return {}
    return {tuple(doc["doc_id"] for doc in row["docs"]): row["question"] for row in rows_of(path)}


def history(
    questions: Sequence[WorkloadQuestion], start: int, stop: int, most: int, *, is_prefix: bool
) -> list[WorkloadQuestion]:
    """The latest requests before `start`, at most `most` and in order, whose KV those of [start, stop) can use.

    As long as the store has space for all, a request that shares no passage with the measured ones is irrelevant; with
    `is_prefix` so is one whose first passage is not the first one of a measured request.
    """
    of = (lambda q: q.passages[:1]) if is_prefix else (lambda q: q.passages)
    wanted = {passage.id for question in questions[start:stop] for passage in of(question)}
    useful = [q for q in questions[:start] if any(passage.id in wanted for passage in of(q))]
    return useful[len(useful) - min(most, len(useful)) :]


def one_by_one(questions: Sequence[WorkloadQuestion], start: int, stop: int) -> list[WorkloadQuestion]:
    """A request for each passage of those from `start` to `stop`, once, in order of their first use."""
    passages = dict.fromkeys(passage for question in questions[start:stop] for passage in question.passages)
    return [WorkloadQuestion(f"What does the passage say about {passage.title}?", (passage,)) for passage in passages]


def windows(num_questions: int, num_windows: int, size: int) -> list[range]:
    """Consecutive, disjoint ranges at the end of the trace, so that all have a long history.

    Raises:
      BenchmarkError: the trace is too short.
    """
    start = num_questions - num_windows * size
    if start < 0:
        raise BenchmarkError(
            f"requests: wanted at most {num_questions // num_windows} a run ({num_windows} runs share a trace of "
            f"{num_questions}), got {size}"
        )
    return [range(start + n * size, start + (n + 1) * size) for n in range(num_windows)]


def poisson_gaps(count: int, seed: int) -> np.ndarray:
    """[count] gaps between arrivals of a Poisson process of rate 1."""
    return np.random.default_rng(seed).exponential(size=count)


def recorded_gaps(data: Path, name: str, count: int, start: int) -> np.ndarray:
    """[count] gaps between the recorded arrivals from number `start` on, rescaled to a mean of 1.

    Raises:
      BenchmarkError: the recording is missing from `data`, has too few arrivals, or they are all at once.
    """
    times = _recorded_times(data / "arrivals" / RECORDINGS[name])
    if start + count + 1 > len(times):
        raise BenchmarkError(f"requests: wanted at most {len(times) - 1 - start} from arrival {start} on, got {count}")
    gaps = np.diff(times[start : start + count + 1])
    if not gaps.any():
        raise BenchmarkError(f"arrivals: wanted some time between {count} arrivals of {name}, got none")
    return gaps / gaps.mean()


def arrival_times(gaps: np.ndarray, rate: float) -> np.ndarray:
    """Seconds at which requests arrive, given unit-mean gaps and a mean rate in requests per second."""
    return np.cumsum(gaps) / rate


@functools.cache
def _recorded_times(path: Path) -> np.ndarray:
    """Ascending seconds from the first one on, of Azure's CSV or Mooncake's JSON lines."""
    if path.suffix == ".csv":
        with existing(path).open(encoding="utf-8", newline="") as lines:
            # Seven decimals of a second; Python parses six.
            stamps = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(lines)]
        seconds = np.sort([stamp.timestamp() for stamp in stamps])
    else:
        seconds = np.sort([row["timestamp"] / 1e3 for row in rows_of(path)])
    return seconds - seconds[0]
