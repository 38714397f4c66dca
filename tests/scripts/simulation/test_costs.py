"""Costs against numbers worked by hand from the data sheets."""

import dataclasses

import pytest

from ccjax.models.llama3.config import LLAMA3_8B, LLAMA3_70B, MIXTRAL_8X7B, LlamaConfig
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.runner.memory import num_parameters
from scripts.simulation.costs import GridCosts, RooflineCosts, SimulatedPiece, overlapped_s
from scripts.simulation.hardware import HARDWARE, Hardware

# One layer of width 8, one head of 8, MLP 16, vocabulary 32: 4 x 64 attention weights, 384 of the MLP, 256 of the head.
TINY = LlamaConfig(32, 8, 1, 1, 1, 8, 16)
PLAIN = Hardware("plain", 1e6, 10**9, 1e6, 1e5, disk_bytes_per_s=1e4, compute_ratio=1.0, memory_ratio=1.0, layer_s=0.0)


@pytest.mark.parametrize(
    ("piece", "flops"),
    [
        # 10 tokens x 2 x 640, 55 pairs x 4 x 8, the head once 2 x 256: 12,800 + 1,760 + 512.
        (SimulatedPiece(10, 10), 15_072),
        # Cached tokens cost attention only: 4 tokens at positions 6 to 9 see 7 + 8 + 9 + 10 = 34 pairs.
        (SimulatedPiece(4, 10), 4 * 1280 + 34 * 32 + 512),
        (SimulatedPiece(10, 10, is_last=False), 14_560),  # without the head
    ],
)
def test_prefill_time_follows_its_flops(piece, flops):
    assert RooflineCosts(TINY, PLAIN).pack_s([piece]) == pytest.approx(flops * 1e-6)


def test_output_head_costs_only_for_the_last_piece_of_a_prompt():
    # With slow memory, without its 256 weights: 640 and 10 tokens of 16 values.
    slow = RooflineCosts(TINY, dataclasses.replace(PLAIN, flops_per_s=1e9))
    assert slow.pack_s([SimulatedPiece(10, 10, is_last=False)]) == pytest.approx(2 * (640 + 160) * 1e-6)


def test_decode_time_follows_bytes_read():
    # 640 + 256 weights and 20 tokens of 16 values, 2 bytes each: 2,432 bytes; products are 2 x 896 + 640 FLOPs.
    slow = dataclasses.replace(PLAIN, flops_per_s=1e9)
    assert RooflineCosts(TINY, slow).decode_s(1, 20) == pytest.approx(2_432e-6)


def test_two_devices_halve_compute_and_add_all_reduce_time():
    alone = RooflineCosts(TINY, dataclasses.replace(PLAIN, link_bytes_per_s=1e3))
    split = dataclasses.replace(alone, tensor_parallel_size=2)
    # Two sums of 2 (2-1)/2 x 10 x 8 values x 2 bytes.
    assert split.pack_s([SimulatedPiece(10, 10)]) == pytest.approx(
        alone.pack_s([SimulatedPiece(10, 10)]) / 2 + 2 * 160 / 1e3
    )
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        RooflineCosts(TINY, PLAIN, 2)


@pytest.mark.parametrize("config", [LLAMA3_8B, LLAMA3_70B, MIXTRAL_8X7B, TINY])
def test_weight_bytes_match_the_parameter_count(config):
    """But for norms and routers, which are left out."""
    wanted = 2 * num_parameters(config)
    assert RooflineCosts(config, PLAIN).weight_bytes == pytest.approx(wanted, rel=0.05 if config is TINY else 1e-4)


def test_mixtral_cost_counts_two_of_eight_experts_per_token():
    dense = dataclasses.replace(MIXTRAL_8X7B, num_experts=0, num_experts_per_token=0, model_type="llama")
    by_experts = RooflineCosts(MIXTRAL_8X7B, HARDWARE["h100"]).pack_s([SimulatedPiece(4096, 4096)])
    assert 1.5 < by_experts / RooflineCosts(dense, HARDWARE["h100"]).pack_s([SimulatedPiece(4096, 4096)]) < 2


def test_simulated_8b_prefill_is_plausible_for_an_h100():
    """2,048 tokens are 31 TFLOPs: at 989 TFLOPS no less than 31 ms, at half of that 63 ms."""
    assert 0.055 < RooflineCosts(LLAMA3_8B, HARDWARE["h100"]).pack_s([SimulatedPiece(2048, 2048)]) < 0.075


def test_load_time_sums_every_link_on_the_path():
    loads_s = [RooflineCosts(TINY, PLAIN).load_s(tier, 1000) for tier in ("device", "host", "disk")]
    assert loads_s == pytest.approx([0.0, 0.01, 0.11])


def test_overlapped_loads_expose_one_layer():
    assert overlapped_s(1.0, 0.0, 4) == 1.0
    assert overlapped_s(1.0, 0.4, 4) == pytest.approx(1.1)  # the first layer's load
    assert overlapped_s(0.4, 1.0, 4) == pytest.approx(1.1)  # the last layer's products
    assert overlapped_s(1.0, 0.4, 1) == pytest.approx(1.4)  # nothing hides behind one layer


GRID = PrefillGrid((0, 100), (10, 20), ((0.02, 0.03), (0.04, 0.06)))


def test_grid_costs_interpolate_and_packs_share_the_fixed_time():
    costs = GridCosts(GRID, decode_fixed_s=0.5, decode_seq_s=0.1, decode_token_s=0.01)
    assert costs.pack_s([SimulatedPiece(20, 120)]) == pytest.approx(0.06)
    assert costs.fixed_s == pytest.approx(0.01)
    assert costs.pack_s([SimulatedPiece(10, 10), SimulatedPiece(20, 20)]) == pytest.approx(0.02 + 0.03 - 0.01)
    assert costs.decode_s(2, 30) == pytest.approx(1.0)
    assert costs.compute_s(5, 100, 20) == pytest.approx(5 * 0.06 / 20)
