"""Time to first token of a real model with the default options, in each state of the store, compared with peers.

Passages are pieces of the demo's corpus, in another order for each prompt. Engines are read-only, so that no prompt
changes the state for the next.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ccjax.engine import Engine, EngineConfig, Response
from ccjax.errors import ConfigError
from ccjax.evaluation.states import STATES, State, fill
from ccjax.evaluation.ways import DEFAULT
from ccjax.loading.model import LoadedModel, load_model
from ccjax.types import Document
from scripts.benchmarks import llama_cpp_peer, transformers_peer
from scripts.benchmarks.common import Say, median
from scripts.demo_model.corpus import build_corpus

MODEL = "smollm2"
NUM_PASSAGES = 8
QUESTION = "Where was the harbour master born?"
_ROOM = 64
"""Approximate tokens of a prompt besides its passages, and tokens of its answer."""


def measure(
    arguments: argparse.Namespace, lengths: list[int], say: Say
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Cases, peers, and what was skipped and why; the cases of one prompt length run in alternation."""
    try:
        model = load_model(MODEL, dtype="float32")
    except ConfigError as error:
        return [], [], [f"{MODEL}: {error}"]
    peer, skipped = transformers_peer.peer(model.config, is_wanted=not arguments.no_peers)
    repetitions = arguments.repetitions
    states: Sequence[State] = ("empty", "prepared") if arguments.quick else STATES
    cases, peers = [], []
    for length in lengths:
        say(f"{MODEL}, {length} tokens")
        documents = _documents(model, length)
        rng = random.Random(length)
        responses: dict[State, list[Response]] = {state: [] for state in states}
        peer_s, count = [], 0
        with _engines(model, states, documents) as engines:
            if not arguments.quick:  # it would take half of its minute
                engines["empty"].warmup()  # all engines share the compiled steps
            for _ in range(repetitions + 1):
                order = rng.sample(documents, len(documents))
                for state, engine in engines.items():
                    responses[state].append(engine.generate(QUESTION, order, max_new_tokens=1))
                    count = responses[state][-1].num_prompt_tokens
                if peer is not None:
                    peer_s.append(peer([rng.randrange(model.config.vocab_size) for _ in range(count)]))
        about = {"model": MODEL, "context_tokens": count}
        for state, (_, *counted) in responses.items():  # the first run is not counted, for any case
            share = median([response.reuse.computed_share for response in counted])
            case = {"strategy": str(DEFAULT), "state": state, **about, "computed_share": share}
            cases.append({**case, **_seconds([response.ttft_s for response in counted])})
        if peer is not None:
            peers.append({"name": "transformers", **about, **_seconds(peer_s[1:])})
    file, why_not = (None, []) if arguments.no_peers else llama_cpp_peer.file_of(MODEL)
    if file is not None:
        counts = list(dict.fromkeys(case["context_tokens"] for case in cases))
        for count, runs_s in llama_cpp_peer.prefill_s(file, counts, repetitions).items():
            peers.append({"name": "llama.cpp", "model": MODEL, "context_tokens": count, **_seconds(runs_s)})
    return cases, peers, skipped + why_not


def _seconds(runs_s: list[float]) -> dict[str, Any]:
    return {"ttft_s": median(runs_s), "runs_s": runs_s}


def _documents(model: LoadedModel, length: int) -> list[Document]:
    """Passages of equal length for a prompt of about this many tokens."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = " ".join(passage.text for passage in build_corpus().documents.values())
    ids = tokenizer.encode(text, allow_special=False)
    size = max(1, (length - _ROOM) // NUM_PASSAGES)
    while len(ids) < NUM_PASSAGES * size:
        ids += ids
    return [Document(tokenizer.decode(ids[first * size : (first + 1) * size])) for first in range(NUM_PASSAGES)]


@contextlib.contextmanager
def _engines(model: LoadedModel, states: Sequence[State], documents: list[Document]) -> Iterator[dict[State, Engine]]:
    """An engine with the default options over a store in each state."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        engines: dict[State, Engine] = {}
        for state in states:
            config = EngineConfig(**DEFAULT.settings, store=(Path(directory) / state).as_uri())
            fill(model, config, state, [documents])
            read = EngineConfig(**{**DEFAULT.settings, "store": config.store, "read_only": True})
            engines[state] = stack.enter_context(Engine(model, read))
        yield engines
