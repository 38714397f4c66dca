"""Attention of the newest token of each running request over its pages of the KV pool."""

from pallas_kernels.decode.api import DecodeOutput, check_implementation, decode_attention
from pallas_kernels.decode.pages import page_rotation

__all__ = ["DecodeOutput", "check_implementation", "decode_attention", "page_rotation"]
