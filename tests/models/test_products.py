"""Float32 products request float32 precision; results on a CPU do not show this, so the tests read the program."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from ccjax.models.llama3 import LLAMA3_8B
from ccjax.models.llama3.experts import batched_experts, blocked_experts, dense_experts, ragged_experts, route
from ccjax.models.llama3.paged_steps import paged_decode_step, paged_layer_step
from ccjax.models.llama3.params import RoutedLayerParams
from ccjax.models.llama3.products import einsum
from ccjax.models.llama3.steps import logits_step, received_step
from tests.pallas_kernels.aot_cases import StepCase

SMALL = dataclasses.replace(
    LLAMA3_8B, vocab_size=64, d_model=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=48
)
STEPS = [paged_layer_step, paged_decode_step, logits_step, received_step]


def products(text):
    return re.findall(r".*(?:stablehlo\.dot_general|chlo\.ragged_dot|mhlo\.ragged_dot).*", text)


def lowered(step, dtype):
    case = StepCase(step, 16, 64, num_segments=4, config=SMALL, dtype=dtype)
    if step is not received_step:
        return case.trace("cpu").lower().as_text()
    layer, hidden, *_ = dataclasses.replace(case, step=paged_layer_step).arguments()
    return step.trace(layer, hidden, jax.ShapeDtypeStruct((), jnp.int32), config=SMALL).lower().as_text()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_float32_products_of_a_step_use_highest_precision(step):
    found = products(lowered(step, "float32"))
    assert found and all(line.count("HIGHEST") == 2 for line in found)
    narrow = [line for line in products(lowered(step, "bfloat16")) if "xbf16>" in line]
    assert narrow and not any("HIGHEST" in line for line in narrow)


@pytest.mark.parametrize("form", [blocked_experts, batched_experts, dense_experts, ragged_experts])
def test_float32_products_of_experts_use_highest_precision(form):
    x, router = jnp.ones((8, 32)), jnp.ones((32, 4))
    inner, outer = jnp.ones((4, 32, 48)), jnp.ones((4, 48, 32))
    names = {field.name for field in dataclasses.fields(RoutedLayerParams)}
    given = {"router": router, "w_gate": inner, "w_up": inner, "w_down": outer, "num_chosen": 2}
    layer = RoutedLayerParams(**{name: given.get(name) for name in names})
    size = {blocked_experts: (4,), batched_experts: (2,)}.get(form, ())

    def compute(x):
        return form(x, route(x, router, 2), layer, *size)

    found = products(jax.jit(compute).trace(x).lower(lowering_platforms=("tpu",)).as_text())
    assert len(found) >= 4 and all(line.count("HIGHEST") == 2 for line in found)


def test_product_without_a_precision_is_detected():
    x = jnp.ones((2, 2))
    (line,) = products(jax.jit(lambda x: jnp.einsum("ab,bc->ac", x, x)).lower(x).as_text())
    assert "HIGHEST" not in line
    (line,) = products(jax.jit(lambda x: einsum("ab,bc->ac", x, x)).lower(x).as_text())
    assert "HIGHEST, HIGHEST" in line
