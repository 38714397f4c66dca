"""Shapes of known models by name, and shapes encoded in a name, for models with random weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ccjax.models.llama3.config import (
    LLAMA2_7B,
    LLAMA3_2_1B,
    LLAMA3_8B,
    LLAMA3_70B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    LlamaConfig,
)

PRESETS: Mapping[str, LlamaConfig] = {
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B,
    "llama3.2-1b": LLAMA3_2_1B,
    "llama2-7b": LLAMA2_7B,
    "mistral-7b": MISTRAL_7B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "tiny": LlamaConfig(512, 64, 2, 4, 2, 16, 176, max_position_embeddings=4096),
}
_SHAPE = re.compile(r"([0-9]+)x([0-9]+)(?:x([0-9]+))?")
_DEFAULT_HEADS = 16


def preset(name: str, vocab_size: int) -> LlamaConfig:
    """The preset of that name, or the shape that "LAYERSxWIDTH" or "LAYERSxWIDTHxHEADS" encodes.

    Args:
      vocab_size: vocabulary size of a shape; presets have their own.

    Raises:
      ValueError: the name is neither; the message lists the presets.
    """
    if name in PRESETS:
        return PRESETS[name]
    found = _SHAPE.fullmatch(name)
    if found is None:
        raise ValueError(f"wanted one of {', '.join(PRESETS)} or LAYERSxWIDTH[xHEADS], got {name!r}")
    layers, width, heads = (int(group or _DEFAULT_HEADS) for group in found.groups())
    if min(layers, width, heads) < 1 or width % (2 * heads):
        raise ValueError(
            f"wanted LAYERSxWIDTH[xHEADS] with a width that is a multiple of twice the heads ({heads}), got {name!r}"
        )
    return shape(vocab_size, layers, width, heads)


def shape(vocab_size: int, num_layers: int, width: int, num_heads: int = _DEFAULT_HEADS) -> LlamaConfig:
    """Llama's proportions with one KV head per four query heads, and tied embeddings as in the small Llama-3.2 models,
    because the vocabulary would otherwise be half of all weights."""
    heads = (num_heads, max(1, num_heads // 4), width // num_heads)
    return LlamaConfig(vocab_size, width, num_layers, *heads, 2816 * width // 1024, 500000.0, tie_embeddings=True)
