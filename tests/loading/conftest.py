"""Shared by the tests of models' files. Engines of these tests pad to few sizes, as those of tests/engine do."""

from pathlib import Path

import jax
import numpy as np
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


def assert_same_model(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert one.fingerprint == other.fingerprint and one.eos_ids == other.eos_ids and one.template == other.template
