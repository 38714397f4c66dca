"""The layout of a store root, and the owners of its namespaces.

ROOT/store.json                         format version of everything below
ROOT/NAMESPACE/identity.json            owner of the namespace, and its KV shape
ROOT/NAMESPACE/hints.json               values that the owner keeps between runs, replaced as a whole
ROOT/NAMESPACE/records/VARIANT.json     commit record of a variant: written last, create-if-absent
ROOT/NAMESPACE/data/OBJECT/c.0.0.0.0.0  one object per variant, under an id that is never reused
ROOT/NAMESPACE/notes/NAME.json          small facts of the owner, never changed
ROOT/NAMESPACE/catalog/K-of-P.bin       copies of many records in one object (`store.catalog`); may be lost at any time
ROOT/NAMESPACE/leases/VARIANT.EPOCH     the process that computes a variant now (`store.leases`)
ROOT/NAMESPACE/quarantine/              records that failed their check; never read
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from typing import Any

import xxhash

from ccjax.store.errors import StoreIdentityError
from ccjax.store.objects import Root
from ccjax.store.spec import FORMAT_VERSION, KVSpec, StoreIdentity

logger = logging.getLogger(__name__)

ORPHAN_AGE_S = 3600.0
"""Data objects without a record and temporary files are deleted at open if they are older: no write takes that long."""

QUARANTINE_AGE_S = 7 * 24 * 3600.0
"""Damaged records are kept this long for inspection."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")


def open_namespace(root: Root, url: str, identity: StoreIdentity, kv_spec: KVSpec, *, read_only: bool = False) -> None:
    """Prepares the namespace of `identity` for use; `url` is for messages. A store that has variants of other models
    and none of this one is used like an empty one, with a warning; what an older format version left is deleted. A file
    that fails its checksum is written again.

    Args:
      read_only: only check what is there; nothing may be there.

    Raises:
      StoreIdentityError: the store has a newer format version, or another KV shape for this identity.
      OSError: the root refused.
    """
    _check_version(root, url, read_only=read_only)
    namespace = identity.namespace
    # In this order, because finding the models in a bucket requires listing all their objects.
    if not root.names(f"{namespace}/records") and (others := _other_fingerprints(root, identity)):
        logger.warning(
            "store: %s holds the KV of %s and none of this model, %s: nothing can be reused yet, and both will be kept",
            url,
            ", ".join(sorted(others)),
            identity.model_fingerprint,
        )
    owner = {
        "format_version": FORMAT_VERSION,
        "model_fingerprint": identity.model_fingerprint,
        "kv_spec": dataclasses.asdict(kv_spec),
    }
    key = f"{namespace}/identity.json"
    if not read_only:
        for folder in ("", "records", "data", "notes", "quarantine"):
            root.make_prefix(f"{namespace}/{folder}".rstrip("/"))
        if not root.create(key, _sealed(owner)) and (_read_json(root, key) or {}).keys() != owner.keys():
            logger.warning("store: %s/%s is damaged: written again, since every record names its owner", url, key)
            root.delete(key)
            root.create(key, _sealed(owner))
    found = _read_json(root, key)
    if found != owner and not (read_only and found is None):
        raise StoreIdentityError(
            f"store: {url}/{key} says {found}, this process is {owner}: one identity must mean one KV shape; name "
            "another URL, or delete this namespace"
        )


def _check_version(root: Root, url: str, *, read_only: bool) -> None:
    """Marks a new store with the format version; in one of an older version, deletes all namespaces first."""
    marker = _sealed({"format_version": FORMAT_VERSION})
    if read_only and root.read("store.json") is None:
        return
    is_new = not read_only and root.create("store.json", marker)
    found = {"format_version": FORMAT_VERSION} if is_new else _read_json(root, "store.json")
    if found is None:  # damaged: each namespace has the version, too
        names = filter(_NAMESPACE.fullmatch, root.names(""))
        owners = filter(None, (_read_json(root, f"{name}/identity.json") for name in names))
        found = {"format_version": max((owner.get("format_version", 0) for owner in owners), default=FORMAT_VERSION)}
        logger.warning("store: %s/store.json is damaged: its models have format version %s", url, found)
        if not read_only:
            root.replace("store.json", _sealed(found))
    version = found.get("format_version")
    if version == FORMAT_VERSION:
        return
    if not isinstance(version, int) or not 0 < version < FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = "upgrade this program" if is_newer else "its store.json is damaged"
        raise StoreIdentityError(
            f"store: {url} has format version {version!r} and this program reads {FORMAT_VERSION}: {advice}; "
            "or name another URL"
        )
    if read_only:
        raise StoreIdentityError(f"store: {url} has format version {version}, this program reads {FORMAT_VERSION}")
    logger.warning("store: deleting the KV of format version %d in %s, which this program cannot read", version, url)
    try:
        for name in filter(_NAMESPACE.fullmatch, root.names("")):
            owner = _read_json(root, f"{name}/identity.json")
            if owner and owner.get("format_version", version) == version:  # else another process has just created it
                for part in root.names(name):
                    if part != "identity.json":  # last, since it shows the version to the next start
                        root.delete(f"{name}/{part}")
                root.delete(name)
        root.replace("store.json", marker)
    except OSError as error:
        logger.warning("store: cannot delete all of it: %s; the next start tries again", error)


def _other_fingerprints(root: Root, identity: StoreIdentity) -> frozenset[str]:
    """Fingerprints of the other models with variants under `root`."""
    found = set()
    for name in root.names(""):
        if name == identity.namespace or not _NAMESPACE.fullmatch(name):
            continue
        owner = _read_json(root, f"{name}/identity.json")
        if owner and root.names(f"{name}/records"):
            found.add(str(owner.get("model_fingerprint")))
    return frozenset(found - {identity.model_fingerprint})


def _sealed(value: dict[str, Any]) -> bytes:
    return json.dumps({**value, "checksum": _checksum(value)}).encode()


def _checksum(value: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def _read_json(root: Root, key: str) -> dict[str, Any] | None:
    """The object in a file, without its checksum if it has one, as those of earlier releases have not; None if it is
    missing or damaged."""
    try:
        value = json.loads(root.read(key) or b"null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    checksum = value.pop("checksum", None)
    return value if checksum is None or checksum == _checksum(value) else None
