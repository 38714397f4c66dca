"""Answers of two requests that have to be equal but for the last bits of their log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import pydantic

LOGPROB_TOLERANCE = 1e-4
"""Rows of a prompt may be packed with other rows, in products of another shape, when it is asked again."""


def nearly_equal(found: Any, wanted: Any) -> bool:
    """Whether both are the same, with numbers that are not whole within LOGPROB_TOLERANCE."""
    found, wanted = (
        value.model_dump() if isinstance(value, pydantic.BaseModel) else value for value in (found, wanted)
    )
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
    if isinstance(found, dict) and isinstance(wanted, dict):
        return list(found) == list(wanted) and all(nearly_equal(found[key], wanted[key]) for key in found)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(nearly_equal, found, wanted))
    return found == wanted


def test_only_the_last_bits_of_a_log_probability_may_differ() -> None:
    wanted = {"tokens": [" a"], "logprobs": [None, {"7": {"logprob": -3.25, "rank": 2}}]}
    assert nearly_equal({"tokens": [" a"], "logprobs": [None, {"7": {"logprob": -3.25001, "rank": 2}}]}, wanted)
    for found in (
        {"tokens": [" a"], "logprobs": [None, {"7": {"logprob": -3.251, "rank": 2}}]},
        {"tokens": [" a"], "logprobs": [None, {"7": {"logprob": -3.25, "rank": 1}}]},
        {"tokens": [" a"], "logprobs": [None, {"8": {"logprob": -3.25, "rank": 2}}]},
        {"tokens": [" b"], "logprobs": [None, {"7": {"logprob": -3.25, "rank": 2}}]},
        {"tokens": [" a"], "logprobs": [None]},
    ):
        assert not nearly_equal(found, wanted)
