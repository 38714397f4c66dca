"""Attention problems with edge cases, and their float64 solution, written from the definition.

The kernels of this machine's device are compiled; on a CPU those of all devices are interpreted.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.kernels.attention import attention
from ccjax.kernels.inputs import AttentionInputs
from ccjax.kernels.rope import rotation_rows
from tests.oracles import rotate

UNUSED = np.iinfo(np.int32).max
PLATFORM = jax.default_backend()
KERNELS = {"gpu": ["triton"], "tpu": ["mosaic_tpu"]}.get(PLATFORM, ["triton_interpret", "mosaic_tpu_interpret"])
IMPLEMENTATIONS = ["reference", "xla", *KERNELS]
TOLERANCE = {"float32": 3e-6 if PLATFORM == "cpu" else 1e-5, "bfloat16": 3e-2}
"""Largest absolute error of output, mass and lse; measured on a CPU at most 1.1e-6 and 1.1e-2, and 2.3e-3 in float32
with operands cut to TF32."""

jitted = jax.jit(attention, static_argnames=("scale", "implementation"))


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

    With `theta`, the keys are before RoPE and the call rotates them: `k_frequencies`, a change of the arguments too.
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
        """Positional arguments of `attention`: q, k, v and inputs; and the scale. `changes`: of any of these."""
        arrays = [jnp.asarray(changes.pop(name, getattr(self, name)), self.dtype) for name in ("q", "k", "v")]
        turns = changes.pop("k_frequencies", self.k_frequencies)
        named = dict(
            q_pos=self.q_pos,
            k_pos=self.k_pos,
            k_segment=self.segment,
            num_segments=self.num_segments,
            q_request=self.q_request,
            k_request=self.k_request,
        )
        named |= changes
        if turns is not None and "k_rotation" not in named:
            named["k_rotation"] = rotation_rows(jnp.where(named["k_pos"] == UNUSED, 0, named["k_pos"]), turns)
        named = {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in named.items()}
        return [*arrays, AttentionInputs(**named)], {"scale": self.scale}

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


class ServingCase(Case):
    """A problem of serving size in bfloat16: scattered queries over a context with unused slots, 16 segments.

    A softmax over 16,000 slots averages away the effect of one slot, so random numbers would hide a wrong mask. Here
    each computed token's own key and the first masked key are aligned with its query, and errors are relative. Only
    `rows` of one query head of each kv head are compared.
    """

    num_segments = 16
    tolerance = 3e-2
    """Largest `relative_error`; measured on a CPU 0.003, and 0.015 where the call rotates the keys."""

    def __init__(self, num_queries, num_slots, heads, theta=500000.0):
        """`heads`: query heads and kv heads, of 128."""
        shape = dict(heads=heads[0], kv_heads=heads[1], head_dim=128, queries=num_queries, slots=num_slots)
        super().__init__(**shape, used=num_slots - num_slots // 64, dtype="bfloat16", theta=theta)
        random = np.random.default_rng(1)
        self.segment = (np.arange(num_slots) * self.num_segments // num_slots).astype(np.int32)
        self.rows = np.sort(random.choice(num_queries, 16, replace=False))
        group = heads[0] // heads[1]
        self.heads = np.arange(heads[1]) * group + random.integers(0, group, heads[1])
        # A score of about log(slots) + 1/2 makes a key as heavy as all other slots, whose scores are standard normal.
        strength = (np.log(num_slots / 2) + 0.5) / np.sqrt(128)
        strong = strength * self.q.reshape(num_queries, heads[1], group, 128).sum(2)
        free = np.setdiff1d(self.q_pos + 1, self.q_pos) - 1  # the token after these is not computed
        free = free[free + 1 < np.count_nonzero(self.k_pos != UNUSED)]
        self._point(free + 1, strong[np.searchsorted(self.q_pos, free)])
        self._point(self.q_pos, strong)

    def _point(self, slots, keys):
        """Sets keys, given as they are after rotation."""
        keys = rotate(keys.astype(np.float64), -slots, self.k_frequencies)
        self.k[slots] = np.asarray(jnp.asarray(keys, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32))

    def expected(self):
        """Output, mass and lse of the sample."""
        k = rotate(self.k.astype(np.float64), np.where(self.k_pos == UNUSED, 0, self.k_pos), self.k_frequencies)
        onehot = (self.segment[:, None] == np.arange(self.num_segments)).astype(np.float64)
        q, visible = self.q[self.rows][:, self.heads], self.k_pos[None] <= self.q_pos[self.rows][:, None]
        return oracle(q, k, self.v, visible=visible, scale=self.scale, onehot=onehot)

    def relative_error(self, result, expected):
        """The largest of three errors: of a row's output relative to its length; of a mass relative to it plus 1e-4; of
        lse. NaN counts as infinite."""
        out, mass, lse = (np.asarray(part[self.rows], np.float64)[:, self.heads] for part in result)
        length = np.linalg.norm(expected[0], axis=-1)
        errors = (
            np.linalg.norm(out - expected[0], axis=-1) / length,
            np.abs(mass - expected[1]) / (expected[1] + 1e-4),
            np.abs(lse - expected[2]),
        )
        return max(np.where(np.isnan(error), np.inf, error).max() for error in errors)


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
