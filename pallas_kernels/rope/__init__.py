"""Rotary position embedding: apply, remove, move."""

from ccjax.kernels.rope.api import (
    apply_rope,
    llama3_frequencies,
    move_rope,
    remove_rope,
    rotate,
    rotate_by,
    rotation_rows,
)

__all__ = [
    "apply_rope",
    "llama3_frequencies",
    "move_rope",
    "remove_rope",
    "rotate",
    "rotate_by",
    "rotation_rows",
]
