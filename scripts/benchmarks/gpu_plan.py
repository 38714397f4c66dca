"""The cases of `bench.py gpu`, most important first, with their work and memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from ccjax.models.llama3 import LLAMA3_8B, LlamaConfig

Kind = Literal["full", "reuse", "decode", "torch"]
Way = tuple[Kind, float | None, str | None]
"""Kind, ratio and tier of a case."""
KV_ITEM_BYTES = 2
"""bfloat16."""
PAGE_TOKENS = 16
"""As in the engine's pool."""

_SPARE_BYTES = 3 << 30
"""For XLA's own buffers, fragmentation and XLA's choice of algorithms."""


@dataclasses.dataclass(frozen=True)
class GpuScale:
    """Sizes of the benchmark.

    Attributes:
      contexts: context lengths, in tokens; prompts are a little shorter (`prompt_tokens`).
      short, long: the contexts of the targets.
      passage_every: tokens of context per passage.
      max_num_batched_tokens: of the engines.
      steps: tokens of the answers in which decode steps are timed, except the first.
      matmul_size, copy_bytes, transfer_bytes: of the ceilings.
    """

    name: str
    config: LlamaConfig
    contexts: tuple[int, ...]
    short: int
    long: int
    batches: tuple[int, ...]
    passage_every: int
    passage_tokens: int
    system_tokens: int
    question_tokens: int
    max_num_batched_tokens: int
    steps: int
    repetitions: int
    matmul_size: int
    copy_bytes: int
    transfer_bytes: int

    def num_passages(self, context: int) -> int:
        """Passages of a prompt."""
        return context // self.passage_every

    def prompt_tokens(self, context: int) -> int:
        """Tokens of a prompt."""
        return self.system_tokens + self.num_passages(context) * self.passage_tokens + self.question_tokens

    @property
    def max_model_len(self) -> int:
        """Of the engines: prompt and answer of the longest case, in whole pages."""
        longest = max(map(self.prompt_tokens, self.contexts)) + self.steps
        return -(-longest // PAGE_TOKENS) * PAGE_TOKENS


LLAMA3_8B_SCALE = GpuScale(
    name="llama3-8b",
    config=LLAMA3_8B,
    contexts=(4096, 8192, 16384, 32768),
    short=8192,
    long=32768,
    batches=(1, 4),
    passage_every=1024,
    passage_tokens=1012,
    system_tokens=32,
    question_tokens=16,
    max_num_batched_tokens=8192,
    steps=48,
    repetitions=5,
    matmul_size=8192,
    copy_bytes=1 << 30,
    transfer_bytes=1 << 30,
)
QUICK_SCALE = GpuScale(
    name="quick",
    config=LlamaConfig(512, 128, 3, 4, 2, 32, 256, 500000.0),
    contexts=(128, 256),
    short=128,
    long=256,
    batches=(1, 2),
    passage_every=32,
    passage_tokens=28,
    system_tokens=8,
    question_tokens=8,
    max_num_batched_tokens=128,
    steps=10,
    repetitions=2,
    matmul_size=256,
    copy_bytes=1 << 20,
    transfer_bytes=1 << 20,
)
"""Every code path in a minute on a CPU; its figures are meaningless."""


@dataclasses.dataclass(frozen=True)
class GpuCase:
    """One figure: a kind of prefill, or decode steps, at one context and batch.

    Attributes:
      ratio, tier: for `reuse`, the recomputed share of every passage, and the tier of its KV.
    """

    kind: Kind
    context: int
    batch: int = 1
    ratio: float | None = None
    tier: str | None = None

    @property
    def name(self) -> str:
        """The case in words."""
        what = {"full": "full prefill", "decode": "decode step", "torch": "full prefill, PyTorch SDPA"}.get(self.kind)
        if self.kind == "reuse":
            what = f"{self.ratio:.0%} recomputed, KV on {self.tier}"
        return f"{what}, {self.context:,} tokens, batch {self.batch}"

    def identity(self) -> dict[str, Any]:
        """The fields under the keys of a row."""
        return {"case": self.name, **dataclasses.asdict(self)}


def cases(scale: GpuScale) -> list[GpuCase]:
    """All cases, most important first; otherwise cases of the same engine are adjacent."""
    short, long = scale.short, scale.long
    others = [context for context in scale.contexts if context not in (short, long)]
    first = [
        GpuCase("full", short),
        GpuCase("full", long),
        GpuCase("decode", short),
        GpuCase("reuse", short, 1, 0.15, "device"),
        GpuCase("reuse", long, 1, 0.15, "device"),
        GpuCase("reuse", short, 1, 0.15, "host"),
        GpuCase("reuse", long, 1, 0.15, "host"),
        GpuCase("torch", short),
        GpuCase("torch", long),
        GpuCase("reuse", short, 1, 0.15, "disk"),
        GpuCase("reuse", short, 1, 0.30, "device"),
        GpuCase("reuse", long, 1, 0.30, "device"),
        GpuCase("reuse", short, 1, 0.30, "host"),
        GpuCase("decode", long),
    ]

    def group(contexts: Sequence[int], batch: int, kinds: Sequence[Way]) -> list[GpuCase]:
        return [GpuCase(kind, context, batch, ratio, tier) for kind, ratio, tier in kinds for context in contexts]

    plain: list[Way] = [("full", None, None), ("decode", None, None)]
    memory: list[Way] = [("reuse", 0.15, "device"), ("reuse", 0.15, "host")]
    more: list[Way] = [("reuse", 0.30, "device"), ("reuse", 0.30, "host")]
    disk: list[Way] = [("reuse", 0.15, "disk"), ("reuse", 0.30, "disk")]
    peer: list[Way] = [("torch", None, None)]
    rest = group(others, 1, [*plain, *memory, *peer, *more])
    for batch in scale.batches:
        rest += group([short], batch, [*plain, *memory, *peer])
    for batch in scale.batches:
        rest += group([*others, long], batch, [*plain, *memory, *peer])
        rest += group(scale.contexts, batch, more)
        rest += group(scale.contexts, batch, disk)
    return list(dict.fromkeys([*first, *rest]))


def layer_weights(config: LlamaConfig) -> int:
    """Weights of all layers that a token is multiplied with."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.num_layers * config.d_model * (heads * config.head_dim + 3 * config.d_ff)


def recomputed_tokens(case: GpuCase, scale: GpuScale) -> int:
    """Recomputed tokens of one prompt, rounded up for each passage as in the engine."""
    if case.kind != "reuse":
        return 0
    return scale.num_passages(case.context) * math.ceil((case.ratio or 0.0) * scale.passage_tokens)


def computed_tokens(case: GpuCase, scale: GpuScale) -> int:
    """Tokens of one prompt that run through the model."""
    if case.kind != "reuse":
        return scale.prompt_tokens(case.context)
    return recomputed_tokens(case, scale) + scale.question_tokens


def prefill_flops(case: GpuCase, scale: GpuScale) -> float:
    """Floating-point operations of all prompts of a case: products with weights, and scores and sums of visible pairs
    only. Recomputed tokens are counted as if they were evenly distributed over the prompt."""
    config, length = scale.config, scale.prompt_tokens(case.context)
    if case.kind == "reuse":
        question = scale.question_tokens
        pairs = recomputed_tokens(case, scale) * length / 2 + question * (length - (question - 1) / 2)
    else:
        pairs = length * (length + 1) / 2
    products = 2 * computed_tokens(case, scale) * layer_weights(config)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return case.batch * float(products + attention + 2 * config.d_model * config.vocab_size)


def kv_bytes(scale: GpuScale, num_tokens: int) -> int:
    """Bytes of the keys and values of this many tokens."""
    config = scale.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * KV_ITEM_BYTES * num_tokens


def decode_bytes(case: GpuCase, scale: GpuScale) -> int:
    """Bytes that one decode step has to read: weights without the embedding table, and every context."""
    config = scale.config
    weights = layer_weights(config) + config.d_model * config.vocab_size
    mean_length = scale.prompt_tokens(case.context) + scale.steps // 2
    return KV_ITEM_BYTES * weights + case.batch * kv_bytes(scale, mean_length)


def weight_bytes(scale: GpuScale) -> int:
    """Bytes of all weights except norms."""
    config = scale.config
    return KV_ITEM_BYTES * (layer_weights(config) + 2 * config.d_model * config.vocab_size)


def pool_tokens(case: GpuCase, scale: GpuScale) -> int:
    """Slots of the page pool that a case needs: requests with partly filled pages, and the passages, if they are on the
    device; the requests of a batch share passages."""
    if case.kind == "torch":
        return 0
    passage = -(-scale.passage_tokens // PAGE_TOKENS) * PAGE_TOKENS
    passages = scale.num_passages(case.context) * passage
    ends = -(-scale.system_tokens // PAGE_TOKENS) - (-scale.question_tokens // PAGE_TOKENS)
    request = passages + ends * PAGE_TOKENS + (scale.steps if case.kind == "decode" else 0) + PAGE_TOKENS
    # KV that was read is promoted to the device after each run, whatever its tier.
    cached = passages + 4 * passage if case.kind == "reuse" else 0
    return case.batch * request + cached


def working_bytes(case: GpuCase, scale: GpuScale) -> int:
    """Bytes for the steps of a case besides weights and pool: activations of a pack, and a layer's context as it is
    read, rotated and transposed."""
    config = scale.config
    if case.kind == "decode":
        rows = case.batch
    else:
        rows = min(case.batch * computed_tokens(case, scale), scale.max_num_batched_tokens)
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    row = 3 * config.d_ff + 6 * config.d_model + heads * config.head_dim
    packed = max(case.context, scale.max_num_batched_tokens) * (2 if case.batch > 1 else 1)
    context = 6 * packed * config.num_kv_heads * config.head_dim
    return KV_ITEM_BYTES * (rows * row + context) + 4 * case.batch * config.vocab_size


def torch_bytes(case: GpuCase, scale: GpuScale) -> int:
    """Bytes that PyTorch needs for a case besides the shared weights: all rows at once, and their KV."""
    config = scale.config
    rows = case.batch * scale.prompt_tokens(case.context)
    heads = 4 * config.num_heads + 2 * config.num_kv_heads
    row = 3 * config.d_ff + 4 * config.d_model + heads * config.head_dim
    return KV_ITEM_BYTES * rows * row + kv_bytes(scale, rows)


def needed_bytes(case: GpuCase, scale: GpuScale) -> int:
    """Bytes of device memory that JAX needs for a case."""
    return weight_bytes(scale) + kv_bytes(scale, pool_tokens(case, scale)) + working_bytes(case, scale) + _SPARE_BYTES


def too_large(case: GpuCase, scale: GpuScale, device_bytes: int | None, torch_free_bytes: int | None) -> str | None:
    """Why a case does not fit, or None.

    Args:
      device_bytes: memory of the device for JAX; None if unknown.
      torch_free_bytes: memory for PyTorch besides that; None if unknown.
    """
    need, have = needed_bytes(case, scale), device_bytes
    if case.kind == "torch":
        need, have = torch_bytes(case, scale), torch_free_bytes
    if have is None or need <= have:
        return None
    return f"does not fit: needs {need / 1e9:.1f} GB of device memory, {have / 1e9:.1f} GB are there"


def pool_bytes(chosen: Sequence[GpuCase], scale: GpuScale, least_bytes: int) -> int:
    """Bytes of one page pool for all of these cases, so that every engine compiles the same shapes; at least
    `least_bytes`."""
    most = max((kv_bytes(scale, pool_tokens(case, scale)) for case in chosen), default=0)
    return max(most, least_bytes)


def repetitions(case: GpuCase, scale: GpuScale) -> int:
    """Timed runs of a case; fewer of long ones."""
    return scale.repetitions if case.batch * case.context <= 16384 else min(3, scale.repetitions)
