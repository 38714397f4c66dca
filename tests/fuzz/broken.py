"""A target with a fault that chance alone does not find, another that hangs."""

from __future__ import annotations

import time

from scripts.fuzzing.target import Target


def _fault(data: bytes) -> None:
    if data[:1] == b"b" and data[1:2] == b"u" and data[2:3] == b"g":
        raise KeyError("found")
    raise ValueError("as promised")


TARGETS = {
    "fault": Target(_fault, (ValueError,), (b"ant",)),
    "hang": Target(lambda data: time.sleep(30), (), (b"",)),
}
