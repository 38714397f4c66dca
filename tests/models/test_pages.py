"""Writing rows to slots, in the form of each platform, against a loop over rows."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from ccjax.models.llama3 import pages as pages_module
from ccjax.models.llama3.pages import read_slots, write_by_head, write_by_slot, write_slots
from ccjax.models.llama3.sharding import EVERYWHERE, KV_ROWS, PAGES

K, P, T, H = 4, 5, 8, 16
MOST = P * T
SLOTS = {
    "some": [3, 39, 0, 8, 17],
    "past the end": [3, P * T, 0, P * T + 1, K * P * T, np.iinfo(np.int32).max, 39],
    "none": [P * T] * 4,
    "all": [*range(P * T - 1, -1, -1)],
}


def write(pages, slots, rows):
    return write_slots(pages, slots, rows, None)


def over_four_devices(pages, slots, rows):
    return write_slots(pages, slots, rows, four_devices())


def four_devices():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("kv", "group"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("writer", [write_by_slot, write_by_head, write, over_four_devices])
def test_each_row_is_written_to_its_slot_and_nothing_else_changes(writer, slots, dtype):
    slots = [*slots, *[P * T] * (MOST - len(slots))]  # one size to compile; slots past the end are not written
    rng = np.random.default_rng(0)
    before = np.asarray(jnp.asarray(rng.standard_normal((K, P, T, H)), dtype))
    rows = np.asarray(jnp.asarray(rng.standard_normal((len(slots), K, H)), dtype))
    expected = before.copy()
    for slot, row in zip(slots, rows, strict=True):
        if slot < P * T:
            expected[:, slot // T, slot % T] = row
    where = jnp.asarray(slots, jnp.int32)
    after = jax.jit(writer)(jnp.asarray(before), where, jnp.asarray(rows))
    assert np.asarray(after).tobytes() == expected.tobytes()
    found = np.asarray(read_slots(after, where))
    assert found.tobytes() == np.where((np.asarray(slots) < P * T)[:, None, None], rows, 0).astype(rows.dtype).tobytes()


@pytest.mark.parametrize(("platform", "rank"), [("tpu", 2), ("cpu", 3), ("cuda", 3)])
def test_pages_are_written_head_by_head_on_tpu(platform, rank):
    """The ahead-of-time check shows the cost of the other form there: `temp_bytes` of a decode step."""
    arrays = (jnp.zeros((K, P, T, H)), jnp.zeros(3, jnp.int32), jnp.zeros((3, K, H)))
    text = jax.jit(write).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    (operand,) = re.findall(r'"stablehlo.scatter".*?\}\) : \(tensor<([0-9x]+)xf32>', text, re.DOTALL)
    assert operand.count("x") + 1 == rank


@pytest.mark.parametrize("writer", [write_by_slot, write_by_head])
def test_sharded_page_writes_need_no_collectives(writer, monkeypatch):
    monkeypatch.setattr(pages_module, "write_by_slot", writer)
    mesh, shapes = four_devices(), ((K, P, T, H), (3,), (3, K, H))
    split = [NamedSharding(mesh, spec) for spec in (PAGES, EVERYWHERE, KV_ROWS)]
    kinds = (jnp.float32, jnp.int32, jnp.float32)
    arrays = [
        jax.device_put(jnp.zeros(*arguments), place)
        for arguments, place in zip(zip(shapes, kinds, strict=True), split, strict=True)
    ]
    compiled = jax.jit(lambda *given: over_four_devices(*given), out_shardings=split[0]).lower(*arrays).compile()
    assert not re.search("all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", compiled.as_text())
