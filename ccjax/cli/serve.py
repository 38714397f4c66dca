"""Serves a model over an OpenAI-compatible HTTP API: `ccjax serve --model demo`.

Listens at once: /health answers while everything loads, /ready changes from 503 to 200 when requests can be answered.
Wrong arguments end it with one line on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ccjax.cli.options import StartupError, config_lines, part
from ccjax.cli.serving.cluster import check_no_cluster_flags, serve_cluster_of
from ccjax.cli.serving.memory import memory_lines, print_memory_plan
from ccjax.cli.serving.messages import Display, Stopped, added_line, final_line, naming, stages, url_of
from ccjax.cli.serving.options import ServeOptions, engine_settings, serve_options
from ccjax.config import DEMO, DocumentOptions
from ccjax.server.logs import configure_logging
from ccjax.server.settings import ServerSettings

if TYPE_CHECKING:
    import uvicorn

    from ccjax.engine import Engine
    from ccjax.retrieval import Retriever
    from ccjax.server import Service


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit code."""
    try:
        args = serve_options(argv, __doc__)
        if args.print_config:
            print(*config_lines(args), sep="\n")
            return 0
        return _serve(args)
    except StartupError as error:
        print(f"ccjax serve: error: {error}", file=sys.stderr)
        return 2


def _serve(args: ServeOptions) -> int:
    if args.warmup_all and not args.warmup:
        raise StartupError("--warmup-all: wanted without --no-warmup")
    if args.print_memory_plan:
        return print_memory_plan(args)
    # Before the slow imports, so that a port in use is reported at once.
    with _listen(args.host, args.port) as listener:
        return _serve_on(listener, args)


def _serve_on(listener: socket.socket, args: ServeOptions) -> int:
    from ccjax.server.keys import Keys
    from ccjax.server.tracing import check_installed

    with naming(args, ""):
        settings = part(args, ServerSettings)
        keys = Keys(settings)  # unusable files are reported at once
        if not keys.api.is_asked_for:
            settings = settings.replace(allowed_hosts=(*settings.allowed_hosts, args.host))
        if settings.otlp_traces_endpoint is not None:
            check_installed()
        if (args.store_index or "").startswith("redis") and importlib.util.find_spec("redis") is None:
            raise StartupError("--store-index: the package redis is not installed: pip install 'ccjax[cluster]'")
    if args.docs not in (None, DEMO) and not Path(args.docs).is_dir():
        from ccjax.server.loading import index_directory

        if not index_directory(Path(args.docs), part(args, DocumentOptions)).is_dir():
            raise StartupError(f"--docs: wanted a directory, or {DEMO}, got {args.docs!r}")

    configure_logging(args.log_level.upper(), args.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if args.cluster is not None:
        return serve_cluster_of(args, settings, listener)
    check_no_cluster_flags(args)

    from ccjax.server import Service, create_app
    from ccjax.server.draining import DrainingServer

    _use_compile_cache(args.compile_cache_dir)
    service = Service(settings)
    server = DrainingServer(create_app(service), service, keep_alive_s=settings.keep_alive_s)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn restores these when it is done
        signal.signal(number, server.handle_exit)
    loader = _BackgroundLoader(args, service, server, url_of(args, listener))
    loader.start()
    try:
        server.run(sockets=[listener])
    finally:
        loader.stop()
        service.close(drain=False)  # nothing is left unless a second Ctrl-C cut the shutdown short
    if loader.error is not None:
        raise loader.error
    return 0


class _BackgroundLoader(threading.Thread):
    """Loads model and documents while the server runs, and hands them to the service."""

    def __init__(self, args: ServeOptions, service: Service, server: uvicorn.Server, url: str) -> None:
        super().__init__(name="ccjax-load", daemon=True)
        self.error: Exception | None = None
        self._args, self._service, self._server, self._url = args, service, server, url
        self._stopping = threading.Event()

    def run(self) -> None:
        """Loads; on failure keeps the error and ends the server."""
        from ccjax.runner.budgets import host_cache_bytes

        display = Display(stages(), self._service.progress, self._stopping)
        try:
            with contextlib.closing(display):
                engine, retriever = self._load(display)
            try:
                self._service.open(engine, retriever, self._args.embedder)
            except RuntimeError:  # shut down in the meantime
                engine.close()
                raise Stopped from None
            memory = memory_lines(engine.memory_plan(), host_cache_bytes(engine.config))
            for line in (*memory, added_line(self._args)):
                print(line, file=sys.stderr)
            print(final_line(self._args, self._service, self._url), flush=True)
        except Stopped:
            pass
        except Exception as error:
            self.error = error
            self._server.should_exit = True

    def stop(self) -> None:
        """Stops the loading at its next step, and waits for that."""
        self._stopping.set()
        self.join()

    def _load(self, progress: Display) -> tuple[Engine, Retriever | None]:
        from ccjax.loading.named import TOY, default_model, how_to_get_a_real_model
        from ccjax.server.loading import load_engine, open_documents

        args = self._args
        if args.model == default_model() == TOY:
            print(f"ccjax serve: {how_to_get_a_real_model()}", file=sys.stderr)
        with naming(args, "--model"):
            engine = load_engine(args.model, engine_settings(args), progress)
        retriever = None
        try:
            with naming(args, "--docs"):
                documents = part(args, DocumentOptions)
                retriever = open_documents(args.model, documents, engine.tokenizer, progress, warmup=args.warmup)
            if args.warmup:
                engine.warmup(progress, only_first=not args.warmup_all)
        except BaseException:
            if retriever is not None:
                retriever.close()
            engine.close()
            raise
        return engine, retriever


def _listen(host: str, port: int) -> socket.socket:
    from ccjax.server.listening import listen

    try:
        return listen(host, port)
    except socket.gaierror as error:
        raise StartupError(f"--host: cannot use {host!r}: {error.strerror or error}") from error
    except OSError as error:
        raise StartupError(f"--port: cannot listen on {host}:{port}: {error.strerror or error}") from error


def _use_compile_cache(named: str | None) -> None:
    from ccjax.server.loading import use_compile_cache, user_cache

    directory = Path(named) if named else user_cache() / "compile"
    try:
        use_compile_cache(directory)
    except OSError as error:
        raise StartupError(f"--compile-cache-dir: cannot use {directory}: {error.strerror or error}") from error
