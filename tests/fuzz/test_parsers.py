"""Parsers of untrusted input raise only their own errors: on malformed input, and on valid input that was changed.

Longer: `CCJAX_FUZZ_EXAMPLES=10000 python -m pytest --all tests/fuzz`, drawn anew every time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

EXAMPLES = os.environ.get("CCJAX_FUZZ_EXAMPLES")
PIECES = [b"", b"\0", b"\xff" * 8, b"9" * 400, b"-1", b"1e999", b"NaN", b"null", b"[", b"{", b'"', b"\\u", b"../"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("x" * 5000)
VALUES = st.recursive(LEAVES, lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(max_size=5), value))


@st.composite
def changed_bytes(draw, seed):
    """The seed with pieces replaced, removed and inserted."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(data)))
        last = first + draw(st.integers(0, 16))
        data[first:last] = draw(st.binary(max_size=16) | st.sampled_from(PIECES))
    return bytes(data)


@st.composite
def changed_json(draw, seed):
    """The seed with a value somewhere in it replaced, removed or added."""
    value = copy.deepcopy(seed)
    inner = value
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = draw(st.sampled_from(keys)) if keys else None
        if key is not None and isinstance(inner[key], (dict, list)) and draw(st.booleans()):
            inner = inner[key]
            continue
        if key is None or draw(st.integers(0, 9)) == 0:
            added = draw(VALUES)
            inner.append(added) if isinstance(inner, list) else inner.update({draw(st.text(max_size=9)): added})
        elif draw(st.integers(0, 4)) == 0:
            del inner[key]
        else:
            inner[key] = draw(VALUES)
        return json.dumps(value).encode()


def inputs(seeds):
    drawn = [st.binary(max_size=64), *map(changed_bytes, seeds)]
    for seed in seeds:
        with contextlib.suppress(ValueError):
            drawn += [changed_json(json.loads(seed))] * 2
    return st.one_of(drawn)


@pytest.mark.parametrize("name", TARGETS)
def test_each_parser_accepts_its_seeds_and_handles_malformed_input(name):
    target = TARGETS[name]
    for seed in target.seeds:
        target.run(seed)
    for data in (b"", b"\0", b"\xff\xfe", b"[" * 4000, b"[" * 100_000, b"{}", b"[1]", b"null", b"a: &a [*a]"):
        with contextlib.suppress(*target.allowed):
            target.run(data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinite weights
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=int(EXAMPLES or 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parser_raises_only_its_own_errors(name, data):
    target = TARGETS[name]
    raw = data.draw(inputs(target.seeds))
    with contextlib.suppress(*target.allowed):
        target.run(raw)
