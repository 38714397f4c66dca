"""Full prefill in Hugging Face transformers, for comparison."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence

from ccjax.models.llama3 import LlamaConfig


def is_installed() -> bool:
    """Whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def peer(config: LlamaConfig, *, is_wanted: bool) -> tuple[Callable[[Sequence[int]], float] | None, list[str]]:
    """(`full_prefill`, or None; the reason if it is missing)."""
    if not is_wanted:
        return None, []
    if not is_installed():
        return None, ["transformers: it is not installed, or torch is not"]
    return full_prefill(config), []


def full_prefill(config: LlamaConfig) -> Callable[[Sequence[int]], float]:
    """A function from token ids to the seconds to the first token, for a model of the same shapes with its own random
    weights, sdpa attention, float32, all cores."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig as PeerConfig  # pyright: ignore[reportMissingImports]
    from transformers import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    raw = {name: value for name, value in config.to_hf().items() if name not in ("architectures", "model_type")}
    peer_config = PeerConfig(**raw)
    peer_config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(peer_config).eval().float()

    def measure(token_ids: Sequence[int]) -> float:
        ids = torch.tensor([list(token_ids)])
        started = time.perf_counter()
        with torch.inference_mode():
            int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - started

    return measure
