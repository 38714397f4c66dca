"""The clients of `bench.py clients`: real packages with their own prompts, and shapes recorded of others."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from typing import Any

from scripts.benchmarks.wrappers import Turn, before_question, in_question, in_system, in_tools

HAYSTACK_TEMPLATE = """
Given the following information, answer the question.

Context:
{% for document in documents %}
    {{ document.content }}
{% endfor %}

Question: {{question}}
Answer:
"""
"""The template of Haystack's own tutorial."""

Ask = Callable[[str, str, Turn, Sequence[Turn]], None]
"""Sends a turn behind earlier ones to the API at a base URL, with that model name."""


@dataclasses.dataclass(frozen=True)
class Client:
    """A client; `package` is None for a recorded shape, `holds_history` False if every request stands alone."""

    ask: Ask
    package: str | None = None
    holds_history: bool = True


def missing(package: str | None) -> str | None:
    """Why a client cannot be run; None if it can."""
    if package is None:
        return None
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed: make bench-clients"
    return None


def _langchain(url: str, model: str, turn: Turn, earlier: Sequence[Turn], *, holds_history: bool = False) -> None:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_classic.chains.question_answering.stuff_prompt import CHAT_PROMPT, system_template
    from langchain_core.documents import Document
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
    from langchain_openai import ChatOpenAI

    prompt = CHAT_PROMPT
    if holds_history or turn.date:
        system = "\n".join(filter(None, (turn.date, system_template)))
        history = MessagesPlaceholder("history", optional=True)
        prompt = ChatPromptTemplate([("system", system), history, ("human", "{question}")])
    past = [m for old in earlier for m in (HumanMessage(old.question), AIMessage(old.answer))]
    chain = create_stuff_documents_chain(ChatOpenAI(base_url=url, api_key="none", model=model), prompt)  # type: ignore[arg-type]
    documents = [Document(page_content=text) for text in turn.passages]
    chain.invoke({"context": documents, "question": turn.question, "history": past})


def _llama_index(url: str, model: str, turn: Turn, earlier: Sequence[Turn], *, is_chat: bool = False) -> None:
    from llama_index.core.chat_engine import ContextChatEngine
    from llama_index.core.llms import ChatMessage
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    class Found(BaseRetriever):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            nodes = [TextNode(text=one, metadata={"file_path": f"/data/{len(one)}.txt"}) for one in turn.passages]
            return [NodeWithScore(node=node, score=0.5) for node in nodes]

    llm = OpenAILike(api_base=url, api_key="none", model=model, is_chat_model=True, max_retries=0, timeout=600.0)
    if not is_chat:
        engine = RetrieverQueryEngine.from_args(Found(), llm=llm)
        engine.query("\n".join(filter(None, (turn.date, turn.question))))
        return
    past = [ChatMessage(role=r, content=c) for o in earlier for r, c in (("user", o.question), ("assistant", o.answer))]
    chat = ContextChatEngine.from_defaults(Found(), llm=llm, system_prompt=turn.date or None)
    chat.chat(turn.question, chat_history=past)


def _haystack(url: str, model: str, turn: Turn, earlier: Sequence[Turn]) -> None:
    from haystack import Document, Pipeline
    from haystack.components.builders import PromptBuilder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    pipeline = Pipeline()
    pipeline.add_component("prompt", PromptBuilder(turn.date + HAYSTACK_TEMPLATE, required_variables="*"))
    key = Secret.from_token("none")
    pipeline.add_component("llm", OpenAIChatGenerator(api_base_url=url, api_key=key, model=model, max_retries=0))
    pipeline.connect("prompt", "llm")
    documents = [Document(content=text) for text in turn.passages]
    pipeline.run({"prompt": {"documents": documents, "question": turn.question}})


def _litellm(url: str, model: str, turn: Turn, earlier: Sequence[Turn]) -> None:
    import litellm

    messages = in_system("numbered", turn, earlier)
    litellm.completion(f"openai/{model}", messages, api_base=url, api_key="none", timeout=600.0, num_retries=0)


def _recorded(shape: str, place: Callable[[str, Turn, Sequence[Turn]], list[dict[str, Any]]]) -> Client:
    def ask(url: str, model: str, turn: Turn, earlier: Sequence[Turn]) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        body = {"model": model, "messages": place(shape, turn, earlier)}
        with contextlib.closing(http.client.HTTPConnection(host)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/{path}/chat/completions", json.dumps(body), headers)
            connection.getresponse().read()

    return Client(ask)


CLIENTS: dict[str, Client] = {
    "langchain": Client(_langchain, "langchain-classic", holds_history=False),
    "langchain history": Client(functools.partial(_langchain, holds_history=True), "langchain-classic"),
    "llamaindex query": Client(_llama_index, "llama-index-core", holds_history=False),
    "llamaindex chat": Client(functools.partial(_llama_index, is_chat=True), "llama-index-core"),
    "haystack": Client(_haystack, "haystack-ai", holds_history=False),
    "litellm": Client(_litellm, "litellm"),
    "openwebui": _recorded("openwebui", in_question),
    "openwebui system": _recorded("openwebui", in_system),
    "openwebui tools": _recorded("openwebui tools", in_tools),
    "lmstudio": _recorded("lmstudio", in_question),
    "librechat": _recorded("librechat", before_question),
    "anythingllm": _recorded("anythingllm", in_system),
    "dify": _recorded("dify", in_system),
    "ragflow": _recorded("ragflow", in_system),
}
