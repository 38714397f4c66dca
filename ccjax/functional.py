"""Pure functions over pytrees: a model's passages prefilled apart, moved, merged, repaired and decoded.

All but `load` are traceable: they work under `jax.jit`, `jax.vmap` and, without replication checks (`check_vma=False`),
`jax.shard_map`, and with `implementation="reference"` under `jax.grad`. `config`, numbers and names are static. They
compute what the engine computes for the same plan, without its store, batching and policies. Sizes are not padded to
buckets: every new shape compiles. One prompt at a time; batches are `jax.vmap`.

Axes: L layers, S slots of a context, N computed tokens, C segments, V vocabulary, K kv heads, H head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, core, lax
from jax.sharding import Mesh
from jaxtyping import Float, Int

from ccjax.config import EngineConfig
from ccjax.kernels import rope
from ccjax.kernels.attention import AttentionOutput, attention
from ccjax.kernels.attention.bounds import UNUSED
from ccjax.kernels.inputs import AttentionInputs
from ccjax.loading.model import load_model
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.forward import forward_rows
from ccjax.models.llama3.inputs import StepSettings
from ccjax.models.llama3.layers import project_qkv, rope_frequencies, unembed
from ccjax.models.llama3.params import Params
from ccjax.text import Tokenizer

__all__ = [
    "KV",
    "UNUSED",
    "AttentionInputs",
    "AttentionOutput",
    "PartialPrefill",
    "attention",
    "decode",
    "deviations",
    "generate",
    "load",
    "move_keys",
    "partial_prefill",
    "prefill",
]


@struct.dataclass
class KV:
    """Keys and values of all layers for the S slots of a context: a pytree. How keys rest is private; `move_keys`
    changes their positions. `kv[a:b]` is the KV of some slots.

    Attributes:
      positions: of each slot, in any order; `UNUSED` (INT32_MAX) for a slot that no token attends to.
    """

    # Keys rest rotated to their positions: each is read more often than moved.
    _k: Float[Array, "L S K H"]
    _v: Float[Array, "L S K H"]
    positions: Int[Array, "S"]
    _frequencies: tuple[float, ...] = struct.field(pytree_node=False)

    @property
    def num_slots(self) -> int:
        """S, used or not."""
        return self.positions.shape[0]

    @property
    def end(self) -> Int[Array, ""]:
        """The position behind the last used one, 0 if there is none."""
        return jnp.max(jnp.where(self.positions == UNUSED, -1, self.positions), initial=-1) + 1

    def __getitem__(self, slots: slice) -> KV:
        return dataclasses.replace(self, _k=self._k[:, slots], _v=self._v[:, slots], positions=self.positions[slots])

    def append(self, positions: Int[Array, "N"]) -> KV:
        """With N more slots at these positions, which `partial_prefill` has to compute before anything attends to them;
        `UNUSED` positions are room for `decode`."""
        positions = _integers("positions", positions, ("N",), least=0)
        zeros = jnp.zeros((*self._k.shape[:1], *positions.shape, *self._k.shape[2:]), self._k.dtype)
        return KV.merge(self, dataclasses.replace(self, _k=zeros, _v=zeros, positions=positions.astype(jnp.int32)))

    @staticmethod
    def merge(*parts: KV) -> KV:
        """The slots of all parts, one after another; positions stay as they are.

        Raises:
          ValueError: the parts are of different models, or there is none.
        """
        if not parts:
            raise ValueError("parts: wanted at least 1, got none")
        for part in parts[1:]:
            _check_same("parts", _model_of(parts[0]), _model_of(part))
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, max(0, leaves[0].ndim - 3)), *parts)


class PartialPrefill(NamedTuple):
    """Result of `partial_prefill`.

    Attributes:
      logits: [V] float32, next-token logits of the last computed token; [M, V] of those asked for.
      kv: the context with the computed rows replaced.
      mass: [L, N, C] float32, softmax mass of each computed token on each segment, mean over heads; None without
        segments.
    """

    logits: Float[Array, "*M V"]
    kv: KV
    mass: Float[Array, "L N C"] | None


def load(
    path: str | Path, *, dtype: str = "float32", quantization: str | None = None
) -> tuple[Params, LlamaConfig, Tokenizer | None]:
    """Weights, configuration and tokenizer of a model that `Engine.from_pretrained` accepts: a Hugging Face directory,
    a GGUF file, "smollm2", "demo" or "random:NAME".

    Args:
      quantization: "int8" or "fp8"; None keeps weights in `dtype`.

    Returns:
      The tokenizer is None for a directory without one.

    Raises:
      ConfigError: there is no such model, `dtype` or `quantization`.
      CheckpointError: files are missing or inconsistent.
    """
    EngineConfig().replace(dtype=dtype, quantization=quantization)  # raises if one of them does not exist
    loaded = load_model(path, dtype=dtype, quantization=quantization)
    return loaded.params, loaded.config, loaded.tokenizer


def prefill(
    params: Params,
    config: LlamaConfig,
    token_ids: Int[Array, "N"],
    *,
    start: int | Int[Array, ""] = 0,
    num_tokens: int | Int[Array, ""] | None = None,
    logits_of: Int[Array, "M"] | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "*M V"], KV]:
    """Computes tokens with nothing before them; returns the next-token logits, float32, and their KV of N slots.

    Args:
      start: position of the first token.
      num_tokens: tokens behind the first `num_tokens` are padding, in unused slots; None if there is none.
      logits_of: indices of the tokens whose logits are returned, [M, V]; None for the last one's, [V].
      implementation: of the attention, as in `attention`; "reference" is differentiable.
      mesh: mesh of the weights if they are on several devices (`ccjax.models.llama3.sharding`).

    Raises:
      ValueError: an argument has a wrong shape, dtype or (if concrete) value, or there are no tokens.
      NotImplementedError: the implementation does not exist or does not support the model.
    """
    token_ids = _integers("token_ids", token_ids, ("N",))
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    if num_tokens is None:
        num_tokens = token_ids.shape[0]
    num_tokens = _integers("num_tokens", num_tokens, (), within=range(1, token_ids.shape[0] + 1)).astype(jnp.int32)
    start = _integers("start", start, ()).astype(jnp.int32)
    positions = jnp.where(index < num_tokens, start + index, UNUSED)
    zeros = jnp.zeros((config.num_layers, *index.shape, config.num_kv_heads, config.head_dim), params.embedding.dtype)
    logits_of = num_tokens - 1 if logits_of is None else logits_of
    how = {"logits_of": logits_of, "implementation": implementation, "mesh": mesh}
    kv = KV(zeros, zeros, positions, tuple(map(float, rope_frequencies(config))))
    logits, kv, _ = partial_prefill(params, config, kv, token_ids, index, **how)
    return logits, kv


def partial_prefill(
    params: Params,
    config: LlamaConfig,
    kv: KV,
    token_ids: Int[Array, "N"],
    rows: Int[Array, "N"],
    *,
    segments: Int[Array, "S"] | None = None,
    num_segments: int = 0,
    logits_of: Int[Array, "*M"] | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> PartialPrefill:
    """Computes any subset of a context's tokens, which attend to all slots at their own and earlier positions
    (CacheCraft sec. 3.4.3). All of them are computed in every layer; all other slots keep their keys and values.

    Args:
      token_ids: the tokens to compute.
      rows: their slots, all distinct; slots past the end are padding.
      segments: segment of each slot in [0, num_segments), for the mass; other values belong to no segment.
      num_segments: number of segments, static.
      logits_of: indices into `rows` of the tokens whose logits are returned; None for the last one's.
      implementation, mesh: as in `prefill`.

    Raises:
      ValueError: an argument is empty or has a wrong shape, dtype or (if concrete) value; the KV is of another model.
      NotImplementedError: the implementation does not exist or does not support the model.
    """
    token_ids = _integers("token_ids", token_ids, ("N",))
    rows = _integers("rows", rows, token_ids.shape)
    _check_model(params, config, kv)
    if (segments is None) != (num_segments == 0):
        raise ValueError(f"segments and num_segments={num_segments}: wanted both or neither")
    if segments is not None:
        segments = _integers("segments", segments, kv.positions.shape)
    if logits_of is not None:
        logits_of = _integers("logits_of", logits_of, None, least=0, within=range(-rows.size, rows.size))
    settings = StepSettings(config, implementation, mesh)
    done = forward_rows(params, token_ids, rows, kv._k, kv._v, kv.positions, segments, num_segments, settings=settings)
    asked = done.x[-1] if logits_of is None else done.x[logits_of]
    logits = unembed(asked.reshape(-1, config.d_model), params, config.rms_norm_eps)
    return PartialPrefill(
        logits.reshape(*asked.shape[:-1], logits.shape[-1]), dataclasses.replace(kv, _k=done.k, _v=done.v), done.mass
    )


def deviations(
    params: Params,
    config: LlamaConfig,
    kv: KV,
    token_ids: Int[Array, "S"],
    *,
    layer: int = 1,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "S"]:
    """How much the keys and values of each slot differ from those that a full prefill computes, Euclidean distance over
    all heads in one layer, float32: the tokens to recompute first (CacheBlend sec. 4.3). Computes all tokens in the
    layers before it. In layer 0 they depend on the token alone. Unused slots are -inf: behind all tokens in a ranking.

    Args:
      token_ids: tokens of all slots.
      implementation, mesh: as in `prefill`.

    Raises:
      ValueError: the tokens are not as many as slots or none, the KV is of another model, or there is no such layer.
    """
    token_ids = _integers("token_ids", token_ids, kv.positions.shape)
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer: wanted 0 to {config.num_layers - 1}, got {layer}")
    _check_model(params, config, kv)
    settings = StepSettings(config, implementation, mesh)
    before, rows = dataclasses.replace(params, layers=params.layers[:layer]), jnp.arange(kv.num_slots, dtype=jnp.int32)
    x = forward_rows(before, token_ids, rows, kv._k[:layer], kv._v[:layer], kv.positions, settings=settings).x
    _, k, v = project_qkv(x, params.layers[layer], config.rms_norm_eps)
    at = jnp.where(kv.positions == UNUSED, 0, kv.positions)
    k = rope.rotate(k, rope.rotation_rows(at, _frequencies(kv)))
    pairs = (k, kv._k[layer]), (v, kv._v[layer])
    square = sum(jnp.square(a.astype(jnp.float32) - b.astype(jnp.float32)).sum((1, 2)) for a, b in pairs)
    is_zero = square == 0  # there the gradient of a square root is NaN
    distance = jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, square)))
    return jnp.where(kv.positions == UNUSED, -jnp.inf, distance)


def decode(
    params: Params,
    config: LlamaConfig,
    kv: KV,
    token_id: Int[Array, ""],
    *,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "V"], KV]:
    """Computes one new token behind all others, in the first unused slot, through the whole model; returns the logits
    of the next one, float32, and the KV with it. The logits are NaN if there is no unused slot.

    Args:
      implementation, mesh: as in `prefill`.

    Raises:
      ValueError: the token is not one integer, or the KV has no slots or is of another model.
    """
    token_id = _integers("token_id", token_id, ())
    _check_model(params, config, kv)
    is_unused = kv.positions == UNUSED
    slot = jnp.where(is_unused.any(), jnp.argmax(is_unused), kv.num_slots).astype(jnp.int32)
    kv = dataclasses.replace(kv, positions=kv.positions.at[slot].set(kv.end, mode="drop"))
    how = {"implementation": implementation, "mesh": mesh}
    logits, kv, _ = partial_prefill(params, config, kv, token_id[None], slot[None], **how)
    return jnp.where(is_unused.any(), logits, jnp.nan), kv


def generate(
    params: Params,
    config: LlamaConfig,
    kv: KV,
    token_id: Int[Array, ""],
    num_tokens: int,
    *,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[Int[Array, "M"], KV]:
    """The likeliest tokens one after another, `num_tokens` in all, of which `token_id` is the first; and the KV with
    all but the last. Ends of texts do not stop it.

    Args:
      num_tokens: at least 1, static.
      implementation, mesh: as in `prefill`.

    Raises:
      ValueError: the token is not one integer, or `num_tokens` is below 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: wanted at least 1, got {num_tokens}")
    first = _integers("token_id", token_id, ())
    compute = functools.partial(decode, params, config, implementation=implementation, mesh=mesh)

    def step(carry: tuple[KV, Array], _: None) -> tuple[tuple[KV, Array], Array]:
        logits, kv = compute(*carry)
        token = logits.argmax().astype(first.dtype)
        return (kv, token), token

    kv = kv.append(jnp.full(num_tokens - 1, UNUSED, jnp.int32))
    (kv, _), others = lax.scan(step, (kv, first), length=num_tokens - 1)
    return jnp.concatenate([first[None], others]), kv


def move_keys(
    kv: KV,
    old: int | Int[Array, "*#S"],
    new: int | Int[Array, "*#S"],
    *,
    implementation: str | None = None,
) -> KV:
    """The KV moved by `new - old` positions; only the difference counts. Unused slots stay unused.

    Args:
      old, new: one position for all slots, or one for each.
      implementation: of `ccjax.kernels.rope.move_keys`.

    Raises:
      ValueError: `old` or `new` are no integers, or neither one position nor as many as slots.
    """
    old, new = (_integers(name, at, None, least=0) for name, at in (("old", old), ("new", new)))
    shift = new.astype(jnp.int32) - old.astype(jnp.int32)
    if shift.shape not in ((), kv.positions.shape):
        raise ValueError(f"old and new: wanted one position or {kv.positions.shape}, got {shift.shape}")
    shift = jnp.where(kv.positions == UNUSED, 0, shift)
    layers, _, *heads = kv._k.shape
    by = jnp.tile(shift, layers)
    keys = kv._k.reshape(-1, *heads)
    moved = rope.move_keys(keys, jnp.zeros_like(by), by, _frequencies(kv), implementation=implementation)
    return dataclasses.replace(kv, _k=moved.reshape(kv._k.shape), positions=kv.positions + shift)


def _frequencies(kv: KV) -> np.ndarray:
    return np.asarray(kv._frequencies, np.float32)


def _integers(
    name: str, value: Any, shape: tuple[int | str, ...] | None, *, least: int = 1, within: range | None = None
) -> Array:
    """The value as an array of at least `least` integers; N in `shape` is any length, None is any shape.

    Raises:
      ValueError: it is not one, has another shape, or has concrete values that are not `within` the range.
    """
    value = jnp.asarray(value)
    wanted = value.shape if shape is None else shape
    if value.ndim != len(wanted) or any(n not in ("N", m) for n, m in zip(wanted, value.shape, strict=True)):
        raise ValueError(f"{name}: wanted shape ({', '.join(map(str, wanted))}), got {value.shape}")
    if value.size < least:
        raise ValueError(f"{name}: wanted at least {least}, got none")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name}: wanted integers, got {value.dtype}")
    if within is not None and not isinstance(value, core.Tracer):
        for outside in {*np.asarray(value).ravel().tolist()} - {*within}:
            raise ValueError(f"{name}: wanted {within[0]} to {within[-1]}, got {outside}")
    return value


def _model_of(kv: KV) -> tuple[Any, ...]:
    layers, _, heads, head_dim = kv._k.shape
    return layers, heads, head_dim, str(kv._k.dtype), *kv._frequencies


def _check_model(params: Params, config: LlamaConfig, kv: KV) -> None:
    """Raises ValueError unless the KV is of such a model and has slots."""
    shape, dtype = (config.num_layers, config.num_kv_heads, config.head_dim), str(params.embedding.dtype)
    _check_same("kv", (*shape, dtype, *map(float, rope_frequencies(config))), _model_of(kv))
    if not kv.num_slots:
        raise ValueError("kv: wanted at least one slot, got none")


def _check_same(argument: str, wanted: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    names = "layers", "kv heads", "head dimension", "dtype", *["RoPE frequency (theta, scaling)"] * len(wanted)
    for name, one, other in zip(names, wanted, got, strict=False):
        if one != other:
            raise ValueError(f"{argument}: wanted the KV of one model, with {name} {one}, got {other}")
