"""What real clients save: their requests, unchanged, against `documents=` and against exact prefixes only.

`ccjax serve` without options is asked through its socket by LangChain, LlamaIndex, Haystack and litellm (`make
bench-clients` installs the pinned versions), with their own prompts and a retriever that returns given passages, and by
requests in the shapes that other clients send, as read in their sources (`scripts.benchmarks.wrappers`). Passages are
MuSiQue's (`--data` or $CCJAX_TEST_DATA). Only address, key and model name are set. A proxy between client and server
makes three ways of each request: `plain` as it is; `documents`, with its passages taken out of the messages and put
into that field; `exact`, as it is with `"reuse": "exact"`. In all of them it bounds the answer (`--max-tokens`,
greedy), asks for a stream, in which it times the first text, and sets a `cache_salt` for each client and way, so that
none profits from another. Requests follow each other at once: a passage was seen, and not yet prepared, except in the
last case.

Cases: `first`, five new passages; `same`, the same request again; `permuted`, in reverse order with another question;
`three kept`, three of them and two new ones; `date`, a line in front of the system prompt changes; `turn 2`, `turn 5`
of a conversation over the same five; `turn 2 changed`, `turn 5 changed`, each turn with another choice and order of the
seven; `prepared`, another order after idle time.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  model, max_tokens, serve_args, passages (of a request)
  clients[]: `name`, `package` and `version` of a real client, null of a recorded shape
  skipped[]: clients that were left out, and why
  requests[]: `client`, `case`, `way`, `prompt_tokens`, `cached_tokens` (usage: stored KV used unchanged),
    `computed_tokens` (the others), `computed_share` (of token-layers, from the reuse report), `ttft_s`, `causes`
    (computed tokens by cause)
  cases[]: `case`, `clients` (number); of each way in `ways`: `prompt_tokens`, `cached_tokens`, `computed_tokens` (sums
    over the clients), `ttft_s` (median); `saved_of_documents`, `saved_over_exact`: cached tokens of `plain` over those
    of the other way, null if that has none. The last one, `all`, has every case but `first`
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import http.client
import http.server
import importlib.metadata
import json
import os
import random
import shlex
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ccjax.cli.values import positive_int
from ccjax.evaluation.pages import show, text
from scripts.benchmarks.client import RequestRecord, closed_loop, serving, ttft_s, wait_for_idle_time
from scripts.benchmarks.client_packages import CLIENTS, missing
from scripts.benchmarks.common import BenchmarkError, data_folder, environment, rows_of, stages
from scripts.benchmarks.wrappers import Turn

QUICK = {"clients": ["langchain", "openwebui"], "turns": 2, "idle_s": 0.0, "max_tokens": 2}
NUM_PASSAGES, NUM_KNOWN = 5, 7
"""Passages of a request, and of all requests of a client."""
DATES = ("Today is Friday, 27 November 2026.", "Today is Saturday, 28 November 2026.")


@dataclasses.dataclass(frozen=True)
class Step:
    """A request of the schedule; those of one `conversation` follow each other in it. `case` None is not reported."""

    case: str | None
    turn: Turn
    conversation: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--data", type=Path, help="folder with rag_trace/ (default $CCJAX_TEST_DATA)")
    add("--model", help="as with ccjax serve (default: its default)")
    add("--serve-args", default="", help="flags for ccjax serve, as one string (default: none)")
    add("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS), help="(default: all)")
    add("--turns", type=positive_int, default=5, help="of a conversation (%(default)s)")
    add("--max-tokens", type=positive_int, default=16, help="of every answer (%(default)s)")
    add("--idle-s", type=float, default=300.0, help="most time to compile before, to prepare after (%(default)s)")
    add("--limit-s", type=float, default=float("inf"), help="begin no client after so many seconds (default: all)")
    add("--timeout-s", type=float, default=600.0, help="seconds of silence until an answer is abandoned (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Asks everything and prints the tables."""
    for name, value in {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}.items():
        os.environ.setdefault(name, value)  # neither downloads nor reports anything
    reasons = {name: missing(CLIENTS[name].package) for name in options.clients}
    skipped = [f"{name}: {why}" for name, why in reasons.items() if why]
    names = [name for name, why in reasons.items() if not why]
    pools = passage_pools(data_folder(options.data), len(names))
    requests: list[dict[str, Any]] = []
    flags = [] if options.model is None else ["--model", options.model]
    flags += [*(["--no-warmup"] if options.quick else []), *shlex.split(options.serve_args)]
    with stages() as say:
        say("start the server")
        with serving(flags) as url, Proxy(url, options.max_tokens, options.timeout_s) as proxy:
            say("what idle time compiles")
            wait_for_idle_time(url, options.idle_s)
            model = _model_name(url)
            asked = []
            until = time.monotonic() + options.limit_s
            for name, pool in zip(names, pools, strict=True):
                if time.monotonic() > until:
                    skipped.append(f"{name}: not begun within --limit-s {options.limit_s:g}")
                    continue
                before, after = schedule(pool, options.turns if CLIENTS[name].holds_history else 0)
                try:
                    for way in WAYS:
                        say(f"{name}: {way}")
                        requests += _ask_all(proxy, model, name, way, before)
                    asked.append((name, after))
                except RefusedError as error:
                    requests = [row for row in requests if row["client"] != name]
                    skipped.append(f"{name}: {error}")
            say("what idle time prepares")
            wait_for_idle_time(url, options.idle_s)
            for name, after in asked if options.idle_s else ():
                for way in WAYS:
                    requests += _ask_all(proxy, model, name, way, after)
    cases = summary(requests)
    _print(requests, cases, skipped)
    about: dict[str, Any] = {"model": model, "max_tokens": options.max_tokens, "serve_args": options.serve_args}
    about |= {"passages": NUM_PASSAGES, "clients": [_about(name) for name, _ in asked], "skipped": skipped}
    return {"benchmark": "clients", **environment(), **about, "requests": requests, "cases": cases}


def _about(name: str) -> dict[str, Any]:
    package = CLIENTS[name].package
    return {"name": name, "package": package, "version": importlib.metadata.version(package) if package else None}


def passage_pools(data: Path, count: int) -> list[list[dict[str, str]]]:
    """For each of `count` clients `NUM_KNOWN` passages of its own, found one after the other by the trace."""
    texts = {row["id"]: row for row in rows_of(data / "rag_trace/musique_docs.jsonl")}
    trace = rows_of(data / "rag_trace/musique_trace.jsonl")
    numbers = list(dict.fromkeys(number for row in trace for number in row["docs"]))
    if len(numbers) < count * NUM_KNOWN:
        raise BenchmarkError(f"wanted a trace of {count * NUM_KNOWN} passages, got {len(numbers)}")
    return [[texts[n] for n in numbers[k * NUM_KNOWN : (k + 1) * NUM_KNOWN]] for k in range(count)]


def schedule(pool: Sequence[Mapping[str, str]], num_turns: int) -> tuple[list[Step], list[Step]]:
    """The requests of one client over its passages, in order: those that follow each other, and those after idle time.

    Args:
      num_turns: of each conversation; 0 for none.
    """

    def turn(about: int, order: Sequence[int], **more: Any) -> Turn:
        question = f"What do the passages say about {pool[about % len(pool)]['title']}?"
        return Turn(question, tuple(pool[n]["text"] for n in order), **more)

    given = range(NUM_PASSAGES)
    steps = [
        Step("first", turn(0, given)),
        Step("same", turn(0, given)),
        Step("permuted", turn(1, given[::-1])),
        Step("three kept", turn(5, (0, 5, 2, 6, 4))),
        Step(None, turn(2, given, date=DATES[0])),
        Step("date", turn(2, given, date=DATES[1])),
    ]
    rng = random.Random(0)
    for name, is_changed in (("", False), (" changed", True)):
        for number in range(1, num_turns + 1):
            order = rng.sample(range(len(pool)), NUM_PASSAGES) if is_changed else given
            case = f"turn {number}{name}" if number in (2, 5) else None
            steps.append(Step(case, turn(number + 2, order), f"conversation{name}"))
    return steps, [Step("prepared", turn(3, (3, 0, 4, 1, 2)))]


def _as_is(body: dict[str, Any], passages: Sequence[str]) -> dict[str, Any]:
    return body


def _as_documents(body: dict[str, Any], passages: Sequence[str]) -> dict[str, Any]:
    """The body with the last turn's passages in `documents`, and no passage in any message."""

    def without(content: Any) -> Any:
        for passage in passages:
            content = content.replace(passage, "").replace(json.dumps(passage)[1:-1], "")
        return content

    messages = [message | {"content": without(message["content"])} for message in body["messages"]]
    return body | {"messages": messages, "documents": [{"text": text} for text in passages[:NUM_PASSAGES]]}


WAYS: dict[str, Callable[[dict[str, Any], Sequence[str]], dict[str, Any]]] = {
    "plain": _as_is,
    "documents": _as_documents,
    "exact": lambda body, passages: body | {"reuse": "exact"},
}
"""Name -> changes a request's body; its second argument are the passages: of the last turn, then of earlier ones."""


class RefusedError(Exception):
    """The server refused a client's request."""


class Proxy:
    """A server that passes chats on, changed as `change` says, and keeps the record of each in `records`."""

    def __init__(self, upstream: str, max_tokens: int, timeout_s: float) -> None:
        self.records: list[RequestRecord] = []
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = bounded(proxy.change(body), max_tokens)
                (record,) = closed_loop(upstream, [body], 1, timeout_s)
                proxy.records.append(record)
                answer = json.dumps(complete(record, body["model"])).encode()
                self.send_response(200 if record.status == "ok" else 400)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def bounded(body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The body with a greedy, streamed answer of that length."""
    kept = {name: value for name, value in body.items() if name != "max_completion_tokens"}
    kept |= {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return kept | {"stream": True, "stream_options": {"include_usage": True}}


def complete(record: RequestRecord, model: str) -> dict[str, Any]:
    """OpenAI's object for a complete answer, or for an error."""
    if record.status != "ok":
        return {"error": {"message": record.error, "type": "invalid_request_error", "param": None, "code": None}}
    message = {"role": "assistant", "content": record.text or " "}
    usage = {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
    usage["total_tokens"] = sum(usage.values())
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    about = {"id": "chatcmpl-0", "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**about, "choices": [choice], "usage": usage}


def _ask_all(proxy: Proxy, model: str, name: str, way: str, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Asks the steps one after the other; returns the figures of those that are cases.

    Raises:
      RefusedError: the server refused one.
    """
    rows, conversations = [], collections.defaultdict(list)
    for step in steps:
        earlier = [] if step.conversation is None else conversations[step.conversation]
        passages = [text for turn in (step.turn, *earlier) for text in turn.passages]
        proxy.change = lambda body, passages=passages: WAYS[way](body, passages) | {"cache_salt": f"{name} {way}"}
        proxy.records.clear()
        with contextlib.suppress(Exception):  # of the client's own kind; the record says why
            CLIENTS[name].ask(proxy.url, model, step.turn, earlier)
        if not proxy.records or proxy.records[-1].status != "ok":
            raise RefusedError(proxy.records[-1].error if proxy.records else "the client sent nothing")
        record = proxy.records[-1]
        earlier.append(dataclasses.replace(step.turn, answer=record.text))
        if step.case is not None:
            rows.append({"client": name, "case": step.case, "way": way, **_figures(record)})
    return rows


def _figures(record: RequestRecord) -> dict[str, Any]:
    causes: dict[str, int] = collections.Counter()
    for part in (record.reuse or {}).get("per_document", ()):
        if part.get("cause"):
            causes[part["cause"]] += part["computed_tokens"]
    return {
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "computed_tokens": record.prompt_tokens - record.cached_tokens,
        "computed_share": None if record.reuse is None else record.reuse["computed_share"],
        "ttft_s": ttft_s(record),
        "causes": causes,
    }


def summary(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each case over all clients, then of all cases but `first`."""
    names = list(dict.fromkeys(row["case"] for row in requests))
    cases = {name: [row for row in requests if row["case"] == name] for name in names}
    cases["all"] = [row for row in requests if row["case"] != "first"]
    return [_of_case(name, rows) for name, rows in cases.items() if rows]


def _of_case(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ways: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        ways[way] = {key: sum(row[key] for row in own) for key in ("prompt_tokens", "cached_tokens", "computed_tokens")}
        ways[way]["ttft_s"] = statistics.median(row["ttft_s"] for row in own)
    saved = {way: found["cached_tokens"] for way, found in ways.items()}
    return {
        "case": name,
        "clients": len({row["client"] for row in rows}),
        "ways": ways,
        "saved_of_documents": saved["plain"] / saved["documents"] if saved["documents"] else None,
        "saved_over_exact": saved["plain"] / saved["exact"] if saved["exact"] else None,
    }


def _model_name(url: str) -> str:
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60.0)) as connection:
        connection.request("GET", "/v1/models")
        return json.loads(connection.getresponse().read())["data"][0]["id"]


def _print(requests: Sequence[Mapping[str, Any]], cases: Sequence[dict[str, Any]], skipped: Sequence[str]) -> None:
    def cells(case: Mapping[str, Any]) -> Iterator[str]:
        for found in case["ways"].values():
            yield f"{found['computed_tokens'] / found['prompt_tokens']:.0%} of {found['prompt_tokens']:,}"
        yield from (f"{found['ttft_s']:.2f}" for found in case["ways"].values())
        yield text(case["saved_of_documents"], ".0%")
        yield text(case["saved_over_exact"], ".1f")

    head = (*(f"{way}, computed" for way in WAYS), *(f"{way}, TTFT s" for way in WAYS))
    head = (*head, "saved of documents", "times exact")
    show(("case", *head), [(case["case"], *cells(case)) for case in cases], "cases, over all clients")
    clients = dict.fromkeys(row["client"] for row in requests)
    rows = []
    for name in clients:
        own = [row for row in requests if row["client"] == name and row["case"] != "first"]
        rows.append((name, *cells(_of_case(name, own))))
    show(("client", *head), rows, "clients, over all cases but first", [f"SKIPPED {why}" for why in skipped])
