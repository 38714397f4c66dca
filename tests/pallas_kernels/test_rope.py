"""ccjax.kernels.rope against complex rotation in float64, and the identities needed to move a chunk."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ccjax.kernels.rope import apply_rope, llama3_frequencies, move_keys, remove_rope, rotate, rotation_rows
from ccjax.kernels.rope.blocks import MOSAIC_TPU
from ccjax.kernels.rope.mosaic_tpu import mosaic_tpu_move
from tests import oracles
from tests.pallas_kernels.attention_cases import IMPLEMENTATIONS

RANDOM = np.random.default_rng(0)
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def case(num_tokens: int, num_heads: int, head_dim: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    x = RANDOM.standard_normal((num_tokens, num_heads, head_dim)).astype(np.float32)
    return x, np.sort(RANDOM.integers(0, last, num_tokens)).astype(np.int32)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", [None, SCALING, SCALING | {"factor": 32.0}])
def test_frequencies_match_the_oracle(theta, scaling):
    for head_dim in (2, 8, 24, 64, 128):
        config = {"head_dim": head_dim, "rope_theta": theta}
        if scaling is not None:
            config["rope_scaling"] = {"rope_type": "llama3", **scaling}
        ours = llama3_frequencies(head_dim, theta, **(scaling or {}))
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, oracles.rope_frequencies(config), rtol=1e-6)


@pytest.mark.parametrize("shape", [(7, 3, 8), (1, 1, 128), (33, 4, 24)])
def test_apply_is_complex_rotation(shape):
    x, positions = case(*shape, last=4000)
    frequencies = llama3_frequencies(shape[-1], 5e5, **SCALING)
    expected = oracles.rotate(x.astype(np.float64), positions, frequencies.astype(np.float64))
    ours = apply_rope(jnp.asarray(x), jnp.asarray(positions), frequencies)
    # float32 angles: at position p the error of an angle is up to p * 2^-24 rad, here 2.4e-4.
    np.testing.assert_allclose(ours, expected, atol=2e-3)
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), jnp.asarray(positions % 16), frequencies),
        oracles.rotate(x.astype(np.float64), positions % 16, frequencies.astype(np.float64)),
        atol=2e-5,
    )


@pytest.mark.parametrize("shape", [(7, 3, 8), (33, 4, 24)])
def test_precomputed_rotation_rows_give_the_same_result_as_apply(shape):
    x, positions = case(*shape, last=100_000)
    frequencies = llama3_frequencies(shape[-1], 5e5, **SCALING)
    rows = rotation_rows(jnp.asarray(positions), frequencies)
    wanted = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(positions), frequencies))
    np.testing.assert_allclose(rotate(jnp.asarray(x), rows), wanted, atol=1e-6)
    assert np.abs(np.asarray(rotate(jnp.asarray(x), rows[::-1])) - wanted).max() > 1e-2


def test_leading_batch_axes_are_rotated_independently():
    x = RANDOM.standard_normal((2, 3, 5, 4, 8)).astype(np.float32)
    positions = RANDOM.integers(0, 50, (2, 3, 5)).astype(np.int32)
    frequencies = llama3_frequencies(8, 1e4)
    whole = np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(positions), frequencies))
    for i in range(2):
        for j in range(3):
            part = apply_rope(jnp.asarray(x[i, j]), jnp.asarray(positions[i, j]), frequencies)
            np.testing.assert_allclose(whole[i, j], part, atol=1e-6)


@pytest.mark.parametrize("last", [16, 8192, 131072])
def test_remove_undoes_apply(last):
    x, positions = case(64, 4, 64, last)
    frequencies = llama3_frequencies(64, 5e5, **SCALING)
    turned = apply_rope(jnp.asarray(x), jnp.asarray(positions), frequencies)
    assert np.abs(np.asarray(turned) - x).max() > 0.5
    np.testing.assert_allclose(remove_rope(turned, jnp.asarray(positions), frequencies), x, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("last", [16, 2000])
def test_moved_keys_are_those_of_the_new_positions_and_move_back(last, implementation):
    x, old = case(48, 3, 64, last)
    new = RANDOM.permutation(old).astype(np.int32)
    frequencies = llama3_frequencies(64, 1e4)
    move = functools.partial(move_keys, frequencies=frequencies, implementation=implementation)
    at_old = apply_rope(jnp.asarray(x), jnp.asarray(old), frequencies)
    moved = move(at_old, jnp.asarray(old), jnp.asarray(new))
    expected = oracles.rotate(x.astype(np.float64), new, frequencies.astype(np.float64))
    np.testing.assert_allclose(moved, expected, atol=2e-6 * last + 2e-5)
    np.testing.assert_allclose(move(moved, jnp.asarray(new), jnp.asarray(old)), at_old, atol=3e-6)


MOVE_TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}
"""Largest absolute error of moved keys; measured on a CPU at most 4e-7 and 1.5e-2, the rounding of the result."""
BROKEN = {
    "inverse angle": lambda k, old, new, frequencies: (k, new, old, frequencies),
    "to where they are": lambda k, old, new, frequencies: (k, old, old, frequencies),
    "a position too far": lambda k, old, new, frequencies: (k, old, new + 1, frequencies),
    "another head": lambda k, old, new, frequencies: (jnp.roll(k, 1, 1), old, new, frequencies),
    "wrong theta": lambda k, old, new, frequencies: (k, old, new, llama3_frequencies(k.shape[2], 9e3)),
}


def paper_inverse(k, angles):
    """CacheCraft sec. 4 as printed: both halves with the sign of the first."""
    first, second = np.split(k, 2, -1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos - first * sin], -1)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(300, 2, 64), (37, 3, 128), (1, 8, 16), (150, 2, 256)], ids=str)
def test_moved_keys_agree_with_the_oracle_and_broken_movements_do_not(shape, dtype, implementation):
    """Numbers of tokens and heads that fill no block."""
    x, old = case(*shape, last=4000)
    new = RANDOM.permutation(8000)[: shape[0]].astype(np.int32)
    k, frequencies = jnp.asarray(x).astype(dtype), llama3_frequencies(shape[2], 1e4)
    angles = ((new - old).astype(np.float32)[:, None] * frequencies).astype(np.float64)
    wide = np.asarray(k.astype(jnp.float32), np.float64)
    pairs = np.split(wide, 2, -1)
    pairs = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([pairs.real, pairs.imag], -1)
    move = jax.jit(functools.partial(move_keys, implementation=implementation))

    def error(*arguments):
        return np.abs(np.asarray(move(*arguments).astype(jnp.float32)) - expected).max()

    given = k, jnp.asarray(old), jnp.asarray(new), frequencies
    assert move(*given).dtype == dtype
    assert error(*given) < MOVE_TOLERANCE[dtype]
    errors = {name: error(*broken(*given)) for name, broken in BROKEN.items()}
    errors["the paper's inverse"] = np.abs(paper_inverse(wide, angles) - expected).max()
    assert min(errors.values()) > MOVE_TOLERANCE[dtype], errors


def test_bad_keys_to_move_are_named():
    x, at = case(5, 2, 24, 40)
    x, at, frequencies = jnp.asarray(x), jnp.asarray(at), llama3_frequencies(24, 1e4)
    move = inspect.unwrap(move_keys)
    with pytest.raises(ValueError, match="k: wanted an even head dimension, got 23"):
        move(x[..., 1:], at, at, frequencies)
    with pytest.raises(ValueError, match=r"frequencies: wanted shape \(12,\), got \(11,\)"):
        move(x, at, at, frequencies[1:])
    with pytest.raises(ValueError, match=r"new_positions: wanted shape \(5,\), got \(4,\)"):
        move(x, at, at[1:], frequencies)
    with pytest.raises(NotImplementedError, match="head dimension .* got 24"):
        move(x, at, at, frequencies, implementation="triton_interpret")
    with pytest.raises(NotImplementedError, match="'cuda'"):
        move(x, at, at, frequencies, implementation="cuda")


def test_the_tpu_kernel_does_not_race(capfd):
    x, at = case(300, 2, 64, 400)
    detector = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    run = functools.partial(mosaic_tpu_move, blocks=MOSAIC_TPU["interpret"], interpret=detector)
    moved = jax.jit(run)(jnp.asarray(x), jnp.asarray(at), llama3_frequencies(64, 1e4))
    np.testing.assert_allclose(
        moved, apply_rope(jnp.asarray(x), jnp.asarray(at), llama3_frequencies(64, 1e4)), atol=3e-6
    )
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtype_is_preserved_and_angles_are_computed_in_float32(dtype):
    x, positions = case(32, 2, 64, 8000)
    frequencies = llama3_frequencies(64, 5e5)
    narrow = jnp.asarray(x).astype(dtype)
    ours = apply_rope(narrow, jnp.asarray(positions), frequencies)
    assert ours.dtype == dtype
    wide = np.asarray(apply_rope(narrow.astype(jnp.float32), jnp.asarray(positions), frequencies))
    # One relative rounding of the result; bfloat16 angles would have errors of whole turns (257 becomes 256).
    np.testing.assert_allclose(np.asarray(ours, np.float32), wide, rtol=2**-8, atol=1e-6)


LAST = 131_071
"""The last position of Llama 3.1's context."""
ROTATIONS = {
    "apply": (apply_rope, lambda old, new: (old,), lambda old, new: old),
    "remove": (remove_rope, lambda old, new: (old,), lambda old, new: -old),
    "move": (move_keys, lambda old, new: (old, new), lambda old, new: new - old),
}
"""Name -> function, its positions, and the positions by which it turns."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_positions_up_to_the_last_one_turn_by_their_float32_angle(name, dtype):
    """On any device; the angles themselves are up to 0.008 radians off there, being float32."""
    function, positions, turns = ROTATIONS[name]
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    x, old = case(256, 8, 128, LAST + 1)
    new = RANDOM.permutation(old)
    old[0], new[0] = LAST, 0
    x, frequencies = jnp.asarray(x).astype(dtype), llama3_frequencies(128, 5e5, **SCALING)
    angles = turns(old, new).astype(np.float32)[:, None] * frequencies
    pairs = np.asarray(x.astype(jnp.float32), np.float64)
    pairs = (pairs[..., :64] + 1j * pairs[..., 64:]) * np.exp(1j * angles.astype(np.float64))[:, None, :]
    expected = np.concatenate([pairs.real, pairs.imag], -1)

    def error(old, new, frequencies=frequencies):
        given = [jnp.asarray(position, jnp.int32) for position in positions(old, new)]
        return np.abs(np.asarray(jax.jit(function)(x, *given, frequencies).astype(jnp.float32)) - expected).max()

    rounded = np.asarray(jnp.asarray(old).astype(jnp.bfloat16).astype(jnp.int32))
    wrong_theta = llama3_frequencies(128, 4.9e5, **SCALING)
    assert error(old, new) < tolerance
    assert min(error(old + 1, new), error(rounded, new), error(old, new, wrong_theta)) > tolerance


@pytest.mark.peers
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_long_positions_match_transformers(scaling):
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        rope_theta=500000.0,
        rope_scaling=scaling and {"rope_type": "llama3", **scaling},
        max_position_embeddings=131072,
    )
    x, positions = case(64, 1, 64, 131072)
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.from_numpy(positions.astype(np.int64))[None])
    key = torch.from_numpy(x.transpose(1, 0, 2))[None]
    theirs = apply_rotary_pos_emb(key, key, cosines, sines)[1][0].numpy().transpose(1, 0, 2)
    ours = apply_rope(jnp.asarray(x), jnp.asarray(positions), llama3_frequencies(64, 5e5, **(scaling or {})))
    # One unit in the last place of a frequency is 0.01 rad at position 131,072.
    np.testing.assert_allclose(ours, theirs, atol=0.05)
