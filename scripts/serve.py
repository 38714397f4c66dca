"""Serves a model over an OpenAI-compatible HTTP API: `python scripts/serve.py --model demo`.

Listens at once: /health answers while everything loads, /ready turns from 503 to 200 when requests can be answered.
Wrong arguments end it with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    import uvicorn

    from ccjax.engine import Engine
    from ccjax.retrieval import Retriever
    from ccjax.server import ServerSettings, Service

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_STAGES = {
    "weights": "Loading weights",
    "read": "Reading documents",
    "embed": "Embedding passages",
    "train": "Finding clusters of passages",
    "add": "Adding passages to them",
    "compile": "Compiling for every prompt size",
}


def _engine_fields() -> set[str]:
    """Names of the engine's settings; each flag of such a name is passed on."""
    from ccjax.engine import EngineConfig

    return {field.name for field in dataclasses.fields(EngineConfig)}


class StartupError(Exception):
    """The server cannot start; the message is one line that names the argument."""


class _Stopped(Exception):
    """The server is told to end while it still loads."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _serve(args)
    except StartupError as error:
        print(f"serve.py: error: {error}", file=sys.stderr)
        return 2


def _serve(args: argparse.Namespace) -> int:
    listener = _listen(
        args.host, args.port, args.stall_timeout_s
    )  # before the slow imports: a port in use shows at once
    with _naming(args, ""):
        settings = _server_settings(args)
    if args.docs is not None and not args.docs.is_dir():
        raise StartupError(f"--docs: wanted a directory, got {str(args.docs)!r}")

    import uvicorn

    from ccjax.server import Service, create_app
    from ccjax.server.draining import DrainingServer

    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _use_compile_cache(args.compile_cache_dir or _user_cache() / "compile")
    service = Service(settings)
    config = uvicorn.Config(
        create_app(service), log_config=None, access_log=False, ws="none", server_header=False, timeout_keep_alive=30
    )
    server = DrainingServer(config, service)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn puts these back when it is done
        signal.signal(number, server.handle_exit)
    url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{listener.getsockname()[1]}"
    loader = _Loader(args, service, server, url)
    loader.start()
    try:
        server.run(sockets=[listener])
    finally:
        loader.stop()
        service.close(drain=False)  # nothing is left unless a second Ctrl-C cut the shutdown short
    if loader.error is not None:
        raise loader.error
    return 0


class _Loader(threading.Thread):
    """Loads model and documents beside the running server and hands them to the service."""

    def __init__(self, args: argparse.Namespace, service: Service, server: uvicorn.Server, url: str) -> None:
        super().__init__(name="ccjax-load", daemon=True)
        self.error: Exception | None = None
        self._args, self._service, self._server, self._url = args, service, server, url
        self._stopping = threading.Event()

    def run(self) -> None:
        """Loads; on failure keeps the error and ends the server."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        display = _Display(Progress(*columns, console=Console(stderr=True)), self._service, self._stopping)
        try:
            with contextlib.closing(display):
                engine, retriever = self._load(display)
            try:
                self._service.open(engine, retriever)
            except RuntimeError:  # ended in the meantime
                engine.close()
                raise _Stopped from None
            print(_final_line(self._args, self._service, self._url), flush=True)
        except _Stopped:
            pass
        except Exception as error:
            self.error = error
            self._server.should_exit = True

    def stop(self) -> None:
        """Ends the loading at its next step, and waits for that."""
        self._stopping.set()
        self.join()

    def _load(self, progress: _Display) -> tuple[Engine, Retriever | None]:
        import jax

        from ccjax.engine import Engine

        args = self._args
        settings = {field: getattr(args, field) for field in _engine_fields() if hasattr(args, field)}
        if settings.get("dtype", "auto") == "auto":
            settings["dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        with _naming(args, "--model"):
            engine = Engine.from_pretrained(args.model, progress=progress, **settings)
        try:
            retriever = self._open_documents(engine, progress)
            if args.warmup:
                engine.warmup(progress)
        except BaseException:
            engine.close()
            raise
        return engine, retriever

    def _open_documents(self, engine: Engine, progress: _Display) -> Retriever | None:
        from ccjax.engine.loading import DEMO_CORPUS
        from ccjax.retrieval import Retriever, default_embedder

        args, tokenizer = self._args, engine.tokenizer
        docs = args.docs if args.docs is not None else DEMO_CORPUS if args.model == "demo" else None
        if docs is None or args.no_docs:
            return None
        if tokenizer is None:
            raise StartupError("--docs: wanted a model with tokenizer files, to cut documents into passages")
        with _naming(args, "--embedder"):
            embedder = default_embedder(args.embedder)
        with _naming(args, "--docs"):
            key = hashlib.sha256(str(Path(docs).resolve()).encode()).hexdigest()[:16]
            retriever = Retriever.open(
                docs,
                index_dir=args.index_dir or _user_cache() / "index" / key,
                embedder=embedder,
                count_tokens=lambda text: len(tokenizer.encode(text, allow_special=False)),
                chunk_tokens=args.chunk_tokens,
                overlap_tokens=args.overlap_tokens,
                index_kind=args.index_kind,
                index_recall=args.index_recall,
                progress=progress,
            )
            if not retriever.num_passages:
                failed = retriever.report.failed
                why = f"; the first of {len(failed)} unusable files: {': '.join(failed[0])}" if failed else ""
                raise StartupError(f"--docs: wanted a directory with documents, got none in {docs}{why}")
        return retriever


class _Display:
    """Shows (stage, done, total) as one bar a stage, tells the service, and breaks off when the server ends."""

    def __init__(self, bars: Any, service: Service, stopping: threading.Event) -> None:
        self._bars, self._service, self._stopping = bars, service, stopping
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise _Stopped
        self._service.progress(stage, done, total)
        if stage not in self._tasks:
            self._bars.start()
            self._tasks[stage] = self._bars.add_task(_STAGES.get(stage, stage.capitalize()), total=total)
        # A stage may turn out to have nothing to do; without a total its bar would seem to run on for ever.
        self._bars.update(self._tasks[stage], completed=done if total else 1, total=total or 1)

    def close(self) -> None:
        """Leaves the bars as they are."""
        if self._tasks:  # without any, rich would print an empty line
            self._bars.stop()


@contextlib.contextmanager
def _naming(args: argparse.Namespace, default: str) -> Iterator[None]:
    """Turns a refusal into a `StartupError` that names the command-line argument: the one the message begins with,
    else `default`."""
    from store.errors import StoreError

    try:
        yield
    except (ValueError, OSError, StoreError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        argument, colon, rest = message.partition(": ")
        renamed = {"docs_dir": "docs", "directory": "embedder"}.get(argument, argument)
        if colon and (renamed in vars(args) or renamed in _engine_fields()):
            message = f"--{renamed.replace('_', '-')}: {rest}"
        else:
            message = f"{'--store' if isinstance(error, StoreError) else default}: {message}"
        raise StartupError(message) from error


def _listen(host: str, port: int, stall_timeout_s: float) -> socket.socket:
    from ccjax.server.listening import listen

    try:
        return listen(host, port, stall_timeout_s=stall_timeout_s)
    except ValueError as error:
        raise StartupError(f"--stall-timeout-s: {error}") from error
    except socket.gaierror as error:
        raise StartupError(f"--host: cannot use {host!r}: {error.strerror or error}") from error
    except OSError as error:
        raise StartupError(f"--port: cannot listen on {host}:{port}: {error.strerror or error}") from error


def _server_settings(args: argparse.Namespace) -> ServerSettings:
    from ccjax.server import ServerSettings

    return ServerSettings(
        served_model_name=args.served_model_name,
        api_key=args.api_key if args.api_key is not None else os.environ.get("CCJAX_API_KEY"),
        admin_key=args.admin_key if args.admin_key is not None else os.environ.get("CCJAX_ADMIN_KEY"),
        reuse=args.reuse,
        top_k=args.top_k,
        retrieval_stages=args.retrieval_stages,
        max_prefill_bs=args.max_prefill_bs,
        request_timeout_s=args.request_timeout_s,
        max_body_bytes=args.max_body_bytes,
        refresh_interval_s=args.refresh_interval_s,
        store_refresh_interval_s=args.store_refresh_interval_s or None,
        repair_when_idle=args.repair,
    )


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ccjax"


def _use_compile_cache(directory: Path) -> None:
    """Lets JAX keep compiled steps between runs. Quick compiles count too: there are hundreds of them."""
    import jax

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--compile-cache-dir: cannot use {directory}: {error.strerror or error}") from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _final_line(args: argparse.Namespace, service: Service, url: str) -> str:
    backend = service.backend
    documents = ""
    if backend.retriever is not None:
        documents = f" over {backend.retriever.num_passages} passages of {backend.retriever.num_documents} documents"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if service.settings.api_key else ""
    body = json.dumps({"messages": [{"role": "user", "content": _example_question(args)}], "max_tokens": 64})
    return (
        f"Ready: {backend.model}{documents} on {url}  Try: curl -s {url}/v1/chat/completions"
        f"{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def _example_question(args: argparse.Namespace) -> str:
    from ccjax.engine.loading import ASSETS

    questions = ASSETS / "demo_questions.jsonl"
    if args.model != "demo" or args.docs is not None or args.no_docs or not questions.is_file():
        return "YOUR QUESTION"
    with questions.open(encoding="utf-8") as lines:
        return json.loads(next(lines))["question"]


def num_bytes(text: str) -> int:
    """The number in "2GiB", "500MB" or "1073741824"; the type of arguments that are sizes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"wanted a size such as 2GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def layer_list(text: str) -> tuple[int, ...]:
    """The numbers in "0,1"."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"wanted layers such as 0,1, got {text!r}")
    return tuple(map(int, text.split(",")))


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"wanted 0 (any free port) to 65535, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    from ccjax.policy.eviction import POLICIES

    parser = argparse.ArgumentParser(
        prog="serve.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=_port, default=8000, help="port to listen on, 0 for any free one (default 8000)")
    add("--served-model-name", metavar="NAME", help="the model's name in the API (default: that of its directory)")
    add("--api-key", metavar="KEY", help="ask clients for this bearer token (default: $CCJAX_API_KEY, else none)")
    admin_text = "open /v1/cache/... to whoever has this bearer token (default: $CCJAX_ADMIN_KEY, else closed)"
    add("--admin-key", metavar="KEY", help=admin_text)
    add("--max-queue", type=int, default=128, metavar="N", help="requests that may wait, more get 429 (default 128)")
    text = "requests that name no timeout_s end with 504 after so long (default never)"
    add("--request-timeout-s", type=float, metavar="S", help=text)
    text = "connections end whose client takes nothing for so long (default 60)"
    add("--stall-timeout-s", type=float, default=60.0, metavar="S", help=text)
    add("--max-body-bytes", type=num_bytes, default=10_000_000, metavar="SIZE", help="longest body (default 10MB)")
    add("--no-warmup", dest="warmup", action="store_false", help="compile when a request first needs it")
    add("--compile-cache-dir", type=Path, metavar="DIR", help="compiled steps (default ~/.cache/ccjax/compile)")
    add("--log-level", default="warning", choices=["debug", "info", "warning", "error"], help="(default warning)")

    add = parser.add_argument_group("documents").add_argument
    add("--docs", type=Path, metavar="DIR", help="documents to answer from (default with --model demo: its own corpus)")
    add("--no-docs", action="store_true", help="retrieve nothing, also with --model demo")
    add("--index-dir", type=Path, metavar="DIR", help="where the index is kept (default below ~/.cache/ccjax/index)")
    kinds = "flat, ivf or hnsw; auto, the default, is ivf for 50,000 passages and more"
    add("--index-kind", default="auto", metavar="KIND", help=kinds)
    text = "share of the nearest passages that ivf and hnsw are to find (default 0.95)"
    add("--index-recall", type=float, default=0.95, metavar="SHARE", help=text)
    add("--embedder", default="auto", metavar="NAME", help="auto, lexical, or a sentence-transformers directory")
    add("--top-k", type=int, default=5, metavar="N", help="passages for a question (default 5)")
    text = "parts of a search; answers may begin from what each of them found (default 1: when all is found)"
    add("--retrieval-stages", type=int, default=1, metavar="N", help=text)
    add("--max-prefill-bs", type=int, default=4, metavar="N", help="they do not while so many wait (default 4)")
    add("--chunk-tokens", type=int, default=200, metavar="N", help="longest passage (default 200)")
    add("--overlap-tokens", type=int, default=0, metavar="N", help="tokens that neighbours may share (default 0)")
    add("--refresh-interval-s", type=float, metavar="S", help="look for changed documents this often (default never)")

    group = parser.add_argument_group("model and reuse", "Defaults not given here are those of ccjax.EngineConfig.")
    add = group.add_argument
    add("--model", default="demo", metavar="DIR", help='Hugging Face model directory, or "demo" (the default)')
    add("--reuse", default="bounded", help="mode of requests that name none: off, exact, bounded (default), fast")
    add("--no-repair", dest="repair", action="store_false", help="leave approximate variants as they are in idle time")
    text = "look this often for what others did to the store, 0 for never (default 10)"
    add("--store-refresh-interval-s", type=float, default=10.0, metavar="S", help=text)
    store_text = (
        "URL of the lasting chunk store: file:///var/cache/ccjax, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX, for others "
        "than AWS s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME; credentials as the clouds' own tools "
        "find them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (default: memory only)"
    )
    metavars = {str: "TEXT", int: "N", float: "X", num_bytes: "SIZE", layer_list: "L,L"}
    # Left out of the namespace where not given, so that EngineConfig alone holds the defaults.
    for flag, kind, text in (
        ("--dtype", str, "float32, bfloat16, or auto: float32 on CPU, bfloat16 elsewhere (default auto)"),
        ("--attention", str, "implementation of the attention kernel (default: the platform's own)"),
        ("--max-model-len", int, "longest prompt plus answer in tokens"),
        (
            "--strategy",
            str,
            "how chunks are reused: cachecraft, auto, cacheblend, reuse, set, prefix, full, legolink, random",
        ),
        ("--alpha", float, "scales the share of tokens that is recomputed"),
        ("--recompute-ratio", float, "forces that share, 0 to 1"),
        ("--max-deviation", float, "strategy auto: recompute what was seen to deviate more, instead of that share"),
        ("--calibration", str, "file of scripts/calibrate.py (default: calibration.json beside the model, if there)"),
        ("--prefill-profile", str, "file of scripts/profile_prefill.py (default: the one beside the model, if there)"),
        ("--ranking-layers", layer_list, "layers that rank a passage's tokens, such as 0,1 (default: all)"),
        ("--focus-window", int, "layers after which unfocused passages are dropped"),
        ("--focus-rule", str, "entropy or largest_gap"),
        ("--store", str, store_text),
        ("--reorder-window", int, "of so many in line the one with most in the cache goes first (1: by arrival)"),
        ("--flow-share", float, "of the places in line, a user may have so many times as many as are left"),
        ("--max-num-seqs", int, "requests that run at once"),
        ("--max-num-batched-tokens", int, "tokens that prefills compute together; longer ones are cut into pieces"),
        ("--max-decode-gap-ms", float, "longest time that a prefill may keep running answers from their next token"),
        ("--max-retries", int, "how often an answer is tried again whose step failed on the device, 0 for never (2)"),
        ("--device-cache-bytes", num_bytes, "device memory for requests and chunk-caches, such as 8GiB"),
        ("--host-cache-bytes", num_bytes, "host memory for chunk-caches, such as 2GiB"),
        ("--disk-cache-bytes", num_bytes, "room in the store"),
        ("--disk-kv-dtype", str, "auto: stored as it is; int8 or fp8: less room, read back as approximate"),
        ("--disk-compression", str, "none or zstd, which pays for a slow link only"),
        ("--preload-bytes", num_bytes, "memory for what requests in line will need from the store, 0 for none"),
        ("--eviction-policy", str, f"which variants leave a full tier: {', '.join(sorted(POLICIES))}"),
        ("--max-variants", int, "chunk variants kept, however much room there is"),
        ("--cached-documents", int, "keep only the first so many passages of a prompt"),
        ("--pin-share", float, "share of every budget that pinned documents may keep, 0 to 1"),
        (
            "--shadow-ratio",
            float,
            "share of the answers over approximate reuse to compare with a full prefill when idle",
        ),
        ("--shadow-target", float, "share of those that should be the same; while fewer are, more is recomputed (0.9)"),
        ("--tenant-salt", str, "separates the chunk-caches of tenants that share a store"),
        ("--system-prompt", str, "used where a request brings no system message"),
    ):
        add(flag, type=kind, default=argparse.SUPPRESS, metavar=metavars[kind], help=text)
    text = "wait for chunks that another process on the same store is computing, instead of computing them too"
    add("--share-computation", action="store_true", default=argparse.SUPPRESS, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
