"""Merges the answers of several replicas to the same call: cache listings, removals, the live view.

Memory belongs to each replica, so bytes there, requests and tokens are summed. The disk tier is shared, so all replicas
see the same apart from staleness: the largest number is taken. The same holds for numbers of chunks and variants, since
it is unknown which ones replicas have in common.
"""

from __future__ import annotations

import collections
import heapq
import json
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ccjax.cluster.calls import Call
from ccjax.server.admin import DEFAULT_PAGE
from ccjax.server.live import NUM_HOTTEST, NUM_RECENT

Body = Mapping[str, Any]
Merge = Callable[[Call, Sequence[Body]], dict[str, Any]]

LIVE = b"/v1/live"
DOCUMENTS = b"/v1/cache/documents"
_OF_EACH = ("queue", "pages", "num_variants", "answered", "tokens", "uptime_s")
_SHARED = "disk"
"""The tier that all replicas share."""


def can_merge(call: Call) -> bool:
    """Whether the answers to `call` can be merged; otherwise any successful answer will do."""
    return _merge_of(call) is not None


def merged(call: Call, told: Sequence[bytes], num_asked: int) -> dict[str, Any]:
    """Merges successful answers. If more than one replica was asked, `replicas` says how many; in the live view it has
    the load of each of them."""
    merge = _merge_of(call)
    assert merge is not None
    found = merge(call, [json.loads(body) for body in told])
    return found if num_asked > 1 else {name: value for name, value in found.items() if name != "replicas"}


def _merge_of(call: Call) -> Merge | None:
    if call.path == LIVE and call.method == "GET":
        return _live
    if call.path == DOCUMENTS and call.method == "GET":
        return _page
    if call.path.startswith(DOCUMENTS + b"/"):
        return {"GET": _versions, "DELETE": _removal}.get(call.method)
    return None


def _page(call: Call, bodies: Sequence[Body]) -> dict[str, Any]:
    """A page of all documents of which any replica has something; `bodies` are complete listings."""
    query = urllib.parse.parse_qs(call.query.decode("latin-1"))  # each replica validated it
    start, count = int(query.get("offset", ["0"])[0]), int(query.get("limit", [str(DEFAULT_PAGE)])[0])
    data = _documents(bodies)
    page = data[start : start + count]
    return {
        **bodies[0],
        "data": page,
        "total": len(data),
        "has_more": start + count < len(data),
        "replicas": len(bodies),
    }


def _versions(_: Call, bodies: Sequence[Body]) -> dict[str, Any]:
    return {**bodies[0], "data": _documents(bodies), "replicas": len(bodies)}


def _documents(bodies: Iterable[Body]) -> list[dict[str, Any]]:
    """All documents in listing order, each version once."""
    found: dict[tuple[str, bool, str], list[Body]] = {}
    for body in bodies:
        for document in body["data"]:
            key = document["id"], document["version"] is not None, document["version"] or ""
            found.setdefault(key, []).append(document)
    return [_document(found[key]) for key in sorted(found)]


def _document(same: Sequence[Body]) -> dict[str, Any]:
    return {
        **same[0],
        **_largest(same, "chunks", "variants", "frequency_reuse"),
        "bytes": _bytes(same),
        "last_used": _latest(same, "last_used"),
        "pinned_until": _latest(same, "pinned_until"),
        "erasing": any(document["erasing"] for document in same),
    }


def _removal(_: Call, bodies: Sequence[Body]) -> dict[str, Any]:
    return {
        **bodies[0],
        **_largest(bodies, "chunks", "kept_chunks", "variants"),
        "bytes": _bytes(bodies),
        "in_documents_directory": any(body["in_documents_directory"] for body in bodies),
        "replicas": len(bodies),
    }


def _live(_: Call, bodies: Sequence[Body]) -> dict[str, Any]:
    """All replicas together, and the load of each of them."""
    tiers: dict[str, list[Body]] = {}
    for body in bodies:
        for tier in body["tiers"]:
            tiers.setdefault(tier["tier"], []).append(tier)
    variants = [body["num_variants"] for body in bodies]
    recent = sorted((answer for body in bodies for answer in body["recent"]), key=lambda answer: answer["at"])
    return {
        **bodies[0],
        "queue": _sums(body["queue"] for body in bodies),
        "pages": _sums(body["pages"] for body in bodies),
        "tiers": [_tier(same) for same in tiers.values()],
        "num_variants": max(variants) if _SHARED in tiers else sum(variants),
        "uptime_s": max(body["uptime_s"] for body in bodies),
        "answered": sum(body["answered"] for body in bodies),
        "tokens": _sums(body["tokens"] for body in bodies),
        "recent": recent[-NUM_RECENT:],
        "documents": _hottest(use for body in bodies for use in body["documents"]),
        "replicas": [{name: body[name] for name in _OF_EACH} for body in bodies],
    }


def _tier(same: Sequence[Body]) -> dict[str, Any]:
    sizes = ("used_bytes", "budget_bytes", "num_variants")
    counted = _sums({name: value for name, value in tier.items() if name not in (*sizes, "tier")} for tier in same)
    together = max if same[0]["tier"] == _SHARED else sum
    held = {}
    for name in sizes:
        values = [tier[name] for tier in same]
        held[name] = None if None in values else together(values)
    return {"tier": same[0]["tier"], **held, **counted}


def _hottest(uses: Iterable[Body]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for use in uses:
        known = found.get(use["id"])
        if known is None:
            found[use["id"]] = dict(use)
            continue
        known |= {name: known[name] + use[name] for name in ("requests", "tokens", "reused_tokens")}
        known["last_used"] = max(known["last_used"], use["last_used"])
    return heapq.nlargest(NUM_HOTTEST, found.values(), key=lambda use: (use["requests"], use["last_used"]))


def _bytes(same: Sequence[Body]) -> dict[str, int]:
    found: dict[str, int] = {}
    for body in same:
        for tier, num_bytes in body["bytes"].items():
            so_far = found.get(tier, 0)
            found[tier] = max(so_far, num_bytes) if tier == _SHARED else so_far + num_bytes
    return found


def _largest(same: Sequence[Body], *names: str) -> dict[str, Any]:
    return {name: max(body[name] for body in same) for name in names}


def _latest(same: Sequence[Body], name: str) -> float | None:
    return max((body[name] for body in same if body[name] is not None), default=None)


def _sums(values: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for counts in values:
        found.update(counts)
    return dict(found)
