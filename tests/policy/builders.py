"""Helpers that build chunks and variants for the policy tests. Contains no assertions."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.policy.settings import PromptChunk
from ccjax.types import ChunkId, Fidelity, SegmentRole, VariantId, VariantMeta


def ids(text: str) -> tuple[ChunkId, ...]:
    """One chunk id for each letter."""
    return tuple(ChunkId(letter) for letter in text)


def variant(
    name: str,
    prefix: str = "",
    inter: Sequence[float] | None = None,
    *,
    variant_id: str | None = None,
    cci: float = 0.5,
    num_tokens: int = 10,
    ranking: Sequence[int] | None = None,
    num_bytes: int = 100,
    f_r: float = 0.0,
    fidelity: Fidelity = "exact",
    deviations: Sequence[float] = (),
    received: Sequence[float] = (),
    start: int | None = None,
) -> VariantMeta:
    """A variant of chunk `name` after the chunks of `prefix`, where S is the system prompt; by default its last token
    is the most contextualised."""
    return VariantMeta(
        variant_id=VariantId(variant_id or f"{name}|{prefix}|{fidelity}"),
        chunk_id=ChunkId(name),
        prefix_ids=ids(prefix),
        inter_by_prefix=tuple(inter) if inter is not None else (1.0,) * len(prefix),
        a_mean=0.0,
        b_mean=1.0,
        cci=cci,
        token_ranking=tuple(ranking) if ranking is not None else tuple(reversed(range(num_tokens))),
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        frequency_reuse=f_r,
        fidelity=fidelity,
        token_deviations=tuple(deviations),
        token_received=tuple(received),
        start=start,
        roles=tuple(
            "instructions" if earlier == "S" and not index else "passage" for index, earlier in enumerate(prefix)
        )
        + ("passage",),
    )


def prompt(names: str, num_tokens: int = 10, *, system: bool = False) -> list[PromptChunk]:
    """One passage for each letter; with `system`, the first one is the instructions."""
    roles: list[SegmentRole] = ["instructions" if system and index == 0 else "passage" for index in range(len(names))]
    return [PromptChunk(ChunkId(name), num_tokens, role) for name, role in zip(names, roles, strict=True)]


def question(num_tokens: int = 3) -> PromptChunk:
    """The question at the end of a prompt."""
    return PromptChunk(ChunkId("?"), num_tokens, "question")
