"""Key files: accepted clients, changes without a restart, and that no key is ever shown; tenants and their caches."""

import functools
import logging
import os
from pathlib import Path

import pytest

import ccjax.server.keys
from ccjax.errors import ConfigError
from ccjax.server import ServerSettings
from ccjax.server.keys import KeyRing, Keys, salt_of
from tests.server import patience

ANNA, BOB, PLAIN, ADMIN = "anna-key-0123456789", "bob-key-0123456789", "plain-key-0123456789", "admin-key-0123456789"
PASSAGES = [
    {"id": "p1", "text": "Anna lives in Paris and repairs violins in a shop by the river."},
    {"id": "p2", "text": "Bob works in Rome and paints houses all day, in blue and in red."},
]


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The monotonic clock of the keys, which only tests advance."""
    seconds = [100.0]
    monkeypatch.setattr(ccjax.server.keys.time, "monotonic", lambda: seconds[0])
    return seconds


@pytest.fixture
def write(tmp_path):
    """`write(text)` puts a key file in place, as an operator should: by renaming."""

    def put(text: str | bytes, name: str = "keys", mode: int = 0o600) -> str:
        new = tmp_path / f"{name}.new"
        new.write_bytes(text if isinstance(text, bytes) else text.encode())
        new.chmod(mode)
        os.replace(new, tmp_path / name)
        return str(tmp_path / name)

    return put


def test_key_file_maps_keys_to_tenants(write):
    ring = KeyRing("api_key_file", "sesame", write(f"# clients\n\n anna:{ANNA}\nbob:{BOB}\n{PLAIN}\n"))
    assert ring.find(ANNA) == "anna" and ring.find(BOB) == "bob"
    assert ring.find(PLAIN) == ring.find("sesame") == ""
    for wrong in (None, "", ANNA[:-1], ANNA + " ", f"anna:{ANNA}", "anna", "#", "ÿ" * 20):
        assert ring.find(wrong) is None


def test_key_lookup_compares_every_key_in_constant_time(write, monkeypatch):
    """In constant time is: as many comparisons for the first key, the last one and none, each by compare_digest."""
    ring = KeyRing("api_key_file", None, write(f"anna:{ANNA}\nbob:{BOB}\n{PLAIN}\n"))
    calls = []
    compare = ccjax.server.keys.hmac.compare_digest
    monkeypatch.setattr(
        ccjax.server.keys.hmac, "compare_digest", lambda a, b: calls.append((len(a), len(b))) or compare(a, b)
    )
    for token in (ANNA, PLAIN, "x", "none of them, and rather longer than all the others"):
        calls.clear()
        ring.find(token)
        assert calls == [(32, 32)] * 3


def test_a_changed_file_is_used_without_a_restart(write, now, caplog):
    path = write(f"anna:{ANNA}\n")
    ring = KeyRing("api_key_file", None, path)
    write(f"anna:{ANNA}\nanna:{BOB}\n")  # rotation: the new key first beside the old one
    assert ring.find(BOB) is None  # looked at once a second
    now[0] += 1.5
    assert ring.find(ANNA) == ring.find(BOB) == "anna"
    write(f"anna:{BOB}\n")
    now[0] += 1.5
    assert ring.find(ANNA) is None and ring.find(BOB) == "anna"
    write("# nobody\n")
    now[0] += 1.5
    assert ring.find(BOB) is None and ring.is_asked_for
    assert ANNA not in caplog.text and BOB not in caplog.text


@pytest.mark.parametrize("damage", ["gone", "bad line", "not UTF-8"])
def test_key_file_that_becomes_invalid_is_ignored_and_logged_once(write, now, caplog, damage):
    path = write(f"anna:{ANNA}\n")
    ring = KeyRing("api_key_file", None, path)
    if damage == "gone":
        Path(path).unlink()
    else:
        write(f"anna:{BOB}\nshort\n" if damage == "bad line" else BOB.encode() + b"\xff")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            now[0] += 1.5
            assert ring.find(ANNA) == "anna" and ring.find(BOB) is None
    assert caplog.text.count("the previous keys stay valid") == 1 and BOB not in caplog.text
    write(f"bob:{BOB}\n")
    now[0] += 1.5
    assert ring.find(ANNA) is None and ring.find(BOB) == "bob"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "at least one key in .*, got none"),
        ("# x\n", "got none"),
        ("hush\n", "line 1: wanted a key of at least 16"),
        (f"{PLAIN}\nan na:{ANNA}\n", "line 2: wanted TENANT:KEY"),
        (f":{ANNA}\n", "line 1: wanted TENANT:KEY"),
        (f"a:b:{ANNA}\n", "line 1: wanted TENANT:KEY"),
        (f"{'x' * 65}:{ANNA}\n", "line 1: wanted TENANT:KEY"),
        (f"../x:{ANNA}\n", "line 1: wanted TENANT:KEY"),
        (f"{ANNA} {BOB}\n", "without spaces"),
        (f"{ANNA}é\n", "ASCII"),
        (f"{ANNA}\nbob:{ANNA}\n", "line 2: wanted each key once"),
        (ANNA.encode() + b"\xff\n", "not UTF-8"),
    ],
)
def test_invalid_key_files_are_rejected_at_start_without_showing_keys(write, text, wanted):
    with pytest.raises(ConfigError, match=wanted) as caught:
        KeyRing("api_key_file", None, write(text))
    assert "api_key_file" in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("hush", ANNA, BOB, PLAIN))


def test_missing_key_file_is_rejected_and_a_readable_one_causes_a_warning(write, tmp_path, caplog):
    with pytest.raises(ConfigError, match="cannot read .*No such file"):
        KeyRing("api_key_file", None, str(tmp_path / "none"))
    KeyRing("api_key_file", None, write(PLAIN))
    assert not caplog.records
    KeyRing("api_key_file", None, write(PLAIN, mode=0o644))
    assert "wanted mode 600" in caplog.text and PLAIN not in caplog.text


def test_key_cannot_be_both_client_and_admin_key(write, now):
    both = ServerSettings(api_key_file=write(PLAIN), admin_key_file=write(PLAIN, "admins"))
    with pytest.raises(ConfigError, match="admin_key: wanted another key"):
        Keys(both)
    with pytest.raises(ConfigError, match="line 1: wanted KEY"):
        Keys(ServerSettings(admin_key_file=write(f"anna:{ANNA}", "admins")))
    keys = Keys(ServerSettings(api_key_file=write(PLAIN), admin_key_file=write(ADMIN, "admins")))
    assert keys.is_admin(ADMIN) and not keys.is_admin(PLAIN)
    write(f"{PLAIN}\n{ADMIN}\n")
    now[0] += 1.5
    assert not keys.is_admin(ADMIN)  # now a client could erase


def test_repr_and_errors_do_not_contain_keys(write):
    settings = ServerSettings(api_key="very-secret", admin_key="more-secret", api_key_file=write(f"anna:{ANNA}"))
    keys = Keys(settings)
    text = f"{settings!r} {keys.api!r} {keys!r} {keys.api.find(ANNA)!r} {vars(keys.api)}"
    assert not any(secret in text for secret in ("very-secret", "more-secret", ANNA))
    with pytest.raises(ConfigError) as caught:
        ServerSettings(api_key="same-secret", admin_key="same-secret")
    assert "same-secret" not in str(caught.value)


def test_salts_of_tenants_never_collide():
    tenants = ["", "anna", "bob"]
    texts = ["", "x", "anna", '["anna", ""]', '["anna"', "bob"]
    salts = {salt_of(text, tenant) for text in texts for tenant in tenants}
    assert len(salts) == len(texts) * 3 and salt_of("", "") == ""


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def ask(url, key, passages=PASSAGES, **fields):
    body = {"messages": [{"role": "user", "content": "Who paints?"}], "max_tokens": 2, "documents": passages} | fields
    return patience.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def num_reused(response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def tenants(start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for name, text in (("api", f"anna:{ANNA}\nbob:{BOB}\n{PLAIN}\n"), ("admin", ADMIN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    settings = ServerSettings(api_key_file=str(folder / "api"), admin_key_file=str(folder / "admin"))
    with start_server(settings, tenant_salt="") as server:
        yield server


def test_tenant_cache_is_reused_only_with_that_tenants_keys(tenants):
    # With a system prompt of its own, so that other tests' requests have no effect.
    messages = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Who paints?"}]
    asked = functools.partial(ask, tenants.url, messages=messages)
    assert num_reused(asked(ANNA)) == 0
    own = num_reused(asked(ANNA))
    assert own > 0
    assert num_reused(asked(BOB)) == 0 and num_reused(asked(PLAIN)) == 0
    # Neither by asking for the other's salt, nor by one that looks like what the server makes of it.
    for salt in ("anna", salt_of("", "anna")):
        assert num_reused(asked(BOB, cache_salt=salt)) == 0
        assert num_reused(asked(PLAIN, cache_salt=salt)) == 0
    assert num_reused(asked(ANNA)) == own
    assert num_reused(asked(ANNA, cache_salt="apart")) == 0
    assert num_reused(asked(ANNA, cache_salt="apart")) == own
    texts = {asked(key).json()["choices"][0]["message"]["content"] for key in (ANNA, BOB, PLAIN)}
    assert len(texts) == 1  # a salt changes no answer


def test_live_view_is_forbidden_to_tenants(tenants):
    for key, status in ((ANNA, 403), (PLAIN, 200), ("none", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert patience.get(f"{tenants.url}/v1/live", headers=headers).status_code == status


def test_keys_from_files_are_enforced_over_http(tenants):
    assert ask(tenants.url, "none").json()["error"]["code"] == "invalid_api_key"
    assert ask(tenants.url, ADMIN).status_code == 401
    documents = f"{tenants.url}/v1/cache/documents"
    assert patience.get(documents, headers={"Authorization": f"Bearer {ADMIN}"}).status_code == 200
    refused = patience.get(documents, headers={"Authorization": f"Bearer {ANNA}"})
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
    metrics = patience.get(f"{tenants.url}/metrics").text
    assert not any(secret in metrics for secret in (ANNA, BOB, PLAIN, ADMIN))


def test_cache_salt_length_is_limited(tenants):
    response = ask(tenants.url, PLAIN, cache_salt="x" * 257)
    assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"


def warmed(server, **fields) -> dict:
    return patience.warmed(server.url, ADMIN, at_once=True, **fields)


def reused_of_passages(response) -> int:
    assert response.status_code == 200, response.text
    told = response.json()["reuse"]["per_document"]
    return sum(document["reused_tokens"] for document in told if document["role"] == "passage")


@pytest.mark.parametrize(
    ("fields", "key", "salt"),
    [
        ({"tenant": "anna"}, ANNA, None),
        ({"tenant": "anna", "cache_salt": "apart"}, ANNA, "apart"),
        ({"cache_salt": "apart"}, PLAIN, "apart"),
        ({}, PLAIN, None),
    ],
    ids=str,
)
def test_documents_warmed_for_a_tenant_are_reused_only_by_that_tenant(tenants, fields, key, salt):
    passage = {"text": f"Zoe keeps {len(str(fields))} tall clocks in the attic, and winds them on Sundays."}
    assert warmed(tenants, documents=[passage], **fields)["computed"] == 1
    everybody = [(other_key, of) for other_key in (ANNA, BOB, PLAIN) for of in (None, "apart", "other")]
    for other_key, of in everybody:
        if (other_key, of) != (key, salt):
            assert reused_of_passages(ask(tenants.url, other_key, [passage], cache_salt=of)) == 0, (other_key, of)
    # After all these: what others computed meanwhile is not what is found here.
    found = ask(tenants.url, key, [passage], cache_salt=salt, reuse="exact")
    assert reused_of_passages(found) > 0
    assert warmed(tenants, documents=[passage], **fields)["present"] == 1


@pytest.mark.parametrize("tenant", ["", "eve", "anna "])
def test_warming_for_an_unknown_tenant_is_refused(tenants, tenant):
    refused = warmed(tenants, documents=PASSAGES, tenant=tenant)
    assert refused["param"] == "tenant" and repr(tenant) in refused["message"]


def test_server_with_tenant_salt_warms_only_under_that_salt(start_server):
    settings = ServerSettings(admin_key=ADMIN)
    with start_server(settings, tenant_salt="house") as server:
        assert warmed(server, documents=PASSAGES[:1], cache_salt="house")["computed"] == 1
        found = patience.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1, "documents": PASSAGES[:1]},
        )
        assert reused_of_passages(found) > 0
        assert warmed(server, documents=PASSAGES[:1], cache_salt="other")["param"] == "cache_salt"
