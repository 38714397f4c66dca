"""8-bit codes: decoded values are within the stated bound, in every dtype, or there is no code."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ccjax.store.quantize import SCALE_ROWS, dequantize, quantize

KINDS = ["int8", "fp8"]
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
TINY = float(np.finfo(np.float32).tiny)

SHAPES = st.tuples(st.integers(1, 2), st.just(2), st.integers(1, 7), st.integers(1, 3), st.integers(1, 4))
LIMIT = 2.0**126
VALUES = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-LIMIT, LIMIT, width=32),  # huge
    st.floats(-(2.0**-120), 2.0**-120, width=32),  # around the least scale, and denormal
    st.sampled_from([0.0, -0.0, 1.0, 127.0, 448.0, LIMIT, 2.0**-149]),
)


def decoded(stored: np.ndarray, kind: str, like: np.ndarray) -> np.ndarray:
    out = np.full(like.shape, 7, like.dtype)
    for layer, target in zip(stored, out, strict=True):
        dequantize(layer, kind, target)
    return out


def bound(kv: np.ndarray, kind: str) -> np.ndarray:
    """The stated bound in float64, with the rounding of float32 (2^-24 of 127, and of each product) on top."""
    x = np.abs(kv.astype(np.float64))
    largest = x.max(axis=2, keepdims=True)  # over tokens: a channel has a scale of its own
    if kind == "int8":
        limit = np.broadcast_to(np.maximum(largest / 127, TINY) / 2, x.shape)
    else:
        limit = np.maximum(x / 16, np.maximum(largest / 448, TINY) / 1024)
    limit = limit * (1 + 2.0**-14)
    if kv.dtype != np.float32:
        limit = limit + (x + limit) / 256 + 2.0**-133  # bfloat16's own rounding, and its least denormal
    return limit


def error(kv: np.ndarray, back: np.ndarray) -> np.ndarray:
    return np.abs(kv.astype(np.float64) - back.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@given(kv=SHAPES.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=VALUES)))
def test_decoded_values_are_within_the_error_bound_of_their_channel(kind, dtype, kv):
    kv = kv.astype(dtype)
    stored = quantize(kv, kind)
    assert stored is not None and stored.dtype == np.uint8
    assert stored.shape == (*kv.shape[:2], kv.shape[2] + SCALE_ROWS, *kv.shape[3:])
    back = decoded(stored, kind, kv)
    assert (error(kv, back) <= bound(kv, kind)).all()
    assert (back[kv == 0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_error_bound_is_tight(kind):
    kv = np.random.default_rng(0).standard_normal((2, 2, 64, 2, 8), dtype=np.float32)
    stored = quantize(kv, kind)
    assert stored is not None
    limit = bound(kv, kind)
    assert (error(kv, decoded(stored, kind, kv)) / limit).max() > 0.93  # fp8: 16/17 at most
    codes = stored[:, :, :64].view(np.int8)
    inner = np.abs(codes) < 100  # where one more is no overflow
    for step in (1, -1):
        mutant = stored.copy()
        mutant[:, :, :64] = np.where(inner, codes + step, codes).astype(np.int8).view(np.uint8)
        assert (error(kv, decoded(mutant, kind, kv)) > limit).mean() > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_channel_does_not_affect_its_neighbours(kind):
    """Keys without RoPE have such channels; a scale for the whole head would lose the others."""
    kv = np.random.default_rng(1).standard_normal((1, 2, 32, 2, 8), dtype=np.float32)
    alone = decoded(quantize(kv, kind), kind, kv)
    kv[..., 3] *= 1000
    beside = decoded(quantize(kv, kind), kind, kv)
    np.testing.assert_array_equal(np.delete(beside, 3, axis=-1), np.delete(alone, 3, axis=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_layout_matches_hand_computed_bytes(kind):
    """One layer, token, head: K = [1, -2, 0, 8], V = [448, 0.5, -0.25, 127]; the scales are little-endian float32."""
    kv = np.array([[[[[1.0, -2.0, 0.0, 8.0]]], [[[448.0, 0.5, -0.25, 127.0]]]]], np.float32)
    stored = quantize(kv, kind)
    assert stored is not None
    largest = {"int8": 127, "fp8": 448}[kind]
    code = {"int8": [127, 129, 0, 127], "fp8": [0x7E, 0xFE, 0x00, 0x7E]}[kind]  # 129 is -127; 0x7E is 448
    assert stored[0, 0, 0, 0].tolist() == code
    for which in (0, 1):
        scales = np.frombuffer(stored[0, which, 1:, 0].T.tobytes(), "<f4")
        wanted = np.maximum(np.abs(kv[0, which, 0, 0]) / np.float32(largest), np.float32(TINY))
        np.testing.assert_array_equal(scales, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_values_that_cannot_be_quantised_give_none(kind, value):
    kv = np.ones((2, 2, 3, 1, 2), np.float32)
    kv[1, 1, 2, 0, 1] = value
    assert quantize(kv, kind) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7e-3, 1e30, 2.0**-149])
def test_constant_values_decode_almost_exactly(kind, value):
    kv = np.full((1, 2, 4, 2, 2), value, np.float32)
    back = decoded(quantize(kv, kind), kind, kv)
    np.testing.assert_allclose(back, kv, rtol=2.0**-23, atol=TINY / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_subset_of_heads_decodes_like_all_heads(kind):
    kv = np.random.default_rng(2).standard_normal((1, 2, 5, 4, 8), dtype=np.float32)
    stored = quantize(kv, kind)
    assert stored is not None
    whole = decoded(stored, kind, kv)
    some = np.empty((2, 5, 2, 8), np.float32)
    dequantize(np.ascontiguousarray(stored[0, :, :, 2:]), kind, some)
    np.testing.assert_array_equal(some, whole[0, :, :, 2:])
