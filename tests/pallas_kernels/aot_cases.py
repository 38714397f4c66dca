"""The kernel calls and steps that serving makes, as abstract shapes, and how to compile them for chips that are absent.

Needs only the compilers, each in an environment of its own (`make kernels-aot`): libtpu for TPUs; for GPUs XLA's CUDA
plugin, which fails if a kernel needs more shared memory than a program may have, and if told so if it spills registers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from ccjax.kernels.attention import attention
from ccjax.kernels.decode import decode_attention
from ccjax.kernels.dispatch import chip_of
from ccjax.kernels.inputs import AttentionInputs, KVPages, PageTables
from ccjax.kernels.rope import llama3_frequencies, move_keys
from ccjax.models.llama3 import LLAMA3_8B, LLAMA3_70B, LlamaConfig
from ccjax.models.llama3.inputs import DecodeInputs, StepInputs, StepSettings
from ccjax.models.llama3.paged_steps import paged_decode_step, paged_layer_step
from ccjax.models.llama3.params import LayerParams, Params, layer_table, top_table
from ccjax.models.llama3.sharding import axes_sharding, make_mesh
from ccjax.models.llama3.steps import logits_step, rotate_step

_CUDA = "jax_cuda13_plugin" if importlib.util.find_spec("jax_cuda13_plugin") else "jax_cuda12_plugin"
COMPILERS = {"libtpu": ("v5e", "v6e", "v4", "v5p"), _CUDA: ("a100", "h100", "l4", "a10", "b200", "rtx5090")}
KINDS = {"l4": "NVIDIA L4", "a10": "NVIDIA A10", "b200": "NVIDIA B200", "rtx5090": "NVIDIA GeForce RTX 5090"}
KINDS |= {"v4": "TPU v4", "v5p": "TPU v5"}
"""Chips for which kernels alone are compiled, as JAX calls them; steps differ from chip to chip in these alone."""
CHIPS = [chip for package, chips in COMPILERS.items() if importlib.util.find_spec(package) for chip in chips]
"""Chips whose compiler is installed."""
MEMORY_BYTES = {"a100": 80e9, "h100": 80e9, "v5e": 16 << 30, "v6e": 32 << 30}
PAGE_TOKENS = 16

DUMP = Path(tempfile.mkdtemp(prefix="ccjax-aot-")) if "v5e" in CHIPS else Path()
if "v5e" in CHIPS:
    atexit.register(shutil.rmtree, DUMP, ignore_errors=True)
    # libtpu reads it when it is loaded; of its passes only one is written, all are 200 MB a kernel
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=hlo-static-per-bundle-utilization"
    )

_GPUS = {
    "a100": """name: "NVIDIA A100-SXM4-80GB" core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
      shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 l2_cache_size: 41943040
      memory_bandwidth: 2039040000000 device_memory_size: 85100068864 cuda_compute_capability { major: 8 }""",
    "h100": """name: "NVIDIA H100 80GB HBM3" core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
      shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
      memory_bandwidth: 3352320000000 device_memory_size: 84942979072
      cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }""",
    "l4": """name: "NVIDIA L4" core_count: 58 fpus_per_core: 128 clock_rate_ghz: 2.04
      shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 l2_cache_size: 50331648
      memory_bandwidth: 300096000000 device_memory_size: 23034068992
      cuda_compute_capability { major: 8 minor: 9 }""",
    "a10": """name: "NVIDIA A10" core_count: 72 fpus_per_core: 128 clock_rate_ghz: 1.7
      shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 l2_cache_size: 6291456
      memory_bandwidth: 600096000000 device_memory_size: 24000000000
      cuda_compute_capability { major: 8 minor: 6 }""",
    "b200": """name: "NVIDIA B200" core_count: 148 fpus_per_core: 128 clock_rate_ghz: 1.965
      shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 l2_cache_size: 132644864
      memory_bandwidth: 8000000000000 device_memory_size: 192000000000
      cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }""",
    "rtx5090": """name: "NVIDIA GeForce RTX 5090" core_count: 170 fpus_per_core: 128 clock_rate_ghz: 2.4
      shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 l2_cache_size: 100663296
      memory_bandwidth: 1792000000000 device_memory_size: 34000000000
      cuda_compute_capability { major: 12 }""",
}
_ANY_GPU = """threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "12.9.0" driver_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0" """


@functools.cache
def devices_of(chip: str) -> Sequence[Any]:
    """Four described devices of a chip; "cpu" for those of this machine."""
    from jax.experimental import topologies

    if chip == "cpu":
        return jax.devices()
    if chip in COMPILERS["libtpu"]:
        bounds = "2x2x1" if chip in ("v4", "v5p") else "2x2"
        return topologies.get_topology_desc(f"{chip}:{bounds}", platform="tpu").devices
    config = f"""gpu_device_info {{ {_ANY_GPU} {_GPUS[chip]} }} platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{chip}" """
    with contextlib.suppress(RuntimeError):  # loads the plugin, then finds no GPU
        topologies.get_topology_desc(platform="cuda")
    named = {"topology_name": "", "topology": "1x1x4", "target_config": config}
    return topologies.get_topology_desc(platform="cuda", **named).devices


def implementation(chip: str) -> str:
    """The chip's kernels, by name."""
    kernel = "mosaic_tpu" if chip in COMPILERS["libtpu"] else "triton"
    return "xla" if chip == "cpu" else f"{kernel}:{chip_of(KINDS.get(chip, chip))}"


def compiled(chip: str, traced: Any, **options: Any) -> Any:
    """The executable of a traced call. `options`: of the compiler of GPUs; autotuning would need one."""
    platform = "cpu" if chip == "cpu" else "tpu" if chip in COMPILERS["libtpu"] else "cuda"
    lowered = traced.lower(lowering_platforms=(platform,))
    return lowered.compile({"xla_gpu_autotune_level": 0, **options} if platform == "cuda" else None)


def lowered_for(chip: str) -> Any:
    """Context to trace and lower in: from JAX 0.11 on, Pallas asks it which GPU a kernel is for."""
    if chip not in _GPUS:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=KINDS.get(chip, f"NVIDIA {chip.upper()}"), num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def compile_kernel(chip: str, operation: Callable[..., Any], arrays: Any, **statics: Any) -> Any:
    """The executable of one call of an operation with abstract arrays."""
    with lowered_for(chip):
        traced = jax.jit(lambda arrays: operation(*arrays, **statics)).trace(placed(arrays, devices_of(chip)[0]))
        return compiled(chip, traced, xla_gpu_fail_ptx_compilation_on_register_spilling=True)


def placed(arrays: Any, device: Any) -> Any:
    """Abstract arrays on a device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arrays)


def array(*shape: int, dtype: str = "int32") -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def prefill(queries=2560, slots=16384, heads=32, kv_heads=8, dim=128, segments=16, dtype="bfloat16", **has):
    """A call of `attention`: by default Llama-3-8B on one chip, 15 % of 16k computed. `has`: packed, rotated."""
    kv, named = array(slots, kv_heads, dim, dtype=dtype), {"q_pos": array(queries), "k_pos": array(slots)}
    named |= {"k_segment": array(slots)} if segments else {}
    named |= {"q_request": array(queries), "k_request": array(slots)} if has.get("packed") else {}
    named |= {"k_rotation": array(slots, dim, dtype="float32")} if has.get("rotated") else {}
    inputs = AttentionInputs(**named, num_segments=segments)
    return attention, (array(queries, heads, dim, dtype=dtype), kv, kv, inputs), {"scale": dim**-0.5}


def decode(requests=32, entries=512, heads=32, kv_heads=8, dim=128, page_size=16, dtype="bfloat16"):
    """A call of `decode_attention`: by default Llama-3-8B on one chip, 32 requests with up to 8k each."""
    pool, table = array(kv_heads, requests * entries, page_size, dim, dtype=dtype), array(requests, entries)
    tables = PageTables(table, table, array(requests, entries, dim, dtype="float32"))
    statics = {"scale": dim**-0.5, "k_frequencies": llama3_frequencies(dim, 500000.0)}
    return decode_attention, (array(requests, heads, dim, dtype=dtype), KVPages(pool, pool), tables), statics


def move(tokens=8192, kv_heads=8, dim=128, dtype="bfloat16"):
    """A call of `move_keys`: by default a layer of Llama-3-8B on one chip."""
    statics = {"frequencies": llama3_frequencies(dim, 500000.0)}
    return move_keys, (array(tokens, kv_heads, dim, dtype=dtype), array(tokens), array(tokens)), statics


_70B_TP8 = {"heads": 8, "kv_heads": 1}
KERNELS = {
    "prefill": prefill(),
    "70B TP8": prefill(**_70B_TP8),
    "no mass": prefill(segments=0),
    "64 segments": prefill(segments=64),
    "packed": prefill(packed=True),
    "rotated": prefill(rotated=True),
    "packed, rotated, 64 segments": prefill(segments=64, packed=True, rotated=True),
    "one token": prefill(1, segments=0),
    "heads of 64": prefill(dim=64),
    "heads of 16, rotated": prefill(dim=16, rotated=True),
    "heads of 256": prefill(dim=256, heads=16),
    "groups of 7 heads": prefill(heads=28, kv_heads=4),
    "float32": prefill(dtype="float32"),
    "decode": decode(),
    "decode, 70B TP8": decode(**_70B_TP8),
    "decode, 70B TP8, up to 128k": decode(entries=8192, **_70B_TP8),
    "decode, 32 kv heads, float32": decode(kv_heads=32, dtype="float32"),
    "move": move(),
    "move, 70B TP8, heads of 64, not in blocks": move(8191, kv_heads=1, dim=64),
    "move, 3 kv heads of 256, float32": move(kv_heads=3, dim=256, dtype="float32"),
}


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One call of one jitted step, for `rows` tokens or requests over contexts of `slots` tokens each. Decode steps
    have few layers here, since one is as another."""

    step: Any
    rows: int
    slots: int = 0
    num_segments: int = 0
    num_devices: int = 1
    config: LlamaConfig = LLAMA3_8B
    dtype: str = "bfloat16"

    def arguments(self, place: Callable[..., Any] = lambda axes, shape: None) -> tuple[Any, ...]:
        """Abstract arrays; `place` gives each one's sharding by its axes, as of the table of weights, and shape."""
        c, n, s = self.config, self.rows, self.slots

        def make(shape: Sequence[int], axes: Sequence[str | None] = (None,) * 4, dtype: str = self.dtype) -> Any:
            axes = tuple(axes[: len(shape)])
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place(axes, tuple(shape)))

        def weights(table: Any) -> dict[str, Any]:
            return {name: make(spec.shape, spec.axes) for name, spec in table.items()}

        def params() -> Params:
            top = weights(top_table(c))
            return Params(layers=(), lm_head=top.pop("lm_head", None), **top)

        hidden = make((n, c.d_model), (None, "embed"))
        if self.step is logits_step:
            return params(), hidden
        if self.step is rotate_step:
            return make((n, c.num_kv_heads, c.head_dim), (None, "kv_heads", "head_dim")), make((n,), dtype="int32")
        is_decode = self.step is paged_decode_step
        # Twice the contexts' pages, as if there were also cached chunks.
        pool = (c.num_kv_heads, 2 * (n if is_decode else 1) * s // PAGE_TOKENS, PAGE_TOKENS, c.head_dim)
        pages = make(pool, ("kv_heads", None, None, "head_dim"))
        entries = 2 * s // PAGE_TOKENS  # padded to a power of two
        if is_decode:
            inputs = DecodeInputs.abstract(n, entries, c.head_dim)
        else:
            inputs = StepInputs.abstract(n, s, self.num_segments, c.head_dim)
        inputs = jax.tree.map(lambda leaf: make(leaf.shape, dtype=leaf.dtype), inputs)
        layer, pages = LayerParams(**weights(layer_table(c))), KVPages(pages, pages)
        if is_decode:
            layers, pools = (layer,) * c.num_layers, (pages,) * c.num_layers
            return layers, params(), make((n,), dtype="int32"), pools, inputs
        return layer, hidden, pages, inputs

    def trace(self, chip: str, attend: str | None = None) -> Any:
        """The step traced for a chip, with another attention if named."""
        devices = devices_of(chip)
        mesh = make_mesh(self.config, devices[: self.num_devices]) if self.num_devices > 1 else None
        place = functools.partial(axes_sharding, mesh) if mesh else lambda *_: SingleDeviceSharding(devices[0])
        if self.step in (logits_step, rotate_step):
            return self.step.trace(*self.arguments(place), config=self.config)
        settings = StepSettings(self.config, attend or implementation(chip), mesh)
        return self.step.trace(*self.arguments(place), settings=settings)


_LAYER = {"slots": 8192, "num_segments": 16}
_TWO, _TWO_70B = (dataclasses.replace(config, num_layers=2) for config in (LLAMA3_8B, LLAMA3_70B))
STEPS = {
    "layer, 8k of 8k": StepCase(paged_layer_step, 8192, 8192),
    "layer, 15 % of 8k": StepCase(paged_layer_step, 1280, **_LAYER),
    "decode, 1 request": StepCase(paged_decode_step, 1, 8192, config=_TWO),
    "decode, 16 requests": StepCase(paged_decode_step, 16, 8192, config=_TWO),
    "logits, 16 rows": StepCase(logits_step, 16),
    "rotate, 8k": StepCase(rotate_step, 8192),
    "layer, 15 % of 8k, 4 devices": StepCase(paged_layer_step, 1280, **_LAYER, num_devices=4),
    "decode, 16 requests, 4 devices": StepCase(paged_decode_step, 16, 8192, num_devices=4, config=_TWO),
    "70B layer, 15 % of 8k, 4 devices": StepCase(paged_layer_step, 1280, **_LAYER, num_devices=4, config=LLAMA3_70B),
    "70B decode, 16 requests, 4 devices": StepCase(paged_decode_step, 16, 8192, num_devices=4, config=_TWO_70B),
}
