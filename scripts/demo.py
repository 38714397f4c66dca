"""Questions to the embedded model, each answered four ways over the same prepared passages: python scripts/demo.py

One passage may hold the answer, open with a pronoun for a name in the passage before, or use a nickname that another
one explains. The ways: the default options, full prefill, reuse without any recomputed token, and Cache-Craft with a
part of each passage recomputed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from ccjax.engine import Engine
from ccjax.evaluation.questions import demo_questions

WAYS: dict[str, dict[str, Any]] = {
    "default options": {},
    "full prefill": {"strategy": "full"},
    "naive reuse": {"strategy": "reuse"},
    "Cache-Craft": {"strategy": "cachecraft", "recompute_ratio": 0.3},
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; `argv` defaults to the process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="ferry", help="of the towns that are asked about (default ferry)")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 118)
    questions = demo_questions(1, (5,), kinds=("single", "pronoun", "alias"), seed=args.seed)
    answers = Table("question", "way", "answer", "", "reused", "recomputed", "computed", "tokens")
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory).as_uri()
        with Engine.from_pretrained("demo", store=store) as engine:
            for question in questions:
                engine.documents.warm(question.documents)
        for way, settings in WAYS.items():
            with Engine.from_pretrained("demo", store=store, read_only=True, **settings) as engine:
                for question in questions:
                    response = engine.generate(question.text, question.documents)
                    text, wanted, reuse = response.text.strip(), question.answers[0], response.reuse
                    counts = (reuse.reused_tokens, reuse.recomputed_tokens, reuse.computed_tokens, reuse.prompt_tokens)
                    verdict = "right" if text == wanted else f"wrong: {wanted}"
                    answers.add_row(question.text, way, text, verdict, *map(str, counts))
    for question in questions:
        console.print(f"\n[bold]{question.text}[/bold]  ({question.kind})")
        for number, passage in enumerate(question.documents, 1):
            console.print(f"  [{number}] {passage.title}: {passage.text}", markup=False)
    console.print(answers)


if __name__ == "__main__":
    main()
