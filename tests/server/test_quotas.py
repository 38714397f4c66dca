"""Quotas: requests at a time and tokens a minute, for each tenant by itself, from a file."""

from types import SimpleNamespace

import pytest

from ccjax.errors import ConfigError, QuotaError
from ccjax.server import ServerSettings
from ccjax.server.quotas import Quotas
from tests.server.test_keys import ANNA, BOB, ask


@pytest.fixture
def quotas_of(tmp_path):
    """`quotas_of(text)` are the quotas of such a file; `quotas_of.now[0]` is their clock."""
    now = [0.0]

    def make(text: str) -> Quotas:
        (tmp_path / "quotas.toml").write_text(text)
        return Quotas(str(tmp_path / "quotas.toml"), clock=lambda: now[0])

    make.now = now
    return make


def answer(num_tokens):
    return SimpleNamespace(num_answer_tokens=num_tokens)


def is_refused(quotas, tenant="anna", name="k") -> float | None:
    """Seconds until a retry; None if the request was accepted, which then ends at once."""
    try:
        quotas.enter(tenant, name).leave()
    except QuotaError as error:
        return error.retry_after_s
    return None


def test_concurrent_request_quota(quotas_of):
    quotas = quotas_of("[default]\nrequests = 2\n[tenants.anna]\nrequests = 1\n")
    seat = quotas.enter("anna", "k")
    assert is_refused(quotas) == 1.0 and is_refused(quotas, name="another key of the same") == 1.0
    first, second = quotas.enter("bob", "k"), quotas.enter("bob", "k")
    assert is_refused(quotas, "bob") is not None
    for _ in range(3):  # over is over, however often it is told
        seat.leave()
        first.leave()
    assert is_refused(quotas) is None
    quotas.enter("anna", "k")
    assert is_refused(quotas) is not None and is_refused(quotas, "bob") is None
    second.leave()


def test_tokens_per_minute_quota(quotas_of):
    quotas = quotas_of("[default]\ntokens_per_minute = 600\n")
    seat = quotas.enter("anna", "k")
    seat.charge(500)
    assert is_refused(quotas) is None  # some are left
    seat.leave(answer(400))
    assert is_refused(quotas) == pytest.approx(301 / 10)  # 300 too many, 10 a second
    assert is_refused(quotas, "bob") is None
    quotas_of.now[0] += 29.9
    assert is_refused(quotas) == pytest.approx(0.2)
    quotas_of.now[0] += 0.2
    assert is_refused(quotas) is None
    quotas_of.now[0] += 10_000  # a quiet night saves up one minute's, not more
    quotas.enter("anna", "k").charge(600)
    assert is_refused(quotas) is not None


def test_without_a_tenant_quotas_apply_per_key_and_idle_keys_are_dropped(quotas_of):
    quotas = quotas_of("[default]\nrequests = 1\n")
    quotas.enter("", "first key")
    assert is_refused(quotas, "", "first key") is not None
    assert is_refused(quotas, "", "second key") is None and is_refused(quotas, "first key", "") is None
    for number in range(3000):
        quotas.enter("", str(number)).leave()
    assert len(quotas._owners) <= 1025 and is_refused(quotas, "", "first key") is not None


def test_without_a_file_there_is_no_limit():
    quotas = Quotas()
    for _ in range(1000):
        quotas.enter("anna", "k").charge(10**9)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[default", "quota_file"),
        ("requests = 3", r"\[default\] and \[tenants.NAME\] only, got requests"),
        ("tenants = 3", "only, got 3"),
        ("[default]\nrequest = 3", "default: wanted requests, tokens_per_minute"),
        ("[default]\nrequests = 0", "default.requests: wanted a positive integer, got 0"),
        ("[default]\nrequests = true", "got True"),
        ("[tenants.anna]\ntokens_per_minute = 1.5", "tenants.anna.tokens_per_minute: wanted a positive integer"),
        ("[tenants]\nanna = 3", "tenants.anna: wanted"),
    ],
)
def test_invalid_quota_files_are_rejected(quotas_of, text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        quotas_of(text)
    with pytest.raises(ConfigError, match="quota_file: cannot read"):
        Quotas("/nowhere/quotas.toml")


def test_quotas_are_enforced_over_http(start_server, tmp_path):
    (tmp_path / "keys").write_text(f"anna:{ANNA}\nbob:{BOB}\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "quotas").write_text("[tenants.anna]\ntokens_per_minute = 60\nrequests = 5\n")
    settings = ServerSettings(api_key_file=str(tmp_path / "keys"), quota_file=str(tmp_path / "quotas"))
    with start_server(settings, tenant_salt="") as server:
        server.service._quotas._clock = lambda: 100.0  # however long an answer takes here
        bad = ask(server.url, ANNA, max_tokens=-1)
        assert bad.status_code == 400
        used = ask(server.url, ANNA).json()["usage"]["total_tokens"]
        assert used > 60
        refused = ask(server.url, ANNA)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "quota_exceeded"
        assert used - 65 <= int(refused.headers["Retry-After"]) <= used - 57  # one token a second
        assert ask(server.url, BOB).status_code == 200
        (owner,) = [owner for name, owner in server.service._quotas._owners.items() if name == "tenant anna"]
        assert owner.num_requests == 0  # refused, failed and whole ones all left
