"""Measures the cost of prefills by the cached part of their prompt: python scripts/profile_prefill.py --model DIR

Writes RAGCache's T(cached, new) to prefill_profile.json beside the model. Servers on this kind of machine then use it
to value chunk-caches when they choose what to evict from a tier. Run it while the machine is otherwise idle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ccjax.cli.progress import bars
from ccjax.cli.values import check_writable
from ccjax.evaluation import pages

CACHED = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
NEW = (16, 64, 256, 512, 1024, 2048, 4096)
ANSWER_TOKENS = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"profile_prefill.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    import jax

    from ccjax.engine import Engine, EngineConfig
    from ccjax.engine.prefill_measurement import measure_prefills
    from ccjax.loading.model import load_model
    from ccjax.loading.prefill_profile import PROFILE_FILE, PrefillProfile, write_profile

    if args.repetitions < 1:
        raise ValueError(f"--repetitions: wanted a positive integer, got {args.repetitions}")
    model = load_model(args.model, dtype=args.dtype, quantization=args.quantization, tokenizer=args.tokenizer)
    output = args.output or (model.directory or Path()) / PROFILE_FILE
    check_writable("output", output)
    config = EngineConfig(
        dtype=args.dtype, quantization=args.quantization, attention=args.attention, max_model_len=args.max_model_len
    )
    with bars() as progress, Engine(model, config) as engine:
        cached, new = (_within(values, engine.max_model_len) for values in (CACHED, NEW))
        task = progress.add_task("prefills")

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        grid = measure_prefills(engine, cached, new, repetitions=args.repetitions, progress=show)
        settings = {"attention": args.attention, "max_model_len": engine.max_model_len, "dtype": args.dtype}
    profile = PrefillProfile(model.fingerprint, jax.devices()[0].device_kind, grid, settings)
    rows = zip(grid.cached, grid.seconds, strict=True)
    cells = ((str(count), *(f"{1e3 * seconds:.1f}" for seconds in row)) for count, row in rows)
    pages.show(("cached", *(f"{count} new" for count in grid.new)), cells, "prefill, ms")
    write_profile(output, profile)
    print(f"written to {output}", file=sys.stderr)
    return 0


def _within(values: Sequence[int], longest: int) -> tuple[int, ...]:
    """The sizes that leave half of the longest prompt to the other number, and space for an answer."""
    found = tuple(value for value in values if value <= (longest - ANSWER_TOKENS) // 2)
    if len(found) < 2:
        raise ValueError(f"--max-model-len: wanted at least {2 * values[1] + ANSWER_TOKENS}, got {longest}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as with ccjax serve (default demo)")
    parser.add_argument("--quantization", choices=("int8", "fp8"), help="as it will be served")
    parser.add_argument("--tokenizer", metavar="DIR", help="as with ccjax serve")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="as it will be served")
    parser.add_argument("--attention", help="as it will be served (default: the platform's own)")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus answer (default: the model's, or 8192)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each prefill, the median counts (default 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: prefill_profile.json beside the model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
