"""Moves a whole chunk-cache: ccjax snapshot save|restore|inspect

save writes the store of a model to a directory or bucket, restore loads it, or its most used part, into a store, and
inspect shows its contents. None loads the weights; their bytes are read once to identify the model. A server may use
the store meanwhile; it finds restored variants at its next refresh.

Exit codes: 0 done; 1 done, but variants were damaged or could not be written, and are left out; 2 refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ccjax.cli import command_of
from ccjax.cli.options import CommandSettings, run_command, subset
from ccjax.cli.progress import Stages, bars
from ccjax.cli.values import size_text
from ccjax.config.base import Described
from ccjax.config.engine import DTYPES, EngineConfig
from ccjax.config.values import FolderPath, NumBytes
from ccjax.loading.named import TOY

if TYPE_CHECKING:
    from ccjax.cache.snapshot import IndexedStore, SnapshotIndex
    from ccjax.config.engine import EngineConfig as _Engine
    from ccjax.loading.model import ModelFiles
    from ccjax.store.spec import StoreIdentity
else:
    _Engine = subset(EngineConfig, {"quantization", "tokenizer", "tenant_salt"})

Place = Annotated[str, Described("a path or a URL", "PLACE")]


class StoreOptions(_Engine, CommandSettings):
    """The store, with options as of `ccjax serve`."""

    model_config = ConfigDict(title="store")

    model: Annotated[str, Described(metavar="MODEL")] = TOY
    """As with ccjax serve."""
    store: Annotated[str, Described("the URL of a chunk store", "URL")]  # pyright: ignore[reportGeneralTypeIssues]
    """URL of the chunk store, as with ccjax serve."""
    json_: bool = False
    """One JSON object on stdout."""


class SaveOptions(StoreOptions):
    """Where the snapshot goes."""

    model_config = ConfigDict(title="snapshot")

    to: Place
    """Absent or empty path or URL of the snapshot: file:///path, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX."""
    overwrite: bool = False
    """Replace an existing snapshot."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the KV; auto is the one that the store holds."""


class RestoreOptions(StoreOptions):
    """Where the snapshot is, and how much of it to restore."""

    model_config = ConfigDict(title="snapshot")

    from_: Place
    """Path or URL of the snapshot."""
    max_bytes: NumBytes | None = Field(default=None, ge=0)
    """Only the hottest variants, up to this size, such as 2GiB; without it all."""
    disk_cache_bytes: NumBytes | None = Field(default=None, ge=1)
    """Space in the store; without it no limit."""


class InspectOptions(CommandSettings):
    """Which snapshot to show, and how."""

    model_config = ConfigDict(title="snapshot")

    from_: Place
    """Path or URL of the snapshot."""
    model: Annotated[str, Described(metavar="MODEL")] | None = None
    """Show the chunks' text with this model's tokenizer."""
    tokenizer: FolderPath | None = None
    """Or with this one."""
    top: int = Field(default=10, ge=1)
    """Hottest chunks to show."""
    json_: bool = False
    """One JSON object on stdout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX would reserve three quarters of a GPU that is not used here
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    texts = {name: run.__doc__ or "" for name, (_, run) in _COMMANDS.items()}
    command, rest = command_of("ccjax snapshot", __doc__, texts, argv)
    model, run = _COMMANDS[command]
    return run_command(model, rest, run, prog=f"ccjax snapshot {command}", description=run.__doc__)


def save(args: SaveOptions) -> int:
    """Takes a snapshot of a store."""
    from ccjax.cache.snapshot import save_snapshot
    from ccjax.loading.model import read_model_files

    files = read_model_files(args.model, tokenizer=args.tokenizer)
    identities = _identities(files, args)
    dtype = _stored_dtype(args, identities)
    with _open(args, files, dtype) as cache, _progress() as progress:
        report = save_snapshot(cache, args.to, overwrite=args.overwrite, progress=progress)
    _print(
        args,
        dataclasses.asdict(report),
        f"Saved {report.num_variants} variants, {size_text(report.num_bytes)}, to {report.url}"
        + _also((report.num_evicted, "evicted meanwhile"), (report.num_damaged, "damaged, left out")),
    )
    return 1 if report.num_damaged else 0


def restore(args: RestoreOptions) -> int:
    """Restores a snapshot into a store."""
    from ccjax.cache.snapshot import inspect_snapshot, restore_snapshot
    from ccjax.loading.model import read_model_files

    dtype = inspect_snapshot(args.from_).kv_spec.dtype  # before the model, whose weights may take a minute
    files = read_model_files(args.model, tokenizer=args.tokenizer)
    with _open(args, files, dtype, args.disk_cache_bytes) as cache, _progress() as progress:
        report = restore_snapshot(cache, args.from_, max_bytes=args.max_bytes, progress=progress)
        cache.store.flush()
        num_failed = cache.store.usage()["disk"].failed_writes
    _print(
        args,
        {**dataclasses.asdict(report), "failed_writes": num_failed},
        f"Restored {report.num_restored - num_failed} variants, {size_text(report.restored_bytes)}, into {args.store}"
        + _also(
            (report.num_present, "there already"),
            (report.num_left_out, "beyond --max-bytes"),
            (report.num_no_room, "without room"),
            (report.num_damaged, "damaged, left out"),
            (report.num_erased, "of erased documents, left out"),
            (num_failed, "could not be written"),
        ),
    )
    return 1 if report.num_damaged or num_failed else 0


def inspect(args: InspectOptions) -> int:
    """Shows the contents of a snapshot."""
    from ccjax.cache.snapshot import inspect_snapshot

    index = inspect_snapshot(args.from_)
    chunks = _hottest_chunks(index, args.top)
    tokenizer = _tokenizer(args.model, args.tokenizer)
    for chunk in chunks:
        token_ids = chunk.pop("token_ids")
        if tokenizer is not None:
            chunk["text"] = tokenizer.decode(token_ids)
    facts = {
        "model": index.model,
        "model_fingerprint": index.model_fingerprint,
        "dtype": index.kv_spec.dtype,
        "num_variants": len(index.variants),
        "num_chunks": len({variant.record.chunk_id for variant in index.variants}),
        "num_tokens": index.num_tokens,
        "num_bytes": index.num_bytes,
        "age_s": max(0.0, time.time() - index.created_s),
        "ccjax_version": index.ccjax_version,
        "hottest": chunks,
    }
    if args.json_:
        print(json.dumps(facts))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 118)
    table = Table("", "", title=str(args.from_), show_header=False)
    spec = index.kv_spec
    table.add_row("model", f"{index.model} ({index.model_fingerprint[:12]})")
    table.add_row("KV", f"{spec.dtype}, {spec.num_layers} layers, {spec.num_kv_heads} KV heads of {spec.head_dim}")
    table.add_row("variants", f"{facts['num_variants']} of {facts['num_chunks']} chunks")
    table.add_row("tokens", str(index.num_tokens))
    table.add_row("bytes", size_text(index.num_bytes))
    table.add_row("age", f"{_age(facts['age_s'])}, ccjax {index.ccjax_version}")
    console.print(table)
    hottest = Table("chunk", "variants", "tokens", "bytes", "f_r", "text" if tokenizer else "", title="Hottest chunks")
    for chunk in chunks:
        text = " ".join(chunk.get("text", "").split())
        numbers = (str(chunk["num_variants"]), str(chunk["num_tokens"]), size_text(chunk["num_bytes"]))
        hottest.add_row(chunk["chunk_id"][:12], *numbers, f"{chunk['frequency_reuse']:.1f}", text[:56])
    console.print(hottest, markup=False)
    return 0


def _hottest_chunks(index: SnapshotIndex, top: int) -> list[dict[str, Any]]:
    """Chunks by the sum of their variants' `f_r`, then bytes."""
    chunks: dict[str, dict[str, Any]] = {}
    for variant in index.variants:
        record = variant.record
        chunk = chunks.setdefault(
            record.chunk_id,
            {
                "chunk_id": record.chunk_id,
                "num_tokens": record.num_tokens,
                "num_variants": 0,
                "num_bytes": 0,
                "frequency_reuse": 0.0,
                "token_ids": record.meta.get("token_ids") or [],
            },
        )
        chunk["num_variants"] += 1
        chunk["num_bytes"] += record.num_bytes
        chunk["frequency_reuse"] += variant.frequency_reuse
    return sorted(chunks.values(), key=lambda chunk: (-chunk["frequency_reuse"], -chunk["num_bytes"]))[:top]


def _tokenizer(model: str | None, directory: str | None) -> Any:
    from ccjax.loading.model import model_tokenizer

    if model is None:
        return None
    tokenizer = model_tokenizer(model, directory)
    if tokenizer is None:
        raise ValueError(f"--model: wanted a model with a tokenizer, got {model!r}")
    return tokenizer


def _identities(files: ModelFiles, args: StoreOptions) -> dict[str, StoreIdentity]:
    """By dtype: a store never mixes them, so one model counts as two."""
    from ccjax.store.spec import StoreIdentity

    return {dtype: StoreIdentity(files.fingerprint(dtype, args.quantization), args.tenant_salt) for dtype in DTYPES}


def _stored_dtype(args: SaveOptions, identities: dict[str, StoreIdentity]) -> str:
    """The dtype of this model's KV in the store."""
    from ccjax.store.objects import open_root

    root = open_root(args.store, read_only=True)
    held = [dtype for dtype, identity in identities.items() if root.names(f"{identity.namespace}/records")]
    if args.dtype != "auto":
        held = [dtype for dtype in held if dtype == args.dtype]
    if not held:
        what = "" if args.dtype == "auto" else f" in {args.dtype}"
        raise ValueError(f"--store: {args.store} holds no KV of {args.model}{what} (under this tenant salt)")
    if len(held) > 1:
        raise ValueError(f"--dtype: wanted one of {held}, since {args.store} holds both")
    return held[0]


@contextlib.contextmanager
def _open(args: StoreOptions, files: ModelFiles, dtype: str, disk_bytes: int | None = None) -> Iterator[IndexedStore]:
    from ccjax.cache.snapshot import open_cache
    from ccjax.runner.device import kv_spec_of

    with open_cache(
        args.store,
        kv_spec=kv_spec_of(files.config, dtype),
        identity=_identities(files, args)[dtype],
        model=files.name,
        disk_bytes=disk_bytes,
    ) as cache:
        yield cache


def _progress() -> contextlib.closing[Stages]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    names = {"save": "Saving", "restore": "Restoring"}
    return contextlib.closing(Stages(bars(*columns, TimeRemainingColumn(), in_bytes=True), names))


def _print(args: StoreOptions, facts: dict[str, Any], text: str) -> None:
    print(json.dumps(facts) if args.json_ else text)


def _also(*counts: tuple[int, str]) -> str:
    return "".join(f"; {number} {what}" for number, what in counts if number)


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


_COMMANDS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "save": (SaveOptions, save),
    "restore": (RestoreOptions, restore),
    "inspect": (InspectOptions, inspect),
}
