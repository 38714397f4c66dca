"""Reads which variants of a model a store has, and computes how many bytes a variant takes. Writes nothing."""

from __future__ import annotations

import dataclasses
import urllib.parse
from pathlib import Path

from ccjax.cache.variant_records import record_from_meta
from ccjax.policy.capture import make_variant_id
from ccjax.prompts import Prompt
from ccjax.store.formats import expected_layout
from ccjax.store.objects import open_root
from ccjax.store.records import encode_record
from ccjax.store.spec import KVSpec, StoreIdentity
from ccjax.types import Chunk, ChunkId, Segment, VariantMeta

_FLOAT, _DEVIATION = 0.012345678901234567, 0.0123  # as many digits as such numbers usually have


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of variants in a store of one model."""

    kv_spec: KVSpec
    identity: StoreIdentity
    kv_dtype: str

    def of(self, chunk: Chunk, prefix_ids: tuple[ChunkId, ...], has_deviations: bool) -> tuple[int, int]:
        """(object, record) bytes of a chunk's exact variant behind `prefix_ids`."""
        num_tokens = len(chunk.token_ids)
        meta = VariantMeta(
            variant_id=make_variant_id(chunk.chunk_id, prefix_ids, "exact"),
            chunk_id=chunk.chunk_id,
            prefix_ids=prefix_ids,
            inter_by_prefix=(0.0, *(_FLOAT,) * len(prefix_ids[1:]))[: len(prefix_ids)],
            a_mean=_FLOAT if prefix_ids[1:] else 0.0,
            b_mean=_FLOAT,
            cci=_FLOAT if prefix_ids[1:] else 0.5,
            token_ranking=tuple(range(num_tokens)),
            num_tokens=num_tokens,
            num_bytes=self.kv_spec.num_bytes(num_tokens),
            token_deviations=(_DEVIATION,) * num_tokens if has_deviations else (),
            start=100,
            roles=("instructions",) * bool(prefix_ids) + ("passage",) * max(1, len(prefix_ids)),
        )
        record = record_from_meta(meta, Prompt.of_chunks([Segment("passage", chunk)]))
        layout = expected_layout(self.kv_spec, num_tokens, self.kv_dtype)
        raw = encode_record(record, identity=self.identity, kv_spec=self.kv_spec, object_id="0" * 32, layout=layout)
        return layout.num_bytes(self.kv_spec, num_tokens), len(raw)


def stored_ids(url: str, identity: StoreIdentity) -> frozenset[str]:
    """Ids of a model's variants in a store; writes nothing, and reads no record.

    Raises:
      ValueError: no store URL.
      StoreUnavailableError, OSError: it cannot be listed.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file" and not Path(urllib.parse.unquote(parts.path)).exists():
        return frozenset()
    names = open_root(url, read_only=True).names(f"{identity.namespace}/records")
    return frozenset(name.removesuffix(".json") for name in names if name.endswith(".json"))
