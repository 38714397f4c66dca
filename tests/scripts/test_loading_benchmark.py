"""What the loading benchmark calls possible: a pipeline simulated layer by layer, and eq. 16 by hand."""

from __future__ import annotations

import pytest

from scripts.benchmarks.loading import least_exposed_s


def test_least_exposed_time_matches_equation_16():
    # L = 5, Tprefill : Tload = 1 : 2 gives Lp = 3: of 2 s the first 3/5 must be there before.
    assert least_exposed_s("layer", 5, 1.0, 2.0, 0.0) == pytest.approx(1.2)
    assert least_exposed_s("layer", 16, 1.0, 0.5, 0.0) == pytest.approx(0.5 / 16)  # only the first layer is waited for
    assert least_exposed_s("sync", 16, 1.0, 2.0, 0.0) == 2.0


@pytest.mark.parametrize("queue_s", [0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("load_s", [0.5, 1.0, 2.0, 4.0])
def test_least_exposed_time_matches_a_simulated_pipeline(load_s, queue_s):
    num_layers, clock = 16, 0.0
    for layer in range(num_layers):
        clock = max(clock, (layer + 1) * load_s / num_layers - queue_s) + 1.0 / num_layers
    assert least_exposed_s("layer", num_layers, 1.0, load_s, queue_s) == pytest.approx(clock - 1.0)
    assert least_exposed_s("async", num_layers, 1.0, load_s, queue_s) == max(0.0, load_s - queue_s)
