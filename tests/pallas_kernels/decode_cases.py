"""Decode problems with edge cases, and their float64 solution, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.kernels.decode import decode_attention
from ccjax.kernels.inputs import KVPages, PageTables
from ccjax.kernels.rope import rotation_rows
from tests.oracles import rotate
from tests.pallas_kernels.attention_cases import frequencies, oracle

jitted = jax.jit(decode_attention, static_argnames=("scale", "implementation"))


class Case:
    """Requests that share the pages of chunks whose last page is partly full; all unused slots are NaN.

    Request 0 has two chunks and its own tokens, request 1 the same chunks in the other order, request 2 one short chunk
    and request 3 nothing.
    """

    def __init__(self, *, heads=4, kv_heads=2, head_dim=32, page_size=16, dtype="float32", theta=10000.0, seed=0):
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
        # Unused entries may be between others.
        self.table[2, 3], self.length[2, 3], self.start[2, 3] = self.table[2, 0], self.length[2, 0], self.start[2, 0]
        self.length[2, 0] = 0
        self.k_frequencies = frequencies(head_dim, theta)
        self.scale = head_dim**-0.5

    def arguments(self, **changes):
        start, turns = changes.pop("page_start", self.start), changes.pop("k_frequencies", self.k_frequencies)
        q, k, v = (jnp.asarray(changes.pop(name, getattr(self, name)), self.dtype) for name in ("q", "k", "v"))
        tables = dict(page_table=self.table, page_length=self.length)
        tables |= dict(page_rotation=rotation_rows(jnp.asarray(start), turns)) | changes
        tables = PageTables(**{name: jnp.asarray(table) for name, table in tables.items()})
        return [q, KVPages(k, v), tables], {"scale": self.scale, "k_frequencies": jnp.asarray(turns)}

    def run(self, implementation, **changes):
        inputs, arguments = self.arguments(**changes)
        return jitted(*inputs, **arguments, implementation=implementation)

    def expected(self):
        """The result of the prefill oracle for each request's slots in a row."""
        out, lse = np.zeros(self.q.shape), np.full(self.q.shape[:2], -np.inf)
        for request in range(len(self.q)):
            k, v = [], []
            for entry in np.flatnonzero(self.length[request]):
                page, used = self.table[request, entry], self.length[request, entry]
                keys = self.k[:, page, :used].transpose(1, 0, 2).astype(np.float64)
                k.append(rotate(keys, self.start[request, entry] + np.arange(used), self.k_frequencies))
                v.append(self.v[:, page, :used].transpose(1, 0, 2))
            if k:
                k, v = np.concatenate(k), np.concatenate(v)
                visible, nothing = np.ones((1, len(k)), bool), np.zeros((len(k), 0))
                result = oracle(self.q[request][None], k, v, visible=visible, scale=self.scale, onehot=nothing)
                out[request], lse[request] = result[0][0], result[2][0]
        return out, lse


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
