"""Paged decode attention against a float64 oracle written from the definition; mutants show each tolerance bites."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

from pallas_kernels.decode.blocks import MosaicDecodeBlocks
from pallas_kernels.decode.mosaic_tpu import mosaic_tpu_decode
from pallas_kernels.rope import rotation_table
from tests.pallas_kernels.cases import OPTIONS, worst
from tests.pallas_kernels.decode_cases import MUTANTS, TOLERANCE, Case, jitted

IMPLEMENTATIONS = ["reference", "xla", "triton_interpret", "mosaic_tpu_interpret"]

SHAPES = [
    dict(heads=4, kv_heads=4, head_dim=64),
    dict(heads=4, kv_heads=2, head_dim=128),
    dict(heads=4, kv_heads=1),
    dict(heads=8, kv_heads=1, head_dim=64),
    dict(page_size=32),
    dict(heads=4, kv_heads=1, head_dim=128, dtype="bfloat16"),
    dict(theta=10000.0),
    dict(theta=10000.0, head_dim=64, dtype="bfloat16"),
    dict(theta=10000.0, head_dim=128),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_oracle(implementation, shape):
    case = Case(**shape)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_broken_variants_exceed_the_tolerance(implementation, mutant, dtype):
    case = Case(head_dim=64, theta=10000.0, dtype=dtype)
    assert worst(case.run(implementation, **mutant(case)), case.expected()) > TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_angles_from_a_table_are_those_that_are_computed(head_dim, dtype):
    case = Case(head_dim=head_dim, theta=10000.0, dtype=dtype)
    table = rotation_table(jnp.arange(case.start.max() + case.page_size), case.k_frequencies)
    assert worst(case.run("xla", k_rotations=table), case.expected()) < TOLERANCE[dtype]
    late = tuple(jnp.roll(part, 1, 0) for part in table)
    assert worst(case.run("xla", k_rotations=late), case.expected()) > TOLERANCE[dtype]
    swapped = table[::-1]
    assert worst(case.run("xla", k_rotations=swapped), case.expected()) > TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_request_without_any_token_gets_zeros(implementation):
    result = Case().run(implementation)
    assert not np.asarray(result.out[3]).any() and np.isneginf(np.asarray(result.lse[3])).all()


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret", "mosaic_tpu_interpret"])
def test_agrees_with_the_paged_attention_of_jax_where_that_one_can_be_used(implementation):
    """One length per request, every page but the last one full; written by others."""
    random = np.random.default_rng(3)
    q, k, v = (random.normal(size=shape) for shape in ((2, 8, 64), (2, 40, 16, 64), (2, 40, 16, 64)))
    table = random.permutation(32).reshape(2, 16).astype(np.int32)
    lengths = np.array([250, 3], np.int32)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    wanted = paged_attention(q * 64**-0.5, k, v, jnp.asarray(table), jnp.asarray(lengths), k_splits=4, interpret=True)
    page_length = np.clip(lengths[:, None] - np.arange(16) * 16, 0, 16).astype(np.int32)
    tables = dict(page_table=jnp.asarray(table), page_length=jnp.asarray(page_length))
    got = jitted(q, k, v, **tables, scale=64**-0.5, implementation=implementation)
    assert np.abs(np.asarray(got.out) - np.asarray(wanted)).max() < TOLERANCE["float32"]
    longer = jitted(q, k, v, **(tables | dict(page_length=jnp.full((2, 16), 16))), scale=64**-0.5, implementation="xla")
    assert np.abs(np.asarray(longer.out) - np.asarray(wanted)).max() > TOLERANCE["float32"]


def test_the_tpu_kernel_does_not_race_and_reads_no_uninitialised_memory(capfd):
    case = Case(theta=10000.0)
    inputs, arguments = case.arguments()
    detector = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    run = functools.partial(mosaic_tpu_decode, blocks=MosaicDecodeBlocks(slots=64), interpret=detector)
    run = jax.jit(run, static_argnames=("scale",), compiler_options=OPTIONS)
    assert worst(run(*inputs, **arguments), case.expected()) < TOLERANCE["float32"]
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_bad_arguments_are_named():
    case = Case()
    with pytest.raises(ValueError, match="kv heads"):
        case.run("xla", q=case.q[:, :3])
    with pytest.raises(ValueError, match="page_start and k_frequencies"):
        case.run("xla", page_start=case.start)
    with pytest.raises(ValueError, match="k_frequencies: wanted shape"):
        case.run("xla", page_start=case.start, k_frequencies=np.ones(7, np.float32))
    turning = Case(theta=10000.0)
    table = rotation_table(jnp.arange(256), turning.k_frequencies)
    with pytest.raises(ValueError, match="k_rotations: wanted None but for"):
        case.run("xla", k_rotations=table)
    with pytest.raises(ValueError, match="k_rotations: wanted None but for"):
        turning.run("triton_interpret", k_rotations=table)
    with pytest.raises(NotImplementedError, match="head dimension .* got 24"):
        Case(head_dim=24).run("triton_interpret")
    with pytest.raises(NotImplementedError, match="pages .* got 12"):
        Case(page_size=12).run("triton_interpret")
    with pytest.raises(NotImplementedError, match="pages .* got 12"):
        Case(page_size=12).run("mosaic_tpu_interpret")
    with pytest.raises(NotImplementedError, match="'cuda'"):
        case.run("cuda")
