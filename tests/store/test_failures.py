"""A full or broken disk: failures are counted and logged once, requests are still served, and the store recovers. Real
kernel errors."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest

from ccjax.store import StoreError, StoreUnavailableError, TensorStoreTier
from ccjax.store.files import FileRoot
from tests.store.kv import (
    OURS,
    SPEC,
    assert_same_bytes,
    bytes_on_disk,
    get,
    make_kv,
    make_record,
    namespace_of,
    object_files,
    open_store,
    put,
    url_of,
)
from tests.store.test_processes import ROOT, result_of, spawn


def check_report(report: dict) -> None:
    assert report["failed"] >= 1 and report["readable"]
    assert len(report["kept"]) + report["failed"] == 6
    assert report["used"] == report["on_disk"]  # failed writes left nothing, in the books or on disk
    assert report["after"] == "disk"
    assert len(report["messages"]) == 2, report["messages"]
    assert "a write failed" in report["messages"][0] and "succeed again" in report["messages"][1]


def test_file_size_limit_fails_writes_and_recovers(tmp_path):
    """EFBIG, in a process of its own."""
    report = json.loads(result_of(spawn("limit_file_size", tmp_path)))
    check_report(report)
    assert report["kept"] == [] and report["on_disk"] == 0


def test_full_disk_fails_writes_and_recovers(tmp_path):
    """ENOSPC on a tmpfs of 2 MiB in a mount namespace of its own."""
    run = f"{sys.executable} -m tests.store.worker fill_disk {tmp_path}"
    inside = f"mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec {run}"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*command, f"mount -t tmpfs tmpfs {tmp_path}"]).returncode:
        pytest.skip("cannot mount a tmpfs here; test_file_size_limit_fails_writes_and_recovers covers a refused write")
    done = subprocess.run([*command, inside], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    report, opened = map(json.loads, done.stdout.splitlines())
    check_report(report)
    assert report["kept"] == ["v0", "v1", "v2"]  # 512 KiB each, and the file system's own blocks
    assert "No space left on device" in report["messages"][0]
    assert opened["open"].startswith(f"store: cannot use {tmp_path}/kv as a KV store: No space left on device")
    assert opened["reason"] == "No space left on device"


@pytest.fixture
def broken(tmp_path):
    """A store whose data folder is replaced by a file from `break` to `repair`; returns (store, break, repair)."""
    data, aside = namespace_of(tmp_path) / "data", namespace_of(tmp_path) / "aside"

    def break_it():
        data.rename(aside)
        data.write_text("")

    def repair():
        data.unlink()
        aside.rename(data)

    with open_store(tmp_path) as store:
        yield store, break_it, repair


def test_failing_disk_is_counted_logged_once_per_change_and_recovers(broken, caplog):
    store, break_it, repair = broken
    put(store, "before")
    break_it()
    with caplog.at_level(logging.INFO, logger="ccjax.store"):
        for variant_id in ("a", "b", "c"):
            put(store, variant_id)
            assert store.tier_of(variant_id) == "host"
            assert_same_bytes(get(store, variant_id), make_kv(variant_id))
        failures = [entry.getMessage() for entry in caplog.records if "write failed" in entry.getMessage()]
        assert len(failures) == 1 and "Not a directory" in failures[0]
        assert len(caplog.records) == 1
        repair()
        put(store, "d")
        put(store, "e")
        recoveries = [entry.getMessage() for entry in caplog.records if "again after" in entry.getMessage()]
        assert len(recoveries) == 1 and "after 3 failures" in recoveries[0]
    usage = store.usage()["disk"]
    assert (usage.failed_writes, usage.writes, usage.num_variants) == (3, 3, 3)


def test_failed_write_leaves_nothing_behind(tmp_path):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    records = namespace_of(tmp_path) / "records"
    records.rmdir()
    records.write_text("")
    with pytest.raises(StoreUnavailableError, match=f"store: cannot write to file://{tmp_path}"):
        tier.write(make_record("v"), make_kv("v"))
    assert object_files(tmp_path) == [] and tier.budget.used_bytes == 0 and "v" not in tier
    records.unlink()
    records.mkdir()
    assert tier.write(make_record("v"), make_kv("v")) and tier.budget.used_bytes == bytes_on_disk(tmp_path)


def test_record_whose_directory_cannot_be_synced_is_removed(tmp_path, monkeypatch):
    tier = TensorStoreTier(url_of(tmp_path), SPEC, OURS)
    assert isinstance(tier._root, FileRoot)
    sync = tier._root.sync

    def failing_sync(prefix):
        if prefix.endswith("records"):
            raise OSError(5, "Input/output error")
        sync(prefix)

    monkeypatch.setattr(tier._root, "sync", failing_sync)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        tier.write(make_record("v"), make_kv("v"))
    assert bytes_on_disk(tmp_path) == 0  # else the record would commit an object that is deleted
    monkeypatch.undo()
    assert tier.write(make_record("v"), make_kv("v"))


def test_unreadable_object_is_unavailable_not_corrupt(tmp_path):
    """A symbolic link to itself gives ELOOP: the kernel refuses the path, which does not mean damaged data."""
    with open_store(tmp_path, host_bytes=0) as store:
        put(store, "v")
        (file,) = object_files(tmp_path)
        kept = file.rename(tmp_path / "kept")
        file.symlink_to(file)
        with pytest.raises(StoreUnavailableError, match="cannot read variant v"):
            get(store, "v")
        assert store.usage()["disk"].corrupt == 0 and store.tier_of("v") == "disk"
        file.unlink()
        kept.rename(file)
        assert_same_bytes(get(store, "v"), make_kv("v"))


def test_refresh_of_a_deleted_directory_does_not_fail_requests(tmp_path, caplog):
    with open_store(tmp_path) as store:
        put(store, "v")
        shutil.rmtree(tmp_path)
        assert store.refresh() == ((), ("v",))
        assert_same_bytes(get(store, "v"), make_kv("v"))  # from host memory
        assert put(store, "w") == ("host", "disk") and store.usage()["disk"].failed_writes == 0


def test_slow_disk_times_out_and_the_load_continues(tmp_path):
    """A named pipe in place of the object: opening it waits until the other end is opened."""
    with open_store(tmp_path, host_bytes=0) as store:
        put(store, "v")
        (file,) = object_files(tmp_path)
        kept = file.rename(tmp_path / "kept")
        os.mkfifo(file)
        ticket = store.prepare_load(["v"])
        ticket.prefetch("v", 0, 1)
        assert not ticket.ready("v", 0, 1)
        with pytest.raises(TimeoutError):
            ticket.read_layers("v", 0, 1, timeout_s=0.02)
        file.open("wb").close()
        with pytest.raises(StoreError):
            ticket.read_layers("v", 0, 1, timeout_s=30)
        assert store.complete_load(ticket, ok=False) == {}
        file.unlink()
        kept.rename(file)
        assert_same_bytes(get(store, "v"), make_kv("v"))
