"""Computes the KV of documents in advance: ccjax precompute --model DIR --documents DIR --store URL

Documents are read, split and indexed as by `ccjax serve --docs` with the same options; every passage is computed behind
the system prompt and stored. A server over that store then computes no passage in first position, and repairs the
others. Stored passages are skipped, so that after an interruption or changes only the missing ones are computed.
Several processes (--workers), and runs on several hosts with one store, share the work.

Exit codes: 0 everything is stored; 1 done, but something failed; 2 refused; 130, 143 ended by SIGINT, SIGTERM.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ccjax.cli.options import CommandSettings, StartupError, flag, parse, subset
from ccjax.cli.progress import Stages, bars
from ccjax.cli.serving.options import ServedDtype, engine_settings
from ccjax.cli.values import check_writable, size_text
from ccjax.config import DEMO, DocumentOptions, EngineConfig
from ccjax.config.base import Described, SettingsModel
from ccjax.config.values import FilePath, FolderPath
from ccjax.loading.named import TOY
from ccjax.server.settings import ServerSettings

if TYPE_CHECKING:
    from ccjax.precompute.report import Report


class WorkSettings(SettingsModel):
    """What to compute, and with which processes."""

    model_config = ConfigDict(title="work")

    model: Annotated[str, Described(metavar="MODEL")] = TOY
    """As with ccjax serve."""
    documents: FolderPath | None = None
    """Documents, as with ccjax serve --docs."""
    neighbours: int = Field(default=0, ge=0)
    """Also compute each passage behind this many of its most similar ones."""
    prune: bool = False
    """Drop stored passages that these documents do not contain, including those of other documents in the store."""
    workers: int = Field(default=1, ge=1)
    """Number of processes that compute."""
    devices: Annotated[str, Described(metavar="LIST")] | None = None
    """GPUs of the workers, one each, as CUDA_VISIBLE_DEVICES names them, such as 0,1."""
    dry_run: bool = False
    """Only print the estimate."""
    force: bool = False
    """Start even if the result does not fit into the store."""
    report: FilePath | None = None
    """Write the report as JSON to this file."""
    compile_cache_dir: FolderPath | None = None
    """Directory of compiled steps; without it ~/.cache/ccjax/compile."""


class QuestionSettings(SettingsModel):
    """Questions to ask at the end, with full prefill and over the store."""

    model_config = ConfigDict(title="questions")

    questions: FilePath | None = None
    """JSONL file of questions."""
    top_k: int = Field(default=ServerSettings.model_fields["top_k"].default, ge=1)
    """Passages for questions that name none."""
    limit: int | None = Field(default=None, ge=1)
    """Number of questions to ask; without it all."""
    max_tokens: int = Field(default=32, ge=1)
    """Longest answer, in tokens."""


if TYPE_CHECKING:  # of which these are subclasses
    from ccjax.config import DocumentOptions as _Documents
    from ccjax.config import EngineConfig as _Engine
else:
    _Documents = subset(DocumentOptions, DocumentOptions.model_fields.keys() - {"docs"})
    _Engine = subset(
        EngineConfig,
        {
            *("dtype", "quantization", "tokenizer", "attention", "max_model_len", "system_prompt", "strategy", "frame"),
            *("store", "host_cache_bytes", "disk_cache_bytes", "disk_kv_dtype", "tenant_salt"),
        },
    )


class PrecomputeOptions(_Engine, _Documents, QuestionSettings, WorkSettings, CommandSettings):
    """All options of `ccjax precompute`; options that differ from the server's make it find nothing, or embed again."""

    dtype: ServedDtype = "auto"
    """Type of weights, activations and stored KV; auto is float32 on CPU, bfloat16 elsewhere."""
    store: Annotated[str, Described("the URL of a chunk store", "URL")]  # pyright: ignore[reportGeneralTypeIssues]
    """URL of the chunk store, as with ccjax serve."""


_STAGES = {
    "weights": "Loading weights",
    "read": "Reading documents",
    "embed": "Embedding passages",
    "sample": "Measuring a sample",
    "questions": "Asking questions",
}


class _Signals:
    """Records the first signal that requests the end; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def name(self) -> str | None:
        """Exit code for the signal, if one was received."""
        return None if self.number is None else signal.Signals(self.number).name


class _Bars:
    """Progress on stderr: a bar per stage, then one for all variants."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._stages = Stages(bars(*columns, TextColumn("{task.fields[speed]}")), _STAGES)

    def stage(self, worker: int, stage: str, done: int, total: int) -> None:
        """Shows what the first worker loads, reads or asks; the others do the same."""
        if worker == 0:
            self._stages(stage, done, total, speed="")

    def estimated(self, report: Report) -> None:
        """Prints the estimate."""
        estimate, collection = report.estimate, report.collection
        assert estimate is not None and collection is not None
        seconds = "unknown time" if estimate.seconds is None else f"about {_time(estimate.seconds)}"
        on_disk = "" if estimate.disk_bytes is None else f", {size_text(estimate.disk_bytes)} of the file system"
        free = "" if estimate.free_bytes is None else f" ({size_text(estimate.free_bytes)} free)"
        text = (
            f"{len(collection.passages)} passages; {estimate.variants} variants to compute: "
            f"{estimate.computed_tokens} tokens, {seconds}, {size_text(estimate.num_bytes)}{on_disk}{free}"
        )
        if report.is_dry_run and estimate.hidden_bytes_per_s is not None:
            text += f"; {_place(estimate.hidden_bytes_per_s)}"
        self._stages.shown.console.print(text, highlight=False, soft_wrap=True)

    def computed(self, report: Report) -> None:
        """Shows the progress of the variants."""
        counts, estimate = report.counts, report.estimate
        assert estimate is not None
        speed = f"{counts.tokens_per_s:.0f} tokens/s, {size_text(counts.stored_bytes)} written"
        self._stages("computing", counts.done, estimate.variants, speed=speed)

    def close(self) -> None:
        """Leaves the bars as they are."""
        self._stages.close()


def _place(rate: float) -> str:
    """The cheapest usual place for the KV."""
    from ccjax.policy.storage import USUAL, cheapest_hidden

    place = cheapest_hidden(USUAL, rate)
    found = "no usual place reads as fast" if place is None else f"{place.name} usually reads as fast"
    return f"requests hide loads of at least {size_text(round(rate))}/s: {found}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        args = parse(PrecomputeOptions, argv, prog="ccjax precompute", description=__doc__)
    except StartupError as error:
        print(f"ccjax precompute: error: {error}", file=sys.stderr)
        return 2
    signals, bars = _Signals(), _Bars()
    try:
        return _run(args, signals, bars)
    except (ValueError, OSError) as error:
        bars.close()
        print(f"ccjax precompute: error: {_named(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a second signal: at once, and without a report
        return 128 + (signals.number or signal.SIGINT)


def _run(args: PrecomputeOptions, signals: _Signals, bars: _Bars) -> int:
    from ccjax.precompute.compilation import Compilation, Options

    report_file = None if args.report is None else Path(args.report)
    check_writable("report", report_file)
    if args.documents not in (None, DEMO) and not Path(args.documents).is_dir():
        raise ValueError(f"documents: wanted a directory, or {DEMO}, got {args.documents!r}")
    options = Options(
        is_dry_run=args.dry_run,
        is_forced=args.force,
        prunes=args.prune,
        questions=None if args.questions is None else Path(args.questions),
        top_k=args.top_k,
        limit=args.limit,
        max_new_tokens=args.max_tokens,
    )
    compilation = Compilation(_settings(args), options, bars, signals.name)
    report = compilation.run()
    bars.close()
    if report_file is not None:
        report_file.write_text(json.dumps(report.to_json(), indent=1) + "\n", "utf-8")
    _print(report)
    if signals.number is not None and report.interrupted is not None:
        print("ccjax precompute: ended early; run the same command again to continue", file=sys.stderr)
        return 128 + signals.number
    if report.error is not None:
        print(f"ccjax precompute: error: {report.error}; run the same command again to continue", file=sys.stderr)
        return 1
    return 0 if report.is_dry_run or (report.is_complete and not report.counts.failed) else 1


def _settings(args: PrecomputeOptions) -> list[Any]:
    from ccjax.precompute.messages import Settings
    from ccjax.server.loading import user_cache

    documents = {name: getattr(args, name) for name in DocumentOptions.model_fields if hasattr(args, name)}
    settings = Settings(
        model=args.model,
        engine=engine_settings(args),
        documents=DocumentOptions(docs=args.documents, **documents),
        compile_cache=str(args.compile_cache_dir or user_cache() / "compile"),
        num_neighbours=args.neighbours,
    )
    devices = [] if args.devices is None else args.devices.split(",")
    if devices and len(devices) != args.workers:
        raise ValueError(f"devices: wanted one for each of {args.workers} workers, got {args.devices!r}")
    if not devices:
        return [settings] * args.workers
    return [dataclasses.replace(settings, environment={"CUDA_VISIBLE_DEVICES": device}) for device in devices]


def _named(message: str) -> str:
    """The message with the option that its argument came from, if it names one."""
    argument, colon, rest = message.partition(": ")
    argument = {"docs": "documents", "docs_dir": "documents", "directory": "embedder"}.get(argument, argument)
    if colon and argument in PrecomputeOptions.model_fields:
        return f"{flag(argument)}: {rest}"
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
        text = f"{pruned.variants} variants of {pruned.passages} passages, {size_text(pruned.num_bytes)}"
        table.add_row("dropped", text)
    table.add_row("computed now", f"{counts.computed} variants, {size_text(counts.stored_bytes)}")
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


def _time(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
