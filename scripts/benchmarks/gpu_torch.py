"""Full prefill in plain PyTorch over JAX's own weights: matrix products, and scaled_dot_product_attention with its own
choice of kernel."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ccjax.models.llama3 import LlamaConfig, Params
from ccjax.models.llama3.layers import rope_frequencies


def missing() -> str | None:
    """Why PyTorch cannot run on JAX's device, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if jax.default_backend() == "cpu":
        return None
    if jax.default_backend() != "gpu":
        return f"torch does not run on {jax.default_backend()}"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def free_bytes() -> int | None:
    """Device memory that neither JAX nor PyTorch has allocated; None if PyTorch sees no GPU."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


class TorchPeer:
    """A Llama of the same shapes; its weights are JAX's arrays, not copies of them."""

    def __init__(self, params: Params, config: LlamaConfig) -> None:
        import torch

        def shared(x: jax.Array) -> Any:
            return torch.from_dlpack(jax.block_until_ready(x))

        self._config = config
        self._layers = [
            {name: shared(getattr(layer, name)) for name in layer.__dataclass_fields__} for layer in params.layers
        ]
        self._embedding, self._final_norm = shared(params.embedding), shared(params.final_norm)
        self._head = self._embedding.T if params.lm_head is None else shared(params.lm_head)
        self._frequencies = torch.from_numpy(np.array(rope_frequencies(config))).to(self._embedding.device)

    def prefill(self, token_ids: Sequence[Sequence[int]], *, is_causal: bool = True) -> tuple[float, np.ndarray]:
        """Seconds until the first token of every prompt is known, and the logits [B, V], float32.

        Args:
          token_ids: prompts of the same length; the KV of all is in memory at the end.
          is_causal: False for a wrong model, to test that comparisons fail.
        """
        import torch
        from torch.nn.functional import scaled_dot_product_attention, silu

        config, device = self._config, self._embedding.device
        num_batch, num_tokens = len(token_ids), len(token_ids[0])
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        started_s = time.perf_counter()
        with torch.inference_mode():
            x = self._embedding[torch.tensor(token_ids, device=device)]
            angles = torch.arange(num_tokens, device=device)[:, None] * self._frequencies[None]
            cos, sin = angles.cos().to(x.dtype)[None, None], angles.sin().to(x.dtype)[None, None]
            kept = []
            for layer in self._layers:
                normed = self._norm(x, layer["attention_norm"])
                q, k, v = (
                    (normed @ layer[name].flatten(1)).view(num_batch, num_tokens, count, head_dim).transpose(1, 2)
                    for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
                )
                q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
                kept.append((k, v))
                out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
                x = x + out.transpose(1, 2).flatten(2) @ layer["wo"].flatten(0, 1)
                normed = self._norm(x, layer["mlp_norm"])
                x = x + (silu(normed @ layer["w_gate"]) * (normed @ layer["w_up"])) @ layer["w_down"]
            logits = self._norm(x[:, -1], self._final_norm) @ self._head
            logits.argmax(-1).tolist()  # waits for the device
            elapsed_s = time.perf_counter() - started_s
            return elapsed_s, logits.float().cpu().numpy()

    def _norm(self, x: Any, weight: Any) -> Any:
        from torch.nn.functional import rms_norm

        return rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def release() -> None:
    """Releases PyTorch's unused device memory."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
