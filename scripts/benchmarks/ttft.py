"""Time to first token of the default options in each state of the store, compared with transformers and llama.cpp.

One prompt at a time: instructions, eight passages (pieces of the shipped corpus) in a new order each time, a question.
Options are those of `ccjax serve`; engines are read-only, so that no prompt changes the state for the next, and warmed
up like a server's (not with --quick). The first run of a case is not counted. On a CPU the cases alternate, so that a
busy machine slows all of them; on an accelerator, whose memory one engine takes, they run one after the other.

Keys of --json, besides those of every benchmark (`bench.py --help`):
  model, dtype, layers, d_model, passages, repetitions
  cases[]: `state` of the store: empty (full prefill), alone (each passage was computed directly behind the
    instructions), prepared (also behind the frame, as servers do), seen (an earlier prompt had the passages in another
    order), idle (the same, then prepared in idle time); `focus_window` (of the focus cut, CacheCraft alg. 1; null for
    the default, without), `num_cut` (runs in which some layer ran without the unfocused passages); `context_tokens`;
    `ttft_s`, `runs_s` (median and all runs); `computed_share` (median share of token-layers that ran through the model)
  peers[]: `name`, `context_tokens`, `ttft_s`, `runs_s` of a full prefill of as many tokens. transformers: sdpa,
    float32, random weights of the same shapes, alternating with the cases. llama.cpp: the same GGUF file (4-bit
    weights), afterwards
  skipped[]: what was left out, and why; empty with --no-peers
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from ccjax.cli.values import positive_int
from ccjax.engine import Engine, EngineConfig, Response
from ccjax.evaluation.pages import plot_file, show, text
from ccjax.evaluation.states import STATES, State, fill
from ccjax.loading.devices import with_dtype
from ccjax.loading.model import LoadedModel, load_model
from ccjax.loading.named import default_model
from ccjax.types import Document
from scripts.benchmarks import peers
from scripts.benchmarks.common import corpus_passages, environment, median, stages

NUM_PASSAGES = 8
QUESTION = "Where was the harbour master born?"
QUICK = {"context_tokens": [256], "repetitions": 2, "states": ["empty", "prepared"]}
_Case = tuple[State, int | None]
_ROOM = 64
"""Approximate tokens of a prompt besides its passages, and tokens of its answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--model", default=default_model(), help="as with ccjax serve (default: its default, %(default)s)")
    add("--context-tokens", type=positive_int, nargs="+", default=[1024, 2048], help="approximately (%(default)s)")
    add("--states", nargs="+", choices=STATES, default=list(STATES), help="of the store (default: all)")
    add("--focus-window", type=positive_int, metavar="LAYERS", help="also each state with the focus cut after as many")
    add("--repetitions", type=positive_int, default=5, help="runs per case; the median counts (%(default)s)")
    add("--no-peers", action="store_true", help="without transformers and llama.cpp")
    add("--plot", type=Path, metavar="FILE", help="draw the table as bars (.svg or .png)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases and prints the table."""
    repetitions, with_peers = arguments.repetitions, not arguments.no_peers
    model = load_model(arguments.model, dtype=with_dtype({})["dtype"])
    reasons = {"transformers": peers.missing("torch", "transformers"), "llama.cpp": None}
    file, reasons["llama.cpp"] = peers.gguf_file(arguments.model)
    peer = peers.full_prefill(model.config) if with_peers and not reasons["transformers"] else None
    is_cpu = jax.default_backend() == "cpu"
    groups = [arguments.states] if is_cpu else [[state] for state in arguments.states]
    cases: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    with stages() as say:
        for length in arguments.context_tokens:
            assert model.tokenizer is not None
            documents = corpus_passages(model.tokenizer, NUM_PASSAGES, max(1, (length - _ROOM) // NUM_PASSAGES))
            peer_s: list[float] = []
            for states in groups:
                say(f"{length} tokens, {', '.join(states)}")
                with _engines(model, states, documents, arguments.focus_window) as engines:
                    if not arguments.quick:
                        next(iter(engines.values())).warmup()  # all engines share the compiled steps
                    responses = _ask(engines, documents, repetitions, peer, peer_s)
                cases += [_case(*key, found) for key, found in responses.items()]
            if peer is not None:
                count = cases[-1]["context_tokens"]
                others.append({"name": "transformers", "context_tokens": count, **_seconds(peer_s)})
        if file is not None and with_peers:
            counts = list(dict.fromkeys(case["context_tokens"] for case in cases))
            server = peers.LlamaCpp(file, 1, max(counts) + 1)
            for count in counts:
                say(f"{count} tokens, llama.cpp")
                runs_s = [server.prefill_s(count) for _ in range(repetitions + 1)]
                others.append({"name": "llama.cpp", "context_tokens": count, **_seconds(runs_s)})
    skipped = [f"{name}: {reason}" for name, reason in reasons.items() if reason and with_peers]
    _print(arguments.model, cases, others, skipped)
    if arguments.plot:
        _plot([*others, *cases], arguments.plot)
    config = model.config
    about = {"model": arguments.model, "dtype": str(with_dtype({})["dtype"]), "layers": config.num_layers}
    about |= {"d_model": config.d_model, "passages": NUM_PASSAGES, "repetitions": repetitions}
    return {"benchmark": "ttft", **environment(), **about, "cases": cases, "peers": others, "skipped": skipped}


@contextlib.contextmanager
def _engines(
    model: LoadedModel, states: Sequence[State], documents: list[Document], focus_window: int | None
) -> Iterator[dict[_Case, Engine]]:
    """An engine with the default options over a store in each state, and one with the focus cut."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        engines: dict[_Case, Engine] = {}
        for state in states:
            config = EngineConfig(**with_dtype({"store": (Path(directory) / state).as_uri()}))
            fill(model, config, state, [documents])
            for window in (None,) if focus_window is None or state == "empty" else (None, focus_window):
                own = config.replace(read_only=True, focus_window=window)
                engines[state, window] = stack.enter_context(Engine(model, own))
        yield engines


def _ask(
    engines: dict[_Case, Engine],
    documents: list[Document],
    repetitions: int,
    peer: Callable[[int], float] | None,
    peer_s: list[float],
) -> dict[_Case, list[Response]]:
    """The responses of each engine; the peer prefills as many tokens in alternation."""
    rng = random.Random(len(documents))
    responses: dict[_Case, list[Response]] = {key: [] for key in engines}
    for _ in range(repetitions + 1):
        order = rng.sample(documents, len(documents))
        for key, engine in engines.items():
            responses[key].append(engine.generate(QUESTION, order, max_new_tokens=1))
        if peer is not None:
            peer_s.append(peer(next(iter(responses.values()))[-1].num_prompt_tokens))
    return responses


def _case(state: State, focus_window: int | None, responses: list[Response]) -> dict[str, Any]:
    num_cut = sum(response.reuse.focus_cut_layer is not None for response in responses[1:])
    share = median([response.reuse.computed_share for response in responses[1:]])
    about = {
        "state": state,
        "focus_window": focus_window,
        "num_cut": num_cut,
        "context_tokens": responses[0].num_prompt_tokens,
        "computed_share": share,
    }
    return {**about, **_seconds([response.ttft_s for response in responses])}


def _seconds(runs_s: list[float]) -> dict[str, Any]:
    """Median and all runs but the first."""
    return {"ttft_s": median(runs_s[1:]), "runs_s": runs_s[1:]}


def _print(model: str, cases: list[dict[str, Any]], others: list[dict[str, Any]], skipped: list[str]) -> None:
    full = {case["context_tokens"]: case["ttft_s"] for case in cases if case["state"] == "empty"}
    cells = [
        (
            str(row["context_tokens"]),
            row["name"] if "name" in row else f"default, {_state(row)}",
            text(row.get("computed_share"), ".1%"),
            f"{row['ttft_s']:.3f}",
            f"{full[row['context_tokens']] / row['ttft_s']:.2f}x" if full else "",
        )
        for row in (*cases, *others)
    ]
    show(("context", "store", "computed", "TTFT s", "faster"), cells, model, [f"SKIPPED {why}" for why in skipped])


def _state(row: dict[str, Any]) -> str:
    if row["focus_window"] is None:
        return row["state"]
    return f"{row['state']}, focus cut ({row['num_cut']} of {len(row['runs_s'])} runs)"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A group of bars for each length of the prompt."""
    lengths = sorted({row["context_tokens"] for row in rows})
    of_empty = "ccjax, full prefill"
    names = [row.get("name") or (f"ccjax, {_state(row)}" if row["state"] != "empty" else of_empty) for row in rows]
    order = sorted(dict.fromkeys(names), key=lambda name: name.startswith("ccjax"))
    with plot_file(path, 1, 1, (6.4, 0.5 + 0.25 * (len(order) + 1) * len(lengths))) as ((panel,),):
        for number, name in enumerate(order):
            own = [row for row, other in zip(rows, names, strict=True) if other == name]
            at = [lengths.index(row["context_tokens"]) * (len(order) + 1) + number for row in own]
            bars = panel.barh(at, [row["ttft_s"] for row in own], color=f"C{number}", label=name)
            panel.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
        middle = (len(order) - 1) / 2
        panel.set_yticks([middle + n * (len(order) + 1) for n in range(len(lengths))], [f"{n} tokens" for n in lengths])
        panel.set(xlabel="time to first token, s")
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
