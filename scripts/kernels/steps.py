"""The engine's jitted steps at Llama-3-8B's shapes, as abstract calls, and their memory as reported by a compiler.

To add a step, list a `StepCase`. Every array names its axes, as the table of weights does: on several chips a mesh
places arrays by these names, on one chip they have no effect.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from ccjax.models.llama3 import LLAMA3_8B, LLAMA3_70B, LlamaConfig
from ccjax.models.llama3.paged_steps import paged_decode_step, paged_layer_step
from ccjax.models.llama3.params import LayerParams, Params, layer_table, top_table
from ccjax.models.llama3.sharding import axes_sharding, make_mesh
from ccjax.models.llama3.steps import logits_step, rotate_step

Axes = tuple[str | None, ...]
Place = Callable[[Axes, tuple[int, ...]], Sharding | None]
"""Axes and shape of an array -> its sharding."""
PAGE_TOKENS = 16

_KV: Axes = (None, "kv_heads", "head_dim")
_PAGES: Axes = ("kv_heads", None, None, "head_dim")


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One call of one step.

    Attributes:
      step: a jitted function of `ccjax.models.llama3`.
      rows: computed tokens; for `paged_decode_step` and `logits_step` requests, for `rotate_step` slots.
      slots: of the context; of each request if there are several.
      num_segments: columns of the mass output, 0 for none.
      num_devices: devices that the model is split over.
    """

    name: str
    step: Any
    rows: int
    slots: int = 0
    num_segments: int = 0
    num_devices: int = 1
    config: LlamaConfig = LLAMA3_8B
    dtype: str = "bfloat16"

    def call(self, place: Place, implementation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Abstract positional arguments, and static ones.

        Args:
          implementation: of the attention, by the chip's name.
        """
        return _CALLS[self.step](self, place, implementation)


class _Arrays:
    """Abstract arrays of a case."""

    def __init__(self, case: StepCase, place: Place) -> None:
        self._case, self._place = case, place

    def make(self, shape: tuple[int, ...], axes: Axes, dtype: Any = None) -> jax.ShapeDtypeStruct:
        """An array in the case's dtype, or another."""
        dtype = jnp.dtype(self._case.dtype) if dtype is None else dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place(axes, shape))

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Positions, slots, tables: the same everywhere."""
        return self.make(shape, (None,) * len(shape), jnp.int32)

    def layer(self) -> LayerParams:
        """The weights of a layer."""
        table = layer_table(self._case.config)
        return LayerParams(**{name: self.make(spec.shape, spec.axes) for name, spec in table.items()})

    def top(self) -> Params:
        """The weights outside the layers."""
        table = top_table(self._case.config)
        made: dict[str, Any] = {name: self.make(spec.shape, spec.axes) for name, spec in table.items()}
        return Params(layers=(), lm_head=made.pop("lm_head", None), **made)

    def hidden(self) -> jax.ShapeDtypeStruct:
        """[N, D], hidden states."""
        return self.make((self._case.rows, self._case.config.d_model), (None, "embed"))

    def context(self, count: int) -> jax.ShapeDtypeStruct:
        """[S, K, H], keys or values."""
        return self.make((count, self._case.config.num_kv_heads, self._case.config.head_dim), _KV)

    def rotation(self, *shape: int) -> jax.ShapeDtypeStruct:
        """[*shape, H], cosines and sines."""
        return self.make((*shape, self._case.config.head_dim), (None,) * (len(shape) + 1), jnp.float32)

    def pages(self) -> jax.ShapeDtypeStruct:
        """[K, P, T, H]: twice the size of the case's contexts, as if there were also cached chunks."""
        case = self._case
        requests = case.rows if case.step is paged_decode_step else 1
        shape = (case.config.num_kv_heads, 2 * requests * case.slots // PAGE_TOKENS, PAGE_TOKENS, case.config.head_dim)
        return self.make(shape, _PAGES)


def _statics(case: StepCase, implementation: str, **more: Any) -> dict[str, Any]:
    return {"config": case.config, "implementation": implementation, "mesh": None, **more}


def _paged_layer(case: StepCase, place: Place, implementation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    a, n, s = _Arrays(case, place), case.rows, case.slots
    rows, slots = (a.ints(n), a.ints(n), a.ints(n)), (a.ints(s), a.ints(s), a.ints(s))
    segments = a.ints(s) if case.num_segments else None
    arrays = (a.layer(), a.hidden(), a.pages(), a.pages(), *rows, *slots, segments, a.rotation(n), a.rotation(s))
    return arrays, _statics(case, implementation, num_segments=case.num_segments)


def _paged_decode(case: StepCase, place: Place, implementation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    a, n, m = _Arrays(case, place), case.rows, 2 * case.slots // PAGE_TOKENS  # tables are padded to powers of two
    tables = (a.ints(n, m), a.ints(n, m), a.rotation(n, m))
    arrays = (a.layer(), a.hidden(), a.pages(), a.pages(), a.ints(n), a.ints(n), *tables)
    return arrays, _statics(case, implementation)


def _logits(case: StepCase, place: Place, implementation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    a = _Arrays(case, place)
    return (a.top(), a.hidden()), {"config": case.config}


def _rotate(case: StepCase, place: Place, implementation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    a = _Arrays(case, place)
    return (a.context(case.rows), a.ints(case.rows)), {"config": case.config}


_CALLS: dict[Any, Callable[[StepCase, Place, str], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    paged_layer_step: _paged_layer,
    paged_decode_step: _paged_decode,
    logits_step: _logits,
    rotate_step: _rotate,
}

STEP_CASES = (
    StepCase("step: paged layer, 8B, 8k of 8k", paged_layer_step, 8192, 8192),
    StepCase("step: paged layer, 8B, 15 % of 8k", paged_layer_step, 1280, 8192, num_segments=16),
    StepCase("step: paged decode, 8B, 1 request of 8k", paged_decode_step, 1, 8192),
    StepCase("step: paged decode, 8B, 16 requests of 8k", paged_decode_step, 16, 8192),
    StepCase("step: logits, 8B, 1 row", logits_step, 1),
    StepCase("step: logits, 8B, 16 rows", logits_step, 16),
    StepCase("step: rotate, 8B, 8k", rotate_step, 8192),
    StepCase("4 devices: paged layer, 8B, 15 % of 8k", paged_layer_step, 1280, 8192, num_segments=16, num_devices=4),
    StepCase("4 devices: paged decode, 8B, 16 of 8k", paged_decode_step, 16, 8192, num_devices=4),
    StepCase(
        *("4 devices: paged layer, 70B, 15 % of 8k", paged_layer_step, 1280, 8192),
        **{"num_segments": 16, "num_devices": 4, "config": LLAMA3_70B},
    ),
    StepCase("4 devices: paged decode, 70B, 16 of 8k", paged_decode_step, 16, 8192, num_devices=4, config=LLAMA3_70B),
)

QUICK_STEPS = frozenset({STEP_CASES[2].name})
"""Names of the steps that every push compiles; the others take minutes for TPUs."""


def compile_step(
    case: StepCase, implementation: str, devices: Sequence[Any], platform: str, options: dict[str, Any] | None = None
) -> Any:
    """The executable of a step on the first of the described devices."""
    mesh = make_mesh(case.config, devices[: case.num_devices]) if case.num_devices > 1 else None

    def place(axes: Axes, shape: tuple[int, ...]) -> Sharding:
        return SingleDeviceSharding(devices[0]) if mesh is None else axes_sharding(mesh, axes, shape)

    arrays, statics = case.call(place, implementation)
    if "mesh" in statics:
        statics["mesh"] = mesh
    traced = case.step.trace(*arrays, **statics)
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def step_figures(executable: Any) -> dict[str, int]:
    """Bytes of the arguments, of the results (except donated ones), of temporaries, and of all three (`hbm_bytes`).

    If the compiler counts them, operations and bytes moved, without those of kernels. With several devices each one's
    figures, and the numbers of all-reduces and of other communication.

    Raises:
      ValueError: the compiler gives no memory analysis.
    """
    used = executable.memory_analysis()
    if used is None:
        raise ValueError("memory_analysis: wanted the sizes of the step, got None")
    figures = {
        "argument_bytes": used.argument_size_in_bytes,
        "result_bytes": used.output_size_in_bytes - used.alias_size_in_bytes,
        "temp_bytes": used.temp_size_in_bytes,
    }
    figures["hbm_bytes"] = sum(figures.values())
    text, costs = executable.as_text(), executable.cost_analysis()
    costs = (costs[0] if isinstance(costs, list) else costs) or {}
    for name, key in (("flops", "flops"), ("moved_bytes", "bytes accessed")):
        if costs.get(key, 0) > 0:
            figures[name] = int(costs[key])
    found = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    if found:
        figures["sums"] = found.count("all-reduce")
        figures["other_collectives"] = len(found) - figures["sums"]
    return figures


def step_controls(implementation: str) -> Iterator[tuple[str, StepCase, str, str]]:
    """(name, case, implementation, message of the gate): steps that must not pass for the case of the same name."""
    prefill, paged, split = STEP_CASES[1], STEP_CASES[2], STEP_CASES[7]
    yield "attention that writes all scores out", prefill, "reference", "temp_bytes rose|(?i:memory)"
    kept = jax.jit(inspect.unwrap(paged_decode_step), static_argnames=("config", "implementation", "mesh"))
    _CALLS[kept] = _paged_decode
    yield "pages that are not donated", dataclasses.replace(paged, step=kept), implementation, "result_bytes rose"
    # The purpose of the mesh: without split heads each device would have all of them.
    whole = dataclasses.replace(split, num_devices=1)
    yield "a step that is not split", dataclasses.replace(whole, name=split.name), implementation, "argument_bytes rose"
