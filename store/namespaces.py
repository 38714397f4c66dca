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

from ccjax.store.errors import StoreIdentityError
from ccjax.store.objects import Root
from ccjax.store.spec import FORMAT_VERSION, KVSpec, StoreIdentity

logger = logging.getLogger(__name__)

ORPHAN_AGE_S = 3600.0
"""Data objects without a record and temporary files are deleted at open if they are older: no write takes that long."""

QUARANTINE_AGE_S = 7 * 24 * 3600.0
"""Damaged records are kept this long for inspection."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")


def open_namespace(root: Root, url: str, identity: StoreIdentity, kv_spec: KVSpec) -> None:
    """Prepares the namespace of `identity` for use; `url` is for messages. A store that has variants of other models
    and none of this one is used like an empty one, with a warning; what an older format version left is deleted.

    Raises:
      StoreIdentityError: the store has a newer format version, or another KV shape for this identity.
      OSError: the root refused.
    """
    _check_version(root, url)
    namespace = identity.namespace
    # In this order, because finding the models in a bucket requires listing all their objects.
    if not root.names(f"{namespace}/records") and (others := _other_fingerprints(root, identity)):
        logger.warning(
            "store: %s holds the KV of %s and none of this model, %s: nothing can be reused yet, and both will be kept",
            url,
            ", ".join(sorted(others)),
            identity.model_fingerprint,
        )
    for folder in ("", "records", "data", "notes", "quarantine"):
        root.make_prefix(f"{namespace}/{folder}".rstrip("/"))
    owner = {
        "format_version": FORMAT_VERSION,
        "model_fingerprint": identity.model_fingerprint,
        "kv_spec": dataclasses.asdict(kv_spec),
    }
    key = f"{namespace}/identity.json"
    if not root.create(key, json.dumps(owner).encode()) and _read_json(root, key) is None:
        root.delete(key)  # damaged: every record carries the identity, so it can be rewritten
        root.create(key, json.dumps(owner).encode())
    found = _read_json(root, key)
    if found != owner:
        raise StoreIdentityError(
            f"store: {url}/{key} says {found}, this process is {owner}: one identity must mean one KV shape; name "
            "another URL, or delete this namespace"
        )


def _check_version(root: Root, url: str) -> None:
    """Marks a new store with the format version; in one of an older version, deletes all namespaces first."""
    marker = json.dumps({"format_version": FORMAT_VERSION}).encode()
    root.create("store.json", marker)
    version = (_read_json(root, "store.json") or {}).get("format_version")
    if version == FORMAT_VERSION:
        return
    if not isinstance(version, int) or not 0 < version < FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        advice = "upgrade this program" if is_newer else "its store.json is damaged"
        raise StoreIdentityError(
            f"store: {url} has format version {version!r} and this program reads {FORMAT_VERSION}: {advice}; "
            "or name another URL"
        )
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


def _read_json(root: Root, key: str) -> dict[str, Any] | None:
    try:
        value = json.loads(root.read(key) or b"null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
