"""KL divergence between rows of logits, compared with scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.engine.divergence import kl_divergence


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=20))
def test_kl_divergence_equals_scipy(pairs):
    from scipy import special

    own, other = (np.asarray(row, np.float32) for row in zip(*pairs, strict=True))
    wanted = special.rel_entr(special.softmax(own.astype(float)), special.softmax(other.astype(float))).sum()
    assert kl_divergence(own, other) == pytest.approx(wanted, abs=1e-9)
    assert kl_divergence(own, own + 3.0) == pytest.approx(0.0, abs=1e-5), "logits count up to a constant"


def test_kl_divergence_is_from_its_first_argument_and_in_nats():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p || q) = ln(2)/2 + ln(2/3)/2, KL(q || p) differs
    p, q = np.log(np.asarray([0.5, 0.5])), np.log(np.asarray([0.25, 0.75]))
    assert kl_divergence(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert abs(kl_divergence(q, p) - kl_divergence(p, q)) > 0.01
    with pytest.raises(ValueError, match=r"one length, got \(2,\) and \(3,\)"):
        kl_divergence(p, np.zeros(3))
