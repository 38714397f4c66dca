"""Three questions to the embedded model, each answered four ways over the same stored passages: python scripts/demo.py

The passages are prepared first, as a server or an offline job would. Then every question is answered with the default
options (and their reuse report), by full prefill, by naive reuse (nothing recomputed) and by Cache-Craft with a part of
each passage recomputed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from ccjax.demo.world import Kind
from ccjax.engine import Engine, Response
from scripts.demo_model.corpus import Corpus, CorpusQuestion, build_corpus, question_context

WAYS: Mapping[str, Mapping[str, Any]] = {
    "default options": {},
    "full prefill": {"strategy": "full"},
    "naive reuse": {"strategy": "reuse"},
    "Cache-Craft": {"strategy": "cachecraft"},
}
ABOUT: Mapping[Kind, str] = {
    "single": "one passage holds the answer",
    "pronoun": "the passage opens with a pronoun; the name is in the passage before",
    "alias": "one passage explains the nickname that another one uses",
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; `argv` defaults to the process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=0, help="which question of each kind (default 0, the first)")
    parser.add_argument("--recompute-ratio", type=float, default=0.3, help="share that Cache-Craft recomputes (0.3)")
    arguments = parser.parse_args(argv)
    number, ratio = arguments.number, arguments.recompute_ratio
    if not 0.0 <= ratio <= 1.0:
        parser.error(f"--recompute-ratio: wanted 0 to 1, got {ratio}")
    console = Console(width=None if sys.stdout.isatty() else 118)
    corpus = build_corpus()
    for kind in ABOUT:
        of_kind = [question for question in corpus.questions if question.kind == kind]
        if not 0 <= number < len(of_kind):
            parser.error(f"--number: wanted 0 to {len(of_kind) - 1}, got {number}")
        ask(console, corpus, of_kind[number], ratio)


def ask(console: Console, corpus: Corpus, question: CorpusQuestion, recompute_ratio: float) -> dict[str, Response]:
    """Prints and returns the answers to one question, one per way."""
    context = question_context(corpus, question, random.Random(question.question))
    documents = [{"title": passage.title, "text": passage.text} for passage in context.passages]
    console.print(f"\n[bold]{question.question}[/bold]  ({ABOUT[question.kind]})")
    for index in context.questions[0].passages:
        console.print(f"  [{index + 1}] {context.passages[index].title}: {context.passages[index].text}", markup=False)
    answers: dict[str, Response] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory).as_uri()
        with Engine.from_pretrained("demo", store=store) as engine:
            engine.documents.warm(documents)
        for way, settings in WAYS.items():
            own = {**settings, "recompute_ratio": recompute_ratio} if way == "Cache-Craft" else settings
            with Engine.from_pretrained("demo", store=store, read_only=True, **own) as engine:
                answers[way] = engine.generate(question.question, documents)
    console.print(_answers(answers, question.answers[0]))
    console.print(_report(answers["default options"]))
    return answers


def _answers(answers: Mapping[str, Response], expected: str) -> Table:
    table = Table("way", "answer", "", "reused", "recomputed", "computed", "tokens")
    for way, response in answers.items():
        text, reuse = response.text.strip(), response.reuse
        counts: Sequence[int] = (
            reuse.reused_tokens,
            reuse.recomputed_tokens,
            reuse.computed_tokens,
            reuse.prompt_tokens,
        )
        table.add_row(way, text, "right" if text == expected else f"wrong: {expected}", *map(str, counts))
    return table


def _report(response: Response) -> Table:
    title = "Default options, passage by passage"
    table = Table("passage", "tier", "behind the frame", "reused", "recomputed", "computed", title=title)
    for part in response.reuse.per_document:
        counts = map(str, (part.reused_tokens, part.recomputed_tokens, part.computed_tokens))
        table.add_row(part.title or part.role, part.tier or "", "yes" if part.framed else "", *counts)
    return table


if __name__ == "__main__":
    main()
