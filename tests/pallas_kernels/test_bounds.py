"""Block bounds against ranges by hand, and against the whole mask for random problems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.errors import ConfigError
from ccjax.kernels import dispatch
from ccjax.kernels.attention.blocks import MOSAIC_TPU, TRITON
from ccjax.kernels.attention.bounds import block_bounds
from ccjax.kernels.dispatch import chip_of, implementation
from ccjax.kernels.inputs import AttentionInputs
from ccjax.models.llama3 import LLAMA3_8B
from ccjax.runner.kernels import check_kernels

UNUSED = np.iinfo(np.int32).max


def bounds(q_pos, k_pos, q_request=None, k_request=None, *, q_block=2, k_block=4):
    given = {"q_pos": q_pos, "k_pos": k_pos, "q_request": q_request, "k_request": k_request}
    inputs = AttentionInputs(**{name: jnp.asarray(x, jnp.int32) for name, x in given.items() if x is not None})
    return [list(map(int, part)) for part in block_bounds(inputs, q_block=q_block, k_block=k_block)]


def test_bounds_of_one_prompt_match_hand_computed_values():
    """Three blocks of four slots. Queries 1 and 2 see part of the first one, 3 and 9 see all of it, -1 sees nothing."""
    first, full_first, full_last, last = bounds([1, 2, 3, 9, -1, -1], range(12))
    assert last == [1, 3, 0]
    assert first == [0, 0, 0]
    assert (full_first, full_last) == ([1, 0, 0], [1, 1, 0])


def test_unused_slots_are_after_every_query():
    assert bounds([5, 7], [0, 1, 2, 3, 4, 5, 6, UNUSED, *[UNUSED] * 4]) == [[0], [0], [1], [2]]


def test_blocks_of_other_requests_are_left_out():
    """Slots of requests 0, 0, 1, 1 by block; the queries of request 1 start at its own first block."""
    k_pos, k_request = [*range(8), *range(8)], np.repeat([0, 1], 8)
    assert bounds([7, 7, 0, 5], k_pos, [0, 0, 1, 1], k_request) == [[0, 2], [0, 4], [2, 4], [2, 4]]


@pytest.mark.parametrize("first_seed", (0, 1, 10, 11))
def test_bounds_hold_for_any_order_and_are_tight_for_ascending_positions(first_seed):
    for seed in range(first_seed, first_seed + 10, 2):
        check_bounds(seed)


def check_bounds(seed):
    random = np.random.default_rng(seed)
    q_pos = np.sort(random.integers(-1, 60, 24))
    k_pos = np.where(np.arange(64) < 60, np.arange(64), UNUSED)
    q_request, k_request = np.sort(random.integers(0, 3, 24)), np.sort(random.integers(0, 3, 64))
    is_packed, is_shuffled = seed % 2 == 1, seed >= 10
    if is_shuffled:
        q_pos, k_pos = random.permutation(q_pos), random.permutation(k_pos)
        q_request = random.permutation(q_request)
    visible = k_pos[None] <= q_pos[:, None]
    if is_packed:
        visible &= k_request[None] == q_request[:, None]
    blocks = visible.reshape(12, 2, 16, 4).transpose(0, 2, 1, 3).reshape(12, 16, 8)
    some, whole = blocks.any(-1), blocks.all(-1)
    parts = bounds(q_pos, k_pos, *((q_request, k_request) if is_packed else ()))
    for block, (first, full_first, full_last, last) in enumerate(zip(*parts, strict=True)):
        assert 0 <= first <= full_first <= full_last <= last <= 16
        assert not some[block, :first].any() and not some[block, last:].any()
        assert whole[block, full_first:full_last].all()
        if not is_packed and not is_shuffled:
            assert last - first == some[block].sum() and full_last - full_first == whole[block].sum()


CHIPS = [
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100-PCIE-40GB", "a100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h100"),
    ("TPU v5 lite", "v5e"),
    ("TPU v6 lite", "v6e"),
    *((name, "v5e") for name in ("TPU v4", "TPU v5", "TPU v5p")),
    *(
        (f"NVIDIA {name}", "l4")
        for name in ("A10", "A10G", "A40", "L4", "L40S", "RTX A6000", "RTX 6000 Ada Generation")
    ),
    *((f"NVIDIA GeForce RTX {name}", "l4") for name in ("3090", "4090", "5090")),
    *((f"NVIDIA {name}", "h100") for name in ("H20", "H800")),
    *((f"NVIDIA {name}", "b200") for name in ("B200", "GB200")),
    *((name, name) for name in ("Tesla T4", "NVIDIA GeForce RTX 2080", "TPU v3", "TPU7x")),
]


def test_chip_without_block_sizes_gets_xla_unless_a_kernel_is_named(monkeypatch, caplog):
    dispatch._warn.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    choices = {"xla": print}, {"triton": (max, {"h100": None})}
    assert implementation(None, *choices) is implementation(None, *choices) is print
    assert caplog.text.count("triton has no block sizes for cpu; XLA's form is used") == 1
    with pytest.raises(NotImplementedError, match="wanted a chip of"):
        implementation("triton", *choices)


@pytest.mark.parametrize(
    ("platform", "kind"), [("gpu", "Tesla T4"), ("gpu", "AMD Instinct MI300X"), ("tpu", "TPU v3"), ("tpu", "TPU7x")]
)
def test_a_model_starts_on_chips_without_block_sizes_with_one_warning(monkeypatch, caplog, platform, kind):
    dispatch._warn.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(dispatch, "chip_of", lambda _: chip_of(kind))
    check_kernels(None, LLAMA3_8B, "bfloat16")
    assert caplog.text.count("XLA's form is used") == caplog.text.count(f"no block sizes for {kind}") == 1
    with pytest.raises(ConfigError, match=f"attention: .*got '{kind}'"):
        check_kernels({"gpu": "triton", "tpu": "mosaic_tpu"}[platform], LLAMA3_8B, "bfloat16")


def test_device_kinds_map_to_chips():
    for kind, chip in CHIPS:
        assert chip_of(kind) == chip
        assert (chip in TRITON or chip in MOSAIC_TPU) == (chip != kind)
