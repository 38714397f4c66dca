"""Several processes on one store: restart, kill -9, two writers. Children are spawned; forks kill tensorstore.

CCJAX_STORE_KILLS=200 kills as many writers on each kind of place, instead of a few; their formats take turns.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ccjax.store import TensorStoreTier
from ccjax.store.formats import KV_DTYPES, dequantize, encode
from ccjax.store.namespaces import ORPHAN_AGE_S
from tests.store.kv import (
    OURS,
    SPEC,
    assert_same_bytes,
    get,
    make_kv,
    make_record,
    open_store,
    put,
)
from tests.store.worker import WIDE, WIDE_TOKENS

ON_MOTO = True

ROOT = Path(__file__).resolve().parents[2]


def spawn(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.worker", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output


def test_second_process_reads_what_the_first_wrote(process_place):
    place = process_place
    with open_store(place.url) as store:
        for variant_id in ("v", "w"):
            put(store, variant_id)
    expected = {
        key: [hashlib.sha256(make_kv(key).tobytes()).hexdigest(), dict(make_record(key).meta)] for key in ("v", "w")
    }
    assert json.loads(result_of(spawn("dump", place.url))) == expected


def test_process_that_ends_without_close_still_writes_its_queue(process_place):
    place = process_place
    result_of(spawn("save", place.url, "v", "w", "x"))
    with open_store(place.url, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["v", "w", "x"]
        assert_same_bytes(get(store, "x"), make_kv("x"))


def kv_dtype_of(number: int) -> str:
    """The format of the writer after this many kills."""
    return KV_DTYPES[number % len(KV_DTYPES)]


def written_by(variant_id: str) -> np.ndarray:
    """The expected KV of a variant of writer `pNUMBER`, decoded from its codes if the format is lossy."""
    number = int(variant_id.partition("-")[0].removeprefix("p"))
    kv = make_kv(variant_id, WIDE_TOKENS, WIDE)
    layout, stored = encode(WIDE, kv, kv_dtype_of(number))
    for layer, out in zip(stored, kv, strict=True) if layout.is_lossy else ():
        dequantize(layer, out)
    return kv


def read_added(tier: TensorStoreTier) -> int:
    """Reads every variant completely that appeared since the last call, and returns their number."""
    added, removed = tier.refresh()
    for variant_id in added:
        assert_same_bytes(tier.open(variant_id).wait(0, WIDE.num_layers), written_by(variant_id))
    assert removed == () and tier.num_corrupt == 0
    return len(added)


def test_killed_writer_leaves_complete_variants_and_sweepable_orphans(process_place, monkeypatch):
    place = process_place
    num_kills = int(os.environ.get("CCJAX_STORE_KILLS", 4 if place.kind == "file" else 2))
    chance = random.Random(4)
    reader = TensorStoreTier(place.url, WIDE, OURS)
    num_read = 0
    for number in range(num_kills):
        reader.remove([record.variant_id for record in reader.records()])  # hundreds of rounds should fit on a disk
        process = spawn("write_forever", place.url, f"p{number}", kv_dtype_of(number))
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        while not (seen := read_added(reader)) and process.poll() is None:
            pass
        killed_at = time.monotonic() + chance.uniform(0.0, 0.1)
        while time.monotonic() < killed_at:
            seen += read_added(reader)
        process.kill()
        process.communicate()
        num_read += seen + read_added(reader)
        assert seen
    tier = TensorStoreTier(place.url, WIDE, OURS)
    assert {record.variant_id for record in tier.records()} >= {record.variant_id for record in reader.records()}
    for record in tier.records():
        assert_same_bytes(tier.open(record.variant_id).wait(0, WIDE.num_layers), written_by(record.variant_id))
    num_orphans = len(place.object_keys()) - len(tier)
    print(f"{place.kind}: {num_kills} kills, {num_read} variants read whole, {num_orphans} orphans")  # with -s
    assert num_orphans >= 0
    place.let_pass(ORPHAN_AGE_S, monkeypatch)
    swept = TensorStoreTier(place.url, WIDE, OURS)
    assert len(place.object_keys()) == len(swept) == len(tier)
    assert not [key for key in place.keys() if key.endswith(".tmp") or "__lock" in key or ".probe" in key]
    assert ORPHAN_AGE_S >= 600  # a slow writer is no orphan


def test_two_writers_of_the_same_keys_have_one_winner_each(place, tmp_path):
    num_keys = 40 if place.kind == "file" else 20
    start_file = tmp_path / "start"
    writers = [spawn("race", place.url, number, start_file, num_keys) for number in range(2)]
    for process in writers:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
    start_file.touch()
    won = [json.loads(result_of(process)) for process in writers]
    assert sorted(won[0] + won[1]) == sorted(f"k{number}" for number in range(num_keys))
    tier = TensorStoreTier(place.url, SPEC, OURS)
    for number, keys in enumerate(won):
        for key in keys:
            assert_same_bytes(tier.open(key).wait(0, 3), make_kv(key, writer=number))
    assert len(place.object_keys()) == num_keys  # the losers deleted their objects


def test_import_loads_neither_jax_nor_higher_layers():
    code = "import ccjax.store, sys; sys.exit(bool({'jax', 'ccjax.engine', 'ccjax.models'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
