"""Engines of these tests pad to few sizes, as those of tests/engine do."""

from tests.engine.conftest import few_shapes

__all__ = ["few_shapes"]
