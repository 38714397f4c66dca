"""Maps a weight to its tensors in a checkpoint: one, a part of one, or one per expert. Reads no files."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.families import FAMILIES
from ccjax.models.llama3.params import ParamSpec, build_params


class Source(NamedTuple):
    """A tensor, or a part of one.

    Attributes:
      shape: shape of the whole tensor; matrices are [out, in], as in Hugging Face.
      rows: rows of the part; None for all.
      expert: index of the part on the tensor's first axis, for stacked experts; None for a tensor without that axis.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: slice | None = None
    expert: int | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        shape = self.shape if self.expert is None else self.shape[1:]
        return shape if self.rows is None else (self.rows.stop - self.rows.start, *shape[1:])

    def place(self, rows: slice, *columns: slice) -> tuple[int | slice, ...]:
        """Index in the whole tensor of some rows and columns of the part."""
        first = 0 if self.rows is None else self.rows.start
        index = (slice(first + rows.start, first + rows.stop), *columns)
        return index if self.expert is None else (self.expert, *index)


def specs_of(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Hugging Face tensor name -> spec, for every weight of the model."""
    specs: dict[str, ParamSpec] = {}
    build_params(config, specs.__setitem__)
    return specs


def sources_of(config: LlamaConfig, held: Container[str] = ()) -> dict[str, list[Source]]:
    """The sources of every weight, one per expert, in a checkpoint with the tensor names `held`; in one to be written
    without these."""
    specs = specs_of(config)
    sources = {name: _expert_sources(name, spec, held) for name, spec in specs.items()}
    return sources | dict(_fused_sources(config, specs))


def _fused_sources(config: LlamaConfig, specs: dict[str, ParamSpec]) -> Iterator[tuple[str, list[Source]]]:
    """The sources of weights that the family keeps in one tensor, rows of one above those of the next."""
    for whole, parts in FAMILIES[config.model_type].fused.items():
        for first in [name for name in specs if f".{parts[0]}." in name]:
            names = [first.replace(parts[0], part) for part in parts]
            shapes = [specs[name].hf_shape for name in names]
            shape, start = (sum(part[0] for part in shapes), *shapes[0][1:]), 0
            for name, (num_rows, *_) in zip(names, shapes, strict=True):
                yield name, [Source(first.replace(parts[0], whole), shape, slice(start, start + num_rows))]
                start += num_rows


def _expert_sources(hf_name: str, spec: ParamSpec, held: Container[str]) -> list[Source]:
    """The router and each expert's w1, w2 and w3 are below `block_sparse_moe` (transformers 4, and 5 by default). If
    `mlp.experts.gate_up_proj` exists, transformers 5 saved its own layout: w1 above w3 of all experts in that tensor,
    [E, 2F, D], and w2 in `mlp.experts.down_proj`, [E, D, F]."""
    block, _, rest = hf_name.partition(".block_sparse_moe.")
    if not rest or f"{block}.mlp.experts.gate_up_proj" not in held:
        names = [hf_name.replace("{expert}", str(expert)) for expert in range(max(spec.num_experts, 1))]
        return [Source(name, spec.hf_shape) for name in names]
    if not spec.num_experts:
        return [Source(f"{block}.mlp.{rest}", spec.hf_shape)]
    out, into = spec.hf_shape
    name, num_rows, start = "gate_up_proj", 2 * out, 0 if rest.endswith("w1.weight") else out
    if rest.endswith("w2.weight"):
        name, num_rows, start = "down_proj", out, 0
    whole = (spec.num_experts, num_rows, into)
    rows = slice(start, start + out)
    return [Source(f"{block}.mlp.experts.{name}", whole, rows, expert) for expert in range(spec.num_experts)]
