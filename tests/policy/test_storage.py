"""Where KV may be stored so that loading hides behind recomputing (CacheBlend sec. 5.1)."""

from __future__ import annotations

import pytest

from ccjax.policy.storage import USUAL, Storage, cheapest_hidden, least_rate


def test_loading_hides_where_it_takes_at_most_as_long_as_recomputing():
    # 1,000 tokens of 100 kB, prefilled in 2 s, of which 15 % is 0.3 s: 100 MB in that time.
    rate = least_rate(100_000, 0.002, 0.15)
    assert rate == pytest.approx(100e6 / 0.3)
    assert least_rate(100_000, 0.002, 0.3) == pytest.approx(rate / 2)
    assert least_rate(100_000, 0.002, 0.0) is None


def test_the_cheapest_place_that_hides_is_chosen():
    slow, fast, dear = Storage("slow", 10.0, 1.0), Storage("fast", 100.0, 3.0), Storage("dear", 100.0, 9.0)
    places = (dear, slow, fast)
    assert [cheapest_hidden(places, rate) for rate in (5.0, 10.0, 10.1, 100.0, 101.0)] == [slow, slow, fast, fast, None]
    assert cheapest_hidden((Storage("a", 10.0, 1.0), Storage("b", 20.0, 1.0)), 5.0).name == "b"


def test_usual_places_are_the_dearer_the_faster():
    for faster, slower in zip(USUAL, USUAL[1:], strict=False):
        assert faster.bytes_per_s > slower.bytes_per_s and faster.price > slower.price


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 0.1, 0.1), "bytes_per_token"), ((1, -0.1, 0.1), "seconds_per_token"), ((1, 0.1, 1.5), "recompute_ratio")],
)
def test_the_error_names_the_argument(arguments, name):
    with pytest.raises(ValueError, match=name):
        least_rate(*arguments)
    with pytest.raises(ValueError, match="price"):
        Storage("x", 1.0, -1.0)
