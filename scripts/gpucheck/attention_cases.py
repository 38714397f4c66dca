"""Attention problems with edge cases, and their float64 solution, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.kernels.attention import attention
from scripts.gpucheck.rotation import rotate

UNUSED = np.iinfo(np.int32).max
TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-2}
"""Largest absolute error of output, mass and lse; measured at most 1.1e-6 and 1.1e-2."""
IMPLEMENTATIONS = ["reference", "xla", "triton_interpret", "mosaic_tpu_interpret"]
KERNELS = ["triton_interpret", "mosaic_tpu_interpret"]

jitted = jax.jit(attention, static_argnames=("scale", "num_segments", "implementation"))


def oracle(q, k, v, *, visible, scale, onehot):
    """softmax(scale q k^T) over visible slots, head by head, float64; zeros for rows that see nothing."""
    num_queries, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    used = visible.any(0)  # other slots contain NaN
    visible, onehot = visible[:, used], onehot[used]
    out = np.zeros((num_queries, num_heads, head_dim))
    mass = np.zeros((num_queries, num_heads, onehot.shape[1]))
    lse = np.full((num_queries, num_heads), -np.inf)
    sees = visible.any(1)
    for head in range(num_heads):
        keys, values = (part[used, head // group].astype(np.float64) for part in (k, v))
        scores = np.where(visible[sees], scale * q[sees, head].astype(np.float64) @ keys.T, -np.inf)
        largest = scores.max(1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(1, keepdims=True)
        lse[sees, head] = (largest + np.log(total))[:, 0]
        out[sees, head] = weights / total @ values
        mass[sees, head] = weights / total @ onehot
    return out, mass, lse


class Case:
    """Signed normal inputs, scattered query positions, unused slots with NaN at the end.

    With `theta`, the keys are before RoPE and the call rotates them.
    """

    num_segments = 7

    def __init__(
        self, *, heads=4, kv_heads=2, head_dim=16, queries=37, slots=150, used=140, dtype="float32", theta=None, seed=0
    ):
        random = np.random.default_rng(seed)
        self.dtype = dtype

        def draw(*shape):
            return np.array(jnp.asarray(random.normal(size=shape), dtype).astype(jnp.float32))

        self.q, self.k = draw(queries, heads, head_dim), draw(slots, kv_heads, head_dim)
        self.v = draw(slots, kv_heads, head_dim)
        self.k[used:], self.v[used:] = np.nan, np.nan
        self.q_pos = np.sort(random.choice(used, queries, replace=False)).astype(np.int32)
        self.k_pos = np.where(np.arange(slots) < used, np.arange(slots), UNUSED).astype(np.int32)
        self.segment = np.minimum(np.arange(slots) // 23, 6).astype(np.int32)
        self.segment[:5] = -1  # belongs to no segment
        self.q_request: np.ndarray | None = None
        self.k_request: np.ndarray | None = None
        self.k_frequencies = None if theta is None else frequencies(head_dim, theta)
        self.scale = head_dim**-0.5

    def arguments(self, **changes):
        """(q, k, v), keyword arguments of `attention`."""
        inputs = {name: changes.pop(name, getattr(self, name)) for name in ("q", "k", "v")}
        arguments = dict(
            q_pos=self.q_pos,
            k_pos=self.k_pos,
            scale=self.scale,
            k_segment=self.segment,
            num_segments=self.num_segments,
            q_request=self.q_request,
            k_request=self.k_request,
            k_frequencies=self.k_frequencies,
        )
        arguments |= changes
        arguments = {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
        return [jnp.asarray(value, self.dtype) for value in inputs.values()], arguments

    def run(self, implementation, **changes):
        inputs, arguments = self.arguments(**changes)
        return jitted(*inputs, **arguments, implementation=implementation)

    def expected(self):
        visible = self.k_pos[None] <= self.q_pos[:, None]
        if self.q_request is not None and self.k_request is not None:
            visible &= self.k_request[None] == self.q_request[:, None]
        onehot = (self.segment[:, None] == np.arange(self.num_segments)).astype(np.float64)
        k = self.k
        if self.k_frequencies is not None:
            k = rotate(k.astype(np.float64), np.where(self.k_pos == UNUSED, 0, self.k_pos), self.k_frequencies)
        return oracle(self.q, k, self.v, visible=visible, scale=self.scale, onehot=onehot)

    def shuffled(self):
        """The same slots in another order."""
        order = np.random.default_rng(1).permutation(len(self.k_pos))
        for name in ("k", "v", "k_pos", "segment"):
            setattr(self, name, getattr(self, name)[order])
        return self


def packed(**shape):
    """Three requests of 60 tokens, 20 of them computed, in one call; block and request boundaries never coincide."""
    case = Case(queries=60, slots=180, used=180, **shape)
    case.k_request = np.repeat([4, 0, 7], 60).astype(np.int32)
    case.k_pos = np.tile(np.arange(60), 3).astype(np.int32)
    case.q_request = np.repeat([4, 0, 7], 20).astype(np.int32)
    case.q_pos = np.sort(np.arange(60).reshape(20, 3).T, axis=1).reshape(-1).astype(np.int32)
    return case


def frequencies(head_dim, theta):
    """Inverse frequencies of plain RoPE."""
    return theta ** (-np.arange(0, head_dim, 2) / head_dim).astype(np.float32)


def worst(result, expected):
    """Largest absolute difference over out, mass and lse; NaN counts as infinite."""
    pairs = zip(result, expected, strict=True)
    both = [(np.asarray(got, np.float64), want) for got, want in pairs]
    with np.errstate(invalid="ignore"):  # -inf minus -inf, if both are -inf
        differences = [np.abs(np.where(got == want, 0.0, got - want)) for got, want in both]
    return max(np.where(np.isnan(difference), np.inf, difference).max() for difference in differences)
