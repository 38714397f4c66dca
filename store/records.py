"""The commit record of a variant as bytes: written last, checked wholly when read. Knows no directory and no array."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from typing import Any, NamedTuple

from store.errors import ShardCorruptError
from store.spec import FORMAT_VERSION, KVSpec, ShardRecord, StoreIdentity


@dataclasses.dataclass(frozen=True, slots=True)
class StoredShard:
    """A committed variant: its record, where its data object is and what must be in there.

    Attributes:
      object_id: fresh random hex per write, the name of the data object.
      layer_crc32: crc32 of each layer's bytes. It binds the object to the record: the object's own checksums would
        accept another variant's object that was moved in its place.
      head_groups: how many inner chunks a layer has along K.
      charge_bytes: bytes of data object and record on disk.
    """

    record: ShardRecord
    object_id: str
    layer_crc32: tuple[int, ...]
    head_groups: int
    charge_bytes: int


class KnownShard(NamedTuple):
    """A committed variant as memory holds it by the hundred thousand: the bytes of its record, and what must be known
    of it before anybody looks into them.

    Attributes:
      raw: the record. `decode_known` gives its `StoredShard`.
      crc32: of `raw` when it was checked wholly.
    """

    variant_id: str
    chunk_id: str
    num_tokens: int
    object_id: str
    charge_bytes: int
    crc32: int
    raw: bytes


def object_bytes(kv_spec: KVSpec, num_tokens: int, head_groups: int) -> int:
    """Size of a data object: the KV, 4 bytes of crc32c per inner chunk, and the shard index (16 bytes per inner chunk
    and its crc32c)."""
    return kv_spec.num_bytes(num_tokens) + kv_spec.num_layers * head_groups * (4 + 16) + 4


def encode_record(
    record: ShardRecord,
    *,
    identity: StoreIdentity,
    kv_spec: KVSpec,
    object_id: str,
    layer_crc32: tuple[int, ...],
    head_groups: int,
) -> bytes:
    """Canonical JSON with a sha256 of itself. Its length does not depend on the digits of ids and checksums."""
    body: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "namespace": identity.namespace,
        "model_fingerprint": identity.model_fingerprint,
        "variant_id": record.variant_id,
        "chunk_id": record.chunk_id,
        "num_tokens": record.num_tokens,
        "num_bytes": record.num_bytes,
        "shape": list(kv_spec.shape(record.num_tokens)),
        "dtype": kv_spec.dtype,
        "head_groups": head_groups,
        "object_id": object_id,
        "layer_crc32": [f"{crc:08x}" for crc in layer_crc32],
        "meta": record.meta,
    }
    return _canonical({**body, "checksum": hashlib.sha256(_canonical(body)).hexdigest()})


def decode_record(raw: bytes, *, variant_id: str, identity: StoreIdentity, kv_spec: KVSpec) -> StoredShard:
    """The shard that `raw`, found under the name `variant_id`, commits.

    Raises:
      ShardCorruptError: a byte differs from what was written, or it is the record of another variant, model or shape.
    """
    try:
        body = json.loads(raw)
        checksum = body.pop("checksum")
        # Comparing the bytes again leaves no byte unchecked: not a space, not a second key of the same name.
        whole = _canonical({**body, "checksum": checksum}) == raw
        sound = whole and checksum == hashlib.sha256(_canonical(body)).hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ShardCorruptError(f"record of variant {variant_id}: checksum failed")
    return _shard(body, len(raw), variant_id, identity, kv_spec)


def known_from_raw(raw: bytes, *, variant_id: str, identity: StoreIdentity, kv_spec: KVSpec) -> KnownShard:
    """As `decode_record`, in the form that is kept. Raises ShardCorruptError."""
    shard = decode_record(raw, variant_id=variant_id, identity=identity, kv_spec=kv_spec)
    record = shard.record
    return KnownShard(
        variant_id, record.chunk_id, record.num_tokens, shard.object_id, shard.charge_bytes, zlib.crc32(raw), raw
    )


def decode_known(known: KnownShard, *, identity: StoreIdentity, kv_spec: KVSpec) -> StoredShard:
    """The shard that `known.raw` commits; a quarter of `decode_record`'s time, as the bytes passed it once.

    Raises:
      ShardCorruptError: they are not those bytes, or not of what `known` says they are.
    """
    if zlib.crc32(known.raw) != known.crc32:
        raise ShardCorruptError(f"record of variant {known.variant_id}: checksum failed")
    try:
        shard = _shard(json.loads(known.raw), len(known.raw), known.variant_id, identity, kv_spec)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ShardCorruptError(f"record of variant {known.variant_id}: {error}") from error
    record = shard.record
    found = (record.variant_id, record.chunk_id, record.num_tokens, shard.object_id, shard.charge_bytes)
    if found != known[:5]:
        raise ShardCorruptError(f"record of variant {known.variant_id}: it is {found}, wanted {known[:5]}")
    return shard


def _shard(
    body: dict[str, Any], record_bytes: int, variant_id: str, identity: StoreIdentity, kv_spec: KVSpec
) -> StoredShard:
    expected = {
        "format_version": FORMAT_VERSION,
        "namespace": identity.namespace,
        "model_fingerprint": identity.model_fingerprint,
        "variant_id": variant_id,
        "shape": list(kv_spec.shape(body["num_tokens"])),
        "dtype": kv_spec.dtype,
    }
    for name, want in expected.items():
        if body[name] != want:
            raise ShardCorruptError(f"record of variant {variant_id}: {name} is {body[name]!r}, wanted {want!r}")
    num_tokens = body["num_tokens"]
    return StoredShard(
        record=ShardRecord.of_json(variant_id, body["chunk_id"], num_tokens, body["num_bytes"], body["meta"]),
        object_id=body["object_id"],
        layer_crc32=tuple(int(crc, 16) for crc in body["layer_crc32"]),
        head_groups=body["head_groups"],
        charge_bytes=record_bytes + object_bytes(kv_spec, num_tokens, body["head_groups"]),
    )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
