"""How real clients write passages into messages, by their sources: separators, numbers, names, and where they stand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

SYSTEM = "You are a helpful assistant. Answer from the passages."


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


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question with the passages that a retriever found for it.

    Attributes:
      date: a line for the beginning of the system prompt, "" for none.
      answer: of an earlier turn.
    """

    question: str
    passages: tuple[str, ...]
    date: str = ""
    answer: str = ""


def _history(earlier: Sequence[Turn]) -> list[dict[str, Any]]:
    pairs = (({"role": "user", "content": t.question}, {"role": "assistant", "content": t.answer}) for t in earlier)
    return [message for pair in pairs for message in pair]


def _system(turn: Turn, after: str = "") -> list[dict[str, Any]]:
    return [{"role": "system", "content": "\n".join(filter(None, (turn.date, SYSTEM, after)))}]


def in_system(shape: str, turn: Turn, earlier: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages with the passages at the end of the system prompt, before the history."""
    context = WRAPPERS[shape](turn.passages)
    return [*_system(turn, context), *_history(earlier), {"role": "user", "content": turn.question}]


def in_question(shape: str, turn: Turn, earlier: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages with the passages in front of the last question; earlier turns without theirs."""
    content = f"{WRAPPERS[shape](turn.passages)}\n{turn.question}"
    return [*_system(turn), *_history(earlier), {"role": "user", "content": content}]


def before_question(shape: str, turn: Turn, earlier: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages with the passages in a system message between history and question."""
    context = {"role": "system", "content": WRAPPERS[shape](turn.passages)}
    return [*_system(turn), *_history(earlier), context, {"role": "user", "content": turn.question}]


def in_tools(shape: str, turn: Turn, earlier: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages with the passages of every turn in the result of a call of a tool."""
    messages = _system(turn)
    for number, one in enumerate((*earlier, turn)):
        query = {"name": "query_knowledge_files", "arguments": json.dumps({"query": one.question})}
        call = {"id": f"call_{number}", "type": "function", "function": query}
        messages += [
            {"role": "user", "content": one.question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": WRAPPERS[shape](one.passages)},
        ]
        messages += [{"role": "assistant", "content": one.answer}] if one is not turn else []
    return messages
