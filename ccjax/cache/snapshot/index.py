"""The index of a snapshot: its contents, its owner, and the location of each variant's KV.

Not an Orbax format, because the commit must be a single atomic write, also in a bucket. A sha256 protects every byte of
the index; a checksum per variant protects the KV, because Orbax does not detect a flipped byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import ccjax
from ccjax.errors import SnapshotError
from ccjax.store.objects import Root, open_root
from ccjax.store.spec import FORMAT_VERSION, KVSpec, ShardRecord, check_record, positive_int

KEY = "snapshot.json"
PARTS = "parts"
FORMAT = "ccjax-snapshot"

_FOLDER = re.compile(r"[0-9a-f]{32}")  # strict, because it becomes part of a path


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotVariant:
    """One variant of a snapshot.

    Attributes:
      frequency_reuse: CacheCraft sec. 3.3 `f_r` when the snapshot was taken.
      checksum: checksum of its KV `[L, 2, T, K, H]`.
      pack, first_token: its KV is `[:, :, first_token : first_token + T]` of that pack.
    """

    record: ShardRecord
    frequency_reuse: float
    checksum: int
    pack: int
    first_token: int


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotIndex:
    """A whole snapshot.

    Attributes:
      model: the model's name, for display; `model_fingerprint` and `namespace` (tenant salt included) are the identity.
      created_s: seconds since the epoch.
      folder: name of the folder below `parts/` that this snapshot uses.
      parts: the part of each pack.
      variants: hottest first.
      uses: the uses that eviction ranks by, from `VariantIndex.uses`.
    """

    model: str
    model_fingerprint: str
    namespace: str
    kv_spec: KVSpec
    created_s: float
    folder: str
    parts: tuple[int, ...]
    variants: tuple[SnapshotVariant, ...]
    uses: dict[str, Any]
    ccjax_version: str = ccjax.__version__

    @property
    def num_bytes(self) -> int:
        """Bytes of all KV."""
        return sum(variant.record.num_bytes for variant in self.variants)

    @property
    def num_tokens(self) -> int:
        """Tokens of all variants."""
        return sum(variant.record.num_tokens for variant in self.variants)

    def encode(self) -> bytes:
        """Canonical JSON that contains the sha256 of its other fields."""
        body = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **_fields(self),
            "kv_spec": _fields(self.kv_spec),
            "variants": [{**_fields(variant), "record": _fields(variant.record)} for variant in self.variants],
        }
        return _canonical({**body, "checksum": hashlib.sha256(_canonical(body)).hexdigest()})


def decode_index(raw: bytes, url: str) -> SnapshotIndex:
    """Parses the bytes of `url`'s snapshot.json.

    Raises:
      SnapshotError: another format or format version, or damaged.
    """
    try:
        body = json.loads(raw)
        kind, version = body.pop("format"), body.pop("format_version")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SnapshotError(f"snapshot: {url} holds no snapshot, or its {KEY} is damaged") from None
    if kind != FORMAT:
        raise SnapshotError(f"snapshot: {url} holds no snapshot: its {KEY} says format {kind!r}, wanted {FORMAT!r}")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise SnapshotError(
            f"snapshot: {url} has format version {version!r} and this program reads {FORMAT_VERSION}: "
            f"{'upgrade this program' if newer else 'save it again'}"
        )
    try:
        checksum = body.pop("checksum")
        whole = {**body, "format": kind, "format_version": version}
        sound = checksum == hashlib.sha256(_canonical(whole)).hexdigest()
        # Comparing the encoded bytes also detects added spaces and duplicate keys.
        if not sound or _canonical({**whole, "checksum": checksum}) != raw:
            raise ValueError("its checksum failed")
        return _index(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"snapshot: the {KEY} in {url} is damaged: {error}") from error


def read_index(root: Root, url: str) -> SnapshotIndex:
    """The index of the snapshot at `root`; `url` is for messages.

    Raises:
      SnapshotError: there is no snapshot, or no usable one.
      OSError: it cannot be read.
    """
    raw = root.read(KEY)
    if raw is None:
        raise SnapshotError(f"snapshot: {url} holds no snapshot (no {KEY}: never saved there, or not to the end)")
    return decode_index(raw, url)


def inspect_snapshot(where: str | Path) -> SnapshotIndex:
    """The contents of a snapshot, hottest variants first. Reads no KV and needs no model.

    Args:
      where: a path, or a URL in the store's format: file:///path, s3://bucket/prefix, gs://bucket/prefix.

    Raises:
      SnapshotError: there is no snapshot, or no usable one.
      ValueError, StoreUnavailableError: a bad URL; the directory or bucket cannot be read.
    """
    url = url_of(where)
    return read_index(open_root(url, read_only=True), url)


def url_of(where: str | Path) -> str:
    """The URL of a path; a URL is returned unchanged."""
    return str(where) if "://" in str(where) else Path(where).absolute().as_uri()


def _index(body: dict[str, Any]) -> SnapshotIndex:
    kv_spec = KVSpec(**body["kv_spec"])
    parts = tuple(positive_int("part", part, minimum=0) for part in body["parts"])
    variants = []
    for fields in body["variants"]:
        variant = SnapshotVariant(**{**fields, "record": ShardRecord(**fields["record"])})
        check_record(variant.record, kv_spec)
        positive_int("first_token", variant.first_token, minimum=0)
        if positive_int("pack", variant.pack, minimum=0) >= len(parts):
            raise ValueError(f"pack: wanted less than {len(parts)}, got {variant.pack}")
        if not math.isfinite(variant.frequency_reuse) or variant.frequency_reuse < 0:
            raise ValueError(f"frequency_reuse: wanted a finite number >= 0, got {variant.frequency_reuse}")
        variants.append(variant)
    if not _FOLDER.fullmatch(body["folder"]):
        raise ValueError(f"folder: wanted 32 hex digits, got {body['folder']!r}")
    return SnapshotIndex(**{**body, "kv_spec": kv_spec, "parts": parts, "variants": tuple(variants)})


def _fields(value: Any) -> dict[str, Any]:
    """As `dataclasses.asdict`, without recursion and without copying lists of token ids."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
