"""ccjax.functional's errors: each bad argument is named."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import ccjax
from ccjax.errors import ConfigError
from ccjax.functional import KV, decode, deviations, generate, load, move_keys, partial_prefill, prefill
from tests.engine.helpers import TinyModel

SHAPE = {"seed": 6, "num_hidden_layers": 3, "head_dim": 16}
MODEL = TinyModel(**SHAPE)
PARAMS, CONFIG = MODEL.loaded.params, MODEL.config
BAD = [
    (r"token_ids: wanted shape \(N\), got \(1, 5\)", lambda kv, ids: prefill(PARAMS, CONFIG, ids[None])),
    ("token_ids: wanted integers, got float32", lambda kv, ids: prefill(PARAMS, CONFIG, np.ones(5, np.float32))),
    (r"rows: wanted shape \(5\), got \(4,\)", lambda kv, ids: repair(kv, ids, ids[1:])),
    (r"segments: wanted shape \(5\), got \(4,\)", lambda kv, ids: repair(kv, ids, segments=ids[1:], num_segments=2)),
    ("num_segments=0: wanted both or neither", lambda kv, ids: repair(kv, ids, segments=ids)),
    ("kv: wanted the KV .* layers 2, got 3", lambda kv, ids: decode(*another_model(num_hidden_layers=2), kv, ids[0])),
    ("parts: wanted the KV .* layers 3, got 2", lambda kv, ids: merge(kv, ids, num_hidden_layers=2)),
    (r"parts: .* RoPE frequency .* 0\.\d+, got 0\.\d+", lambda kv, ids: merge(kv, ids, rope_theta=1e3)),
    (
        r"kv: .* RoPE frequency .* 0\.\d+, got 0\.\d+",
        lambda kv, ids: decode(*another_model(rope_theta=1e3), kv, ids[0]),
    ),
    ("parts: wanted at least 1, got none", lambda kv, ids: KV.merge()),
    ("kv: .* dtype float32, got bfloat16", lambda kv, ids: repair(in_bfloat16(kv), ids)),
    ("kv: .* dtype .* bfloat16", lambda kv, ids: deviations(PARAMS, CONFIG, in_bfloat16(kv), ids)),
    ("token_ids: wanted at least 1, got none", lambda kv, ids: repair(kv, ids[:0])),
    ("token_ids: wanted at least 1, got none", lambda kv, ids: prefill(PARAMS, CONFIG, ids[:0])),
    ("token_ids: wanted at least 1, got none", lambda kv, ids: deviations(PARAMS, CONFIG, kv[:0], ids[:0])),
    ("kv: wanted at least one slot", lambda kv, ids: decode(PARAMS, CONFIG, kv[:0], ids[0])),
    ("logits_of: wanted -5 to 4, got 5", lambda kv, ids: prefill(PARAMS, CONFIG, ids, logits_of=jnp.asarray([0, 5]))),
    ("logits_of: wanted -3 to 2, got -4", lambda kv, ids: repair(kv, ids[:3], logits_of=[-4])),
    ("logits_of: wanted integers, got float32", lambda kv, ids: repair(kv, ids, logits_of=[1.0])),
    ("num_tokens: wanted 1 to 5, got 6", lambda kv, ids: prefill(PARAMS, CONFIG, ids, num_tokens=6)),
    ("start: wanted integers", lambda kv, ids: prefill(PARAMS, CONFIG, ids, start=1.5)),
    ("new: wanted integers", lambda kv, ids: move_keys(kv, 0, 1.9)),
    ("old: wanted integers", lambda kv, ids: move_keys(kv, 0.5, 1)),
    (r"token_ids: wanted shape \(5\), got \(4,\)", lambda kv, ids: deviations(PARAMS, CONFIG, kv, ids[1:])),
    ("layer: wanted 0 to 2, got 3", lambda kv, ids: deviations(PARAMS, CONFIG, kv, ids, layer=3)),
    (r"token_id: wanted shape \(\), got \(5,\)", lambda kv, ids: decode(PARAMS, CONFIG, kv, ids)),
    ("num_tokens: wanted at least 1, got 0", lambda kv, ids: generate(PARAMS, CONFIG, kv, ids[0], 0)),
    (r"old and new: wanted one position or \(5,\), got \(4,\)", lambda kv, ids: move_keys(kv, 0, ids[1:])),
    (r"positions: wanted shape \(N\), got \(\)", lambda kv, ids: kv.append(ids[0])),
]


def repair(kv, ids, rows=None, **named):
    return partial_prefill(PARAMS, CONFIG, kv, ids, ids if rows is None else rows, **named)


@functools.cache
def another_model(**changes):
    model = TinyModel(**SHAPE | changes)
    return model.loaded.params, model.config


def merge(kv, ids, **changes):
    return KV.merge(kv, prefill(*another_model(**changes), ids)[1])


def in_bfloat16(kv):
    return dataclasses.replace(kv, _k=kv._k.astype(jnp.bfloat16), _v=kv._v.astype(jnp.bfloat16))


@pytest.mark.parametrize(("message", "call"), BAD)
def test_bad_arguments_are_named(message, call):
    ids = jnp.arange(5)
    _, kv = prefill(PARAMS, CONFIG, ids)
    with pytest.raises(ValueError, match=message):
        call(kv, ids)


def test_load_gives_what_an_engine_loads():
    assert ccjax.functional.load is load
    params, config, tokenizer = load("random:2x32x4")
    assert tokenizer is not None and len(params.layers) == config.num_layers == 2
    for name, value in {"quantization": "int4", "dtype": "float8"}.items():
        with pytest.raises(ConfigError, match=f"{name}: wanted one of .*, got '{value}'"):
            load("demo", **{name: value})
