"""Small random models and prompts for engine tests, and a slow float64 oracle of selective recompute."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ccjax.cache.capture import capture_variants, context_deviations
from ccjax.cache.contexts import LayerLoader
from ccjax.cache.reads import WaitLimit
from ccjax.engine import Engine, EngineConfig
from ccjax.loading.model import LoadedModel
from ccjax.models.llama3 import LlamaConfig
from ccjax.models.llama3.params import Params, build_params
from ccjax.prompts import Prompt
from ccjax.runner.context_loader import JobFailedError
from ccjax.runner.device import kv_spec_of
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import Contexts, PrefillJob
from ccjax.runner.pack import Pack, Piece
from ccjax.runner.pages import RequestPages
from ccjax.runner.plan_rows import PrefillOutcome
from ccjax.runner.pool import PAGE_TOKENS, DevicePool
from ccjax.store.throttle import ThrottledLink
from ccjax.types import PrefillPlan, VariantId, VariantMeta
from tests.oracles import head_size, random_llama, rope_frequencies, rotate

TOLERANCE = 3e-5
"""Largest difference of float32 logits (up to 5) to the float64 oracle, over prompts of up to 1,100 tokens; measured
2.2e-5 at most. Mutants in these tests exceed it a hundredfold."""


def params_from_hf(weights: Mapping[str, np.ndarray], config: LlamaConfig) -> Params:
    """Our parameter tree from weights in Hugging Face names and shapes."""

    def make(name: str, spec: Any) -> Any:
        if spec.num_experts:
            return jnp.stack([jnp.asarray(weights[name.format(expert=e)].T) for e in range(spec.num_experts)])
        weight = weights[name]
        return jnp.asarray((weight.T if spec.layout == "linear" else weight).reshape(spec.shape))

    return build_params(config, make)


class TinyModel:
    """A random model in two forms: weights for the oracle, and a LoadedModel for the engine."""

    def __init__(self, seed: int = 0, **changes: Any) -> None:
        self.weights, self.raw = random_llama(seed, **{"max_position_embeddings": 4096, **changes})
        self.config = LlamaConfig.from_hf(self.raw)
        self.loaded = LoadedModel(
            name="tiny",
            config=self.config,
            params=params_from_hf(self.weights, self.config),
            tokenizer=None,
            template=None,
            eos_ids=frozenset(),
            fingerprint=f"tiny-{seed}",
        )

    def __str__(self) -> str:
        return self.loaded.fingerprint

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in float32."""
        return kv_spec_of(self.config, "float32").num_bytes(1)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of such KV."""
        return PAGE_TOKENS * self.token_bytes

    def device_model(self) -> DeviceModel:
        return DeviceModel(self.loaded.params, self.config)

    def engine(
        self, *, disk_link: ThrottledLink | None = None, device_link: ThrottledLink | None = None, **settings: Any
    ) -> Engine:
        # No share of an accelerator's memory: other processes run their tests on it, too.
        config = EngineConfig(**{"max_model_len": 4096, "device_cache_bytes": 0, **settings})
        return Engine(self.loaded, config, disk_link=disk_link, device_link=device_link)


class After:
    """An `is_cancelled` that returns False the given number of times."""

    def __init__(self, num_asked: int) -> None:
        self.left = num_asked

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def draw_segments(
    random: np.random.Generator, lengths: Sequence[int], *, system: int = 7, question: int = 9, vocab: int = 97
) -> list[list[int]]:
    """System, passages of the given lengths, question."""
    return [[int(token) for token in random.integers(0, vocab, length)] for length in (system, *lengths, question)]


def permuted(segments: Sequence[list[int]], order: Sequence[int]) -> list[list[int]]:
    """The same segments with the passages in another order."""
    return [segments[0], *(segments[1 + index] for index in order), segments[-1]]


ReadLayers = Callable[[VariantId, int, int], np.ndarray]
"""(variant, first layer, last layer) -> [layers, 2, T, K, H]: keys before RoPE and values."""


class Memory:
    """A ticket whose variants are all in memory, in the format of `read_layers`."""

    missing = frozenset()
    tiers = collections.defaultdict(lambda: "host")

    def __init__(self, read_layers: ReadLayers) -> None:
        self._read_layers = read_layers

    def prefetch(self, variant_id: VariantId, first: int, last: int) -> None: ...

    def ready(self, variant_id: VariantId, first: int, last: int) -> bool:
        return True

    def read_layers(
        self, variant_id: VariantId, first: int, last: int, *, timeout_s: float | None = None
    ) -> np.ndarray:
        return self._read_layers(variant_id, first, last)


def loader(model: DeviceModel, plan: PrefillPlan, ticket: Any, **settings: Any) -> LayerLoader:
    """A loader of a plan's variants for `run_plan`; it waits at most 5 s for a chunk."""
    wait_limit = WaitLimit(None)
    wait_limit.expect({segment.variant_id: segment.num_tokens for segment in plan.segments if segment.variant_id})
    settings = {"wait_limit": wait_limit, **settings}
    return LayerLoader(ticket, plan, kv_spec=kv_spec_of(model.config, str(model.dtype)), **settings)


def run_plan(
    model: DeviceModel,
    token_ids: np.ndarray,
    plan: PrefillPlan,
    *,
    contexts: Contexts | None = None,
    collect: bool = False,
) -> PrefillOutcome:
    """A plan executed in one pack, with its own pages; has the logits of all rows after the last layer."""
    spec = kv_spec_of(model.config, str(model.dtype))
    pool = DevicePool(spec, spec.num_bytes(64 * PAGE_TOKENS), model.mesh, model.sizes)
    pages = RequestPages(pool, plan, {})
    job = PrefillJob(token_ids, plan, pages, contexts=contexts, collect=collect, num_logits=plan.num_tokens)
    pack = Pack(model, pool, [Piece(job, 0, len(job.offsets))])
    try:
        while not pack.is_done:
            pack.run_layer()
    except JobFailedError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
    pack.logits()
    job.result.kv = pages.hold()
    return job.result


def run_reusing(
    model: DeviceModel, token_ids: np.ndarray, plan: PrefillPlan, read_layers: ReadLayers, *, collect: bool = False
) -> PrefillOutcome:
    """`run_plan` with variants in memory."""
    with loader(model, plan, Memory(read_layers)) as contexts:
        return run_plan(model, token_ids, plan, contexts=contexts, collect=collect)


def check_deviations(engine: Engine, meta: VariantMeta) -> None:
    """Compares a variant's deviations with full prefills of its chunk behind its prefix and behind the instructions."""
    prompt = engine._chunks.variants.prompt_of(meta)
    alone = Prompt.of_chunks((prompt.cached[0], prompt.cached[-1]))
    computed = []
    for one in (prompt, alone):
        plan = engine._chunks.planner.plan(one, "exact", {})
        result = run_plan(engine._device.model, one.token_ids, plan, collect=True)
        *_, (_, kv) = capture_variants(plan, result, {})
        computed.append(kv)
    # The prefix was read, not computed: equal up to rounding in other shapes, and three digits.
    np.testing.assert_allclose(
        meta.token_deviations,
        context_deviations(computed[0], computed[1].read_layers(0, engine.model_config.num_layers)),
        rtol=2e-2,
        atol=1e-5,
    )
    assert max(meta.token_deviations) > 0.05, "the tolerance is not what passes"


def selective_oracle(
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    token_ids: Sequence[int],
    cached: Sequence[tuple[np.ndarray, np.ndarray]],
    computed: Sequence[np.ndarray],
    contexts: list[tuple[np.ndarray, np.ndarray]] | None = None,
    choose: Callable[[int, np.ndarray, np.ndarray], np.ndarray] | None = None,
    hidden_rows: Sequence[int] = (),
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Selective recompute token by token, float64: CacheCraft sec. 3.4.3.

    Args:
      cached: per layer, keys before RoPE and values [n, K, H] of the whole prompt; only rows not computed are read.
      computed: per layer, ascending prompt offsets computed in it; each a subset of the previous layer's.
      contexts: collects each layer's keys before RoPE and values [n, K, H] after the computed rows were written.
      choose: maps layer, rows and the deviation of their keys and values from the cached ones to the rows to compute.
      hidden_rows: prompt offsets that no token attends to.

    Returns:
      Logits [V] of the last token, and per layer the attention weights [rows, Q, n].
    """
    num_kv, head_dim = config["num_key_value_heads"], head_size(config)
    frequencies, eps = rope_frequencies(config), config["rms_norm_eps"]

    def weight(name: str) -> np.ndarray:
        return weights[name].astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + eps) * weight(name)

    hidden = {int(row): weight("model.embed_tokens.weight")[token_ids[row]] for row in computed[0]}
    attentions = []
    for number, rows in enumerate(computed):
        block = f"model.layers.{number}."
        keys, values = (np.array(part, np.float64) for part in cached[number])
        values[list(hidden_rows)] = 0.0
        queries, fresh = {}, {}
        rows = np.asarray([row for row in rows if row in hidden])
        for row in map(int, rows):
            normed = norm(hidden[row], block + "input_layernorm.weight")
            queries[row] = (weight(block + "self_attn.q_proj.weight") @ normed).reshape(-1, head_dim)
            fresh[row] = np.stack(
                [(weight(f"{block}self_attn.{part}_proj.weight") @ normed).reshape(num_kv, head_dim) for part in "kv"]
            )
        if choose is not None:
            deviations = [np.sqrt(np.square(fresh[row] - (keys[row], values[row])).sum()) for row in map(int, rows)]
            rows = choose(number, rows, np.asarray(deviations))
        for row in map(int, rows):
            keys[row], values[row] = fresh[row]
        if contexts is not None:
            contexts.append((keys, values))
        turned = rotate(keys, np.arange(len(token_ids)), frequencies)
        attention = np.zeros((len(rows), config["num_attention_heads"], len(token_ids)))
        after = {}
        for index, row in enumerate(map(int, rows)):
            query = rotate(queries[row][None], np.array([row]), frequencies)[0]
            attended = np.zeros_like(query)
            for head in range(len(query)):
                kv_head = head * num_kv // len(query)
                scores = turned[: row + 1, kv_head] @ query[head] / math.sqrt(head_dim)
                scores[[other for other in hidden_rows if other <= row]] = -np.inf
                weights_of_head = np.exp(scores - scores.max())
                weights_of_head /= weights_of_head.sum()
                attention[index, head, : row + 1] = weights_of_head
                attended[head] = weights_of_head @ values[: row + 1, kv_head]
            x = hidden[row] + weight(block + "self_attn.o_proj.weight") @ attended.reshape(-1)
            normed = norm(x, block + "post_attention_layernorm.weight")
            gate = weight(block + "mlp.gate_proj.weight") @ normed
            up = weight(block + "mlp.up_proj.weight") @ normed
            after[row] = x + weight(block + "mlp.down_proj.weight") @ (gate / (1 + np.exp(-gate)) * up)
        hidden = after
        attentions.append(attention)
    last = norm(hidden[len(token_ids) - 1], "model.norm.weight")
    return weight("lm_head.weight") @ last, attentions
