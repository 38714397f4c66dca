"""OpenAI's own client (`pip install openai`) against a running `ccjax serve`: python examples/openai_client.py

Sends two questions with the same passages in another order, shows the answers as they are generated, and what the
server reused for each.
"""

from __future__ import annotations

import argparse

from openai import OpenAI

PASSAGES = {
    "lighthouse": "The old lighthouse on Heron Point was built in 1871 from blocks of grey granite. Its keeper lit "
    "forty oil lamps every evening until the lamps were replaced by a single electric bulb in 1936.",
    "harbour": "The harbour of Saltby freezes over in most winters. Fishermen then pull their boats onto the northern "
    "beach, where a long wooden shed was put up in 1902 for repairs and for drying the nets.",
    "ferry": "The ferry Marigold sails from Saltby to the island three times a day. It carries sixty passengers and "
    "eight cars, and it does not sail when the wind blows harder than fifty knots.",
}


def ask(client: OpenAI, model: str, question: str, names: list[str]) -> None:
    """Prints an answer while it is generated, then what was reused: the last chunks carry `reuse` and `usage`."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"documents": [{"id": name, "text": PASSAGES[name]} for name in names]},
    )
    print(question, end="\n  ")
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached, count = chunk.usage.prompt_tokens_details.cached_tokens, chunk.usage.prompt_tokens
            print(f"\n  {cached} of {count} tokens reused")
        for part in (chunk.model_extra or {}).get("reuse", {}).get("per_document", []):
            counts = [f"{part[f'{kind}_tokens']:4} {kind}" for kind in ("reused", "recomputed", "computed")]
            print(f"    {part['document_id'] or part['role']:12}", *counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server's API")
    parser.add_argument("--api-key", default="none", help="if the server needs one")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key=options.api_key)
    (model,) = client.models.list().data
    ask(client, model.id, "When was the lighthouse built?", ["lighthouse", "harbour", "ferry"])
    ask(client, model.id, "How often does the ferry sail to the island?", ["ferry", "lighthouse", "harbour"])


if __name__ == "__main__":
    main()
