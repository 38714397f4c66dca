"""Attention of scattered query tokens over a merged context, with softmax mass per segment."""

from pallas_kernels.attention.api import AttentionOutput, attention, check_implementation

__all__ = ["AttentionOutput", "attention", "check_implementation"]
