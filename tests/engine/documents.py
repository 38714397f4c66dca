"""Documents, a model whose vocabulary has their words, and helpers that query an engine about them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.prompts import chunk_id
from ccjax.types import Document
from tests.server.tiny_model import write_tiny_model

TEXTS = {
    "anna": "Anna lives in Paris. She repairs violins in a small shop by the river.",
    "bob": "Bob works in Rome. He paints houses and drives an old green van.",
    "carla": "Carla studies whales. Her boat is called Minerva and sails from Lisbon.",
    "dino": "Dino bakes bread in Naples. His oven burns olive wood every morning.",
}
ANNA, BOB, CARLA, DINO = (Document(text, name, version="1") for name, text in TEXTS.items())


def write_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer for these texts."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, list(TEXTS.values()))
    return directory


@contextlib.contextmanager
def engines(model: Path):
    """Yields `start(**settings)`, which returns an engine; all are closed at the end."""
    with contextlib.ExitStack() as stack:
        # Chunk by chunk, as prompts have them: without a frame no runs of whole prompts are stored beside them.
        settings = {"max_model_len": 512, "frame": "none"}
        yield lambda **more: stack.enter_context(Engine.from_pretrained(model, **{**settings, **more}))


def ask(engine: Engine, *documents: Document, **more: Any):
    """The report of a short answer."""
    return engine.generate("Who sings?", documents, max_new_tokens=1, **more).reuse


def ids_of(engine: Engine, document: Document) -> tuple[int, ...]:
    assert engine._builder is not None
    return engine._builder.document_ids(document)


def set_clock(engine: Engine, now: list[float]) -> None:
    """Makes `now[0]` the engine's time."""
    engine.documents._documents.registry.clock = lambda: now[0]
    engine.documents._documents._next_tend = 0.0


def key_of(engine: Engine, document: Document):
    return chunk_id(ids_of(engine, document))


def rows_of(engine: Engine, variant_ids) -> list[bytes]:
    """KV rows of variants, as bytes: of the last layer, because those of the first do not depend on the prefix."""
    rows = []
    for variant_id in variant_ids:
        ticket = engine._chunks.store.prepare_load([variant_id])
        kv = ticket.read_layers(variant_id, 0, engine.model_config.num_layers)
        rows += [np.array(kv[-1, part, 3]).tobytes() for part in (0, 1)]
        engine._chunks.store.complete_load(ticket, ok=False)
    return rows


def files(tmp_path: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}


def where(tmp_path: Path, needles) -> list[Path]:
    """Files of the store that contain one of the needles."""
    return [path for path, data in files(tmp_path).items() if any(needle in data for needle in needles)]


def as_json(ids) -> bytes:
    """Token ids in the format of a record."""
    return json.dumps(list(ids), separators=(",", ":")).encode()[1:-1]


def seen_by(engine: Engine, document: Document) -> list:
    """Variants whose computation attended to a document."""
    key = key_of(engine, document)
    return [meta for meta in engine._chunks.variants if key in engine._chunks.variants.origin_of(meta.variant_id).seen]


def summary(engine: Engine) -> dict[tuple[str, str | None], tuple[int, int]]:
    return {(item.document_id, item.version): (item.chunks, item.variants) for item in engine.documents.list()}
