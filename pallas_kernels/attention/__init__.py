"""Attention of scattered query tokens over a merged context, with softmax mass per segment."""

from ccjax.kernels.attention.api import AttentionOutput, attention, check_implementation

__all__ = ["AttentionOutput", "attention", "check_implementation"]
