"""How real clients write passages into a message, by their sources: each with its separators, numbers and names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence


def _tagged(passages: Sequence[str]) -> str:
    sources = (f'<source id="{n}" name="F{n}.pdf">{text}</source>' for n, text in enumerate(passages, 1))
    return "### Task:\nRespond to the user query.\n\n<context>\n" + "\n".join(sources) + "\n</context>\n"


def _listed(passages: Sequence[str]) -> str:
    lines = (f"page_label: {n}\nfile_path: /data/f{n}.txt\n\n{text}" for n, text in enumerate(passages, 3))
    return "Context information is below.\n---------------------\n" + "\n\n".join(lines) + "\n---------------------\n"


def _items(passages: Sequence[str]) -> str:
    files = (
        f"<file>\n<filename>f{n}.md</filename>\n<context>\n        <contextItem>\n          <![CDATA[{text}]]>\n"
        "        </contextItem>\n</context>\n</file>\n"
        for n, text in enumerate(passages)
    )
    return "<files>\n" + "".join(files) + "</files>"


def _boxes(passages: Sequence[str]) -> str:
    blocks = (f"\nID: {n}\n├── Title: F{n}.pdf\n└── Content:\n{text}\n" for n, text in enumerate(passages))
    return "------" + "------".join(blocks) + "------"


WRAPPERS: dict[str, Callable[[Sequence[str]], str]] = {
    "langchain": lambda passages: "Use the pieces of context below.\n\n" + "\n\n".join(passages),
    "openwebui": _tagged,
    "openwebui tools": lambda passages: json.dumps(
        [{"content": text, "source": f"{n}.pdf", "distance": 0.3 + n / 7} for n, text in enumerate(passages)]
    ),
    "llamaindex": _listed,
    "haystack": lambda passages: "Documents:\n" + "".join(f"\n        {text}\n    " for text in passages),
    "librechat": _items,
    "anythingllm": lambda passages: (
        "Today is 2026-11-27.\nContext:\n"
        + "".join(f"    [CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(passages))
    ),
    "dify": lambda passages: "<context>\n" + "\n".join(passages) + "\n</context>",
    "ragflow": _boxes,
    "lmstudio": lambda passages: (
        "The following citations were found:\n\n"
        + "\n\n".join(f'Citation {n}: "{text}"' for n, text in enumerate(passages, 1))
    ),
    "numbered": lambda passages: "\n".join(f"[{n}] {text}" for n, text in enumerate(passages, 1)),
    "documents": lambda passages: "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(passages, 7)),
    "list": lambda passages: "Facts:\n" + "\n".join(f"- {text}" for text in passages),
}
"""Name of the client, or of a usual hand-written form -> its message for some passages."""
