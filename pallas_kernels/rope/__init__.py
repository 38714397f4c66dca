"""Rotary position embedding: apply and remove it, and move keys to other positions."""

from ccjax.kernels.rope.api import move_keys
from ccjax.kernels.rope.rotation import (
    apply_rope,
    llama3_frequencies,
    remove_rope,
    rotate,
    rotate_by,
    rotation_rows,
)

__all__ = [
    "apply_rope",
    "llama3_frequencies",
    "move_keys",
    "remove_rope",
    "rotate",
    "rotate_by",
    "rotation_rows",
]
