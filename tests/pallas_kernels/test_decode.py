"""Paged decode attention against a float64 oracle written from the definition; mutants show each tolerance bites."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

from pallas_kernels.decode import decode_attention
from pallas_kernels.decode.blocks import MosaicDecodeBlocks
from pallas_kernels.decode.mosaic_tpu import mosaic_tpu_decode
from tests.oracles import rotate
from tests.pallas_kernels.cases import OPTIONS, frequencies, oracle, worst

TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-2}
"""Largest absolute error of output and lse."""
IMPLEMENTATIONS = ["reference", "xla", "triton_interpret", "mosaic_tpu_interpret"]

jitted = jax.jit(decode_attention, static_argnames=("scale", "implementation"), compiler_options=OPTIONS)


class Case:
    """Requests that share the pages of chunks whose last page is part full; everything that none holds is NaN.

    Request 0 has two chunks and its own tokens, request 1 the same chunks in the other order, request 2 one short chunk
    and request 3 nothing.
    """

    def __init__(self, *, heads=4, kv_heads=2, head_dim=32, page_size=16, dtype="float32", theta=None, seed=0):
        random = np.random.default_rng(seed)
        self.dtype, self.page_size = dtype, page_size
        chunks = {"one": 7 * page_size + 3, "two": 2 * page_size, "short": 5, "own": page_size - 1}
        num_pages = 23
        free = list(random.permutation(num_pages - 1) + 1)
        pages = {name: [free.pop() for _ in range(-(-size // page_size))] for name, size in chunks.items()}

        def draw(*shape):
            return np.array(jnp.asarray(random.normal(size=shape), dtype).astype(jnp.float32))

        self.q = draw(4, heads, head_dim)
        self.k, self.v = (np.full((kv_heads, num_pages, page_size, head_dim), np.nan, np.float32) for _ in range(2))
        for name, size in chunks.items():
            for n, page in enumerate(pages[name]):
                used = min(page_size, size - n * page_size)
                self.k[:, page, :used] = draw(kv_heads, used, head_dim)
                self.v[:, page, :used] = draw(kv_heads, used, head_dim)
        entries = 12
        self.table = np.full((4, entries), 10**6, np.int32)
        self.length, self.start = np.zeros((4, entries), np.int32), np.zeros((4, entries), np.int32)
        for request, names in enumerate((("one", "two", "own"), ("two", "one"), ("short",), ())):
            position = entry = 0
            for name in names:
                for n, page in enumerate(pages[name]):
                    used = min(page_size, chunks[name] - n * page_size)
                    self.table[request, entry], self.length[request, entry] = page, used
                    self.start[request, entry] = position
                    position, entry = position + used, entry + 1
        # Entries that hold nothing may stand between others.
        self.table[2, 3], self.length[2, 3], self.start[2, 3] = self.table[2, 0], self.length[2, 0], self.start[2, 0]
        self.length[2, 0] = 0
        self.k_frequencies = None if theta is None else frequencies(head_dim, theta)
        self.scale = head_dim**-0.5

    def arguments(self, **changes):
        values = dict(page_table=self.table, page_length=self.length, scale=self.scale)
        if self.k_frequencies is not None:
            values |= dict(page_start=self.start, k_frequencies=self.k_frequencies)
        inputs = [jnp.asarray(changes.pop(name, getattr(self, name)), self.dtype) for name in ("q", "k", "v")]
        values |= changes
        return inputs, {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in values.items()}

    def run(self, implementation, **changes):
        inputs, arguments = self.arguments(**changes)
        return jitted(*inputs, **arguments, implementation=implementation)

    def expected(self):
        """Each request's slots laid out in a row, through the oracle of the prefill."""
        out, lse = np.zeros(self.q.shape), np.full(self.q.shape[:2], -np.inf)
        for request in range(len(self.q)):
            k, v = [], []
            for entry in np.flatnonzero(self.length[request]):
                page, used = self.table[request, entry], self.length[request, entry]
                keys = self.k[:, page, :used].transpose(1, 0, 2).astype(np.float64)
                if self.k_frequencies is not None:
                    keys = rotate(keys, self.start[request, entry] + np.arange(used), self.k_frequencies)
                k.append(keys)
                v.append(self.v[:, page, :used].transpose(1, 0, 2))
            if k:
                k, v = np.concatenate(k), np.concatenate(v)
                visible, nothing = np.ones((1, len(k)), bool), np.zeros((len(k), 0))
                result = oracle(self.q[request][None], k, v, visible=visible, scale=self.scale, onehot=nothing)
                out[request], lse[request] = result[0][0], result[2][0]
        return out, lse


SHAPES = [
    dict(heads=4, kv_heads=4, head_dim=64),
    dict(heads=4, kv_heads=2, head_dim=128),
    dict(heads=4, kv_heads=1),
    dict(heads=8, kv_heads=1, head_dim=64),
    dict(page_size=32),
    dict(heads=4, kv_heads=1, head_dim=128, dtype="bfloat16"),
    dict(theta=10000.0),
    dict(theta=10000.0, head_dim=64, dtype="bfloat16"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_oracle(implementation, shape):
    case = Case(**shape)
    assert worst(case.run(implementation), case.expected()) < TOLERANCE[case.dtype]


MUTANTS = {
    "a token too few": lambda case: dict(page_length=np.maximum(case.length - (case.length == 3), 0)),
    "a page of another chunk": lambda case: dict(page_table=np.where(case.length == 3, case.table[0, 0], case.table)),
    "a chunk dropped": lambda case: dict(page_length=case.length * (np.arange(12) < 8)),
    "wrong scale": lambda case: dict(q=case.q * 1.05),
    "wrong kv head": lambda case: dict(k=np.roll(case.k, 1, axis=0)),
    "wrong theta": lambda case: dict(k_frequencies=frequencies(case.q.shape[2], 500.0)),
    "rotated backwards": lambda case: dict(k_frequencies=-case.k_frequencies),
    "pages without a start": lambda case: dict(page_start=np.zeros_like(case.start)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_broken_variants_exceed_the_tolerance(implementation, mutant, dtype):
    case = Case(head_dim=64, theta=10000.0, dtype=dtype)
    assert worst(case.run(implementation, **mutant(case)), case.expected()) > TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_request_without_any_token_gets_zeros(implementation):
    result = Case().run(implementation)
    assert not np.asarray(result.out[3]).any() and np.isneginf(np.asarray(result.lse[3])).all()


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret", "mosaic_tpu_interpret"])
def test_agrees_with_the_paged_attention_of_jax_where_that_one_can_be_used(implementation):
    """One length per request, every page but the last one full; written by others."""
    random = np.random.default_rng(3)
    q, k, v = (random.normal(size=shape) for shape in ((2, 8, 64), (2, 40, 16, 64), (2, 40, 16, 64)))
    table = random.permutation(32).reshape(2, 16).astype(np.int32)
    lengths = np.array([250, 3], np.int32)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    wanted = paged_attention(q * 64**-0.5, k, v, jnp.asarray(table), jnp.asarray(lengths), k_splits=4, interpret=True)
    page_length = np.clip(lengths[:, None] - np.arange(16) * 16, 0, 16).astype(np.int32)
    tables = dict(page_table=jnp.asarray(table), page_length=jnp.asarray(page_length))
    got = jitted(q, k, v, **tables, scale=64**-0.5, implementation=implementation)
    assert np.abs(np.asarray(got.out) - np.asarray(wanted)).max() < TOLERANCE["float32"]
    longer = jitted(q, k, v, **(tables | dict(page_length=jnp.full((2, 16), 16))), scale=64**-0.5, implementation="xla")
    assert np.abs(np.asarray(longer.out) - np.asarray(wanted)).max() > TOLERANCE["float32"]


def test_the_tpu_kernel_does_not_race_and_reads_no_uninitialised_memory(capfd):
    case = Case(theta=10000.0)
    inputs, arguments = case.arguments()
    detector = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    run = functools.partial(mosaic_tpu_decode, blocks=MosaicDecodeBlocks(slots=64), interpret=detector)
    run = jax.jit(run, static_argnames=("scale",), compiler_options=OPTIONS)
    assert worst(run(*inputs, **arguments), case.expected()) < TOLERANCE["float32"]
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_bad_arguments_are_named():
    case = Case()
    with pytest.raises(ValueError, match="kv heads"):
        case.run("xla", q=case.q[:, :3])
    with pytest.raises(ValueError, match="page_start and k_frequencies"):
        case.run("xla", page_start=case.start)
    with pytest.raises(ValueError, match="k_frequencies: wanted shape"):
        case.run("xla", page_start=case.start, k_frequencies=np.ones(7, np.float32))
    with pytest.raises(NotImplementedError, match="head dimension .* got 24"):
        Case(head_dim=24).run("triton_interpret")
    with pytest.raises(NotImplementedError, match="pages .* got 12"):
        Case(page_size=12).run("triton_interpret")
    with pytest.raises(NotImplementedError, match="pages .* got 12"):
        Case(page_size=12).run("mosaic_tpu_interpret")
    with pytest.raises(NotImplementedError, match="'cuda'"):
        case.run("cuda")
