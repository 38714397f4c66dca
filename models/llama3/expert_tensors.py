"""Maps a weight to its tensors in a checkpoint: one, or one per expert. Reads no files."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from ccjax.models.llama3.params import ParamSpec


class Source(NamedTuple):
    """A tensor, or a part of one.

    Attributes:
      shape: shape of the whole tensor.
      index: expert and rows of the part, None for the whole tensor; matrices are [out, in], as in Hugging Face.
    """

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int, slice] | None = None

    def place(self, rows: slice, columns: slice) -> tuple[int, slice, slice] | tuple[slice, slice]:
        """Index in the whole tensor of some rows and columns of the part."""
        if self.index is None:
            return rows, columns
        number, part = self.index
        return number, slice(part.start + rows.start, part.start + rows.stop), columns


def sources_of(hf_name: str, spec: ParamSpec, held: Container[str]) -> list[Source]:
    """The sources of a weight, one per expert, in a checkpoint with the tensor names `held`.

    The router and each expert's w1, w2 and w3 are below `block_sparse_moe` (transformers 4, and 5 by default). If
    `mlp.experts.gate_up_proj` exists, transformers 5 saved its own layout: w1 above w3 of all experts in that tensor,
    [E, 2F, D], and w2 in `mlp.experts.down_proj`, [E, D, F].
    """
    block, _, rest = hf_name.partition(".block_sparse_moe.")
    if not rest or f"{block}.mlp.experts.gate_up_proj" not in held:
        names = [hf_name.replace("{expert}", str(expert)) for expert in range(max(spec.num_experts, 1))]
        return [Source(name, spec.hf_shape) for name in names]
    if not spec.num_experts:
        return [Source(f"{block}.mlp.{rest}", spec.hf_shape)]
    out, into = spec.hf_shape
    if rest.endswith("w2.weight"):
        name, num_rows, rows = "down_proj", out, slice(0, out)
    else:
        name, num_rows, rows = (
            "gate_up_proj",
            2 * out,
            slice(0, out) if rest.endswith("w1.weight") else slice(out, 2 * out),
        )
    whole = (spec.num_experts, num_rows, into)
    return [Source(f"{block}.mlp.experts.{name}", whole, (expert, rows)) for expert in range(spec.num_experts)]
