"""Several processes on one directory: restart, kill -9, two writers. Children are spawned; forks kill tensorstore."""

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from store import TensorStoreTier
from store.disk import ORPHAN_AGE_S
from tests.store.kv import (
    OURS,
    SPEC,
    assert_same_bytes,
    get,
    make_kv,
    make_record,
    object_files,
    open_store,
    put,
    url_of,
)
from tests.store.test_corruption import make_old
from tests.store.worker import WIDE, WIDE_TOKENS

ROOT = Path(__file__).resolve().parents[2]


def spawn(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.worker", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


def test_second_process_reads_what_the_first_wrote(tmp_path):
    with open_store(tmp_path) as store:
        for variant_id in ("v", "w"):
            put(store, variant_id)
    expected = {
        key: [hashlib.sha256(make_kv(key).tobytes()).hexdigest(), dict(make_record(key).meta)] for key in ("v", "w")
    }
    assert json.loads(result_of(spawn("dump", tmp_path))) == expected


def test_process_that_ends_without_close_still_writes_its_queue(tmp_path):
    result_of(spawn("save", tmp_path, "v", "w", "x"))
    with open_store(tmp_path, host_bytes=0) as store:
        assert [record.variant_id for record in store.records()] == ["v", "w", "x"]
        assert_same_bytes(get(store, "x"), make_kv("x"))


def test_kill_9_leaves_whole_variants_and_orphans_that_are_swept(tmp_path):
    chance = random.Random(4)
    for number in range(10):
        process = spawn("write_forever", tmp_path, f"p{number}")
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        time.sleep(chance.uniform(0.02, 0.25))
        process.kill()
        process.communicate()
    tier = TensorStoreTier(url_of(tmp_path), WIDE, OURS)
    assert tier.num_corrupt == 0 and len(tier) >= 10
    for record in tier.records():
        expected = make_kv(record.variant_id, WIDE_TOKENS, WIDE)
        assert_same_bytes(tier.open(record.variant_id).wait(0, WIDE.num_layers), expected)
    assert len(object_files(tmp_path)) >= len(tier)
    make_old(tmp_path)
    swept = TensorStoreTier(url_of(tmp_path), WIDE, OURS)
    assert len(object_files(tmp_path)) == len(swept) == len(tier)
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*__lock*"))
    assert ORPHAN_AGE_S >= 600  # a slow writer is no orphan


def test_two_writers_of_the_same_keys_have_one_winner_each(tmp_path):
    num_keys = 40
    start_file = tmp_path / "start"
    writers = [spawn("race", tmp_path / "kv", number, start_file, num_keys) for number in range(2)]
    for process in writers:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
    start_file.touch()
    won = [json.loads(result_of(process)) for process in writers]
    assert sorted(won[0] + won[1]) == sorted(f"k{number}" for number in range(num_keys))
    tier = TensorStoreTier(url_of(tmp_path / "kv"), SPEC, OURS)
    for number, keys in enumerate(won):
        for key in keys:
            assert_same_bytes(tier.open(key).wait(0, 3), make_kv(key, writer=number))
    assert len(object_files(tmp_path / "kv")) == num_keys  # the losers deleted their objects


def test_import_brings_neither_jax_nor_the_system_above():
    code = "import store, sys; sys.exit(bool({'jax', 'ccjax', 'models', 'pallas_kernels'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
