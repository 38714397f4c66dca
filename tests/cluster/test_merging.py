"""Merged answers of several replicas: from hand-made bodies, and through the front."""

from __future__ import annotations

import json

import httpx
import pytest

from ccjax.cluster.calls import Call
from ccjax.cluster.merging import can_merge, merged
from ccjax.server.live import NUM_HOTTEST, NUM_RECENT
from tests.cluster.conftest import ADMIN_KEY, API_KEY, bearer
from tests.polling import wait_until

CHAT = "/v1/chat/completions"
DOCUMENTS = "/v1/cache/documents"


def document(name: str, version: str | None = None, **more) -> dict:
    return {
        "object": "cache.document",
        "id": name,
        "version": version,
        "bytes": {"host": 10, "disk": 100},
        "chunks": 1,
        "variants": 2,
        "frequency_reuse": 0.5,
        "last_used": None,
        "pinned_until": None,
        "erasing": False,
    } | more


def listing(*documents: dict) -> bytes:
    return json.dumps({"object": "list", "data": documents, "total": len(documents), "has_more": False}).encode()


def together(path: str, *told: bytes, method: str = "GET", query: str = "", num_asked: int | None = None) -> dict:
    call = Call(method, path.encode(), query.encode(), (), b"")
    assert can_merge(call)
    return merged(call, told, len(told) if num_asked is None else num_asked)


def test_listing_merges_replicas_and_deduplicates_versions():
    first = listing(document("a", "1"), document("b"), document("b", "2"))
    second = listing(document("a"), document("a", "1"), document("c"))
    found = together(DOCUMENTS, first, second)
    names = [(entry["id"], entry["version"]) for entry in found["data"]]
    assert names == [("a", None), ("a", "1"), ("b", None), ("b", "2"), ("c", None)]  # the order of one listing
    assert (found["total"], found["has_more"], found["replicas"], found["object"]) == (5, False, 2, "list")


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("", "abcd", False),
        ("limit=2", "ab", True),
        ("limit=2&offset=1", "bc", True),
        ("offset=2&limit=2", "cd", False),
        ("offset=9", "", False),
    ],
)
def test_pagination_covers_all_documents(query, names, has_more):
    found = together(
        DOCUMENTS, listing(document("b"), document("d")), listing(document("a"), document("c")), query=query
    )
    assert "".join(entry["id"] for entry in found["data"]) == names
    assert (found["total"], found["has_more"]) == (4, has_more)


def test_host_bytes_are_summed_and_shared_disk_bytes_are_not():
    first = document("a", bytes={"host": 10, "disk": 100}, chunks=1, variants=3, frequency_reuse=2.0, last_used=5.0)
    second = document("a", bytes={"host": 7, "disk": 300}, chunks=2, variants=1, pinned_until=9.0, erasing=True)
    (found,) = together(f"{DOCUMENTS}/a", listing(first), listing(second))["data"]
    assert found == document(
        "a",
        bytes={"host": 17, "disk": 300},
        chunks=2,
        variants=3,
        frequency_reuse=2.0,
        last_used=5.0,
        pinned_until=9.0,
        erasing=True,
    )
    later = together(f"{DOCUMENTS}/a", listing(first), listing(first | {"last_used": 8.0, "pinned_until": 1.0}))
    assert (later["data"][0]["last_used"], later["data"][0]["pinned_until"]) == (8.0, 1.0)


def test_the_answer_of_a_single_replica_is_unchanged():
    body = listing(document("a"), document("b", "1"))
    assert together(DOCUMENTS, body) == json.loads(body)
    assert together(f"{DOCUMENTS}/a", body, num_asked=2)["replicas"] == 1  # the other knows nothing of it


def test_removal_counts_are_merged():
    def removal(chunks: int, variants: int, host: int, disk: int, is_own: bool) -> bytes:
        counts = {"chunks": chunks, "kept_chunks": 0, "variants": variants, "bytes": {"host": host, "disk": disk}}
        named = {"object": "cache.removal", "id": "a", "version": None, "erased": True}
        return json.dumps(named | counts | {"in_documents_directory": is_own}).encode()

    found = together(f"{DOCUMENTS}/a", removal(1, 4, 10, 50, False), removal(2, 1, 5, 0, True), method="DELETE")
    assert (found["chunks"], found["variants"], found["bytes"]) == (2, 4, {"host": 15, "disk": 50})
    assert found["in_documents_directory"] is True and found["replicas"] == 2


def live(name: str, **more) -> dict:
    tier = {"used_bytes": 10, "budget_bytes": 100, "num_variants": 5, "hits": 3, "misses": 1}
    return {
        "object": "live",
        "model": "m",
        "strategy": "auto",
        "queue": {"running": 1, "waiting": 2},
        "pages": {"used": 3, "total": 8},
        "tiers": [{"tier": "host"} | tier, {"tier": "disk"} | tier | {"budget_bytes": None}],
        "num_variants": 6,
        "uptime_s": 9.0,
        "answered": 4,
        "tokens": {"reused": 7, "recomputed": 0, "computed": 1},
        "recent": [{"at": 1.0, "ttft_s": 0.5}, {"at": 4.0, "ttft_s": 0.25}],
        "documents": [{"id": name, "title": None, "requests": 2, "tokens": 6, "reused_tokens": 3, "last_used": 1.0}],
    } | more


def test_live_view_has_totals_and_each_replica():
    first = live("a")
    disk = first["tiers"][1] | {"used_bytes": 30, "num_variants": 4}
    second = live("a", tiers=[first["tiers"][0], disk], num_variants=5, answered=1, uptime_s=2.0)
    second["recent"] = [{"at": 2.0, "ttft_s": 1.0}]
    found = together("/v1/live", json.dumps(first).encode(), json.dumps(second).encode())
    assert found["queue"] == {"running": 2, "waiting": 4} and found["pages"] == {"used": 6, "total": 16}
    counted = {"num_variants": 10, "hits": 6, "misses": 2}
    assert found["tiers"][0] == {"tier": "host", "used_bytes": 20, "budget_bytes": 200} | counted
    disk_of_all = {"tier": "disk", "used_bytes": 30, "budget_bytes": None} | counted | {"num_variants": 5}
    assert found["tiers"][1] == disk_of_all
    assert (found["num_variants"], found["answered"], found["uptime_s"]) == (6, 5, 9.0)
    assert found["tokens"] == {"reused": 14, "recomputed": 0, "computed": 2}
    assert [answer["at"] for answer in found["recent"]] == [1.0, 2.0, 4.0]
    both = {"requests": 4, "tokens": 12, "reused_tokens": 6, "last_used": 1.0}
    assert found["documents"] == [{"id": "a", "title": None} | both]
    assert [replica["answered"] for replica in found["replicas"]] == [4, 1]
    assert found["replicas"][0]["queue"] == {"running": 1, "waiting": 2}


def test_variants_are_summed_when_no_store_is_shared():
    def alone(number: int) -> bytes:
        return json.dumps(live("a", tiers=[live("a")["tiers"][0]], num_variants=number)).encode()

    assert together("/v1/live", alone(6), alone(5))["num_variants"] == 11


def test_live_view_lists_do_not_grow_with_the_number_of_replicas():
    def much(number: int) -> bytes:
        recent = [{"at": float(2 * at + number), "ttft_s": 1.0} for at in range(NUM_RECENT)]
        use = {"title": None, "tokens": 1, "reused_tokens": 1, "last_used": 1.0}
        hot = [{"id": f"{number}-{rank}", "requests": 9 - rank} | use for rank in range(NUM_HOTTEST)]
        return json.dumps(live("a", recent=recent, documents=hot)).encode()

    found = together("/v1/live", much(0), much(1))
    assert len(found["recent"]) == NUM_RECENT and found["recent"][-1]["at"] == 2 * NUM_RECENT - 1
    assert [entry["requests"] for entry in found["documents"]] == sorted(
        [9 - rank for rank in range(NUM_HOTTEST)] * 2, reverse=True
    )[:NUM_HOTTEST]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/cache/warm/x"), ("PUT", "/v1/cache/pins/a"), ("GET", "/v1/models"), ("POST", "/v1/live")],
)
def test_other_answers_are_not_merged(method, path):
    assert not can_merge(Call(method, path.encode(), b"", (), b""))


# -- through the front ---------------------------------------------------------------------------------------------


def chat(*documents: dict, **more) -> dict:
    question = [{"role": "user", "content": "Who lives in Paris?"}]
    return {"messages": question, "max_tokens": 2, "documents": list(documents), **more}


def test_front_listing_covers_all_replicas(cluster):
    names = [f"of-both-{number}" for number in range(3)]
    texts = [f"Note {number} tells of the {number} bells of Bremen." for number in range(3)]
    first, second, third = ({"id": name, "text": text} for name, text in zip(names, texts, strict=True))
    for asked in ((first, third), (second, third)):  # one replica after the other
        assert cluster.post(CHAT, chat(*asked)).status_code == 200
    known = [{entry.document_id for entry in server.engine.documents.list()} for server in cluster.servers]
    assert names[0] not in known[1] and names[1] not in known[0]
    found = cluster.ask("GET", DOCUMENTS).json()
    ids = [entry["id"] for entry in found["data"]]
    assert set(ids) == known[0] | known[1] and ids == sorted(ids) and len(ids) == len(set(ids)) == found["total"]
    assert found["replicas"] == 2
    held = {entry["id"]: entry["bytes"]["host"] for entry in found["data"]}
    of_each = [server.engine.documents.list(names[2])[0].num_bytes["host"] for server in cluster.servers]
    assert held[names[2]] == sum(of_each) and min(of_each) > 0
    pages = [cluster.ask("GET", f"{DOCUMENTS}?limit=1&offset={number}").json() for number in range(len(ids) + 1)]
    assert [entry["id"] for page in pages for entry in page["data"]] == ids
    assert [page["has_more"] for page in pages[-3:]] == [True, False, False]
    single = cluster.ask("GET", f"{DOCUMENTS}/{names[0]}").json()
    assert [entry["id"] for entry in single["data"]] == [names[0]] and single["replicas"] == 1
    assert cluster.ask("GET", f"{DOCUMENTS}/{names[2]}").json()["replicas"] == 2


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        (DOCUMENTS, API_KEY, 403),
        (DOCUMENTS, None, 401),
        (f"{DOCUMENTS}?limit=0", ADMIN_KEY, 400),
        (f"{DOCUMENTS}?limit=1&limit=2", ADMIN_KEY, 400),
        (f"{DOCUMENTS}/nobody-knows-this", ADMIN_KEY, 404),
        ("/v1/live", None, 401),
        ("/v1/live", ADMIN_KEY, 401),
    ],
)
def test_a_call_refused_by_all_replicas_is_refused(cluster, servers, path, key, status):
    urls = cluster.url, servers[0].url
    found, wanted = (httpx.get(f"{url}{path}", headers=bearer(key), timeout=60) for url in urls)
    assert found.status_code == wanted.status_code == status and found.json() == wanted.json()


def test_the_live_view_counts_answers_of_all_replicas(cluster):
    def view() -> dict:
        return httpx.get(f"{cluster.url}/v1/live", headers=bearer(API_KEY), timeout=60).json()

    before = view()
    assert [cluster.post(CHAT, chat(retrieval=None)).status_code for _ in range(3)] == [200] * 3
    wait_until(lambda: view()["answered"] == before["answered"] + 3)
    found = view()
    pairs = zip(found["replicas"], before["replicas"], strict=True)
    grown = [now["answered"] - then["answered"] for now, then in pairs]
    assert sorted(grown) == [1, 2]  # asked in turn
    (tier,) = found["tiers"]
    used = [server.engine.cache.usage()["host"].used_bytes for server in cluster.servers]
    assert tier["used_bytes"] == sum(used) and min(used) > 0
    cluster.replicas.unreachable = {1}
    assert len(view()["replicas"]) == 1  # better than none
    cluster.replicas.states = {"starting": 1}
    assert httpx.get(f"{cluster.url}/v1/live", headers=bearer(API_KEY), timeout=60).status_code == 503


def test_front_serves_the_page_without_replicas(cluster, servers):
    """So it is available while no replica is."""
    cluster.replicas.states = {"starting": 2}
    for path in ("/", "/page/app.js", "/page/style.css"):
        wanted, found = (httpx.get(f"{url}{path}", timeout=60) for url in (servers[0].url, cluster.url))
        assert (found.status_code, found.content) == (200, wanted.content)
        own = ("date", "server", "x-request-id")
        kept = [{k: v for k, v in response.headers.items() if k not in own} for response in (wanted, found)]
        assert kept[0] == kept[1] and "content-security-policy" in kept[1]
        head = httpx.head(f"{cluster.url}{path}", timeout=60)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", found.headers["etag"])
    for path in ("/page/none.js", "/page/%2e%2e/page.py"):
        missing = httpx.get(f"{cluster.url}{path}", timeout=60)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert cluster.replicas.calls == []
