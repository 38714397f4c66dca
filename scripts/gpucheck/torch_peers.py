"""PyTorch's attention kernels on JAX's arrays, for comparison. Importable without PyTorch (see `missing`)."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from scripts.gpucheck.timing import Timed

MOST_CALLS = 200
"""Calls in one CUDA graph."""
_RECOMPILES = 64
"""Shapes that one process may compile FlexAttention for; PyTorch's default of 8 is too low for a full run."""

Call = Callable[[], Any]
"""Runs a kernel; returns [1, Q, N, H]."""


def missing() -> str | None:
    """Why PyTorch cannot run, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def tensor(x: jax.Array) -> Any:
    """[T, A, H] of JAX as [1, A, T, H] of torch, contiguous, on the same device."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(x)).transpose(0, 1)[None].contiguous()


def rows_of(result: Any, rows: np.ndarray) -> np.ndarray:
    """[R, Q, H] float32 of a result [1, Q, N, H]."""
    import torch

    return result[0][:, torch.from_numpy(rows).to(result.device)].transpose(0, 1).float().cpu().numpy()


def causal(q: Any, k: Any, v: Any, *, scale: float, backend: str) -> Call:
    """Causal attention of all tokens by one backend of `scaled_dot_product_attention`, as SDPBackend names it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call() -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return call


def flex(q: Any, k: Any, v: Any, q_pos: Any, *, scale: float, is_compiled: bool = True) -> Call:
    """FlexAttention of queries at positions `q_pos` [N], int32, over slots at 0, 1, ... With its block mask, built once
    and not timed, it skips blocks that no query sees, and the mask in those that every query sees completely."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    positions = torch.from_dlpack(jax.block_until_ready(q_pos))

    def is_visible(batch: Any, head: Any, query: Any, slot: Any) -> Any:
        return slot <= positions[query]

    mask = create_block_mask(is_visible, None, None, q.shape[2], k.shape[2], device=q.device)
    attend = flex_attention
    if is_compiled:
        torch._dynamo.config.recompile_limit = _RECOMPILES
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def timed_torch(call: Call, calls: int) -> Timed:
    """A kernel, warmed up and captured as one CUDA graph of `calls` calls, timed by events on the device."""
    import torch

    calls = min(calls, MOST_CALLS)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                result = call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # JAX's threads may call CUDA meanwhile, which the default mode would treat as an error of this capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / calls

    return Timed(sample, result, "CUDA graph")
