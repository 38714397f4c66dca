"""Attention implementations against a float64 oracle from the definition; mutants show that tolerances are tight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.kernels import dispatch
from ccjax.kernels.attention import attention, xla
from ccjax.kernels.attention.xla import _block
from ccjax.kernels.rope import rotation_rows
from tests.pallas_kernels.attention_cases import (
    IMPLEMENTATIONS,
    KERNELS,
    PLATFORM,
    TOLERANCE,
    UNUSED,
    Case,
    ServingCase,
    frequencies,
    packed,
    worst,
)

LONG = dict(heads=8, kv_heads=1, head_dim=64, queries=130, slots=300, used=290)
SHAPES = [
    *((kernel, dict(heads=4, kv_heads=1, queries=1)) for kernel in ("xla", *KERNELS)),
    *((kernel, dict(heads=14, kv_heads=2, queries=40)) for kernel in KERNELS),
    *((kernel, dict(heads=2, kv_heads=2, queries=200, slots=200, used=200)) for kernel in ("xla", *KERNELS)),
    *((kernel, dict(heads=4, kv_heads=1, head_dim=128, queries=16, dtype="bfloat16")) for kernel in IMPLEMENTATIONS),
    *((kernel, dict(head_dim=24)) for kernel in ("xla", *KERNELS) if "triton" not in kernel),  # any even dimension
    *((KERNELS[0], dict(head_dim=256, queries=70, theta=1e4, dtype=dtype)) for dtype in TOLERANCE),
]
"""Cases that implementations handle differently; `LONG` and the packs below are for all of them."""


@functools.cache
def solved_pack(head_dim, dtype):
    """Packed requests with keys before RoPE, and the expected result; do not modify them."""
    case = packed(head_dim=head_dim, theta=10000.0, dtype=dtype)
    return case, case.expected()


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "shape"), SHAPES, ids=str)
def test_agrees_with_the_oracle(implementation, shape):
    case = Case(**shape)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "head_dim"),
    # A TPU's registers are 128 wide: heads that fill them are rotated differently from narrower ones.
    [*((kernel, 64) for kernel in IMPLEMENTATIONS), (KERNELS[-1], 128)],
)
def test_wrong_key_rotation_exceeds_the_tolerance(implementation, head_dim):
    case, expected = solved_pack(head_dim, "bfloat16")
    tolerance = TOLERANCE["bfloat16"]
    assert worst(case.run(implementation), expected) < tolerance
    rows = np.asarray(rotation_rows(jnp.asarray(case.k_pos), case.k_frequencies))
    unrotated = np.asarray(rotation_rows(jnp.zeros_like(case.k_pos), case.k_frequencies))
    for wrong in (np.roll(rows, 1, 0), np.roll(rows, head_dim // 2, 1), np.ones_like(rows), unrotated):
        assert worst(case.run(implementation, k_rotation=wrong), expected) > tolerance


@pytest.mark.parametrize(("queries", "heads", "block"), [(160, 4, 80), (384, 4, 128), (2050, 2, 232)])
def test_cpu_divides_queries_evenly_into_blocks(monkeypatch, queries, heads, block):
    monkeypatch.setattr(xla, "_MOST_SCORES", 2 * 256 * 256)  # makes 4 heads count as many
    slots = 1100 if queries < 1000 else 2300
    case = Case(queries=queries, slots=slots, used=slots - 100, heads=heads, head_dim=32 if queries < 1000 else 8)
    assert _block(queries, slots, heads)[0] == block
    expected = case.expected()
    assert worst(case.run("xla"), expected) < TOLERANCE["float32"]
    for changed in (dict(q_pos=case.q_pos - 1), dict(v=np.roll(case.v, 1, axis=1))):
        assert worst(case.run("xla", **changed), expected) > TOLERANCE["float32"]


def test_cpu_block_sizes_match_the_docs():
    sizes = [(160, 16), (320, 16), (383, 16), (384, 16), (2047, 16), (2048, 16), (2048, 32)]
    blocks = [_block(queries, 4096, heads) for queries, heads in sizes]
    assert blocks == [(80, 512), (80, 512), (80, 512), (128, 256), (128, 256), (256, 256), (128, 256)]
    assert _block(3, 100, 16) == (8, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_queries_and_slots_may_be_in_any_order(implementation):
    """In a packed batch positions restart with every request; here every block has all requests, unordered."""
    case = packed(head_dim=64, theta=10000.0)
    for names in (("q", "q_pos", "q_request"), ("k", "v", "k_pos", "k_request", "segment")):
        order = np.random.default_rng(1).permutation(len(getattr(case, names[0])))
        for name in names:
            setattr(case, name, getattr(case, name)[order])
    assert worst(case.run(implementation), case.expected()) < TOLERANCE["float32"]


MUTANTS = {
    "mask off by one": lambda case: dict(q_pos=case.q_pos - 1),
    "a chunk dropped": lambda case: dict(k_pos=np.where(case.segment == 2, UNUSED, case.k_pos).astype(np.int32)),
    "wrong scale": lambda case: dict(q=case.q * 1.05),
    "wrong kv head": lambda case: dict(k=np.roll(case.k, 1, axis=1)),
    "wrong segment": lambda case: dict(k_segment=case.segment + 1),
    "wrong theta": lambda case: dict(k_frequencies=frequencies(case.q.shape[2], 500.0)),
    "rotated backwards": lambda case: dict(k_frequencies=-case.k_frequencies),
    "another request": lambda case: dict(k_request=case.k_request[::-1].copy()),
}
FLOAT32_MUTANTS = {"operands cut to TF32": lambda case: dict(q=tf32(case.q), k=tf32(case.k))}


def tf32(x):
    """float32 cut to the 10 bits of TF32's fraction."""
    return np.bitwise_and(x.view(np.uint32), np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_requests_agree_with_the_oracle_and_mutants_do_not(implementation, dtype):
    """With keys before RoPE."""
    case, expected = solved_pack(64, dtype)
    assert worst(case.run(implementation), expected) < TOLERANCE[dtype]
    mutants = MUTANTS | (FLOAT32_MUTANTS if dtype == "float32" else {})
    errors = {name: worst(case.run(implementation, **mutant(case)), expected) for name, mutant in mutants.items()}
    assert min(errors.values()) > TOLERANCE[dtype], errors


SERVING_MUTANTS = {name: mutant for name, mutant in MUTANTS.items() if name != "another request"}
SERVING_MUTANTS["a key block dropped"] = lambda case: dict(
    k_pos=np.where(np.arange(len(case.k_pos)) // 64 == len(case.k_pos) // 128, UNUSED, case.k_pos).astype(np.int32)
)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_sampled_rows_of_serving_size_agree_with_the_oracle_and_mutants_do_not(implementation):
    """Llama-3-8B's heads and 15 % of 16k tokens on an accelerator, less where kernels are interpreted."""
    sizes = (96, 512, (4, 2)) if PLATFORM == "cpu" else (2560, 16384, (32, 8))
    case = ServingCase(*sizes)
    expected = case.expected()
    assert case.relative_error(case.run(implementation), expected) < ServingCase.tolerance
    for name, mutant in SERVING_MUTANTS.items():
        error = case.relative_error(case.run(implementation, **mutant(case)), expected)
        assert error > ServingCase.tolerance, name


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_may_be_in_any_order_and_fully_masked_rows_are_zero(implementation):
    case = Case(**LONG).shuffled()
    case.q_pos = np.concatenate([[-1, -1], case.q_pos[2:]]).astype(np.int32)
    result = case.run(implementation)
    assert worst(result, case.expected()) < TOLERANCE["float32"]
    assert not np.asarray(result.out[:2]).any() and not np.asarray(result.mass[:2]).any()
    assert np.isneginf(np.asarray(result.lse[:2])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_many_segments_agree_with_the_oracle(implementation):
    """More segments than one program of the Triton kernel keeps in registers."""
    case = Case(queries=20)
    case.num_segments = 40
    case.segment = (np.arange(150) // 3 - 2).astype(np.int32)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE["float32"]
    wrong = case.run(implementation, k_segment=np.where(case.segment == 37, 5, case.segment).astype(np.int32))
    assert worst(wrong, case.expected()) > TOLERANCE["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mass_sums_to_one_and_omitting_it_does_not_change_the_output(implementation):
    case = Case(**LONG)
    case.segment = np.maximum(case.segment, 0)
    result = case.run(implementation)
    np.testing.assert_allclose(np.asarray(result.mass).sum(-1), 1.0, atol=1e-5)
    bare = case.run(implementation, k_segment=None, num_segments=0)
    assert bare.mass is None
    for name in ("out", "lse"):
        np.testing.assert_allclose(getattr(bare, name), getattr(result, name), atol=TOLERANCE["float32"] / 3)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_blocks_after_the_last_query_are_never_read(implementation):
    """NaN in used slots of blocks after the last query: reading them would give NaN."""
    case = Case(queries=40, slots=600, used=600)
    case.q_pos = np.sort(np.random.default_rng(2).choice(100, 40, replace=False)).astype(np.int32)
    case.k[512:], case.v[512:] = np.nan, np.nan
    assert worst(case.run(implementation), case.expected()) < TOLERANCE["float32"]
    case.q_pos[-1] = 590
    assert worst(case.run(implementation), case.expected()) == np.inf


def test_cpu_defaults_to_the_xla_implementation():
    case = Case(**LONG)
    for got, wanted in zip(case.run(None), case.run("xla"), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_unsupported_implementation_raises_instead_of_falling_back(monkeypatch):
    inputs, arguments = Case(head_dim=64).arguments()
    with pytest.raises(NotImplementedError, match="'cuda'"):
        attention(*inputs, **arguments, implementation="cuda")
    with pytest.raises(NotImplementedError, match="'triton:h100_interpret'"):
        attention(*inputs, **arguments, implementation="triton:h100_interpret")
    for name in ("triton", "mosaic_tpu"):
        with pytest.raises(NotImplementedError, match="wanted a chip of .* got 'cpu'"):
            attention(*inputs, **arguments, implementation=name)
    with pytest.raises(ValueError, match="(?i)only interpret mode is supported on CPU"):
        attention(*inputs, **arguments, implementation="triton:h100")
    narrow, arguments = Case(head_dim=24).arguments()
    with pytest.raises(NotImplementedError, match="head dimension .* got 24"):
        attention(*narrow, **arguments, implementation="triton_interpret")
    monkeypatch.setattr(jax, "default_backend", lambda: "abacus")
    with pytest.raises(NotImplementedError, match="platform 'abacus'"):
        attention(*narrow, **arguments)


def test_default_implementation_is_the_kernel_of_the_platform(monkeypatch):
    """The default of a GPU or TPU is its kernel, with the block sizes of the chip; here it fails without the chip."""
    inputs, arguments = Case(head_dim=64).arguments()
    for platform, chip in (("gpu", "h100"), ("gpu", "l4"), ("tpu", "v5e")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        monkeypatch.setattr(dispatch, "chip_of", lambda kind, chip=chip: chip)
        with pytest.raises(ValueError, match="(?i)only interpret mode is supported on CPU"):
            attention(*inputs, **arguments)


def test_bad_arguments_are_named():
    case = Case()
    with pytest.raises(ValueError, match="num_segments"):
        case.run("xla", num_segments=0)
    with pytest.raises(ValueError, match="kv heads"):
        case.run("xla", k=case.k[:, [0, 0, 0]], v=case.v[:, [0, 0, 0]])
    with pytest.raises(ValueError, match="k_request"):
        case.run("xla", q_request=case.q_pos)
    with pytest.raises(ValueError, match=r"k_rotation: wanted shape \(150, 16\), got \(149, 16\)"):
        case.run("xla", k_rotation=np.ones((149, 16), np.float32))
    for name, wanted in {"q_pos": 37, "k_pos": 150, "k_segment": 150}.items():
        with pytest.raises(ValueError, match=rf"{name}: wanted shape \({wanted},\), got \(9,\)"):
            case.run("xla", **{name: np.zeros(9, np.int32)})


@pytest.mark.parametrize(("head_dim", "rotates"), [(16, False), (32, True), (128, True), (256, False)])
def test_triton_rotates_keys_in_the_kernel_only_for_supported_head_dims(head_dim, rotates):
    """With halves of 8, the H100's tensor cores count each product twice, which interpret mode does not show."""
    case = Case(head_dim=head_dim, dtype="bfloat16", theta=10000.0)
    inputs, arguments = case.arguments()
    call = functools.partial(attention, implementation="triton:h100", **arguments)
    (kernel,) = [eqn for eqn in jax.make_jaxpr(call)(*inputs).jaxpr.eqns if "pallas_call" in eqn.primitive.name]
    tables = [x for x in kernel.invars if x.aval.dtype == jnp.float32 and x.aval.shape[1:] == (head_dim // 2,)]
    assert len(tables) == 2 * rotates
