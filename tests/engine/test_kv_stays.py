"""KV does not travel: the batch thread copies none of it to the host, and what requests computed stays in its pages."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ccjax.runner.pool import PagedShard
from ccjax.store.copies import HostCopier
from tests.engine.helpers import TinyModel, draw_segments, permuted
from tests.engine.test_identities import answer

MODEL = TinyModel(seed=11)
ALL = 200 * MODEL.page_bytes
LENGTHS = (40, 33, 64, 17)
STRATEGIES = ["auto", "cachecraft", "cacheblend"]


def mixed_load(engine) -> None:
    """Prompts with new, reused and permuted passages in several modes, with answers of several tokens, at once."""
    segments = draw_segments(np.random.default_rng(11), LENGTHS)
    others = draw_segments(np.random.default_rng(12), LENGTHS)
    prompts = [segments, permuted(segments, (2, 0, 3, 1)), others, permuted(others, (3, 2, 1, 0)), segments]
    threads = [
        threading.Thread(target=answer, args=(engine, prompt, reuse))
        for prompt in prompts
        for reuse in ("bounded", "exact")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer(engine, permuted(segments, (1, 3, 0, 2)), "bounded")
    assert engine._chunks.store.flush(120)


@pytest.mark.parametrize("device_bytes", [0, ALL])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_thread_copies_no_kv_to_the_host(strategy, device_bytes, tmp_path):
    settings = {"strategy": strategy, "device_cache_bytes": device_bytes, "store": tmp_path.as_uri()}
    with MODEL.engine(max_model_len=512, **settings) as engine:
        mixed_load(engine)
        copied = engine.batch_counts.bytes_to_host
        assert copied["store-copy"] > 0 and not copied["ccjax-batch"]


def test_a_copy_on_the_batch_thread_is_counted(monkeypatch):
    start = HostCopier.start

    def here(copier: HostCopier, kv: PagedShard, on_failure):
        kv.read_layers(0, MODEL.config.num_layers)
        return start(copier, kv, on_failure)

    monkeypatch.setattr(HostCopier, "start", here)
    with MODEL.engine(max_model_len=512) as engine:
        mixed_load(engine)
        assert engine.batch_counts.bytes_to_host["ccjax-batch"] > 0


def test_what_a_prompt_computed_is_cached_in_its_own_pages(monkeypatch):
    """Nothing is written to the device for the tier: each variant there has pages that a prompt had."""
    with MODEL.engine(max_model_len=512, device_cache_bytes=ALL) as engine:
        pool = engine._device.pool
        monkeypatch.setattr(pool, "_write", lambda *_: pytest.fail("KV was written to the device again"))
        mixed_load(engine)
        assert len(pool) > 4 and pool.num_available() == pool.num_pages > pool.num_free
