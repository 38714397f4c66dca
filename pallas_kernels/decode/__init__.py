"""Attention of the newest token of each running request over its pages of the KV pool."""

from ccjax.kernels.decode.api import DecodeOutput, check_implementation, decode_attention

__all__ = ["DecodeOutput", "check_implementation", "decode_attention"]
