"""Requests drawn from the server's own OpenAPI document, right and wrong ones, against a real server.

More of them: `CCJAX_FUZZ_EXAMPLES=1000 python -m pytest --all tests/fuzz`, drawn anew every time.
"""

from __future__ import annotations

import collections
import os

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings, strategies
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from ccjax.server import ServerSettings, Service, create_app

EXAMPLES = os.environ.get("CCJAX_FUZZ_EXAMPLES")
SETTINGS = ServerSettings(top_k=2, admin_key="admin", request_timeout_s=60, max_body_bytes=100_000)
ADMIN = {"Authorization": "Bearer admin"}
CHECKS = [content_type_conformance, response_schema_conformance]
ANSWER_LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
VALID = {"messages": [{"role": "user", "content": "Who lives in Paris?"}], "prompt": "Anna lives in", "max_tokens": 2}

pytestmark = pytest.mark.slow
# What is sent is worked out where it is sent, in one process of three.
schema = schemathesis.pytest.from_fixture("described")
drawn = settings(
    max_examples=int(EXAMPLES or 3),
    deadline=None,
    derandomize=EXAMPLES is None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def named(request):
    """Schemathesis keeps the test's name in an attribute that pytest 9.2 no longer has."""
    request.node._nodeid = request.node.nodeid


@pytest.fixture(scope="module")
def described():
    return schemathesis.openapi.from_dict(create_app(Service(SETTINGS)).openapi())


@pytest.fixture(scope="module")
def url(start_server):
    with start_server(SETTINGS) as server:
        yield server.url
        assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


@pytest.fixture(scope="module")
def statuses():
    """How often came which status, by operation."""
    counts = collections.defaultdict(collections.Counter)
    yield counts
    assert counts and all(count[200] for count in counts.values()), counts


def send(case, url) -> int:
    """The status of the answer, which is none of a fault of the server: 504 is a time limit's, 501 a lack."""
    limit = ANSWER_LIMITS.get(case.operation.path)
    if limit and isinstance(case.body, dict) and case.body.get(limit) is None:
        case.body[limit] = 2  # thousands of whole answers only take longer
    response = case.call(base_url=url, headers=ADMIN, timeout=300)
    assert response.status_code < 500 or response.status_code in (501, 504), response.text
    case.validate_response(response, checks=CHECKS)
    return response.status_code


# Hypothesis takes a use of `random` by the server's thread for one by the strategy.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@drawn
@schema.parametrize()
def test_arbitrary_requests_are_answered_or_refused(case, url):
    send(case, url)


# The document's own examples have no `data`.
@settings(drawn, max_examples=4 * drawn.max_examples, phases=[phase for phase in Phase if phase != Phase.explicit])
@schema.include(path_regex="completions").parametrize()
@schema.given(data=strategies.data())
def test_requests_with_a_few_random_fields_are_answered_or_refused(case, url, data, statuses):
    """All at once they would nearly always be refused for the first of them."""
    body = case.body if isinstance(case.body, dict) else {}
    names = sorted(body.keys() - VALID.keys() - {"model"})
    kept = data.draw(strategies.sets(strategies.sampled_from(names), max_size=2)) if names else ()
    wanted = "prompt" if "/chat/" not in case.operation.path else "messages"
    case.body = {name: body[name] for name in kept} | {name: VALID[name] for name in (wanted, "max_tokens")}
    statuses[case.operation.label][send(case, url)] += 1
