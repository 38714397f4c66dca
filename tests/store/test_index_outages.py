"""Shared indexes that are unreachable, lost, damaged, slow or another program's; and invalid URLs."""

import builtins
import shutil
import sqlite3
import subprocess
import threading
import traceback
import uuid
from pathlib import Path

import pytest

from ccjax.store import IndexUnavailableError
from ccjax.store.index import open_index
from ccjax.store.index.outage import Outage
from ccjax.store.index.sqlite import SqliteIndex
from tests.polling import wait_until
from tests.redis_server import free_port, redis_server


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


def answers(index) -> bool:
    try:
        index.changes(None)
        return True
    except IndexUnavailableError:
        return False


def assert_it_waits_once_and_recovers(index, come_back, num_waits) -> None:
    """The index is unreachable until `come_back`."""
    with pytest.raises(IndexUnavailableError):
        index.leases.acquire(["a"], 1000)
    calls = [
        lambda: index.leases.held(["a"]),
        lambda: index.notify({"v": b"1"}, {}),
        lambda: index.orders.take(1),
        lambda: index.changes(None),
    ]
    looked = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        look = Outage._check
        patch.setattr(Outage, "_check", lambda outage: (look(outage), looked.set()))

        def all_are_refused() -> bool:  # also while it is looked for
            for call in calls:
                with pytest.raises(IndexUnavailableError, match="did not answer recently"):
                    call()
            return looked.is_set()

        wait_until(all_are_refused)
    assert num_waits() == 1
    come_back()
    wait_until(lambda: answers(index))
    index.notify({"v": b"1"}, {})
    index.leases.sweep()


def test_killed_redis_delays_one_call_and_restarts_empty(own_redis, namespace, num_waits):
    index, other = (open_index(own_redis.url, namespace) for _ in range(2))
    index.notify({"v": b"1"}, {})
    cursor = other.changes(None).cursor
    assert index.leases.acquire(["b"], 1000) and index.orders.place("o", b"", 1000)
    own_redis.kill()
    assert_it_waits_once_and_recovers(index, own_redis.start, num_waits)
    wait_until(lambda: answers(other))
    assert not other.changes(cursor).is_complete
    assert index.leases.held(["b"]) == frozenset() and len(index.orders) == 0
    assert other.leases.acquire(["b"], 1000)
    for handle in (index, other):
        handle.close()


def test_paused_redis_delays_one_call_and_loses_nothing(own_redis, namespace, impatient, num_waits):
    index, other = (open_index(own_redis.url, namespace) for _ in range(2))
    cursor = other.changes(None).cursor
    index.notify({"before": b"1"}, {})
    assert index.leases.acquire(["b"], 1000)
    pause = own_redis.stopped()
    pause.__enter__()
    assert_it_waits_once_and_recovers(index, lambda: pause.__exit__(None, None, None), num_waits)
    found = other.changes(cursor)
    assert found.is_complete and {"before", "v"} <= found.added.keys()
    assert other.leases.held(["b"]) == {"b"}
    for handle in (index, other):
        handle.close()


def test_redis_flush_is_detected_even_after_later_changes(own_redis, namespace):
    index, other = (open_index(own_redis.url, namespace) for _ in range(2))
    fresh = other.changes(None).cursor
    index.notify({"v": b"1"}, {})
    cursor = other.changes(fresh).cursor
    own_redis.run("FLUSHALL")
    assert not other.changes(cursor).is_complete
    own_redis.run("FLUSHALL")
    index.notify({"w": b"1"}, {})
    assert not other.changes(cursor).is_complete and not other.changes(fresh).is_complete
    cursor = other.changes(cursor).cursor
    index.notify({"x": b"1"}, {})
    assert other.changes(cursor).added == {"x": b"1"}
    own_redis.run("DEL", f"ccjax:{{{namespace}}}:changes")
    assert not other.changes(cursor).is_complete
    cursor = other.changes(cursor).cursor
    own_redis.run("DEL", f"ccjax:{{{namespace}}}:generation")
    assert not other.changes(cursor).is_complete
    for handle in (index, other):
        handle.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_redis_restart_from_an_old_snapshot_is_detected(own_redis, namespace, goes_on):
    index, other = (open_index(own_redis.url, namespace) for _ in range(2))
    index.notify({"v": b"1"}, {})
    own_redis.run("SAVE")
    index.notify({"lost": b"1"}, {})
    cursor = other.changes(None).cursor
    index.notify({"unread": b"1"}, {})
    own_redis.kill()
    own_redis.start()
    if goes_on:
        wait_until(lambda: answers(index))
        index.notify({"w": b"1"}, {})
    wait_until(lambda: answers(other))
    assert not other.changes(cursor).is_complete
    for handle in (index, other):
        handle.close()


def test_redis_error_is_reported_and_affects_no_other_call(own_redis, namespace):
    index = open_index(own_redis.url, namespace)
    own_redis.run("SET", f"ccjax:{{{namespace}}}:changes", "no stream")
    for _ in range(3):
        with pytest.raises(IndexUnavailableError, match="WRONGTYPE"):
            index.notify({"v": b"1"}, {})
        assert index.leases.held(["a"]) == frozenset()
    index.close()


def test_passwords_work_and_are_never_shown(namespace):
    with redis_server("se cret/#") as server:
        server_url = f"redis://:se%20cret%2F%23@127.0.0.1:{server.port}/1"
        index = open_index(server_url, namespace)
        assert index.leases.acquire(["a"], 1000)
        index.close()
        index = open_index(f"redis://:wrong-word@127.0.0.1:{server.port}", namespace)
        with pytest.raises(IndexUnavailableError) as caught:
            index.changes(None)
        index.close()
        shown = "".join(traceback.format_exception(caught.value))
        assert "wrong-word" not in shown and f"redis://127.0.0.1:{server.port}/0" in str(caught.value)


def test_tls_certificate_is_verified_against_the_given_authority(tmp_path, namespace):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    with redis_server("word", ["--tls-port", str(port), "--tls-auth-clients", "no", *map(str, files)]):
        trusting = open_index(f"rediss://:word@127.0.0.1:{port}/0?ssl_ca_certs={certificate}", namespace)
        assert trusting.leases.acquire(["a"], 1000)
        for url in (f"rediss://:word@127.0.0.1:{port}/0", f"redis://:word@127.0.0.1:{port}/0"):
            other = open_index(url, namespace)
            with pytest.raises(IndexUnavailableError):
                other.changes(None)
            other.close()
        trusting.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis:///0",
        "redis://:hidden@/0",
        "redis://host:port/0",
        "redis://:hidden@host:70000/0",
        "redis://:hid#den@host/0",
        "redis://:hid/den@host/0",
        "redis://:hidden@host/zero",
        "redis://:hidden@host/0/1",
        "redis://:hidden@host/0?decode_responses=True",
        "redis://host/0?password=hidden",
        "redis://host/0?ssl_ca_certs=/x",
        "rediss://host/0?ssl_ca_certs=/x&ssl_ca_certs=/y",
        "rediss://host/0?ssl_cert_reqs=none",
        "memcached://hidden",
        "host:6379",
        "",
        "sqlite://index.db",
        "sqlite:///",
        "sqlite:index.db",
        "sqlite:///index.db?mode=ro",
        "sqlite:///index.db#1",
        "sqlite:///tmp",
        None,
        5,
    ],
)
def test_invalid_url_is_rejected_without_showing_its_password(url):
    with pytest.raises(ValueError, match="^store_index: wanted ") as caught:
        open_index(url, "n")
    shown = "".join(traceback.format_exception(caught.value, chain=True)).replace(__file__, "")
    shown = "\n".join(line for line in shown.splitlines() if not line.startswith("    "))  # no line of code
    assert "hid" not in shown


def test_missing_redis_package_is_named_and_not_needed_for_sqlite(monkeypatch, tmp_path):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "redis":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"store_index: .* needs the package redis.*ccjax\[cluster\]"):
        open_index("redis://:hidden@127.0.0.1", "n")
    index = open_index(f"sqlite://{tmp_path}/a%20b/index.db", "n")
    assert answers(index) and (tmp_path / "a b" / "index.db").exists()
    index.close()


# -- SQLite ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "index.db"


@pytest.fixture
def pair(path):
    opened = [SqliteIndex(path, "n") for _ in range(2)]
    yield opened
    for index in opened:
        index.close()


def test_sqlite_file_locked_by_another_process_delays_one_call(impatient, path, pair, num_waits):
    index, _ = pair
    index.notify({"v": b"1"}, {})
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert index.changes(None).is_complete  # reading goes on
    assert_it_waits_once_and_recovers(index, lambda: holder.execute("ROLLBACK"), num_waits)
    holder.close()


def damage_all(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)


def damage_some(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[100:] = bytes(len(raw) - 100)
    path.write_bytes(raw)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    for part in ("", "-wal", "-shm"):
        Path(f"{path}{part}").unlink(missing_ok=True)


@pytest.mark.parametrize("harm", [damage_all, damage_some, cut_off, empty, delete])
@pytest.mark.parametrize("is_open", [True, False])
def test_damaged_sqlite_file_is_recreated_and_detected_by_others(path, pair, harm, is_open):
    index, other = pair
    for number in range(20):
        index.notify({f"v{number}": bytes(1000)}, {})
    assert index.leases.acquire(["a"], 1000) and index.orders.place("o", b"", 1000)
    cursor = other.changes(None).cursor
    if is_open:
        checkpoint = sqlite3.connect(path)
        checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else it all lies beside the file
        checkpoint.close()
    else:
        index.close()
        other.close()
    harm(path)
    wait_until(lambda: works(index))
    wait_until(lambda: works(other))
    assert not other.changes(cursor).is_complete
    cursor = other.changes(cursor).cursor
    index.notify({"w": b"1"}, {})
    assert other.changes(cursor).added == {"w": b"1"}
    assert other.leases.acquire(["b"], 1000) and not index.leases.acquire(["b"], 1000)
    if harm is not empty:  # found empty it is filled, found empty while in use it is set aside
        assert Path(f"{path}.damaged").exists() == (harm is not delete)


def works(index) -> bool:
    try:
        index.notify({"x": b"1"}, {})
        index.leases.sweep()
        len(index.orders)
        return True
    except IndexUnavailableError:
        return False


def test_another_programs_database_is_left_alone(path):
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE recipes (name TEXT)")
        theirs.execute("INSERT INTO recipes VALUES ('soup')")
    theirs.close()
    before = path.read_bytes()
    index = SqliteIndex(path, "n")
    for _ in range(2):
        with pytest.raises(IndexUnavailableError, match="another program"):
            index.notify({"v": b"1"}, {})
    index.close()
    assert path.read_bytes() == before and not Path(f"{path}.damaged").exists()


def test_unusable_sqlite_path_is_treated_as_an_outage(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    index = SqliteIndex(tmp_path / "file" / "index.db", "n")
    assert not answers(index)
    (tmp_path / "file").unlink()
    wait_until(lambda: answers(index))
    index.close()
