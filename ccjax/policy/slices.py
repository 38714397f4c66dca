"""What a stored variant says about a slice of its tokens, so that a segment can reuse that slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ccjax.policy.settings import PromptChunk
from ccjax.types import ChunkId, VariantId, VariantMeta


def with_slices(
    chunks: Sequence[PromptChunk], candidates: Mapping[ChunkId, Sequence[VariantMeta]]
) -> tuple[dict[ChunkId, Sequence[VariantMeta]], dict[tuple[ChunkId, VariantId], int]]:
    """The candidates of each chunk of a prompt, among them the slices of its source's variants; and for each such
    slice, by chunk and variant, the row that it begins with."""
    found: dict[ChunkId, Sequence[VariantMeta]] = dict(candidates)
    offsets: dict[tuple[ChunkId, VariantId], int] = {}
    for chunk in chunks:
        if chunk.source is None:
            continue
        own = {meta.variant_id: meta for meta in found.get(chunk.chunk_id, ())}
        for meta in candidates.get(chunk.source.chunk_id, ()):
            if meta.variant_id not in own:
                own[meta.variant_id] = variant_slice(meta, chunk)
                offsets[chunk.chunk_id, meta.variant_id] = chunk.source.offset
        found[chunk.chunk_id] = tuple(own.values())
    return found, offsets


def variant_slice(meta: VariantMeta, chunk: PromptChunk) -> VariantMeta:
    """The metadata of the slice of a variant that is the KV of `chunk`, which has a source.

    With causal attention, rows do not depend on later tokens, so the beginning of an exact variant is exact. Of any
    other slice the head, what precedes it in its chunk, is one more chunk of the prefix: an id of its own, which no
    prompt has, with the mass that the chunk put on itself. So such a slice is never exact, nor is it behind its own
    prefix. CCI (CacheCraft eq. 11) is that of the whole chunk.
    """
    assert chunk.source is not None
    offset, end = chunk.source.offset, chunk.source.offset + chunk.num_tokens
    changes = {}
    if offset:
        changes = {
            "prefix_ids": (*meta.prefix_ids, ChunkId(f"{meta.chunk_id}[:{offset}]")),
            "inter_by_prefix": (*meta.inter_by_prefix, meta.b_mean * meta.num_tokens**2),
            "roles": (*meta.roles, meta.roles[-1]) if meta.roles else (),
            "start": None if meta.start is None else meta.start + offset,
        }
    return dataclasses.replace(
        meta,
        chunk_id=chunk.chunk_id,
        token_ranking=tuple(token - offset for token in meta.token_ranking if offset <= token < end),
        num_tokens=chunk.num_tokens,
        token_deviations=meta.token_deviations[offset:end],
        token_received=meta.token_received[offset:end],
        **changes,
    )
