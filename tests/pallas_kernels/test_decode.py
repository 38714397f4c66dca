"""Paged decode attention against a float64 oracle from the definition; mutants show that tolerances are tight."""

import functools
import inspect
import re

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ccjax.kernels.decode import decode_attention, mosaic_tpu
from ccjax.kernels.decode.blocks import MosaicDecodeBlocks
from ccjax.kernels.decode.mosaic_tpu import mosaic_tpu_decode
from tests.pallas_kernels.attention_cases import IMPLEMENTATIONS, KERNELS, TOLERANCE, worst
from tests.pallas_kernels.decode_cases import MUTANTS, Case

LATE_TOLERANCE = 2e-3
"""Largest error at position 131,000; measured 5.1e-4 with single angles, 8.7e-4 with sums of two."""

SHAPES = [
    *((kernel, dict(heads=4, kv_heads=4, head_dim=64)) for kernel in KERNELS),
    *((kernel, dict(heads=8, kv_heads=1, page_size=32)) for kernel in IMPLEMENTATIONS),
    *((kernel, dict(heads=4, kv_heads=1, head_dim=128, dtype="bfloat16")) for kernel in ("xla", *KERNELS)),
    *((kernel, dict(heads=32, kv_heads=8, head_dim=128, theta=500000.0)) for kernel in KERNELS),
]
"""Cases that implementations handle differently; `solved` is for all of them."""


@functools.cache
def solved(dtype):
    """A case and the expected result; do not modify them."""
    case = Case(head_dim=64, dtype=dtype)
    return case, case.expected()


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "shape"), SHAPES, ids=str)
def test_agrees_with_the_oracle(implementation, shape):
    case = Case(**shape)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_agrees_with_the_oracle_and_mutants_do_not(implementation, dtype):
    case, expected = solved(dtype)
    assert worst(case.run(implementation), expected) < TOLERANCE[dtype]
    errors = {name: worst(case.run(implementation, **mutant(case)), expected) for name, mutant in MUTANTS.items()}
    assert min(errors.values()) > TOLERANCE[dtype], errors


@pytest.mark.parametrize("last", [22, 21, 14])
def test_pages_in_a_row_agree_with_the_oracle_also_at_the_end_of_the_pool(last):
    """On CPUs they are read as one slice, if it ends within the pool."""
    case = Case(head_dim=64)
    expected, own = case.expected(), case.table[0][case.length[0] > 0]
    places, pages = np.arange(last - len(own) + 1, last + 1), np.arange(case.k.shape[1])
    moved = np.empty_like(pages)
    moved[own], moved[~np.isin(pages, own)] = places, pages[~np.isin(pages, places)]
    case.table = np.where(case.length > 0, moved[np.minimum(case.table, pages[-1])], case.table)
    from_pages = np.argsort(moved)
    case.k, case.v = case.k[:, from_pages], case.v[:, from_pages]
    assert worst(case.run("xla"), expected) < TOLERANCE["float32"]
    assert worst(case.run("xla", page_table=case.table - (case.table > 0)), expected) > TOLERANCE["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "head_dim", "dtype"),
    [*((kernel, 64, "bfloat16") for kernel in ("xla", *KERNELS)), (KERNELS[-1], 32, "float32")],
)
def test_wrong_page_rotation_exceeds_the_tolerance(implementation, head_dim, dtype):
    case = Case(head_dim=head_dim, dtype=dtype)
    expected, rows = case.expected(), np.asarray(case.arguments()[0][2].page_rotation)
    assert worst(case.run(implementation), expected) < TOLERANCE[dtype]
    for wrong in (np.roll(rows, 1, 1), np.roll(rows, head_dim // 2, 2), np.ones_like(rows)):
        assert worst(case.run(implementation, page_rotation=wrong), expected) > TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_positions_lose_no_more_precision_than_angle_rounding(implementation):
    """Angles of 100,000 radians are rounded to 2 ** -7, both of slots and of pages."""
    case = Case(head_dim=64, theta=500000.0)
    case.start += 131_000 * (case.length > 0)
    expected = case.expected()
    assert worst(case.run(implementation), expected) < LATE_TOLERANCE
    assert worst(case.run(implementation, page_start=case.start + 1), expected) > LATE_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_request_without_tokens_gets_zero_output(implementation):
    result = Case(head_dim=64).run(implementation)
    assert not np.asarray(result.out[3]).any() and np.isneginf(np.asarray(result.lse[3])).all()


def test_the_tpu_kernel_does_not_race_and_reads_no_uninitialised_memory(capfd):
    case = Case()
    inputs, arguments = case.arguments()
    detector = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    run = functools.partial(mosaic_tpu_decode, blocks=MosaicDecodeBlocks(slots=64), interpret=detector)
    run = jax.jit(run, static_argnames=("scale",))
    assert worst(run(*inputs, **arguments), case.expected()) < TOLERANCE["float32"]
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_page_tables_too_large_for_scalar_memory_are_split_by_requests(monkeypatch):
    calls = []
    monkeypatch.setattr(mosaic_tpu, "_MOST_ENTRIES", 36)
    monkeypatch.setattr(mosaic_tpu.pl, "pallas_call", watched(mosaic_tpu.pl.pallas_call, calls))
    case = Case()
    inputs, arguments = case.arguments()
    run = functools.partial(decode_attention, scale=arguments.pop("scale"), implementation="mosaic_tpu_interpret")
    result = jax.jit(run)(*inputs, **arguments)
    assert worst(result, case.expected()) < TOLERANCE["float32"]
    assert [call["grid_spec"].grid for call in calls] == [(3,), (1,)]


def watched(function, calls):
    def call(*arguments, **named):
        calls.append(named)
        return function(*arguments, **named)

    return call


def test_bad_arguments_are_named():
    case = Case()
    with pytest.raises(ValueError, match="kv heads"):
        case.run("xla", q=case.q[:, :3])
    inputs, arguments = case.arguments()
    with pytest.raises(ValueError, match="k_frequencies: wanted shape"):
        inspect.unwrap(decode_attention)(*inputs, **arguments | {"k_frequencies": np.ones(7, np.float32)})
    for name, shape in {"page_rotation": (4, 12, 16), "page_length": (4, 11)}.items():
        with pytest.raises(ValueError, match=rf"{name}: wanted shape \(4, 12.*\), got {re.escape(str(shape))}"):
            case.run("xla", **{name: np.zeros(shape, np.float32)})
    with pytest.raises(NotImplementedError, match="head dimension .* got 24"):
        Case(head_dim=24).run("triton_interpret")
    with pytest.raises(NotImplementedError, match="pages .* got 12"):
        Case(page_size=12).run("triton_interpret")
    with pytest.raises(NotImplementedError, match="pages .* got 12"):
        Case(page_size=12).run("mosaic_tpu_interpret")
    with pytest.raises(NotImplementedError, match="'cuda'"):
        case.run("cuda")
