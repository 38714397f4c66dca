"""Targets: a fault that chance alone does not find, one that hangs, one that takes a gigabyte, one that is fine."""

from __future__ import annotations

import time

from scripts.fuzzing.target import FuzzTarget


def _fault(data: bytes) -> None:
    if data[:1] == b"b" and data[1:2] == b"u" and data[2:3] == b"g":
        raise KeyError("found")
    raise ValueError("as promised")


def _hoard(data: bytes) -> None:
    hoard = b"\1" * (1 << 30)
    time.sleep(2)  # libFuzzer looks once a second
    del hoard


TARGETS = {
    "fault": FuzzTarget(_fault, (ValueError,), (b"ant",)),
    "hang": FuzzTarget(lambda data: time.sleep(600), (), (b"",)),
    "fine": FuzzTarget(lambda data: time.sleep(0.01), (), (b"",)),
    "hoard": FuzzTarget(_hoard, (), (b"",)),
}
