"""A store that was opened with a lower limit than it holds is brought under it, and then takes new variants."""

from __future__ import annotations

import logging

import pytest

from ccjax.engine import Engine
from ccjax.types import Document

DOCUMENTS = [
    Document(f"Note {n}. The harbour has {n} boats, and the market {n + 5} stalls.", f"{n}") for n in range(12)
]


def open_engine(store: str, **more) -> Engine:
    return Engine.from_pretrained("demo", max_model_len=512, store=store, frame="none", **more)


@pytest.mark.parametrize("policy", ["pgdsf", "lru"])
def test_a_store_above_its_limit_shrinks_and_takes_new_variants(tmp_path, caplog, policy):
    store = tmp_path.as_uri()
    with open_engine(store) as engine:
        engine.documents.warm(DOCUMENTS[:10])
        engine.cache.flush()
        used = engine.cache.usage()["disk"].used_bytes
    limit = used // 2
    with open_engine(store, disk_cache_bytes=limit, eviction_policy=policy) as engine:
        assert engine.cache.usage()["disk"].used_bytes == used
        with caplog.at_level(logging.INFO, "ccjax"):
            engine.cache.refresh()
            engine.cache.refresh()
        assert [record for record in caplog.messages if "more than its limit" in record] == caplog.messages[:1]
        kept = engine.cache.usage()["disk"].used_bytes
        assert 0 < kept <= limit
        engine.documents.warm(DOCUMENTS[10:])
        engine.cache.flush()
        assert engine.cache.usage()["disk"].used_bytes <= limit
        report = engine.generate("Who?", DOCUMENTS[10:11], max_new_tokens=1).reuse
        assert report.reused_tokens > 20


def test_a_read_only_engine_evicts_nothing(tmp_path):
    store = tmp_path.as_uri()
    with open_engine(store) as engine:
        engine.documents.warm(DOCUMENTS[:6])
        engine.cache.flush()
        used = engine.cache.usage()["disk"].used_bytes
    with open_engine(store, disk_cache_bytes=used // 3, read_only=True) as engine:
        engine.cache.refresh()
        assert engine.cache.usage()["disk"].used_bytes == used
