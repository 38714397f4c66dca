"""Command line of the simulator, and the workload and deployment that it describes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ccjax.cli.options import flag
from ccjax.cli.serving.options import ServeOptions
from ccjax.cli.values import num_bytes, positive_int
from scripts.simulation.cache import SimulatedCacheSettings

if TYPE_CHECKING:
    from scripts.simulation.replica import Deployment
    from scripts.simulation.workload import Workload

_TYPICAL_TOKENS = (90, 110, 130, 160, 200, 260)
"""Lengths of drawn passages if none are given: approximately those of Wikipedia's paragraphs."""
_POOL_SHARE = 0.5
"""Share of the memory left by the weights for pages of requests, without --pool-bytes and a device budget."""
_USED_SHARE = 0.9
_WEIGHTS_IN_WORKSPACE = 1.05


def make_parser(doc: str) -> argparse.ArgumentParser:
    """The argument parser of `scripts/simulate.py`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("requests and their arrivals")
    add = what.add_argument
    add("--requests", type=positive_int, default=10_000, help="how many (default 10,000)")
    add("--warmup", type=int, default=0, help="how many of these only fill the caches and count in no figure")
    add("--rate", type=float, help="arrivals a second (default 5, with --arrivals as recorded)")
    text = "recorded arrivals: Azure's .csv, Mooncake's .jsonl (default: Poisson)"
    add("--arrivals", type=Path, metavar="FILE", help=text)
    add("--trace", type=Path, metavar="FILE", help="retrieval trace: JSON lines with 'docs' (default: drawn)")
    add("--lengths", type=Path, metavar="FILE", help="JSON: tokens by passage id, or a list that passages draw from")
    add("--passages", type=positive_int, default=5000, help="drawn: number of passages (default 5,000)")
    add("--lists", type=positive_int, default=20_000, help="drawn: distinct lists of passages (default 20,000)")
    add("--zipf", type=float, default=0.9, help="drawn: exponent of the frequency of passages and lists (default 0.9)")
    add("--top-k", type=positive_int, default=5, help="passages of a request (default 5)")
    add("--question-tokens", type=positive_int, default=32, help="of each question (default 32)")
    add("--system-tokens", type=int, default=32, help="of the system prompt, 0 for none (default 32)")
    add("--answer-tokens", type=positive_int, help="of each answer (default 16, with --arrivals as recorded)")
    add("--seed", type=int, default=0, help="of all random draws (default 0)")

    add = parser.add_argument_group("what answers").add_argument
    add("--model", default="llama3-8b", help="a preset such as llama3-70b, or LAYERSxWIDTH[xHEADS] (default llama3-8b)")
    add("--hardware", default="h100", help="a100, h100, h200, h800, a10g, v5e or v6e (default h100)")
    add("--tensor-parallel-size", type=positive_int, default=1, help="devices of a replica (default 1)")
    add("--profile", type=Path, metavar="FILE", help="T(cached, new) of scripts/profile_prefill.py in place of FLOPs")
    add("--replicas", type=positive_int, default=1, help="each with tiers of its own (default 1)")
    add("--strategy", default="cachecraft", help="of ccjax.policy.strategies; full for none (default cachecraft)")
    add("--reuse", default="bounded", choices=("off", "exact", "bounded", "fast"), help="(default bounded)")
    add("--recompute-ratio", type=float, help="of each passage reused behind another prefix (default: eq. 12)")
    add("--eviction-policy", help="as with ccjax serve")
    add("--max-variants", type=int, help="as with ccjax serve")
    add("--device-cache-bytes", type=num_bytes, default=0, help="of a replica (default 0)")
    add("--host-cache-bytes", type=num_bytes, default=64 * 2**30, help="of a replica (default 64GiB)")
    add("--disk-cache-bytes", type=num_bytes, default=0, help="of a replica (default 0)")
    add("--pool-bytes", type=num_bytes, help="for pages of requests (default: half of what the weights leave)")
    add("--loading", default="layerwise", choices=("layerwise", "sync"), help="(default layerwise)")
    add("--no-preload", action="store_true", help="do not read for waiting requests")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue", "reorder_window"):
        default = ServeOptions.model_fields[name].default
        add(flag(ServeOptions, name), type=int, default=default, help=f"as with ccjax serve (default {default:,})")

    add = parser.add_argument_group("goals and output").add_argument
    add("--size-for", metavar="GOAL", help="find budgets and replicas, such as for 'p99 TTFT < 1 s at 20 req/s'")
    add("--budgets", type=num_bytes, nargs="+", help="host budgets to try (default: 5, 20, 50, 100 %% of all passages)")
    add("--most-replicas", type=positive_int, default=64, help="to try (default 64)")
    add("--paper", type=Path, metavar="FILE", help="simulate the papers' experiments, and put the tables in that page")
    add("--quick", action="store_true", help="with --paper: few requests, to see that it runs")
    add("--json", action="store_true", help="print raw figures as one JSON object on the last line")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that the options describe.

    Raises:
      ValueError, OSError: an option, or a file that it names, is invalid.
    """
    import numpy as np

    from scripts.simulation import workload as made

    if not 0 <= args.warmup < args.requests:
        raise ValueError(f"--warmup: wanted fewer than --requests {args.requests}, got {args.warmup}")
    if args.rate is not None and args.rate <= 0.0:
        raise ValueError(f"--rate: wanted more than 0, got {args.rate}")
    lengths = _lengths(args.lengths) if args.lengths is not None else list(_TYPICAL_TOKENS)
    if args.trace is not None:
        lists = made.trace_lists(args.trace, lengths, args.top_k)
        which = made.draw_which(args.requests, len(lists), exponent=None, seed=args.seed)
    else:
        tokens = list(lengths.values()) if isinstance(lengths, dict) else lengths
        lists = made.zipf_lists(args.passages, args.lists, args.top_k, tokens, exponent=args.zipf, seed=args.seed)
        which = made.draw_which(args.requests, len(lists), exponent=args.zipf, seed=args.seed + 1)
    if args.arrivals is None:
        times = made.poisson(args.requests, 5.0 if args.rate is None else args.rate, args.seed + 2)
        answers = np.full(args.requests, 16 if args.answer_tokens is None else args.answer_tokens)
    else:
        found, recorded = made.recorded(args.arrivals)
        times = made.in_turn(args.requests, found)
        answers = np.resize(recorded, args.requests)
        if args.answer_tokens is not None:
            answers = np.full(args.requests, args.answer_tokens)
    workload = made.Workload(times, which, lists, args.question_tokens, answers, args.system_tokens)
    if args.arrivals is not None and args.rate is not None:
        workload = workload.at_rate(args.rate)
    return workload


def deployment_of(args: argparse.Namespace, workload: Workload) -> Deployment:
    """The deployment that the options describe.

    Raises:
      ValueError: an option is invalid, or the model does not fit its devices.
    """
    from ccjax.loading.prefill_profile import PrefillProfile
    from ccjax.models.llama3.presets import preset
    from ccjax.policy.eviction import DEFAULT_POLICY, make_policy
    from ccjax.policy.scheduling import SchedulerSettings
    from ccjax.runner.pool import PAGE_TOKENS
    from ccjax.store.spec import KVSpec
    from scripts.simulation.costs import GridCosts, RooflineCosts
    from scripts.simulation.hardware import hardware
    from scripts.simulation.replica import Deployment

    device = hardware(args.hardware)
    config = preset(args.model, vocab_size=128_256)
    roofline = RooflineCosts(config, device, args.tensor_parallel_size)
    kv_spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, "bfloat16")
    usable = _USED_SHARE * device.memory_bytes * args.tensor_parallel_size
    left = int(usable - _WEIGHTS_IN_WORKSPACE * roofline.weight_bytes - args.device_cache_bytes)
    page_bytes = kv_spec.num_bytes(PAGE_TOKENS)
    longest = workload.system_tokens + max(sum(passages.num_tokens) for passages in workload.lists)
    longest += workload.question_tokens + int(workload.answer_tokens.max())
    pool = args.pool_bytes
    if pool is None:
        pool = left if args.device_cache_bytes else int(left * _POOL_SHARE)
    if pool > left or pool < 2 * kv_spec.num_bytes(longest):
        raise ValueError(
            f"--pool-bytes: wanted at least two of the longest requests ({2 * kv_spec.num_bytes(longest) / 1e9:.2f} "
            f"GB) and at most the rest of {args.tensor_parallel_size} x {device.name} after weights and "
            f"--device-cache-bytes ({left / 1e9:.1f} GB), got {pool / 1e9:.2f} GB"
        )
    costs = roofline
    if args.profile is not None:
        costs = GridCosts(
            PrefillProfile.from_json(json.loads(args.profile.read_text("utf-8"))).grid,
            decode_fixed_s=roofline.decode_s(1, 0),
            decode_seq_s=roofline.decode_s(2, 0) - roofline.decode_s(1, 0),
            disk_bytes_per_s=device.disk_bytes_per_s,
        )
    policy = args.eviction_policy or DEFAULT_POLICY
    make_policy(policy)
    return Deployment(
        costs,
        kv_spec,
        SimulatedCacheSettings(
            strategy=args.strategy,
            reuse="off" if args.strategy == "full" else args.reuse,
            recompute_ratio=args.recompute_ratio,
            eviction_policy=policy,
            max_variants=args.max_variants,
            device_cache_bytes=args.device_cache_bytes,
            host_cache_bytes=args.host_cache_bytes,
            disk_cache_bytes=args.disk_cache_bytes,
        ),
        SchedulerSettings(
            num_pages=pool // page_bytes,
            page_tokens=PAGE_TOKENS,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            max_queue=args.max_queue,
            reorder_window=args.reorder_window,
        ),
        replicas=args.replicas,
        loading=args.loading,
        preloads=not args.no_preload,
    )


def _lengths(path: Path) -> dict[int, int] | list[int]:
    found = json.loads(path.read_text("utf-8"))
    values = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(values, list) or not values or not all(type(value) is int and value > 0 for value in values):
        raise ValueError(f"--lengths: wanted positive integers in an object by passage id, or in a list, in {path}")
    return {int(key): value for key, value in found.items()} if isinstance(found, dict) else found
