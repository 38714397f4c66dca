"""Messages of `ccjax serve`: progress, the ready line, and startup errors."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ccjax.cli.options import StartupError, flag, options_of
from ccjax.cli.serving.options import ServeOptions
from ccjax.config import DEMO

if TYPE_CHECKING:
    from ccjax.cli.progress import Stages
    from ccjax.server import ServerSettings, Service

_STAGES = {
    "weights": "Loading weights",
    "read": "Reading documents",
    "embed": "Embedding passages",
    "compile": "Compiling sizes of prompts",
    "ray": "Starting Ray",
    "replicas": "Starting replicas",
}


class Stopped(Exception):
    """The server was told to exit while it was loading."""


def stages() -> Stages:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from ccjax.cli.progress import Stages, bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Stages(bars(*columns), _STAGES)


class Display:
    """Shows (stage, done, total), passes it to `note`, and raises when the server ends."""

    def __init__(self, shown: Stages, note: Callable[[str, int, int], None], stopping: threading.Event) -> None:
        self._shown, self._note, self._stopping = shown, note, stopping

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise Stopped
        self._note(stage, done, total)
        self._shown(stage, done, total)

    def close(self) -> None:
        """Leaves the bars as they are."""
        self._shown.close()


@contextlib.contextmanager
def naming(args: ServeOptions, default: str) -> Iterator[None]:
    """Turns a refusal into a `StartupError` that names the command-line argument: the one the message begins with, else
    `default`."""
    from ccjax.store.errors import StoreError

    try:
        yield
    except (ValueError, OSError, StoreError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        argument, colon, rest = message.partition(": ")
        renamed = {"docs_dir": "docs"}.get(argument, argument)
        if colon and renamed.replace("_", "-") in options_of(ServeOptions):
            message = f"{flag(renamed)}: {rest}"
        else:
            message = f"{'--store' if isinstance(error, StoreError) else default}: {message}"
        raise StartupError(message) from error


def added_line(args: ServeOptions) -> str:
    """Says whether passages are added to prompts."""
    if args.docs is None:
        return "  Nothing is added to prompts; --docs DIR would add passages of documents there."
    return f'  Requests without passages get some of {args.docs}; one with "retrieval": false gets none.'


def url_of(args: ServeOptions, listener: socket.socket) -> str:
    return f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{listener.getsockname()[1]}"


def final_line(args: ServeOptions, service: Service, url: str) -> str:
    backend = service.backend
    documents = ""
    if backend.retriever is not None:
        documents = f" over {backend.retriever.num_passages} passages of {backend.retriever.num_documents} documents"
        if pending := backend.retriever.num_pending:
            documents += f", {pending} of them found by words alone until their vectors are computed,"
    return ready_line(args, service.settings, f"{backend.model}{documents}", url)


def ready_line(args: ServeOptions, settings: ServerSettings, what: str, url: str) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    body = json.dumps({"messages": [{"role": "user", "content": _example_question(args)}], "max_tokens": 64})
    return (
        f"Ready: {what} on {url}  Try: curl -s {url}/v1/chat/completions"
        f"{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def _example_question(args: ServeOptions) -> str:
    from ccjax.loading.model import ASSETS
    from ccjax.loading.named import TOY

    questions = ASSETS / "demo_questions.jsonl"
    if args.docs != DEMO:
        return "YOUR QUESTION"
    if args.model != TOY:
        return "When was the harbour dug?"
    with questions.open(encoding="utf-8") as lines:
        return json.loads(next(lines))["question"]
