"""Bytes against what a store really takes, and what fits."""

from __future__ import annotations

import dataclasses
import os

import pytest

from ccjax.engine import Engine
from ccjax.precompute.estimate import FileSystem, file_system_of, make_estimate, sample
from ccjax.precompute.plan import Unit
from ccjax.precompute.stored import Sizes, stored_ids
from ccjax.runner.device import kv_spec_of
from ccjax.store.spec import KVSpec, StoreIdentity
from ccjax.store.usage import DISK
from ccjax.types import Chunk, ChunkId, VariantId

TEXTS = ["Anna lives in Paris and has a dog.", "Bob lives in Rome. He is a baker, and sings at night.", "Carla sings."]


def unit(number: int, num_tokens: int, *, object_bytes: int = 0, record_bytes: int = 0, behind=()) -> Unit:
    return Unit(number, behind, VariantId(str(number)), num_tokens, num_tokens + 1, object_bytes, record_bytes, True)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("compares", [True, False])
def test_estimated_bytes_match_the_store(tmp_path, kv_dtype, compares):
    """Objects to the byte; records within 3 %, though deviations and masses have any number of digits."""
    url = tmp_path.as_uri()
    with Engine.from_pretrained(
        "demo", store=url, disk_kv_dtype=kv_dtype, strategy="auto" if compares else "cachecraft"
    ) as engine:
        documents = [{"text": text} for text in TEXTS]
        engine.documents.warm_shared(documents[:2])
        engine.documents.warm_shared([documents[2]], behind=[documents[:2]])
        chunks, (system, _) = engine.documents.passage_chunks(documents), engine.documents.prompt_overhead()
        used = engine.cache.usage()[DISK].used_bytes
        spec = kv_spec_of(engine.model_config, "float32")
        identity = StoreIdentity(engine._chunks.store._disk.identity.model_fingerprint)
    sizes = Sizes(spec, identity, kv_dtype)
    assert system is not None
    expected = [sizes.of(system, (), False)]
    expected += [sizes.of(chunk, (system.chunk_id,), False) for chunk in chunks[:2]]
    expected.append(sizes.of(chunks[2], (system.chunk_id, chunks[0].chunk_id, chunks[1].chunk_id), compares))
    objects = sum(path.stat().st_size for path in tmp_path.glob("*/data/*/*"))
    records = sum(path.stat().st_size for path in tmp_path.glob("*/records/*.json"))
    assert objects == sum(size for size, _ in expected) and objects + records == used
    assert records == pytest.approx(sum(size for _, size in expected), rel=0.03)
    assert len(stored_ids(url, identity)) == 4


def test_records_with_deviations_differ_by_more_than_the_tolerance():
    sizes = Sizes(KVSpec(6, 2, 32, "float32"), StoreIdentity("m"), "auto")
    chunk = Chunk(ChunkId("a" * 64), tuple(range(500, 540)))
    assert sizes.of(chunk, (), True)[1] > 1.1 * sizes.of(chunk, (), False)[1]


def test_estimated_time_is_for_all_workers_together():
    units = [unit(number, 99) for number in range(10)]
    estimate = make_estimate(
        units, file_system=None, budget_bytes=None, stored_bytes=0, sample_tokens=100, sample_s=[1.0, 0.5]
    )
    assert estimate.computed_tokens == 1000 and estimate.seconds == pytest.approx(1000 / (100 + 200))
    assert estimate.seconds_per_token == pytest.approx(0.0075)  # of one worker, which a request waits for
    nothing = make_estimate([], file_system=None, budget_bytes=None, stored_bytes=0, sample_tokens=0, sample_s=[])
    assert (nothing.seconds, nothing.num_bytes, nothing.missing_bytes) == (0.0, 0, 0)


def test_estimate_rounds_files_up_to_whole_blocks():
    units = [unit(0, 9, object_bytes=4097, record_bytes=1), unit(1, 9, object_bytes=4096, record_bytes=4096)]
    place = FileSystem("/", 28671, 4096)
    estimate = make_estimate(units, file_system=place, budget_bytes=None, stored_bytes=0, sample_tokens=0, sample_s=[])
    # Object, record, note and directory: 2 + 1 + 1 + 1 and 1 + 1 + 1 + 1 blocks.
    assert estimate.disk_bytes == 9 * 4096 and estimate.num_bytes == 4097 + 1 + 4096 + 4096
    assert estimate.missing_bytes == 9 * 4096 - 28671 and estimate.seconds is None
    enough = dataclasses.replace(estimate, free_bytes=9 * 4096)
    assert enough.missing_bytes == 0


def test_stored_bytes_count_against_the_budget():
    units = [unit(0, 9, object_bytes=600, record_bytes=100)]
    options = {"file_system": FileSystem("/", 10**9, 4096), "sample_tokens": 0, "sample_s": []}
    assert make_estimate(units, budget_bytes=1000, stored_bytes=300, **options).missing_bytes == 0
    assert make_estimate(units, budget_bytes=1000, stored_bytes=301, **options).missing_bytes == 1
    assert make_estimate(units, budget_bytes=1000, stored_bytes=2000, **options).missing_bytes == 700


def test_sample_spans_short_to_long_units():
    units = [unit(number, 100 - number) for number in range(100)]
    assert [one.num_tokens for one in sample(units, 4)] == [13, 38, 63, 88]
    assert len(sample(units[:3], 4)) == 3 and sample([], 4) == ()
    behind = [unit(200, 5, behind=(1,))]
    assert sample([*units[:1], *behind], 4) == (units[0],) and sample(behind, 4) == tuple(behind)


def test_file_system_of_a_nonexistent_store_is_found(tmp_path):
    place = file_system_of((tmp_path / "a" / "b").as_uri())
    assert place is not None and place.directory == str(tmp_path)
    assert place.free_bytes > 0 and place.block_bytes == os.statvfs(tmp_path).f_frsize
    assert file_system_of("s3://bucket/prefix") is None
    assert stored_ids((tmp_path / "a").as_uri(), StoreIdentity("m")) == frozenset() and not (tmp_path / "a").exists()
