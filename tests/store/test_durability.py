"""State of a directory after a power cut: the order in which objects reach the disk, and what may be lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ccjax.store.commits
from ccjax.store.files import FileRoot
from ccjax.store.leases import Leases
from ccjax.store.objects import open_root
from tests.store.kv import OURS, namespace_of, open_store, put


class Disk:
    """Records which files and folders were synced, by inode, since names may change."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: list[os.stat_result] = []
        self._patch = patch
        fsync = os.fsync
        patch.setattr(os, "fsync", lambda descriptor: (self.synced.append(os.fstat(descriptor)), fsync(descriptor))[1])

    def has(self, path: Path) -> bool:
        """True if `path` was synced since the last `forget`."""
        return any(os.path.samestat(stat, path.stat()) for stat in self.synced)

    def forget(self) -> None:
        self.synced.clear()

    def before(self, name: str, look: Callable[..., object]) -> None:
        """Has `look` called with the arguments of every `os.NAME`, first."""
        call = getattr(os, name)
        self._patch.setattr(os, name, lambda *arguments, **options: (look(*arguments), call(*arguments, **options))[1])


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def test_record_is_written_only_after_its_data_is_durable(tmp_path, disk):
    space, linked = namespace_of(tmp_path), []

    def look(source: Path, final: Path) -> None:
        if final.parent.name == "records":
            (folder,) = (space / "data").iterdir()
            (data,) = folder.iterdir()
            assert all(map(disk.has, (data, folder, space / "data", Path(source))))
            linked.append(final)
            disk.forget()

    with open_store(tmp_path) as store:
        disk.before("link", look)
        put(store, "v")
        assert linked == [space / "records" / "v.json"] and disk.has(space / "records")


def test_replaced_file_is_durable(tmp_path, disk):
    root = FileRoot(tmp_path.as_uri())
    root.replace("k", b"old")
    disk.forget()
    disk.before("replace", lambda source, _: disk.has(Path(source)) or pytest.fail("it may be empty afterwards"))
    root.replace("k", b"new")
    assert disk.has(tmp_path), "or a power cut brings the old one back, after what it named was deleted"


def test_leases_and_catalogs_are_not_synced(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(ccjax.store.commits, "LEAST_CHANGES", 1)
    leases = Leases(open_root(tmp_path.as_uri()), OURS.namespace)
    leases.acquire(["a"], 10)
    disk.forget()
    leases.acquire(["b"], 10)
    assert not disk.synced
    with open_store(tmp_path) as kv:
        put(kv, "v")
        kv.tidy()
        parts = list((tmp_path / OURS.namespace / "catalog").iterdir())
        assert parts and not any(map(disk.has, parts))


@pytest.mark.parametrize(("write", "call"), [(FileRoot.create, "link"), (FileRoot.replace, "replace")])
def test_temporary_file_swept_by_another_process_is_rewritten(tmp_path, disk, write, call):
    root, swept = FileRoot(tmp_path.as_uri()), []

    def sweep(source, _) -> None:
        if len(swept) < at_most:
            swept.append(source)
            assert root.left_overs([""]) == [Path(source).name]
            root.delete(Path(source).name)

    disk.before(call, sweep)
    at_most = 2
    write(root, "k", b"whole")
    assert len(swept) == 2 and root.read("k") == b"whole" and disk.has(tmp_path)
    at_most = 9
    with pytest.raises(FileNotFoundError):
        write(root, "other", b"whole")
    assert len(swept) == 5 and root.names("") == ["k"]
