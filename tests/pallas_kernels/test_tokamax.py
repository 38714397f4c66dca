"""The tokamax adapter against the float64 oracle; mutants show that tolerances are tight. Skipped without tokamax.

tokamax's XLA form runs natively here, its Triton kernel in interpret mode. Its Mosaic kernel needs a Hopper GPU.
"""

import functools
import importlib.util
import sys

import jax
import numpy as np
import pytest

from ccjax.kernels.attention import attention, tokamax
from tests.pallas_kernels.attention_cases import TOLERANCE, Case, packed, worst
from tests.pallas_kernels.test_attention import LONG, MUTANTS

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs tokamax: pip install -e .[tokamax]"
)


pytestmark = pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot was moved:DeprecationWarning")


@pytest.fixture(params=["tokamax_xla", "tokamax_triton"])
def implementation(request, monkeypatch):
    """A name that runs on a CPU: the Triton kernel is interpreted, with tokamax's check for a GPU bypassed."""
    if request.param == "tokamax_triton":
        kernel = pytest.importorskip("tokamax._src.ops.attention.pallas_triton")
        original = kernel._fwd_kernel

        def with_indices_taken_first(*args, **kwargs):
            """The interpreter provides program indices only outside of loops; tokamax also reads them inside."""
            indices = kernel.pl.program_id(0), kernel.pl.program_id(1)
            monkeypatch.setattr(kernel.block, "_pids", lambda: indices)
            return original(*args, **kwargs)

        monkeypatch.setattr(kernel, "_fwd_kernel", with_indices_taken_first)
        monkeypatch.setattr(kernel.PallasTritonFlashAttention, "supported_on", lambda *_: True)
        monkeypatch.setattr(kernel.pl, "pallas_call", functools.partial(kernel.pl.pallas_call, interpret=True))
    return request.param


@needs_tokamax
@pytest.mark.parametrize("shape", [LONG, dict(queries=1), dict(head_dim=64, queries=20, dtype="bfloat16")], ids=str)
def test_agrees_with_the_oracle(implementation, shape):
    case = Case(**shape)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[case.dtype]


@needs_tokamax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_requests_with_keys_before_rope_agree_with_the_oracle(implementation, dtype):
    """Also in another order, in which ranges of slots mix requests and positions do not ascend."""
    case = packed(head_dim=64, theta=10000.0, dtype=dtype)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[dtype]
    order = np.random.default_rng(1).permutation(len(case.k_pos))
    for name in ("k", "v", "k_pos", "segment", "k_request"):
        setattr(case, name, getattr(case, name)[order])
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[dtype]


@needs_tokamax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mutants_exceed_the_tolerance(dtype):
    case = packed(head_dim=64, theta=10000.0, dtype=dtype)
    expected = case.expected()
    errors = {name: worst(case.run("tokamax_xla", **mutant(case)), expected) for name, mutant in MUTANTS.items()}
    assert min(errors.values()) > TOLERANCE[dtype], errors


@needs_tokamax
def test_slots_may_be_in_any_order_and_fully_masked_rows_are_zero(implementation):
    case = Case(**LONG).shuffled()
    case.q_pos = np.concatenate([[-1, -1], case.q_pos[2:]]).astype(np.int32)
    case.scale = 0.2  # all other cases have tokamax's default scale
    result = case.run(implementation)
    assert worst(result, case.expected()) < TOLERANCE["float32"]
    assert not np.asarray(result.out[:2]).any() and not np.asarray(result.mass[:2]).any()
    assert np.isneginf(np.asarray(result.lse[:2])).all()


@needs_tokamax
def test_request_without_slots_attends_to_nothing(implementation):
    case = packed(head_dim=64)
    case.q_request = np.where(case.q_request == 0, 5, case.q_request).astype(np.int32)
    result = case.run(implementation)
    assert worst(result, case.expected()) < TOLERANCE["float32"]
    assert np.isneginf(np.asarray(result.lse[20:40])).all() and np.isfinite(np.asarray(result.lse[40:])).all()


@needs_tokamax
def test_many_segments_agree_with_the_oracle(implementation):
    """More columns of values and segments than fit one launch of a GPU kernel."""
    case = Case(queries=20)
    case.num_segments = 250
    case.segment = (np.arange(150) * 5 // 3 - 2).astype(np.int32)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE["float32"]
    wrong = case.run(implementation, k_segment=np.where(case.segment == 3, 5, case.segment).astype(np.int32))
    assert worst(wrong, case.expected()) > TOLERANCE["float32"]


@needs_tokamax
def test_omitting_mass_does_not_change_the_output(implementation):
    case = Case(**LONG)
    result, bare = case.run(implementation), case.run(implementation, k_segment=None, num_segments=0)
    assert bare.mass is None
    np.testing.assert_allclose(bare.out, result.out, atol=1e-6)
    np.testing.assert_allclose(bare.lse, result.lse, atol=1e-6)


@needs_tokamax
def test_best_kernel_is_chosen_by_platform(monkeypatch):
    case = Case()
    for got, wanted in zip(case.run("tokamax"), case.run("tokamax_xla"), strict=True):
        np.testing.assert_array_equal(got, wanted)
    inputs, arguments = case.arguments()
    for name in ("triton", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match=f"{name}.* platform 'cpu'"):
            attention(*inputs, **arguments, implementation=f"tokamax_{name}")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="platform 'tpu'"):
        attention(*inputs, **arguments, implementation="tokamax")


@pytest.mark.parametrize(("capability", "kernel"), [("8.0", "triton"), ("9.0", "mosaic_gpu"), (None, "triton")])
def test_hopper_takes_the_mosaic_kernel(monkeypatch, capability, kernel):
    class Device:
        compute_capability = capability

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert tokamax._best_kernel() == kernel


@pytest.mark.parametrize("name", ["tokamax", *(f"tokamax_{kernel}" for kernel in tokamax.OPERATIONS)])
def test_missing_tokamax_error_says_how_to_install_it(monkeypatch, name):
    for module in [module for module in sys.modules if module.partition(".")[0] == "tokamax"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tokamax", None)  # makes its import fail
    inputs, arguments = Case().arguments()
    with pytest.raises(NotImplementedError, match=r"pip install -e \.\[tokamax\]"):
        attention(*inputs, **arguments, implementation=name)
