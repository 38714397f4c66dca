"""The tests here run with `-m clients` alone: in an environment of their own (make test-clients)."""

from __future__ import annotations

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leaves the folder out otherwise: its packages are not installed."""
    return None if "clients" in (config.getoption("markexpr") or "") else True


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> None:
    """Clients may leave threads of their own."""
