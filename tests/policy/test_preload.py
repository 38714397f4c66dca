"""The preload depth by hand and against a simulated pipeline of layers, and its errors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.preload import preload_depth


@pytest.mark.parametrize(
    ("num_layers", "prefill_s", "load_s", "expected"),
    [
        (5, 1.0, 2.0, 3),  # the paper's example, fig. 19: 4 (1 - 1/2) + 1
        (5, 0.02, 0.04, 3),
        (32, 1.0, 4.0, 25),  # 31 * 3/4 + 1 = 24.25
        (32, 3.0, 4.0, 9),  # 31 / 4 + 1 = 8.75
        (32, 0.0, 1.0, 32),
        (32, 1.0, 1.0, 1),
        (32, 2.0, 1.0, 1),
        (32, 1.0, 0.0, 1),
        (32, 0.0, 0.0, 1),
        (32, 1.0, 1.0001, 2),  # slightly slower: 1.003
        (2, 1.0, 100.0, 2),  # 1.99
        (1, 0.0, 5.0, 1),
        (1, 5.0, 0.0, 1),
        (5, 0.3, 0.4, 2),  # 4 * (0.3 / 0.4) is below 3 in binary
        (16, 0.6, 1.5, 10),  # and 15 * (0.6 / 1.5) below 6
        (32, 1e308, 1.5e308, 12),  # 31 / 3 + 1 = 11.33
        (2, 5e-324, 1.0, 2),
    ],
)
def test_preload_depth_matches_hand_computed_values(num_layers, prefill_s, load_s, expected):
    assert preload_depth(num_layers, prefill_s, load_s) == expected


def runs_without_a_gap(depth: int, num_layers: int, prefill: int, load: int) -> bool:
    """Layers load one after another, `load` ticks each; the first, of `prefill` ticks, runs once `depth` are loaded."""
    clock = depth * load
    for layer in range(1, num_layers + 1):
        if layer * load > clock:
            return False
        clock += prefill
    return True


@given(st.integers(1, 80), st.integers(0, 50), st.integers(0, 50), st.sampled_from([1.0, 0.1, 1e-3, 0.7]))
def test_preload_depth_is_the_least_at_which_no_layer_waits(num_layers, prefill, load, tick_s):
    depths = [depth for depth in range(1, num_layers + 1) if runs_without_a_gap(depth, num_layers, prefill, load)]
    got = preload_depth(num_layers, num_layers * prefill * tick_s, num_layers * load * tick_s)
    assert got == depths[0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"prefill_s": -1e-9}, "prefill_s"),
        ({"prefill_s": math.nan}, "prefill_s"),
        ({"load_s": -1.0}, "load_s"),
        ({"load_s": math.inf}, "load_s"),
        ({"load_s": "1"}, "load_s"),
    ],
)
def test_bad_input_is_named(change, name):
    with pytest.raises(ValueError, match=f"^{name}: wanted .*, got "):
        preload_depth(**{"num_layers": 4, "prefill_s": 1.0, "load_s": 2.0, **change})
