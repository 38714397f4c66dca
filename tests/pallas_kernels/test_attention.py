"""Attention implementations against a float64 oracle written from the definition; mutants show each tolerance bites."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention

UNUSED = np.iinfo(np.int32).max
TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-2}


def oracle(q, k, v, *, visible, scale, onehot):
    """softmax(scale q k^T) over visible slots, row by row, float64; zeros for rows that see nothing."""
    num_queries, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out = np.zeros((num_queries, num_heads, head_dim))
    mass = np.zeros((num_queries, num_heads, onehot.shape[1]))
    lse = np.full((num_queries, num_heads), -np.inf)
    for n in range(num_queries):
        slots = np.flatnonzero(visible[n])
        for head in range(num_heads if len(slots) else 0):
            scores = scale * (k[slots, head // group].astype(np.float64) @ q[n, head].astype(np.float64))
            weights = np.exp(scores - scores.max())
            lse[n, head] = scores.max() + np.log(weights.sum())
            weights /= weights.sum()
            out[n, head] = weights @ v[slots, head // group].astype(np.float64)
            mass[n, head] = weights @ onehot[slots]
    return out, mass, lse


class Case:
    """Signed normal inputs, scattered query positions, unused slots at the end that hold huge finite values."""

    def __init__(self, *, heads=4, kv_heads=2, head_dim=16, queries=37, slots=150, used=140, dtype="float32", seed=0):
        random = np.random.default_rng(seed)
        self.dtype = dtype

        def draw(*shape):
            return np.array(jnp.asarray(random.normal(size=shape), dtype).astype(jnp.float32))

        self.q, self.k = draw(queries, heads, head_dim), draw(slots, kv_heads, head_dim)
        self.v = draw(slots, kv_heads, head_dim)
        self.k[used:], self.v[used:] = 1e4, 1e4
        self.q_pos = np.sort(random.choice(used, queries, replace=False)).astype(np.int32)
        self.k_pos = np.where(np.arange(slots) < used, np.arange(slots), UNUSED).astype(np.int32)
        self.segment = np.minimum(np.arange(slots) // 23, 6).astype(np.int32)
        self.segment[:5] = -1  # belongs to no segment
        self.q_request = self.k_request = None
        self.scale = head_dim**-0.5

    def run(self, implementation, **changes):
        inputs = {name: changes.pop(name, getattr(self, name)) for name in ("q", "k", "v")}
        arrays = {name: jnp.asarray(value, self.dtype) for name, value in inputs.items()}
        arguments = dict(q_pos=self.q_pos, k_pos=self.k_pos, scale=self.scale, k_segment=self.segment, num_segments=7)
        if self.q_request is not None:
            arguments |= dict(q_request=self.q_request, k_request=self.k_request)
        arguments |= changes
        arguments = {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
        return attention(*arrays.values(), **arguments, implementation=implementation)

    def expected(self):
        visible = self.k_pos[None] <= self.q_pos[:, None]
        if self.q_request is not None:
            visible &= self.k_request[None] == self.q_request[:, None]
        onehot = (self.segment[:, None] == np.arange(7)).astype(np.float64)
        return oracle(self.q, self.k, self.v, visible=visible, scale=self.scale, onehot=onehot)


def worst(result, expected):
    """Largest absolute difference over out, mass and lse."""
    pairs = zip(result, expected, strict=True)
    both = [(np.asarray(got, np.float64), want) for got, want in pairs]
    with np.errstate(invalid="ignore"):  # -inf minus -inf, where both agree
        return max(np.abs(np.where(got == want, 0.0, got - want)).max() for got, want in both)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "shape",
    [
        dict(heads=4, kv_heads=4),
        dict(heads=4, kv_heads=2),
        dict(heads=8, kv_heads=2, head_dim=24),
        dict(heads=8, kv_heads=1),
        dict(queries=1),
        dict(queries=130, slots=1100, used=1090),
        dict(queries=64, slots=512, used=512, head_dim=64),
        dict(queries=200, slots=200, used=200),
        dict(dtype="bfloat16"),
    ],
    ids=str,
)
def test_agrees_with_the_oracle(implementation, shape):
    case = Case(**shape)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "mutant",
    [
        lambda case: dict(q_pos=case.q_pos - 1),
        lambda case: dict(k_pos=np.where(case.segment == 2, UNUSED, case.k_pos).astype(np.int32)),
        lambda case: dict(scale=case.scale * 1.05),
        lambda case: dict(k=np.roll(case.k, 1, axis=1)),
        lambda case: dict(k_segment=case.segment + 1),
    ],
    ids=["mask off by one", "a chunk dropped", "wrong scale", "wrong kv head", "wrong segment"],
)
def test_broken_variants_exceed_the_tolerance(implementation, mutant):
    for dtype in ("float32", "bfloat16"):
        case = Case(dtype=dtype)
        assert worst(case.run(implementation, **mutant(case)), case.expected()) > TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_packed_requests_do_not_see_each_other(implementation):
    case = Case(queries=60, slots=180, used=180)
    case.k_request = np.repeat(np.arange(3), 60).astype(np.int32)
    case.k_pos = np.tile(np.arange(60), 3).astype(np.int32)
    case.q_request = np.repeat(np.arange(3), 20).astype(np.int32)
    case.q_pos = np.sort(np.arange(60).reshape(20, 3).T, axis=1).reshape(-1).astype(np.int32)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_rows_that_see_nothing_are_zero(implementation):
    case = Case()
    case.q_pos = np.concatenate([[-1, -1], case.q_pos[2:]]).astype(np.int32)
    result = case.run(implementation)
    assert worst(result, case.expected()) < TOLERANCE["float32"]
    assert not np.asarray(result.out[:2]).any() and not np.asarray(result.mass[:2]).any()


def test_mass_of_all_segments_is_one():
    case = Case()
    case.segment = np.maximum(case.segment, 0)
    mass = np.asarray(case.run("xla").mass)
    np.testing.assert_allclose(mass.sum(-1), 1.0, atol=1e-5)


def test_without_segments_there_is_no_mass_and_the_same_output():
    case = Case()
    bare = case.run("xla", k_segment=None, num_segments=0)
    assert bare.mass is None
    np.testing.assert_allclose(bare.out, case.run("xla").out, atol=1e-6)


def test_bad_arguments_are_named():
    case = Case()
    with pytest.raises(NotImplementedError, match="'cuda'"):
        case.run("cuda")
    with pytest.raises(ValueError, match="num_segments"):
        case.run("xla", num_segments=0)
    with pytest.raises(ValueError, match="kv heads"):
        case.run("xla", k=case.k[:, [0, 0, 0]], v=case.v[:, [0, 0, 0]])
