"""Text that is too long however it is tokenized is refused before that, and the error names what is too long."""

from __future__ import annotations

import pytest

from ccjax.engine import Engine, Request, SamplingParams
from ccjax.errors import ContextLengthError
from ccjax.types import Document

LONG = "Where is the harbour? " * 100_000
SHORT = [{"role": "user", "content": "Where is it?"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"enum": [LONG, 1, None]}}}
OVERLONG = {
    "prompt": Request(prompt=LONG),
    "messages": Request(messages=[*SHORT, {"role": "assistant", "content": LONG}, *SHORT]),
    "messages of parts": Request(messages=[{"role": "user", "content": [{"type": "text", "text": LONG}] * 2}]),
    "documents": Request(messages=SHORT, documents=(Document("Here."), Document(LONG))),
    "tools": Request(messages=SHORT, tools=[TOOL]),
}


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("demo", max_model_len=256) as engine:
        yield engine


@pytest.mark.parametrize("name", OVERLONG)
def test_overlong_text_is_refused_before_it_is_tokenized(engine, monkeypatch, name):
    def encode(*_, **__):
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(engine.tokenizer), "_encode_plain", encode)
    monkeypatch.setattr(type(engine.tokenizer), "_token_starts", encode)
    argument = name.split()[0]
    with pytest.raises(ContextLengthError, match=rf"^{argument}: wanted at most 256 tokens .*, got at least \d\d\d"):
        engine.assemble(OVERLONG[name])


def test_documents_that_may_be_left_out_are_not_counted(engine):
    def request(*documents):
        return Request(messages=SHORT, documents=documents, truncate=True, sampling=SamplingParams(4))

    assert not engine.assemble(request(Document(LONG, score=0.5))).documents
    assert len(engine.assemble(request(Document("Short."), Document(LONG))).documents) == 1
    for documents in ((Document(LONG),), (Document(LONG), Document("Short."))):
        with pytest.raises(ContextLengthError, match="^documents: wanted at least one that fits into 256 tokens"):
            engine.assemble(request(*documents))


@pytest.mark.parametrize("content", ["Where? " * 300, "Where? " * 20])
def test_advice_about_documents_is_given_only_if_it_helps(engine, content):
    documents = [Document("The harbour is behind the market. " * 30)] * 3
    with pytest.raises(ContextLengthError) as caught:
        engine.assemble(Request(messages=[{"role": "user", "content": content}], documents=documents))
    assert ("documents" in str(caught.value)) == (len(content) < 200)
