"""Computes the KV of documents ahead of traffic: ccjax precompute --model DIR --documents DIR --store URL

Documents are read, cut and indexed as by `ccjax serve --docs` with the same options; every passage is computed behind
the system prompt and stored; a server over that store then computes no passage that stands first, and repairs the
others. What is there already is left alone, so a run that was broken off, or documents that changed, cost only what is
missing. Several processes (--workers), and runs on several hosts with one store, share the work.

Exit codes: 0 all is there; 1 done, but something failed; 2 refused; 130, 143 ended by SIGINT, SIGTERM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ccjax.cli.progress import Stages, bars
from ccjax.cli.serving.options import add_document_arguments, document_options
from ccjax.cli.values import check_writable, layer_list, num_bytes, positive_int

if TYPE_CHECKING:
    from ccjax.precompute.report import Report

_ENGINE = (
    *(
        "dtype",
        "quantization",
        "tokenizer",
        "attention",
        "max_model_len",
        "strategy",
        "ranking_layers",
        "store",
        "host_cache_bytes",
    ),
    *(
        "disk_cache_bytes",
        "disk_kv_dtype",
        "disk_compression",
        "store_key_file",
        "encrypt_store",
        "tenant_salt",
        "system_prompt",
    ),
)
_STAGES = {
    "weights": "Loading weights",
    "read": "Reading documents",
    "embed": "Embedding passages",
    "train": "Finding clusters of passages",
    "add": "Adding passages to them",
    "sample": "Measuring a sample",
    "questions": "Asking questions",
}


class _Signals:
    """Notes the first signal that wants an end; the second one is not waited for."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def name(self) -> str | None:
        """Of the signal, if one came."""
        return None if self.number is None else signal.Signals(self.number).name


class _Bars:
    """Draws on stderr: a bar a stage, then one for all variants."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._stages = Stages(bars(*columns, TextColumn("{task.fields[speed]}")), _STAGES)

    def stage(self, worker: int, stage: str, done: int, total: int) -> None:
        """Shows what the first worker loads, reads or asks; the others do the same."""
        if worker == 0:
            self._stages(stage, done, total, speed="")

    def estimated(self, report: Report) -> None:
        """Prints what is to be done."""
        estimate, collection = report.estimate, report.collection
        assert estimate is not None and collection is not None
        seconds = "unknown time" if estimate.seconds is None else f"about {_time(estimate.seconds)}"
        on_disk = "" if estimate.disk_bytes is None else f", {_size(estimate.disk_bytes)} of the file system"
        free = "" if estimate.free_bytes is None else f" ({_size(estimate.free_bytes)} free)"
        text = (
            f"{len(collection.passages)} passages; {estimate.variants} variants to compute: "
            f"{estimate.computed_tokens} tokens, {seconds}, {_size(estimate.num_bytes)}{on_disk}{free}"
        )
        self._stages.shown.console.print(text, highlight=False, soft_wrap=True)

    def computed(self, report: Report) -> None:
        """Shows how far the variants are."""
        counts, estimate = report.counts, report.estimate
        assert estimate is not None
        speed = f"{counts.tokens_per_s:.0f} tokens/s, {_size(counts.stored_bytes)} written"
        self._stages("computing", counts.done, estimate.variants, speed=speed)

    def close(self) -> None:
        """Leaves the bars as they are."""
        self._stages.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    signals, bars = _Signals(), _Bars()
    try:
        return _run(args, signals, bars)
    except (ValueError, OSError) as error:
        bars.close()
        print(f"ccjax precompute: error: {_named(args, ' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a second signal: at once, and without a report
        return 128 + (signals.number or signal.SIGINT)


def _run(args: argparse.Namespace, signals: _Signals, bars: _Bars) -> int:
    from ccjax.precompute.compilation import Compilation, Options

    check_writable("report", args.report)
    if args.documents is not None and not args.documents.is_dir():
        raise ValueError(f"documents: wanted a directory, got {str(args.documents)!r}")
    options = Options(
        is_dry_run=args.dry_run,
        is_forced=args.force,
        prunes=args.prune,
        questions=args.questions,
        top_k=args.top_k,
        limit=args.limit,
        max_new_tokens=args.max_tokens,
    )
    compilation = Compilation(_settings(args), options, bars, signals.name)
    report = compilation.run()
    bars.close()
    if args.report is not None:
        args.report.write_text(json.dumps(report.to_json(), indent=1) + "\n", "utf-8")
    _print(report)
    if signals.number is not None and report.interrupted is not None:
        print("ccjax precompute: ended early; run the same command again to go on", file=sys.stderr)
        return 128 + signals.number
    if report.error is not None:
        print(f"ccjax precompute: error: {report.error}; run the same command again to go on", file=sys.stderr)
        return 1
    return 0 if report.is_dry_run or (report.is_complete and not report.counts.failed) else 1


def _settings(args: argparse.Namespace) -> list[Any]:
    from ccjax.precompute.messages import Settings
    from ccjax.server.loading import user_cache

    args.docs, args.no_docs = args.documents, False
    settings = Settings(
        model=args.model,
        engine={name: getattr(args, name) for name in _ENGINE if hasattr(args, name)},
        documents=document_options(args),
        compile_cache=str(args.compile_cache_dir or user_cache() / "compile"),
        num_neighbours=args.neighbours,
    )
    devices = [] if args.devices is None else args.devices.split(",")
    if devices and len(devices) != args.workers:
        raise ValueError(f"devices: wanted one for each of {args.workers} workers, got {args.devices!r}")
    if not devices:
        return [settings] * args.workers
    return [dataclasses.replace(settings, environment={"CUDA_VISIBLE_DEVICES": device}) for device in devices]


def _named(args: argparse.Namespace, message: str) -> str:
    """The message with the option that its argument came from, where it names one."""
    argument, colon, rest = message.partition(": ")
    argument = {"docs": "documents", "docs_dir": "documents", "directory": "embedder"}.get(argument, argument)
    if colon and (argument in vars(args) or argument in _ENGINE):
        return f"--{argument.replace('_', '-')}: {rest}"
    return message


def _print(report: Report) -> None:
    """The report for people."""
    collection, counts = report.collection, report.counts
    if collection is None or report.is_dry_run:
        return
    found = report.to_json()
    table = Table("", "", show_header=False, title="Precomputed")
    passages = found["passages"]
    table.add_row(
        "passages with their KV", f"{passages['stored']} of {passages['total']} ({_share(passages['share'])})"
    )
    table.add_row("tokens of these", _share(passages["token_share"]))
    for name, key, units in (
        ("also behind the frame", "framed", collection.plan.framed),
        ("also behind neighbours", "behind_neighbours", collection.plan.conditioned),
    ):
        if units:
            table.add_row(name, f"{found[key]['stored']} of {len(units)} ({_share(found[key]['share'])})")
    if report.pruned is not None:
        pruned = report.pruned
        text = f"{pruned.variants} variants of {pruned.passages} passages, {_size(pruned.num_bytes)}"
        table.add_row("dropped", text)
    table.add_row("computed now", f"{counts.computed} variants, {_size(counts.stored_bytes)}")
    table.add_row("in", f"{_time(counts.seconds)}, {counts.tokens_per_s:.0f} tokens/s")
    for name, values in (("too long", found["too_long"]), ("unusable files", found["unusable_files"])):
        if values:
            table.add_row(name, str(len(values)))
    for failed in found["failed"][:5]:
        table.add_row("failed", f"{failed['passage']}: {failed['reason']}")
    if len(found["failed"]) > 5:
        table.add_row("failed", f"and {len(found['failed']) - 5} more")
    if report.quality is not None:
        quality = report.quality
        same = quality.same_answers
        text = f"{same.mean:.1%} (95 %: {same.low:.1%} to {same.high:.1%}) of {quality.num_questions} questions"
        table.add_row("answers as with full prefill", text)
        table.add_row("passage tokens computed for them", _share(quality.computed_share))
        if quality.right is not None:
            table.add_row("right answers", f"{quality.right:.1%}, with full prefill {quality.right_full:.1%}")
    Console(width=None if sys.stdout.isatty() else 118).print(table, markup=False)


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _size(num_bytes_: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes_ < 1000:
            return f"{num_bytes_:.3g} {unit}"
        num_bytes_ /= 1000
    return f"{num_bytes_:.3g} TB"


def _time(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"wanted an integer of at least 0, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ccjax precompute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what").add_argument
    add("--model", default="demo", metavar="MODEL", help="as with ccjax serve (default demo)")
    text = "documents, as with ccjax serve --docs (default with --model demo: its own corpus)"
    add("--documents", type=Path, metavar="DIR", help=text)
    add("--store", required=True, metavar="URL", help="URL of the chunk store, as with ccjax serve")
    text = "compute each passage also behind its N most similar ones (default 0)"
    add("--neighbours", type=_count, default=0, metavar="N", help=text)
    text = (
        "drop what is stored of passages that these documents do not have; those of other documents in the store, too"
    )
    add("--prune", action="store_true", help=text)

    add = parser.add_argument_group("how").add_argument
    add("--workers", type=positive_int, default=1, metavar="N", help="processes that compute (default 1)")
    text = "GPUs of the workers, one each, as CUDA_VISIBLE_DEVICES names them, such as 0,1"
    add("--devices", metavar="LIST", help=text)
    add("--dry-run", action="store_true", help="say what it would take, and end")
    add("--force", action="store_true", help="begin even if the store has no room for all")
    add("--report", type=Path, metavar="FILE", help="write what came of it as JSON")
    add("--compile-cache-dir", type=Path, metavar="DIR", help="compiled steps (default ~/.cache/ccjax/compile)")

    add = parser.add_argument_group("questions").add_argument
    text = "JSONL file of questions to ask at the end, with full prefill and over the store"
    add("--questions", type=Path, metavar="FILE", help=text)
    add("--top-k", type=positive_int, default=5, metavar="N", help="passages for one that names none (default 5)")
    add("--limit", type=positive_int, metavar="N", help="ask so many (default all)")
    add("--max-tokens", type=positive_int, default=32, metavar="N", help="of an answer (default 32)")

    group = parser.add_argument_group("as the server", "What is not the same there finds nothing, or embeds again.")
    add = group.add_argument
    add_document_arguments(add)
    for flag, kind, metavar, text in (
        ("--dtype", str, "TEXT", "float32, bfloat16, or auto: float32 on CPU, bfloat16 elsewhere (default auto)"),
        ("--quantization", str, "TEXT", "int8 or fp8: weights of products in 8 bits"),
        ("--tokenizer", str, "DIR", "directory with other tokenizer files than the model's own"),
        ("--attention", str, "TEXT", "implementation of the attention kernel (default: the platform's own)"),
        ("--max-model-len", int, "N", "longest prompt plus answer in tokens"),
        ("--strategy", str, "TEXT", "how chunks will be reused; auto and deviation use the frame"),
        ("--frame", str, "TEXT", "what passages are prepared behind: default, none, or a text file"),
        ("--ranking-layers", layer_list, "L,L", "layers that rank a passage's tokens, such as 0,1 (default: all)"),
        ("--host-cache-bytes", num_bytes, "SIZE", "host memory of each worker for chunk-caches, such as 2GiB"),
        ("--disk-cache-bytes", num_bytes, "SIZE", "room in the store"),
        ("--disk-kv-dtype", str, "TEXT", "auto: stored as it is; int8 or fp8: less room, read back as approximate"),
        ("--disk-compression", str, "TEXT", "none or zstd, which pays for a slow link only"),
        ("--store-key-file", str, "FILE", "keys that the store is sealed with, as with ccjax serve"),
        ("--tenant-salt", str, "TEXT", "separates the chunk-caches of tenants that share a store"),
        ("--system-prompt", str, "TEXT", "used where a request brings no system message"),
    ):
        add(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    text = "the store is encrypted, as with ccjax serve"
    add("--encrypt-store", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    return parser
