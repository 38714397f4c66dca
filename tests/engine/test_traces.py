"""Compilation stays bounded: random requests use only the listed sizes."""

import numpy as np
import pytest

from ccjax.models.llama3 import paged_steps, steps
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.buckets import segment_bucket, slot_bucket, token_bucket
from ccjax.runner.compilations import compilations
from tests.engine.helpers import TinyModel, draw_segments, permuted


def test_a_hundred_random_requests_compile_only_listed_sizes():
    model = TinyModel(seed=9, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=16)
    random = np.random.default_rng(0)
    pool = [draw_segments(random, [int(random.integers(1, 40))])[1] for _ in range(25)]
    sizes = BatchSizes(256, max_num_seqs=1)
    compiled = {
        "layer": paged_steps.paged_layer_step,
        "decode": paged_steps.paged_decode_step,
        "select": steps.select_step,
    }
    before = {name: step._cache_size() for name, step in compiled.items()}
    with model.engine(max_model_len=256, max_variants=40) as engine:
        for number in range(100):
            chosen = random.choice(len(pool), random.integers(1, 6), replace=False)
            segments = [[1, 2, 3], *(pool[index] for index in chosen), draw_segments(random, [])[1]]
            reuse = ("bounded", "exact", "fast", "off")[number % 4]
            engine.generate_from_tokens(segments, max_new_tokens=2, reuse=reuse)
    grown = {name: step._cache_size() - before[name] for name, step in compiled.items()}
    # An upper bound for any number of requests; one prompt sees at most 256 slots, and mode `off` takes no masses.
    assert 0 < grown["layer"] <= 2 * sum(slots <= 256 for _, slots in sizes.packs())
    assert 0 < grown["decode"] <= len(sizes.decodes())
    rows = {count for count, slots in sizes.packs() if slots <= 256}
    assert grown["select"] <= len(rows) * (len(rows) + 1) / 2  # at the focus cut, and for the last token


@pytest.mark.parametrize(
    ("strategy", "num_layers", "num_pages"),
    [("cachecraft", 2, 0), ("cacheblend", 2, 0), ("full", 2, 0), ("auto", 2, 0), ("auto", 14, 0), ("auto", 2, 80)],
)
def test_warm_up_leaves_nothing_to_compile(strategy, num_layers, num_pages):
    shape = {"hidden_size": 48, "num_attention_heads": 2, "intermediate_size": 16}
    model = TinyModel(seed=9, num_hidden_layers=num_layers, **shape)
    random = np.random.default_rng(1)
    seen = []
    few = {"max_num_batched_tokens": 128, "max_num_seqs": 2, "device_cache_bytes": num_pages * model.page_bytes}
    with model.engine(max_model_len=128, strategy=strategy, focus_window=None, **few) as engine:
        engine.warmup(lambda stage, done, total: seen.append((stage, done, total)))
        assert len(seen) > len(engine._device.sizes.packs()) + len(engine._device.sizes.decodes())
        assert seen == [("compile", done, len(seen)) for done in range(1, len(seen) + 1)]
        before = compilations().count
        segments = draw_segments(random, [30, 24, 36])
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 0, 2]):
            report = engine.generate_from_tokens(permuted(segments, order), max_new_tokens=3).reuse
        assert compilations().count == before
        assert (report.per_document[1].tier == "device") == (num_pages > 0)


@pytest.mark.parametrize("bucket", [token_bucket, slot_bucket, segment_bucket])
def test_buckets_cover_every_size_and_are_few(bucket):
    sizes = [bucket(number) for number in range(1, 20000)]
    assert all(size >= number for number, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and len(set(sizes)) < 90
    assert all(bucket(size) == size for size in set(sizes))


def test_padding_is_bounded():
    assert all(token_bucket(number) <= number * 1.125 + 1 for number in range(257, 20000))
