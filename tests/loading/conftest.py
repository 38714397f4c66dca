"""Shared by the tests of models' files. Engines of these tests pad to few sizes, as those of tests/engine do."""

from pathlib import Path

import pytest

from ccjax.errors import ConfigError
from ccjax.loading.named import gguf_path
from tests.engine.conftest import few_shapes

__all__ = ["few_shapes"]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's file; skips the test where its package is not installed."""
    try:
        path = gguf_path("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    assert path is not None
    return path
