"""Simulated workloads: random or recorded arrivals, and random or traced passages of each request.

No public trace has both arrival times and passages, so recorded arrivals are always combined with passages by us.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ccjax.types import Chunk, ChunkId


@dataclasses.dataclass(frozen=True, slots=True)
class Passages:
    """The passages of one request in prompt order: their numbers, and their lengths in tokens."""

    numbers: tuple[int, ...]
    num_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests by arrival.

    Attributes:
      arrival_s: [n] seconds from the start, ascending.
      which: [n] index into `lists`, what each request retrieved.
      lists: the distinct lists of passages.
      question_tokens: of every request.
      answer_tokens: [n] tokens of each answer.
      system_tokens: of the system prompt before all passages; 0 for none.
    """

    arrival_s: np.ndarray
    which: np.ndarray
    lists: Sequence[Passages]
    question_tokens: int
    answer_tokens: np.ndarray
    system_tokens: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    def at_rate(self, rate: float) -> Workload:
        """The same requests with their gaps scaled to `rate` per second on average."""
        return dataclasses.replace(self, arrival_s=self.arrival_s * (len(self) / rate / self.arrival_s[-1]))

    def unhurried(self, count: int, gap_s: float) -> Workload:
        """The same requests, the first `count` of them `gap_s` seconds apart and the rest with their own gaps: filling
        the caches then leaves no backlog."""
        first_s = self.arrival_s[count] if count < len(self) else 0.0
        slow, rest = np.arange(count) * gap_s, self.arrival_s[count:] - first_s
        return dataclasses.replace(self, arrival_s=np.concatenate([slow, count * gap_s + rest]))

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all passages that occur in some request, each counted once."""
        return sum(
            dict(
                pair for passages in self.lists for pair in zip(passages.numbers, passages.num_tokens, strict=True)
            ).values()
        )


def chunk_of(number: int) -> Chunk:
    """The chunk that represents a passage: its only token id is the passage's number."""
    ids = (number,)
    return Chunk(ChunkId(hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()), ids)


def zipf_odds(count: int, exponent: float) -> np.ndarray:
    """[count] probabilities of ranks, proportional to `rank ** -exponent`."""
    odds = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return odds / odds.sum()


def zipf_lists(
    num_passages: int, num_lists: int, top_k: int, tokens: Sequence[int], *, exponent: float, seed: int
) -> list[Passages]:
    """Lists of `top_k` distinct passages, each drawn with odds `rank ** -exponent`.

    RAGCache fig. 5 has 3 % of the documents in 60 % of MMLU's requests: 10,000 passages with an exponent of 0.9 come
    close to that. Order within a list is as drawn, so the same passages may occur in several orders.

    Args:
      tokens: lengths, from which each passage's is drawn.
    """
    if top_k > num_passages:
        raise ValueError(f"top_k: wanted at most {num_passages}, the number of passages, got {top_k}")
    rng = np.random.default_rng(seed)
    edges = np.cumsum(zipf_odds(num_passages, exponent))
    lengths = rng.choice(np.asarray(tokens), num_passages)
    found = []
    for _ in range(num_lists):
        numbers: dict[int, None] = {}
        while len(numbers) < top_k:
            drawn = np.searchsorted(edges, rng.random(top_k)).clip(max=num_passages - 1)
            numbers.update(dict.fromkeys(drawn.tolist()))
        chosen = tuple(numbers)[:top_k]
        found.append(Passages(chosen, tuple(int(lengths[number]) for number in chosen)))
    return found


def trace_lists(path: Path, lengths: Sequence[int] | dict[int, int], top_k: int) -> list[Passages]:
    """The lists of a retrieval trace (JSON lines with `docs`, ids of passages, best first), in its order.

    Args:
      lengths: tokens by passage id, or a list of lengths indexed by the id modulo its size.

    Raises:
      ValueError: a line is malformed, or a passage has no length.
    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("docs"), list):
            raise ValueError(f"{path}: wanted an object with 'docs' in line {number + 1}, got {line[:80]!r}")
        numbers = tuple(dict.fromkeys(int(passage) for passage in row["docs"]))[:top_k]
        if isinstance(lengths, dict):
            missing = [passage for passage in numbers if passage not in lengths]
            if missing:
                raise ValueError(f"{path}: wanted the length of each passage, got none of passage {missing[0]}")
        found.append(
            Passages(
                numbers,
                tuple(lengths[passage if isinstance(lengths, dict) else passage % len(lengths)] for passage in numbers),
            )
        )
    return found


def poisson(count: int, rate: float, seed: int) -> np.ndarray:
    """[count] seconds of arrivals of a Poisson process of `rate` a second."""
    return np.cumsum(np.random.default_rng(seed).exponential(size=count)) / rate


def recorded(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """([n] seconds of recorded arrivals from the first one on, [n] tokens of their answers).

    Reads Azure's form (CSV with TIMESTAMP and GeneratedTokens) and Mooncake's (JSON lines with timestamp in ms and
    output_length).

    Raises:
      ValueError: the file is neither.
    """
    times: list[float] = []
    answers: list[int] = []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            if path.suffix == ".csv":
                for row in csv.DictReader(lines):
                    # Seven decimals of a second; Python parses six.
                    times.append(datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp())
                    answers.append(int(row["GeneratedTokens"]))
            else:
                for line in lines:
                    row = json.loads(line)
                    times.append(row["timestamp"] / 1e3)
                    answers.append(int(row["output_length"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: wanted arrivals like Azure's .csv or Mooncake's .jsonl: {error!r}") from error
    if not times:
        raise ValueError(f"{path}: wanted arrivals, got none")
    order = np.argsort(np.asarray(times), kind="stable")
    seconds = np.asarray(times)[order]
    return seconds - seconds[0], np.maximum(1, np.asarray(answers)[order])


def in_turn(count: int, values: np.ndarray) -> np.ndarray:
    """[count] of the recorded times, repeated if there are fewer: each repetition starts a mean gap after the last."""
    rounds = -(-count // len(values))
    period = values[-1] + values[-1] / max(1, len(values) - 1)
    if rounds > 1 and not period:
        raise ValueError("arrivals: wanted some time between them, got none")
    return np.concatenate([values + number * period for number in range(rounds)])[:count]


def draw_which(count: int, num_lists: int, *, exponent: float | None, seed: int) -> np.ndarray:
    """[count] requested lists: in order and repeated, or drawn with odds `rank ** -exponent`."""
    if exponent is None:
        return np.arange(count) % num_lists
    rng = np.random.default_rng(seed)
    return np.searchsorted(np.cumsum(zipf_odds(num_lists, exponent)), rng.random(count)).clip(max=num_lists - 1)
