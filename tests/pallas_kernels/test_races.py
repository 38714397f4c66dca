"""The TPU kernel in JAX's TPU interpreter, which simulates memories and transfers and detects races."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ccjax.kernels.attention.blocks import MosaicBlocks
from ccjax.kernels.attention.mosaic_tpu import mosaic_tpu_attention
from tests.pallas_kernels.attention_cases import TOLERANCE, Case, packed, worst

DETECTOR = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
RACE = "RACE DETECTED"


@pytest.mark.parametrize(
    "case",
    [
        Case(queries=20, slots=300, used=290),
        packed(theta=10000.0, heads=2, kv_heads=1),
    ],
    ids=["one request", "packed, rotated"],
)
def test_the_kernel_does_not_race_and_reads_no_uninitialised_memory(case, capfd):
    inputs, arguments = case.arguments()
    run = functools.partial(mosaic_tpu_attention, blocks=MosaicBlocks(rows=32, keys=128), interpret=DETECTOR)
    run = jax.jit(run, static_argnames=("scale",))
    assert worst(run(*inputs, **arguments), case.expected()) < TOLERANCE["float32"]
    assert RACE not in capfd.readouterr().out


def test_a_planted_race_is_found(capfd):
    """All steps of a parallel axis write one output block."""

    def copy(x, o):
        o[...] = x[...]

    racing = pl.pallas_call(
        copy,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=DETECTOR,
    )
    jax.block_until_ready(racing(jnp.ones((32, 128))))
    assert RACE in capfd.readouterr().out
