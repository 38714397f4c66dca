"""Settings of the HTTP side, fixed for the life of a server."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, model_validator

from ccjax.config.base import Described, SettingsModel
from ccjax.config.values import FilePath, NumBytes, Seconds
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


Text = Annotated[str, AfterValidator(_not_blank)]


class ServerSettings(SettingsModel):
    """What the server decides without the engine."""

    model_config = ConfigDict(title="server")

    served_model_name: Annotated[Text, Described(metavar="NAME")] | None = None
    """The model's name in the API; without it that of its directory."""
    api_key: Annotated[Text, Described(metavar="KEY")] | None = Field(default=None, repr=False)
    """Bearer token that all but health, readiness and metrics ask for; without any key they ask for none."""
    admin_key: Annotated[Text, Described(metavar="KEY")] | None = Field(default=None, repr=False)
    """Bearer token that opens /v1/cache/...; without any such key these endpoints are closed."""
    api_key_file: FilePath | None = None
    """File of such tokens, KEY or TENANT:KEY a line, read again when it changes; a tenant has caches of its own."""
    admin_key_file: FilePath | None = None
    """File of such tokens for /v1/cache/..., KEY a line, read again when it changes."""
    quota_file: FilePath | None = None
    """TOML file of what each tenant may ask for, in each replica: requests at a time, tokens a minute."""
    reuse: ReuseMode = "bounded"
    """Mode of requests that name none."""
    top_k: int = Field(default=5, ge=1, le=LARGEST_TOP_K)
    """Passages retrieved where a request does not say how many."""
    retrieval_stages: int = Field(default=1, ge=1)
    """Parts of a search after each of which an answer may begin from what is found so far (RAGCache sec. 5.3); 1 begins
    once the search is through."""
    max_prefill_bs: int = Field(default=4, ge=0)
    """No such answer begins while so many requests wait."""
    request_timeout_s: Seconds | None = None
    """Requests that name no timeout_s end with 504 after so long; without it never."""
    max_body_bytes: NumBytes = Field(default=10_000_000, ge=1)
    """Longest request body; more is refused with 413."""
    refresh_interval_s: Seconds | None = None
    """Pause between looks for changed documents; without it there are none."""
    store_refresh_interval_s: Annotated[float, _OR_NEVER] | None = Field(default=10.0, ge=0)
    """Pause between looks at what other processes did to the store; 0 for never."""
    repair_when_idle: bool = Field(default=True, validation_alias=AliasChoices("repair", "repair_when_idle"))
    """Compute approximate chunk variants anew while no request waits."""
    prepare_when_idle: bool = Field(default=True, validation_alias=AliasChoices("prepare", "prepare_when_idle"))
    """Compute the server's own documents then, until the store or, without one, host memory is 80 % full; in a bucket
    only with disk_cache_bytes."""
    page: bool = True
    """Serve the page at /, and what it reads: `trace` in requests, which tells the text of passages, and the live
    view."""
    otlp_traces_endpoint: Annotated[str, AfterValidator(_http), Described(metavar="URL")] | None = None
    """URL that takes requests' spans by OTLP, such as http://localhost:4318/v1/traces; needs ccjax[tracing]."""
    even_out_timing: bool = False
    """Hold every answer back as if its whole prompt had been computed, and tell nothing of what was reused, so that
    nobody can see what others asked for; wants no page."""

    @model_validator(mode="after")
    def _check_keys_and_page(self) -> Self:
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ValueError("admin_key: wanted another key than api_key: whoever may ask must not be able to erase")
        if self.even_out_timing and self.page:
            raise ValueError("page: wanted it off (--no-page) with even_out_timing: it shows what was reused")
        return self

    @property
    def shows_reuse(self) -> bool:
        """True where clients are told what was reused of a prompt."""
        return not self.even_out_timing
