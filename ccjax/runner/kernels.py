"""Selects an engine's attention kernels and checks that they support its model."""

from __future__ import annotations

from typing import Any

import ccjax.kernels.attention
import ccjax.kernels.decode
from ccjax.errors import ConfigError
from ccjax.models.llama3.config import LlamaConfig
from ccjax.runner.pool import PAGE_TOKENS


def check_kernels(attention: str | None, config: LlamaConfig, dtype: str) -> None:
    """Checks that prefill and decode of a model can run with an implementation of attention.

    Raises:
      ConfigError: one of them cannot, on this platform, on this chip or with these heads.
    """
    shape: dict[str, Any] = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    shape |= {"head_dim": config.head_dim, "dtype": dtype}
    try:
        ccjax.kernels.attention.check_implementation(attention, **shape)
        ccjax.kernels.decode.check_implementation(attention, page_size=PAGE_TOKENS, **shape)
    except NotImplementedError as error:
        raise ConfigError(f"attention: {error}") from error
