"""Snapshots: what is refused, what a place may hold already, killed saves, other processes."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import psutil
import pytest

from ccjax.cache.snapshot import inspect_snapshot, restore_snapshot, save_snapshot
from ccjax.cache.snapshot import save as save_module
from ccjax.cache.snapshot.index import KEY
from ccjax.cache.snapshot.packs import PackFolder
from ccjax.errors import SnapshotError
from ccjax.store import KVSpec, StoreIdentity, StoreUnavailableError
from tests.cache.snapshots import (
    BF16,
    OURS,
    SPEC,
    WIDE,
    contents,
    dump,
    fill,
    make_kv,
    make_record,
    open_cache,
    put,
    save,
    save_ten,
)
from tests.polling import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("kv_spec", "identity", "message"),
    [
        (SPEC, StoreIdentity("model-b", OURS.tenant_salt), "is of model 'a model', model-a; this is for .* model-b"),
        (SPEC, StoreIdentity("model-a", "another"), "of this model, but was taken under another tenant salt"),
        (BF16, OURS, "holds KV in float32, this is for bfloat16"),
        (KVSpec(3, 2, 8, "float32"), OURS, "holds KV of another shape, .*head_dim=4.* this is for .*head_dim=8"),
    ],
    ids=["model", "tenant", "dtype", "shape"],
)
def test_restore_refuses_a_snapshot_of_another_identity(place, kv_spec, identity, message):
    save_ten(place)
    with open_cache(kv_spec=kv_spec, identity=identity) as cache:
        with pytest.raises(SnapshotError, match=message):
            restore_snapshot(cache, place)
        assert contents(cache) == {}


def test_snapshot_files_do_not_contain_the_tenant_salt(place):
    save_ten(place)
    files = [path for path in place.rglob("*") if path.is_file()]
    assert len(files) > 4 and not any(OURS.tenant_salt.encode() in path.read_bytes() for path in files)


def test_places_without_a_snapshot_are_rejected(tmp_path):
    with pytest.raises(SnapshotError, match=r"holds no snapshot \(no snapshot.json"):
        inspect_snapshot(tmp_path)
    (tmp_path / KEY).write_text('{"format": "something", "format_version": 1}')
    with pytest.raises(SnapshotError, match="says format 'something', wanted 'ccjax-snapshot'"):
        inspect_snapshot(tmp_path)
    with pytest.raises(StoreUnavailableError, match="wanted a directory, got"):
        inspect_snapshot(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="wanted a URL that starts with one of file://, gs://, s3://"):
        inspect_snapshot("ftp://somewhere")


def test_existing_snapshot_is_kept_unless_overwrite_is_set(place, small_packs, monkeypatch):
    _, expected = save_ten(place)
    with open_cache() as cache:
        new = put(cache, 50)
        with pytest.raises(SnapshotError, match="holds a snapshot already; name another place, or overwrite it"):
            save_snapshot(cache, place)
        fill(cache, 7)
        write = PackFolder.write

        def fail_later(folder, part, packs):
            if part == 1:
                raise StoreUnavailableError("disk full")
            write(folder, part, packs)

        with monkeypatch.context() as patch:
            patch.setattr(PackFolder, "write", fail_later)
            with pytest.raises(StoreUnavailableError, match="disk full"):
                save_snapshot(cache, place, overwrite=True)
        assert len(list((place / "parts").iterdir())) == 1
        with open_cache() as other:
            restore_snapshot(other, place)
            assert contents(other) == expected
        save_snapshot(cache, place, overwrite=True)
        assert new in {variant.record.variant_id for variant in inspect_snapshot(place).variants}
        assert [path.name for path in (place / "parts").iterdir()] == [inspect_snapshot(place).folder]
        (place / KEY).write_bytes(b"damaged")
        save_snapshot(cache, place, overwrite=True)
        assert len(inspect_snapshot(place).variants) == 8


def test_slower_of_two_concurrent_saves_to_one_place_fails(place, monkeypatch):
    write = PackFolder.write
    with open_cache() as cache:
        fill(cache, 2)

        def write_after_another(folder, part, packs):
            with monkeypatch.context() as patch:
                patch.setattr(PackFolder, "write", write)
                save_snapshot(cache, place)
            write(folder, part, packs)

        with monkeypatch.context() as patch:
            patch.setattr(PackFolder, "write", write_after_another)
            with pytest.raises(SnapshotError, match="another process saved one to .* meanwhile; that one stays"):
                save_snapshot(cache, place)
        assert restore_snapshot(cache, place).num_present == 2
        assert [path.name for path in (place / "parts").iterdir()] == [inspect_snapshot(place).folder]


def test_directory_with_other_files_is_left_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with open_cache() as cache, pytest.raises(SnapshotError, match="absent or empty .* with 'thesis.txt'"):
        save_snapshot(cache, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def spawn(*arguments, devices=1):
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "tests.cache.snapshots", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(("saving", "restoring"), [(1, "here"), ("here", 1)])
def test_snapshot_can_be_restored_on_a_different_number_of_devices(place, saving, restoring, capsys):
    assert jax.device_count() > 1
    if saving == "here":
        save(str(place), "5")
    else:
        with spawn("save", place, 5, devices=saving) as process:
            assert process.wait(120) == 0
    if restoring == "here":
        dump(str(place))
        output = capsys.readouterr().out
    else:
        with spawn("dump", place, devices=restoring) as process:
            output, _ = process.communicate(timeout=120)
    expected = {make_record(number).variant_id: make_kv(number).tobytes() for number in range(5)}
    assert json.loads(output) == {key: hashlib.sha256(kv).hexdigest() for key, kv in expected.items()}


def stop_within_a_save(process, folder, seeded) -> None:
    """At some moment, the process is stopped while the last of its saves is not complete."""
    while True:
        time.sleep(seeded.uniform(0.0, 0.2))
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, timeout_s=120)
        places = saved_in(folder)
        if places and not (places[-1] / KEY).exists():
            return
        process.send_signal(signal.SIGCONT)


def saved_in(folder) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: int(path.name)) if folder.exists() else []


def test_killed_save_is_never_mistaken_for_a_snapshot(tmp_path):
    """CCJAX_SNAPSHOT_KILLS=50 kills as many."""
    seeded = random.Random(0)
    with open_cache(kv_spec=WIDE) as cache:
        fill(cache, 16, num_tokens=64)
        expected = contents(cache)
        num_refused = 0
        for kill in range(int(os.environ.get("CCJAX_SNAPSHOT_KILLS", "2"))):
            folder = tmp_path / str(kill)
            with spawn("save_forever", folder, 16) as process:
                assert process.stdout is not None and process.stdout.readline() == "started\n"
                stop_within_a_save(process, folder, seeded)
                process.kill()
            for place in saved_in(folder)[-2:]:
                with open_cache(kv_spec=WIDE) as other:
                    try:
                        report = restore_snapshot(other, place)
                    except SnapshotError as error:
                        assert "holds no snapshot" in str(error) and contents(other) == {}
                        num_refused += 1
                        save_snapshot(cache, place)  # the place is as good as new
                    else:
                        assert (report.num_restored, report.num_damaged) == (16, 0) and contents(other) == expected
        assert num_refused


def test_later_save_removes_old_leftovers_of_a_killed_save(place):
    save_ten(place)
    old, recent = place / "parts" / f"{1:032x}", place / "parts" / f"{2:032x}"
    for path in (old, recent):
        path.mkdir()
    then = time.time() - save_module.LEFT_OVER_AGE_S - 60
    os.utime(old, (then, then))
    with open_cache() as cache:
        put(cache, 1)
        save_snapshot(cache, place, overwrite=True)
    assert {path.name for path in (place / "parts").iterdir()} == {recent.name, inspect_snapshot(place).folder}
