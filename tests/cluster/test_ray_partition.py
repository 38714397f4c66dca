"""Two hosts, one of which is cut off and comes back: Linux network namespaces with a link between them. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import REPLICA, loading, serving
from tests.polling import wait_until
from tests.store.servers import free_port

pytestmark = pytest.mark.cluster
HERE, THERE = "10.231.7.1", "10.231.7.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """A second host: a namespace with a link to this one."""

    def __init__(self) -> None:
        self.name = f"ccjax{os.getpid()}"
        self._link = f"cc{os.getpid()}"[:14]
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "there", "netns", self.name)
        ip("addr", "add", f"{HERE}/24", "dev", self._link)
        ip("link", "set", self._link, "up")
        for name in ("lo", "there"):
            ip("-n", self.name, "link", "set", name, "up")
        ip("-n", self.name, "addr", "add", f"{THERE}/24", "dev", "there")

    def cut(self) -> None:
        ip("link", "set", self._link, "down")

    def heal(self) -> None:
        ip("link", "set", self._link, "up")

    def end(self) -> None:
        ip("netns", "del", self.name)


@pytest.fixture
def other() -> Iterator[Host]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, for a network namespace")
    try:
        host = Host()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield host
    host.end()


def test_requests_continue_while_a_host_is_cut_off(other: Host, tmp_path: Path) -> None:
    port = free_port()
    options = ["--cluster", "ray", "--store", f"file://{tmp_path}/store", "--generators", "0"]
    head = [*options, "--replicas", "1", "--cluster-host", HERE, "--cluster-port", str(port)]
    joiner = [*options, "--replicas", "2", "--cluster-address", f"{HERE}:{port}", "--cluster-host", THERE]
    with serving(tmp_path, *head) as here:
        with serving(tmp_path, *joiner, under=["ip", "netns", "exec", other.name]) as there:
            here.wait_for(2)
            print(f"replicas here {len(here.pids(REPLICA))}, there {len(there.pids(REPLICA))}")
            assert len(there.pids(REPLICA)) == 1, "the replicas are not spread over the hosts"
            for number in range(4):
                here.text(f"Warm {number}?")
            with loading(here) as load:
                time.sleep(2.0)
                other.cut()
                cut = time.monotonic()
                wait_until(lambda: here.running() == 2 and len(here.pids(REPLICA)) == 2, timeout_s=120)
                replaced_s = time.monotonic() - cut
                other.heal()
                time.sleep(5.0)
            longest_s = max(load.seconds)
            print(f"cut off: replaced after {replaced_s:.1f} s, the longest answer took {longest_s:.1f} s")
            assert set(load.statuses) == {200}, load.statuses
            assert longest_s < 50.0  # 71 s with Ray's own settings
        here.wait_for(2)
        assert here.chat("Who?").status_code == 200
