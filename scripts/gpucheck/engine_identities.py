"""Identities of reuse in bfloat16 on the device, through the engine with a small model and the platform's own kernels;
and the precision of its float32."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.config.engine import Dtype
from ccjax.engine import Engine, EngineConfig, Request, Response, SamplingParams
from ccjax.loading.model import LoadedModel
from ccjax.models.llama3 import LlamaConfig, init_params
from ccjax.models.llama3.forward import forward
from ccjax.models.llama3.params import Params
from ccjax.types import ReuseMode
from scripts.gpucheck.record import CheckRecord, table

SUITE = "engine_identities"
CONFIG = LlamaConfig(512, 256, 4, 8, 2, 64, 512, 500000.0)
ROUNDING = 0.03
"""Largest relative distance of logits if shapes, and so rounding, differ; measured on a CPU 0.007, and 0.6 for KV
computed behind other passages and reused unchanged."""
FLOAT32_ROUNDING = 3e-5
"""The same in float32 from the plain model on the host's CPU, which runs no kernel; measured on a CPU 1.3e-6, and 0.009
in bfloat16. TF32 keeps 11 bits, 5e-4."""
_LENGTHS = (60, 48, 130, 33)
_POOL_BYTES = 8 << 20
_TOKENS = 8


def run(record: CheckRecord) -> None:
    """Checks every identity, and a mutant that must not be one."""
    params = init_params(CONFIG, jax.random.key(5), jnp.bfloat16)
    model = LoadedModel("identities", CONFIG, params, None, None, frozenset(), "gpu-check-identities")
    draw = random.Random(5)
    system, *passages, question = ([draw.randrange(512) for _ in range(size)] for size in (17, *_LENGTHS, 19))
    prompt, other = [system, *passages, question], [system, *passages[::-1], question]

    def engine(model: LoadedModel = model, dtype: Dtype = "bfloat16", **settings: Any) -> Engine:
        return Engine(model, EngineConfig(dtype=dtype, max_model_len=512, **settings))

    with engine() as instance:
        plain = _ask(instance, prompt, "off")
        again = _ask(instance, prompt, "off")
        _same(record, "a full prefill, and once more", again, plain)
        _same(record, "an empty store, mode bounded", _ask(instance, prompt, "bounded"), plain)
        warm = _ask(instance, prompt, "exact")
        _close(record, "all reused behind the same prefix", warm, plain, is_exact=True)
        _close(record, "the same in mode bounded", _ask(instance, prompt, "bounded"), plain, is_exact=True)
        _close(
            record,
            "mode exact in another order",
            _ask(instance, other, "exact"),
            _ask(instance, other, "off"),
            is_exact=True,
        )
    with engine(recompute_ratio=1.0) as instance:
        _ask(instance, prompt, "exact")
        _same(record, "everything recomputed", _ask(instance, other, "bounded"), _ask(instance, other, "off"))
    with engine(strategy="reuse", device_cache_bytes=_POOL_BYTES) as instance:
        _ask(instance, prompt, "exact")
        on_device = _ask(instance, prompt, "exact")
        _same(record, "KV on the device against host memory", on_device, warm)
        tiers = {document.tier for document in on_device.reuse.per_document}
        if tiers != {"device"}:
            record.fail(f"{SUITE}: wanted every chunk on the device, got {sorted(map(str, tiers))}")
        naive, full = _ask(instance, other, "bounded"), _ask(instance, other, "off")
        record.compare(SUITE, _distance(naive, full), ROUNDING, mutant="nothing recomputed", name="naive reuse")
        record.compare(SUITE, _distance(naive, plain), ROUNDING, mutant="another prompt", name="another order")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    with engine(dataclasses.replace(model, params=wide), "float32") as instance:
        in_float32 = _ask(instance, prompt, "off")
    wanted = _on_the_host(wide, prompt)
    for mutant, got in ((None, in_float32), ("bfloat16", plain)):
        error = _apart(got.first_logits, wanted)
        record.compare(SUITE, error, FLOAT32_ROUNDING, mutant=mutant, name="float32, and on the host")


def _on_the_host(params: Params, segments: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits of the first token, [V], by the plain model on the host's CPU."""
    cpu = jax.devices("cpu")[0]
    token_ids = np.array([list(itertools.chain(*segments))], np.int32)
    with jax.default_device(cpu):
        return np.asarray(forward(jax.device_put(params, cpu), CONFIG, jax.device_put(token_ids, cpu))[0, -1])


def _ask(engine: Engine, segments: Sequence[Sequence[int]], reuse: ReuseMode) -> Response:
    sampling = SamplingParams(max_new_tokens=_TOKENS, first_logits=True, ignore_eos=True)
    return engine.run(Request(segments=segments, sampling=sampling, reuse=reuse))


def _same(record: CheckRecord, name: str, got: Response, wanted: Response) -> None:
    """Checks for the same bits and tokens: the same steps ran at the same sizes."""
    error = _distance(got, wanted) if got.token_ids == wanted.token_ids else float("inf")
    record.compare(SUITE, error, 0.0, name=name)


def _close(record: CheckRecord, name: str, got: Response, wanted: Response, *, is_exact: bool) -> None:
    """Checks for the same logits up to rounding, and a report that agrees with `is_exact`."""
    record.compare(SUITE, _distance(got, wanted), ROUNDING, name=name)
    if got.reuse.exact is not is_exact or got.reuse.recomputed_tokens:
        record.fail(
            f"{SUITE}: {name}: wanted exact reuse without recomputing, got {got.reuse.recomputed_tokens} tokens"
        )


def _distance(got: Response, wanted: Response) -> float:
    """Relative distance of the logits of the first token; NaN stays NaN."""
    return _apart(got.first_logits, wanted.first_logits)


def _apart(got: np.ndarray | None, wanted: np.ndarray | None) -> float:
    assert got is not None and wanted is not None
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def tables(record: CheckRecord) -> list[str]:
    """One row per identity."""
    rows = [
        (row["name"] if row["mutant"] is None else f"broken: {row['mutant']}", row["error"], row["tolerance"])
        for row in record.rows.get(SUITE, [])
    ]
    return [
        table("Logits that must not differ, bfloat16 where none is named", ("identity", "distance", "tolerance"), rows)
    ]
