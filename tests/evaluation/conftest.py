"""The demo model; engines of these tests pad to few sizes, as those of tests/engine do."""

import pytest

from ccjax.loading.model import load_model
from tests.engine.conftest import few_shapes

__all__ = ["few_shapes"]


@pytest.fixture(scope="package")
def model():
    return load_model("demo", dtype="float32")
