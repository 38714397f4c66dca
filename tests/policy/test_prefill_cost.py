"""T(cached, new) against SciPy's bilinear interpolation, and by hand outside the grid."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.prefill_cost import PrefillGrid, coarse_grid

GRID = PrefillGrid((0, 100, 400), (10, 50), ((1.0, 3.0), (2.0, 6.0), (8.0, 9.0)))


@given(st.data())
def test_interpolation_matches_scipy_bilinear_between_grid_points(data):
    from scipy.interpolate import RegularGridInterpolator

    cached = sorted(data.draw(st.sets(st.integers(0, 5000), min_size=2, max_size=6)))
    new = sorted(data.draw(st.sets(st.integers(1, 5000), min_size=2, max_size=6)))
    seconds = np.random.default_rng(data.draw(st.integers(0, 99))).random((len(cached), len(new)))
    grid = PrefillGrid(tuple(cached), tuple(new), tuple(map(tuple, seconds.tolist())))
    wanted = RegularGridInterpolator((cached, new), seconds)
    at = data.draw(st.integers(cached[0], cached[-1])), data.draw(st.integers(new[0], new[-1]))
    assert grid.prefill_s(*at) == pytest.approx(wanted([at])[0], rel=1e-9)


@pytest.mark.parametrize(
    ("cached", "new", "seconds"),
    [
        (0, 10, 1.0),
        (400, 50, 9.0),
        (100, 30, 4.0),
        (50, 30, 3.0),  # between 2 and 4
        (0, 1, 1.0),  # fewer than measured: no cheaper
        (0, 90, 5.0),  # more: 0.05 s per token, as in the last cell
        (700, 10, 14.0),  # 0.02 s per cached token
        (0, 0, 0.0),
    ],
)
def test_prefill_seconds_match_hand_computed_values(cached, new, seconds):
    assert GRID.prefill_s(cached, new) == pytest.approx(seconds)


def test_extrapolated_cost_is_never_negative():
    assert PrefillGrid((0, 10), (1, 2), ((1.0, 0.1), (1.0, 0.1))).prefill_s(0, 100) == 0.0


def test_grid_round_trips_through_json():
    assert PrefillGrid.from_json(json.loads(json.dumps(GRID.to_json()))) == GRID


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cached": [0]}, "cached: wanted at least two"),
        ({"cached": [100, 0, 400]}, "cached: wanted at least two ascending"),
        ({"new": [0, 50]}, "new"),
        ({"seconds": [[1.0, 3.0]]}, "seconds: wanted 3 rows of 2"),
        ({"seconds": [[1.0, 3.0], [2.0], [8.0, 9.0]]}, "seconds: wanted 3 rows of 2"),
        ({"seconds": [[1.0, 3.0], [2.0, -6.0], [8.0, 9.0]]}, "seconds"),
        ({"seconds": None}, "missing or not what it should be"),
    ],
)
def test_invalid_grid_is_rejected_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        PrefillGrid.from_json({**GRID.to_json(), **change})
    with pytest.raises(ValueError, match="wanted an object"):
        PrefillGrid.from_json([])


@pytest.mark.parametrize(("cached", "new", "name"), [(-1, 5, "cached"), (5, -1, "new"), (1.5, 5, "cached")])
def test_invalid_token_counts_are_rejected_by_name(cached, new, name):
    with pytest.raises(ValueError, match=name):
        GRID.prefill_s(cached, new)


def test_three_full_prefills_give_a_coarse_grid():
    """T(0, n) = f + u n + a n^2 / 2; the last tokens of a longer prompt cost what is left of it, and the fixed part."""

    def full_s(n):
        return 0.5 + 2e-3 * n + 1e-5 * n * n / 2

    grid = coarse_grid([(n, full_s(n)) for n in (50, 200, 800)])
    assert grid.new == (50, 200, 800)
    for cached in (0, 400, 1600):
        for new in grid.new:
            assert grid.prefill_s(cached, new) == pytest.approx(full_s(cached + new) - full_s(cached) + 0.5)
    bent = coarse_grid([(50, 0.3), (200, 0.29), (800, 0.1)])  # noise
    assert set(bent.seconds[0]) == {0.3} == set(bent.seconds[1])
    for bad in ([(50, 1.0), (200, 1.0)], [(50, 1.0), (50, 1.0), (60, 1.0)]):
        with pytest.raises(ValueError, match="times: wanted three ascending lengths"):
            coarse_grid(bad)
