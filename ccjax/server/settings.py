"""Settings of the HTTP side, fixed for the life of a server."""

from __future__ import annotations

import urllib.parse
from typing import Annotated, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ccjax.config.base import KEYWORD_ONLY, Described, SettingsModel
from ccjax.config.values import FilePath, Names, NumBytes, Seconds
from ccjax.text import CallForm
from ccjax.types import ReuseMode

LARGEST_TOP_K = 100
_OR_NEVER = Described("a positive number of seconds, or 0 for never", "S")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("wanted a non-empty text")
    return text


def _http(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("wanted a URL such as http://localhost:4318/v1/traces")
    return url


def _origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    for origin in origins:
        parts = urllib.parse.urlsplit(origin)
        if origin != "*" and not (parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"):
            raise ValueError("wanted origins such as https://chat.example.com, without a path")
    return origins


Text = Annotated[str, AfterValidator(_not_blank)]


class ServerSettings(SettingsModel):
    """Settings of the HTTP server."""

    model_config = ConfigDict(title="server")

    served_model_name: Annotated[Text, Described(metavar="NAME")] | None = None
    """Model name in the API; the name of its directory if not given."""
    api_key: Annotated[Text, Described(metavar="KEY")] | None = Field(default=None, repr=False)
    """Bearer token for the API; health, readiness, metrics, the page's files and /openapi.json need none. Without any
    key no token is needed."""
    admin_key: Annotated[Text, Described(metavar="KEY")] | None = Field(default=None, repr=False)
    """Bearer token for /v1/cache/...; without any such key these endpoints are disabled."""
    api_key_file: FilePath | None = None
    """File of API keys, KEY or TENANT:KEY per line, reread when it changes; each tenant has caches of its own."""
    admin_key_file: FilePath | None = None
    """File of keys for /v1/cache/..., KEY per line, reread when it changes."""
    allowed_hosts: Names = ()
    """Host names (`*.example.com`: all below; `*`: any) under which a server may be asked, besides this machine's and
    IP addresses; without any, a server with API keys does not check."""
    allowed_origins: Annotated[Names, AfterValidator(_origins)] = ()
    """Origins of web pages that may use the server from browsers (CORS), such as https://chat.example.com; `*`: any."""
    reuse: ReuseMode = "bounded"
    """Mode of requests that name none."""
    top_k: int = Field(default=5, ge=1, le=LARGEST_TOP_K)
    """Passages to retrieve for requests that do not say how many."""
    min_score: float | None = None
    """Least score of passages to retrieve: similarity to the question, -1 to 1, or bm25 in a search by words alone;
    without it the best are retrieved, however bad they are."""
    context_tokens: int = Field(default=0, ge=0)
    """As far as retrieved passages have no more tokens than this together, those before and after them are added."""
    max_prefill_bs: Annotated[int, KEYWORD_ONLY] = Field(default=4, ge=0)
    """Begin no answer during its search while this many requests wait; where searches take long, others begin from the
    passages found so far (RAGCache sec. 5.3)."""
    request_timeout_s: Seconds | None = None
    """Requests without a timeout_s of their own end with 504 after this time; without it never."""
    keep_alive_s: Annotated[Seconds, KEYWORD_ONLY] = 75.0
    """How long connections stay open between requests; longer than a proxy in front keeps them."""
    max_body_bytes: Annotated[NumBytes, KEYWORD_ONLY] = Field(default=10_000_000, ge=1)
    """Largest request body; larger ones are refused with 413."""
    refresh_interval_s: Seconds | None = None
    """Interval of checks for changed documents; none if not given."""
    store_refresh_interval_s: Annotated[float, _OR_NEVER, KEYWORD_ONLY] = Field(default=10.0, ge=0)
    """Interval of checks for changes of other processes in the store; 0 for never."""
    repair: bool = True
    """Recompute approximate chunk variants while no request waits."""
    prepare: bool = True
    """Compute the server's own documents in idle time, until the store (or host memory, if there is no store) is 80 %
    full; in a bucket only with disk_cache_bytes."""
    page: bool = True
    """Serve the page at /, and what it needs: `trace` in requests, which shows the text of passages, and the live
    view."""
    tool_call_parser: CallForm | None = None
    """Form in which the model calls tools; the one of its chat template if not given."""
    otlp_traces_endpoint: Annotated[str, AfterValidator(_http), Described(metavar="URL")] | None = None
    """OTLP endpoint for request spans, such as http://localhost:4318/v1/traces; needs ccjax[tracing]."""

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ValueError("admin_key: wanted another key than api_key: clients must not be able to erase")
        return self
