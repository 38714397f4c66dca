"""ccjax.runner.memory: hand-computed figures of known models, compiled steps' own figures, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest

from ccjax.engine import Engine, EngineConfig
from ccjax.errors import ConfigError
from ccjax.kernels.inputs import KVPages
from ccjax.models.llama3 import (
    LLAMA3_8B,
    LLAMA3_70B,
    MIXTRAL_8X7B,
    LlamaConfig,
    abstract_params,
    init_params,
    paged_steps,
)
from ccjax.models.llama3.inputs import DecodeInputs, SamplingState, StepInputs, StepSettings
from ccjax.models.llama3.paged_steps import paged_decode_step, paged_layer_step, question_step
from ccjax.models.llama3.sharding import EVERYWHERE, PAGES, make_mesh, param_sharding, placement, shard_params
from ccjax.models.llama3.steps import logits_step, sample_step
from ccjax.runner import device_memory, memory
from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.device_memory import memory_plan, sizes_of, with_pool
from ccjax.runner.memory import MemoryPlan, ServedShapes, check_fits, in_8_bits, plain, plan_memory, weight_bytes
from tests.engine.helpers import TinyModel

GB = 10**9
MODEL = TinyModel()
CONFIG = LlamaConfig(1000, 1024, 1, 16, 4, 64, 2816, 500000.0)
MIXTURE = dataclasses.replace(CONFIG, model_type="mixtral", num_experts=8, num_experts_per_token=2)


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> None:
    """None here: memory is planned for the sizes that engines list."""


def plan_of(model: LlamaConfig, **settings) -> MemoryPlan:
    """On devices of 80 GB, of which nine tenths may be taken."""
    settings = {"device_memory_bytes": 80 * GB, "gpu_memory_utilization": 0.9, **settings}
    return memory_plan(model, EngineConfig(dtype="bfloat16", **settings))


def test_llama3_8b_fits_one_80_gb_device():
    """Embedding and head of 128,256 x 4,096; in each of 32 layers queries and output of 4,096 x 4,096, keys and values
    of 4,096 x 1,024, three matrices of 4,096 x 14,336, two norms; one more norm."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    parameters = 2 * 128256 * 4096 + 32 * layer + 4096
    plan = plan_of(LLAMA3_8B)
    assert parameters == 8_030_261_248 and plan.weights == 2 * parameters
    assert plan.kv_per_token == 32 * 2 * 8 * 128 * 2
    # Contexts of 8,192 slots: two layers of 4,096 bytes a token ahead; KV and 17 masses a layer until they are stored.
    assert plan.transit == 2 * 8192 * 4096 + 8192 * 32 * (4096 + 17 * 4)
    assert plan.logits == 3 * 32 * 128256 * 4
    # Rows of the context three times over, 16 columns of masses; of 1,024 rows queries twice and float32 sums.
    assert plan.workspace == 8192 * 8 * (3 * 128 + 16) * 2 + 1024 * 32 * (2 * 128 * 2 + (128 + 16) * 4)
    # Float32 cosines and sines of 1,024 rows and of the context.
    assert plan.activations == 1024 * 2 * 4096 * 2 + (1024 + 8192) * 128 * 4
    assert plan.pool == 72 * GB - plan.besides_pool
    assert plan.missing == 0 and 416_000 < plan.num_pool_tokens < 417_000
    check_fits(plan)
    assert [name for name, *_ in plan.rows()][:2] == ["weights", "activations"]
    assert sum(size for _, size, _ in plan.rows()) == 80 * GB


def test_llama3_70b_does_not_fit_one_80_gb_device():
    plan = plan_of(LLAMA3_70B)
    assert plan.weights == 2 * 70_553_706_496
    assert plan.pool == plan.least_pool == (8192 + 64 * 16) * 80 * 2 * 8 * 128 * 2
    message = (
        r"model: wanted 147\.1 GB of each device \(weights 141\.1 GB, .*KV pool 3\.0 GB\), got 72\.0 GB "
        r"\(80\.0 GB: as given\), 75\.1 GB too few; what fits: tensor_parallel_size 4, tensor_parallel_size 2 with "
        r"quantization int8"
    )
    with pytest.raises(ConfigError, match=message):
        check_fits(plan)


def test_llama3_70b_fits_four_80_gb_devices():
    plan = plan_of(LLAMA3_70B, tensor_parallel_size=4)
    norms = (2 * 80 + 1) * 8192  # on every device
    assert plan.weights == 2 * ((70_553_706_496 - norms) // 4 + norms)
    assert plan.kv_per_token == 80 * 2 * 2 * 128 * 2
    assert plan.missing == 0 and 430_000 < plan.num_pool_tokens < 450_000
    check_fits(plan)


def test_mixtral_8x7b_fits_two_80_gb_devices():
    """46.7 billion parameters, as its authors say."""
    plan = plan_of(MIXTRAL_8X7B, tensor_parallel_size=2)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336 + 4096 * 8 + 2 * 4096
    assert memory.num_parameters(MIXTRAL_8X7B) == 2 * 32000 * 4096 + 32 * layer + 4096 == 46_702_792_704
    assert plan.missing == 0
    with pytest.raises(
        ConfigError, match="what fits: tensor_parallel_size 2, tensor_parallel_size 1 with quantization int8"
    ):
        check_fits(plan_of(MIXTRAL_8X7B))


def test_8_bit_weight_bytes_match_a_hand_calculation():
    shapes = ServedShapes(CONFIG, "bfloat16", BatchSizes(1024), in_8_bits("bfloat16", "fp8"))
    kept = 2 * 1000 * 1024 + 3 * 1024
    matrices = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 2816
    channels = 1024 + 2 * 256 + 1024 + 2 * 2816 + 1024
    assert weight_bytes(shapes) == 2 * kept + matrices + 4 * channels
    leaves = jax.tree.leaves(abstract_params(CONFIG, jnp.bfloat16, quantization="fp8"))
    assert weight_bytes(shapes) == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    config = EngineConfig(dtype="bfloat16", quantization="fp8", device_memory_bytes=GB, max_model_len=1024)
    assert memory_plan(CONFIG, config).weights == weight_bytes(shapes)
    with_head = memory_plan(CONFIG, config.replace(quantization="int8"))  # on CPUs
    assert with_head.weights == weight_bytes(shapes) + 1000 * 1024 + 4 * 1000


def test_what_fits_counts_the_head_in_8_bits():
    config = EngineConfig(dtype="bfloat16", quantization="int8", device_memory_bytes=GB, max_model_len=1024)
    plan = memory_plan(CONFIG, config)
    config = config.replace(device_memory_bytes=plan.besides_pool + plan.least_pool - 1000)
    for quantization in (None, "int8"):
        config = config.replace(quantization=quantization)
        with pytest.raises(ConfigError, match="what fits: tensor_parallel_size 2") as refused:
            with_pool(CONFIG, config)
        assert "tensor_parallel_size 1" not in str(refused.value)


@pytest.mark.parametrize("model", [CONFIG, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_weights_and_pages_take_the_planned_memory(model, size):
    model = dataclasses.replace(model, d_model=128, d_ff=256)
    plan = plan_memory(
        ServedShapes(model, "float32", BatchSizes(512), plain("float32"), size), GB, source="as given", pool=10**6
    )
    shards = memory.kv_shards(plan.shapes)
    assert plan.kv_per_token * shards == 2 * 4 * 64 * 4
    if size > len(jax.devices()):
        return
    params = init_params(model, jax.random.key(0))
    params = shard_params(params, model, make_mesh(model, jax.devices()[:size]))
    assert plan.weights == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


def test_indivisible_tensor_parallel_size_is_rejected():
    with pytest.raises(ConfigError, match="tensor_parallel_size: wanted a divisor of the model's 16 attention heads"):
        memory_plan(CONFIG, EngineConfig(tensor_parallel_size=3))


@functools.cache
def measured(model: LlamaConfig, num_rows: int, num_slots: int, num_masses: int, size: int = 1) -> int:
    """Bytes that XLA's compiled layer step takes of a device besides its arguments, and those of the rotations."""
    mesh = None if size == 1 else make_mesh(model, jax.devices()[:size])

    def array(*shape: int, dtype=jnp.int32, spec=EVERYWHERE):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement(mesh, spec))

    layer = abstract_params(model).layers[0]
    if mesh is not None:
        from ccjax.models.llama3.params import layer_table

        table = layer_table(model)
        layer = dataclasses.replace(
            layer,
            **{
                name: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=param_sharding(mesh, spec))
                for name, spec in table.items()
            },
        )
    pages = array(model.num_kv_heads, 64, 16, model.head_dim, dtype=jnp.float32, spec=PAGES)
    inputs = StepInputs.abstract(num_rows, num_slots, num_masses, model.head_dim)
    inputs = jax.tree.map(lambda leaf: array(*leaf.shape, dtype=leaf.dtype), inputs)
    x = array(num_rows, model.d_model, dtype=jnp.float32)
    lowered = paged_layer_step.lower(layer, x, KVPages(pages, pages), inputs, settings=StepSettings(model, None, mesh))
    used = lowered.compile().memory_analysis()
    kept = sum(rows.size * rows.dtype.itemsize for rows in (inputs.q_rotation, inputs.k_rotation))
    return kept + used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes


def planned(model: LlamaConfig, num_rows: int, num_slots: int, with_mass: bool, size: int = 1) -> MemoryPlan:
    sizes = BatchSizes(num_slots, max_num_batched_tokens=num_rows, with_mass=with_mass)
    assert sizes.context_tokens == num_slots
    return plan_memory(ServedShapes(model, "float32", sizes, plain("float32"), size), GB, source="as given")


OVER_FOUR = ("long context", "wide MLP")
STEPS = {
    "short context": (CONFIG, 1024, 2048, True),
    "long context": (CONFIG, 1024, 8192, True),
    "few rows": (CONFIG, 256, 8192, True),
    "no masses": (CONFIG, 1024, 8192, False),
    "narrow MLP": (dataclasses.replace(CONFIG, d_ff=512), 1024, 2048, True),
    "as many kv heads as heads": (dataclasses.replace(CONFIG, num_kv_heads=16), 1024, 8192, True),
    "wide MLP": (dataclasses.replace(CONFIG, d_ff=8192), 2048, 4096, True),
    "experts": (MIXTURE, 1024, 2048, True),
}


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, 1) for case in ("short context", "no masses", "as many kv heads as heads", "experts")),
        *(pytest.param(case, 1, marks=pytest.mark.slow) for case in ("few rows", "narrow MLP", *OVER_FOUR)),
        *((case, 4) for case in OVER_FOUR),
    ],
)
def test_compiled_steps_take_the_planned_memory(case, size):
    """And hardly more; experts are planned as GPUs compute them, which takes more. Float32: XLA turns bfloat16 weights
    into that on CPUs."""
    model, num_rows, num_slots, with_mass = STEPS[case]
    plan = planned(model, num_rows, num_slots, with_mass, size)
    taken = measured(model, num_rows, num_slots, plan.shapes.sizes.num_segments, size)
    ratio = (plan.activations + plan.workspace) / taken
    print(f"{case}: {ratio:.2f} of {taken / 1e6:.1f} MB")
    assert 0.95 <= ratio <= (2.2 if case == "experts" else 1.8)


@pytest.mark.parametrize("case", ["short context", "as many kv heads as heads"])
@pytest.mark.parametrize("num_rows", [32, 256])
def test_pass_of_questions_takes_no_more_than_is_planned(case, num_rows, monkeypatch):
    model, num_batched, num_slots, with_mass = STEPS[case]
    plan = planned(model, num_batched, num_slots, with_mass)

    def taken() -> int:
        def array(*shape: int, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(shape, dtype)

        x = array(num_rows, model.d_model, dtype=jnp.float32)
        pages = array(model.num_kv_heads, 64, 16, model.head_dim, dtype=jnp.float32)
        inputs = KVPages(pages, pages), StepInputs.abstract(num_rows, num_slots, 0, model.head_dim)
        layer = abstract_params(model).layers[0]
        step = functools.partial(question_step.__wrapped__, settings=StepSettings(model))
        used = jax.jit(step, donate_argnums=2).lower(layer, x, *inputs).compile().memory_analysis()
        return used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes

    least = taken()
    print(f"{least / 1e6:.1f} MB of {(plan.activations + plan.workspace) / 1e6:.1f} MB")
    assert least <= plan.activations + plan.workspace
    # Mutant: the weights of all rows at once.
    monkeypatch.setattr(paged_steps, "QUESTION_ROWS", 256)
    assert num_rows == 32 or taken() > plan.activations + plan.workspace


def test_planning_one_context_too_few_would_be_detected(monkeypatch):
    monkeypatch.setattr(memory, "_CONTEXT_COPIES", 1)
    model, num_rows, num_slots, with_mass = STEPS["as many kv heads as heads"]
    plan = planned(model, num_rows, num_slots, with_mass)
    assert plan.activations + plan.workspace < 0.9 * measured(model, num_rows, num_slots, 16)


@pytest.mark.parametrize("batch", [1, 2, 8, 32])
@pytest.mark.parametrize("num_entries", [32, 64, 512])
def test_decode_step_does_not_copy_the_pool(batch, num_entries):
    """XLA would fuse the write of new rows into the reads of the attention, and keep the pages as they were before."""
    params = abstract_params(CONFIG)
    pages = jax.ShapeDtypeStruct((4, 16384, 16, 64), jnp.float32)
    pools = [KVPages(pages, pages)] * CONFIG.num_layers  # pyright: ignore[reportArgumentType]
    hidden = jax.ShapeDtypeStruct((batch, 1024), jnp.float32)
    inputs = DecodeInputs.abstract(batch, num_entries, 64)
    used = paged_decode_step.lower(params.layers, None, hidden, pools, inputs, settings=StepSettings(CONFIG))
    assert used.compile().memory_analysis().temp_size_in_bytes < math.prod(pages.shape) * 4 / 2


def test_decode_and_logits_take_no_more_than_is_planned():
    plan = planned(CONFIG, 1024, 8192, True)
    params, batch, entries = abstract_params(CONFIG), 32, 512

    def array(*shape: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = array(4, 1024, 16, 64, dtype=jnp.float32)
    pools = [KVPages(pages, pages)] * CONFIG.num_layers
    hidden, inputs = array(batch, 1024, dtype=jnp.float32), DecodeInputs.abstract(batch, entries, 64)
    used = paged_decode_step.lower(params.layers, None, hidden, pools, inputs, settings=StepSettings(CONFIG))
    assert used.compile().memory_analysis().temp_size_in_bytes < plan.workspace
    top = dataclasses.replace(params, layers=())
    logits = logits_step.lower(top, array(batch, 1024, dtype=jnp.float32), config=CONFIG).compile().memory_analysis()
    numbers = array(batch, dtype=jnp.float32)
    state = SamplingState(numbers, numbers, array(batch, 2, dtype=jnp.uint32), array(batch))
    for allowed in (None, array(batch, 32, dtype=jnp.uint32)):
        state = state.replace(allowed=allowed)
        drawn = sample_step.lower(array(batch, 1000, dtype=jnp.float32), state, num_top=20)
        taken = logits.output_size_in_bytes + drawn.compile().memory_analysis().temp_size_in_bytes
        assert 0.9 * taken < plan.logits < 1.5 * taken


def test_memory_share_sets_the_pool_size_unless_bytes_are_given():
    settings = {"max_model_len": 512, "device_memory_bytes": 64 << 20}
    with MODEL.engine(gpu_memory_utilization=0.5, **settings) as engine:
        plan = engine.memory_plan()
        assert engine._chunks.store.shortfall_bytes("device", 1) == 0  # there is such a tier
        page = engine._device.pool.page_bytes
        assert (
            0 <= (32 << 20) - (plan.besides_pool + plan.pool) < page
            and plan.pool == engine._device.pool.num_pages * page
        )
    with MODEL.engine(gpu_memory_utilization=0.5, device_cache_bytes=3 << 20, **settings) as engine:
        assert engine.config.device_cache_bytes == 3 << 20
        assert (3 << 20) - page < engine.memory_plan().pool <= 3 << 20


def test_cpu_memory_is_not_planned_without_gpu_memory_utilization(monkeypatch):
    config = EngineConfig(max_model_len=512)

    def refuse(*_):
        raise AssertionError("planned")

    monkeypatch.setattr(device_memory, "memory_plan", refuse)
    assert with_pool(MODEL.config, config) == config.replace(device_cache_bytes=0)
    with pytest.raises(AssertionError, match="planned"):
        with_pool(MODEL.config, config.replace(gpu_memory_utilization=0.9))


def test_memory_of_a_dedicated_device_is_always_checked(monkeypatch):
    monkeypatch.setattr(device_memory, "_own_bytes", lambda: 24 * GB)
    config = EngineConfig(dtype="bfloat16")
    plan = memory_plan(LLAMA3_8B, config)
    assert (
        plan.usable == int(0.9 * 24 * GB) and 0 <= plan.usable - plan.besides_pool - plan.pool < plan.kv_per_token * 16
    )
    assert with_pool(LLAMA3_8B, config).device_cache_bytes == plan.pool > plan.least_pool
    assert with_pool(LLAMA3_8B, config.replace(device_cache_bytes=0)).device_cache_bytes == 0
    assert memory_plan(LLAMA3_8B, config).source.startswith("what JAX may take of a")
    with pytest.raises(ConfigError, match=r"24\.0 GB: what JAX may take.*too few; what fits: tensor_parallel_size 8"):
        with_pool(LLAMA3_70B, config)


@pytest.mark.parametrize(("total", "rows"), [(80 * GB, 8192), (40 * GB, 4096), (24 * GB, 2048), (20 * GB, 1024)])
def test_packs_on_accelerators_are_as_large_as_their_memory_allows(monkeypatch, total, rows):
    config = EngineConfig(dtype="bfloat16")
    assert sizes_of(LLAMA3_8B, config).max_num_batched_tokens == 1024
    monkeypatch.setattr(device_memory, "_own_bytes", lambda: total)
    plan = memory_plan(LLAMA3_8B, config)
    assert plan.shapes.sizes.max_num_batched_tokens == rows
    assert rows == 1024 or plan.besides_pool - plan.weights <= total / 16
    assert sizes_of(LLAMA3_8B, config.replace(max_num_batched_tokens=2000)).max_num_batched_tokens == 2000


def test_model_that_does_not_fit_is_rejected_before_reading_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B.to_hf()))
    with pytest.raises(ConfigError, match=r"model: wanted 3\d\.\d GB of each device .*what fits"):
        Engine.from_pretrained(tmp_path, device_memory_bytes=16 * GB, gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="it does not fit on any number of such devices"):
        Engine.from_pretrained(tmp_path, device_memory_bytes=10**8)


def test_planned_batch_sizes_equal_those_of_the_engine():
    with MODEL.engine(max_model_len=512, strategy="full") as engine:
        assert engine._device.sizes == sizes_of(MODEL.config, engine.config) == BatchSizes(512, with_mass=False)
