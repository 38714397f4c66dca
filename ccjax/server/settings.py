"""Settings of the HTTP side, fixed for the life of a server."""

from __future__ import annotations

import dataclasses
import math

from ccjax.errors import ConfigError
from ccjax.types import REUSE_MODES, ReuseMode

LARGEST_TOP_K = 100


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """What the server decides without the engine.

    Attributes:
      served_model_name: the model's name in the API; None takes the engine's.
      api_key: bearer token that all but health, readiness and metrics ask for; None asks for none.
      admin_key: bearer token for what changes the cache; None keeps those endpoints closed.
      api_key_file, admin_key_file: files of more such keys (`ccjax.server.keys.KeyRing`), read again when they change.
      quota_file: what each tenant may ask for (`ccjax.server.quotas.Quotas`), in each replica; None for no limits.
      reuse: mode of requests that name none.
      top_k: passages retrieved where a request does not say how many.
      retrieval_stages: parts of a search after each of which an answer may begin from what is found so far (RAGCache
        sec. 5.3); 1 begins once the search is through.
      max_prefill_bs: no such answer begins while so many requests wait.
      request_timeout_s: `Request.timeout_s` of requests that name none; None for no limit.
      max_body_bytes: longest request body; more is refused with 413.
      refresh_interval_s: pause between looks for changed documents; None never looks.
      store_refresh_interval_s: pause between looks at what other processes did to the store; None never looks.
      repair_when_idle: replace approximate chunk variants by exact ones while no request waits.
      prepare_when_idle: compute the server's own documents then, before anybody asks, as far as there is room.
      otlp_traces_endpoint: URL that takes requests' spans as OTLP over HTTP (`ccjax.server.tracing`); None makes none.
      page: serve the page at /, and what it reads: `trace` in requests, which tells the text of passages, and the live
        view.
      even_out_timing: hold every answer back as if its whole prompt had been computed, and tell nothing of what was
        reused, so that nobody can see what others asked for; no page then (`shows_reuse`).
    """

    served_model_name: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    admin_key: str | None = dataclasses.field(default=None, repr=False)
    api_key_file: str | None = None
    admin_key_file: str | None = None
    quota_file: str | None = None
    reuse: ReuseMode = "bounded"
    top_k: int = 5
    retrieval_stages: int = 1
    max_prefill_bs: int = 4
    request_timeout_s: float | None = None
    max_body_bytes: int = 10_000_000
    refresh_interval_s: float | None = None
    store_refresh_interval_s: float | None = 10.0
    repair_when_idle: bool = True
    prepare_when_idle: bool = True
    page: bool = True
    otlp_traces_endpoint: str | None = None
    even_out_timing: bool = False

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "admin_key"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ConfigError(f"{name}: wanted a non-empty text, got a blank one")
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ConfigError("admin_key: wanted another key than api_key: whoever may ask must not be able to erase")
        if self.reuse not in REUSE_MODES:
            raise ConfigError(f"reuse: wanted one of {REUSE_MODES}, got {self.reuse!r}")
        if not 1 <= self.top_k <= LARGEST_TOP_K:
            raise ConfigError(f"top_k: wanted 1 to {LARGEST_TOP_K}, got {self.top_k}")
        for name, least in (("retrieval_stages", 1), ("max_prefill_bs", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: wanted an integer of at least {least}, got {getattr(self, name)}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint: wanted a URL such as http://localhost:4318/v1/traces, got {endpoint!r}"
            )
        if self.even_out_timing and self.page:
            raise ConfigError("page: wanted it off (--no-page) with even_out_timing: it shows what was reused")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes: wanted a positive number of bytes, got {self.max_body_bytes}")
        for name in ("request_timeout_s", "refresh_interval_s", "store_refresh_interval_s"):
            interval = getattr(self, name)
            if interval is not None and not (math.isfinite(interval) and interval > 0):
                raise ConfigError(f"{name}: wanted a positive number of seconds, got {interval}")

    @property
    def shows_reuse(self) -> bool:
        """True where clients are told what was reused of a prompt."""
        return not self.even_out_timing
