"""The engine as a library: two questions over the same passages, whose order changes: python examples/library.py

The first answer computes the KV of every passage. The second one finds the passages at other positions, behind other
text, and computes only its question and a bounded share of the passages' tokens.
"""

from __future__ import annotations

import argparse

from ccjax import Document, Engine, Response

PASSAGES = [
    Document(
        "The old lighthouse on Heron Point was built in 1871 from blocks of grey granite. Its keeper lit forty oil "
        "lamps every evening until the lamps were replaced by a single electric bulb in 1936.",
        id="lighthouse",
    ),
    Document(
        "The harbour of Saltby freezes over in most winters. Fishermen then pull their boats onto the northern beach, "
        "where a long wooden shed was put up in 1902 for repairs and for drying the nets.",
        id="harbour",
    ),
    Document(
        "The ferry Marigold sails from Saltby to the island three times a day. It carries sixty passengers and eight "
        "cars, and it does not sail when the wind blows harder than fifty knots.",
        id="ferry",
    ),
]


def show(question: str, response: Response) -> None:
    """Prints an answer, and how much of each part of its prompt was reused."""
    reuse = response.reuse
    print(f"{question}\n  {response.text.strip()}\n  {reuse.reused_tokens} of {reuse.prompt_tokens} tokens reused")
    for part in reuse.per_document:
        counts = [f"{getattr(part, f'{kind}_tokens'):4} {kind}" for kind in ("reused", "recomputed", "computed")]
        print(f"    {part.document_id or part.role:12}", *counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, demo, a Hugging Face directory or a GGUF file")
    options = parser.parse_args()
    lighthouse, harbour, ferry = PASSAGES
    with Engine.from_pretrained(options.model) as engine:  # with store="file:///..." the KV survives this process
        question = "When was the lighthouse built?"
        show(question, engine.generate(question, [lighthouse, harbour, ferry], max_new_tokens=24))
        question = "How often does the ferry sail to the island?"
        show(question, engine.generate(question, [ferry, lighthouse, harbour], max_new_tokens=24))


if __name__ == "__main__":
    main()
