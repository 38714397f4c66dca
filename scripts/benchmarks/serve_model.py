"""The model for benchmarks of a server: by default random weights, with the real Llama-3 tokenizer.

Only time is measured, so weights need not be trained.
"""

from __future__ import annotations

import dataclasses
import getpass
import tempfile
from pathlib import Path

from ccjax.loading.weights import RANDOM


@dataclasses.dataclass(frozen=True)
class BenchModel:
    """A model as an option of `scripts/serve.py`; `tokenizer` is None for the model's own."""

    name: str
    tokenizer: Path | None

    @property
    def flags(self) -> list[str]:
        """The flags that select it."""
        return ["--model", self.name, *([] if self.tokenizer is None else ["--tokenizer", str(self.tokenizer)])]


def bench_model(model: str | None, data: Path, num_layers: int, width: int, num_heads: int = 16) -> BenchModel:
    """The named model, or random weights in this shape with Llama-3's tokenizer.

    Args:
      data: folder with tokenizer_llama3/.
    """
    name = model or f"{RANDOM}{num_layers}x{width}x{num_heads}"
    return BenchModel(name, data / "tokenizer_llama3" if name.startswith(RANDOM) else None)


def cache_folder() -> Path:
    """The user's folder of compiled steps, in the system's temporary directory."""
    return Path(tempfile.gettempdir()) / f"ccjax-bench-{getpass.getuser()}"
