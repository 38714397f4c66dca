"""A large, realistic index of vectors: real passages and random ones.

No public corpus of vectors is available, so all but the real passages' vectors are synthetic. Topics are the real
passages, and others with the same mean and covariance; each vector is as far from a topic as a real passage is from its
nearest neighbour. With the real passages as the only topics there would be fewer topics than clusters, and every search
would find its passages in the first cluster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np

from ccjax.types import Document
from scripts.benchmarks.ragcache_replay import documents_of
from scripts.benchmarks.serve_workload import WorkloadPassage

VECTORS_PER_TOPIC = 20
_TRAINED_PER_CLUSTER = 64
_TRAINING_ROUNDS = 10
_DRAWN_AT_ONCE = 50_000


@dataclasses.dataclass(frozen=True)
class ReplayCorpus:
    """An IVF index by inner product, with the topics of its rows.

    Attributes:
      index: real passages first, in their order.
      topics: [num_vectors] the topic of each row; the first topics are the passages themselves.
    """

    index: faiss.IndexIVFFlat
    passages: Sequence[WorkloadPassage]
    topics: np.ndarray

    def documents(self, rows: Sequence[int]) -> tuple[Document, ...]:
        """The passages of some rows; a random one has the text of a real one, with its own number."""
        return documents_of([self._passage(row) for row in rows])

    def _passage(self, row: int) -> WorkloadPassage:
        parent = self.passages[self.topics[row] % len(self.passages)]
        if row < len(self.passages):
            return parent
        return dataclasses.replace(parent, id=-row, title=f"{parent.title} ({row})")


def differences_to_nearest(real: np.ndarray) -> np.ndarray:
    """[n, dim] differences of each vector from its nearest other one by inner product, without duplicates."""
    index = faiss.IndexFlatIP(real.shape[1])
    index.add(real)  # pyright: ignore[reportCallIssue]
    scores, found = index.search(real, min(len(real), 16))  # pyright: ignore[reportCallIssue]
    is_other = scores < 1.0 - 1e-4
    nearest = found[np.arange(len(real)), is_other.argmax(axis=1)]
    return (real - real[nearest])[is_other.any(axis=1)]


def draw_topics(real: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, dim] unit vectors, normal with mean and covariance of the real ones before normalisation."""
    mean = real.mean(axis=0)
    weights = rng.standard_normal((count, len(real)), dtype=np.float32) / np.sqrt(max(1, len(real) - 1))
    return _unit(mean + weights.astype(np.float32) @ (real - mean))


def draw_vectors(
    topics: np.ndarray, differences: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """[count, dim] unit vectors and [count] the topic of each: a topic plus or minus the difference of some real vector
    from its nearest, so that they are as far from their topics as real passages are from each other."""
    own = rng.integers(0, len(topics), count)
    moves = differences[rng.integers(0, len(differences), count)] * rng.choice((-1.0, 1.0), (count, 1))
    return _unit(topics[own] + moves.astype(np.float32)), own


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def build(
    passages: Sequence[WorkloadPassage], real: np.ndarray, num_vectors: int, num_clusters: int, seed: int
) -> ReplayCorpus:
    """The index of the real vectors, filled up with random ones.

    Args:
      real: [len(passages), dim] unit vectors.
    """
    rng = np.random.default_rng(seed)
    topics = np.concatenate([real, draw_topics(real, num_vectors // VECTORS_PER_TOPIC, rng)])
    draw = functools.partial(draw_vectors, topics, differences_to_nearest(real), rng=rng)
    dim = real.shape[1]
    index: Any = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, num_clusters, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = _TRAINING_ROUNDS
    index.train(draw(count=min(num_vectors, _TRAINED_PER_CLUSTER * num_clusters))[0])
    index.add(real)
    own = [np.arange(len(real))]
    while index.ntotal < num_vectors:
        vectors, of = draw(count=min(_DRAWN_AT_ONCE, num_vectors - index.ntotal))
        index.add(vectors)
        own.append(of)
    return ReplayCorpus(index, passages, np.concatenate(own))
