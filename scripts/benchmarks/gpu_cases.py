"""Runs the cases of `bench.py gpu` as far as memory and time allow; each is saved as soon as it is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.engine import Engine, EngineConfig
from ccjax.models.llama3 import Params, init_params
from ccjax.runner.budgets import free_device_bytes
from ccjax.runner.budgets import pool_bytes as least_pool_bytes
from ccjax.runner.compilations import compilations
from ccjax.store.usage import DEVICE, DISK, HOST
from ccjax.types import ReuseReport
from scripts.benchmarks import gpu_plan, gpu_torch
from scripts.benchmarks.common import shapes_of
from scripts.benchmarks.gpu_engines import Engines, Prompts, Run, run_prompts
from scripts.benchmarks.gpu_plan import GpuCase, GpuScale
from scripts.gpucheck.ceilings import SUITE as CEILINGS
from scripts.gpucheck.ceilings import ceiling
from scripts.gpucheck.record import CheckRecord
from scripts.gpucheck.timing import copy_gbps, matmul_tflops, transfer_gbps

CASES, SETUP = "cases", "setup"
"""Suites of rows in the results."""
_MOST_WARM_UPS = 4
SAME = 0.1
"""Largest relative distance of our logits to PyTorch's, in bfloat16. With the tiny model of --quick it was 0.014, and
0.66 without the causal mask."""
_LEAST_STEPS = 4
_ROUNDS = 7


def run(record: CheckRecord, scale: GpuScale, *, folder: Path | None, only: str = "") -> None:
    """Measures the ceilings, then every case while there is time.

    Args:
      folder: of the disk tier; None for the directory of temporary files.
      only: cases with this part in their name.
    """
    measure_ceilings(record, scale)
    started_s, seconds = time.perf_counter(), compilations().seconds
    params = jax.block_until_ready(init_params(scale.config, jax.random.key(0), jnp.bfloat16))
    took = {"seconds": time.perf_counter() - started_s, "compile_s": compilations().seconds - seconds}
    record.add(SETUP, name="weights", bytes=gpu_plan.weight_bytes(scale), **took)
    record.say(f"weights of {scale.name} generated in {took['seconds']:.0f} s")

    chosen = [case for case in gpu_plan.cases(scale) if only in case.name]
    peer_missing = gpu_torch.missing()
    free = free_device_bytes(1)
    device_bytes = None if free is None else free + gpu_plan.weight_bytes(scale)
    torch_bytes = None if peer_missing else gpu_torch.free_bytes()
    reasons = {case: gpu_plan.too_large(case, scale, device_bytes, torch_bytes) for case in chosen}
    if peer_missing:
        reasons |= {case: peer_missing for case in chosen if case.kind == "torch"}
    fitting = [case for case in chosen if reasons[case] is None]
    kv_spec = kv_spec_of(scale.config, "bfloat16")
    least = least_pool_bytes(EngineConfig(dtype="bfloat16"), kv_spec, scale.max_model_len)
    pool = gpu_plan.pool_bytes(fitting, scale, least)
    num_passages = max((scale.num_passages(case.context) for case in fitting), default=0)
    record.add(SETUP, name="pool", bytes=pool, device_bytes=device_bytes, torch_bytes=torch_bytes)

    prompts = Prompts(scale)
    with Engines(params, scale, prompts, pool_bytes=pool, num_passages=num_passages, folder=folder) as engines:
        bench = GpuBench(record, scale, params, engines, prompts)
        for case in chosen:
            reason = reasons[case] or (None if record.seconds_left() > 0.0 else "not run: out of time")
            if reason is not None:
                record.add(CASES, **case.identity(), note=reason)
                record.say(f"{case.name}: {reason}")
                continue
            attempt(record, case, lambda case=case: bench.measure(case))


def measure_ceilings(record: CheckRecord, scale: GpuScale) -> None:
    """Adds the device's ceilings in this run."""
    rounds = 3 if record.is_quick else _ROUNDS
    record.add(CEILINGS, name="matmul_tflops", value=matmul_tflops(scale.matmul_size, rounds))
    record.add(CEILINGS, name="copy_gbps", value=copy_gbps(scale.copy_bytes, rounds))
    found = []
    for kind in ("pinned_host", "unpinned_host"):
        try:
            found.append(transfer_gbps(scale.transfer_bytes, rounds, kind))
        except NotImplementedError as error:
            record.say(f"transfer from {kind}: {error}")
            continue
        record.add(CEILINGS, name=f"transfer_{kind}_gbps", value=found[-1])
    record.add(CEILINGS, name="transfer_gbps", value=max(found))
    record.say(", ".join(f"{row['name']} {row['value']:.3g}" for row in record.rows[CEILINGS]))


def attempt(record: CheckRecord, case: GpuCase, measured: Callable[[], dict[str, Any]]) -> None:
    """Adds the case's row; an exception becomes a row and a failure, and the next case continues."""
    counter, started_s = compilations(), time.perf_counter()
    count, seconds = counter.count, counter.seconds
    try:
        row = measured()
    except Exception as error:  # the others are still useful
        note = " ".join(f"failed: {type(error).__name__}: {error!s:.300}".split())
        record.add(CASES, **case.identity(), note=note)
        record.fail(f"{case.name}: {note}")
        return
    row["compilations"], row["compile_s"] = counter.count - count, counter.seconds - seconds
    row["case_s"] = time.perf_counter() - started_s
    record.add(CASES, **case.identity(), **row)
    figure = f"{1e3 * row['step_s']:.2f} ms a step" if case.kind == "decode" else f"{1e3 * row['ttft_s']:.1f} ms"
    record.say(f"{case.name}: {figure}; {row['compilations']} compiled in {row['compile_s']:.0f} s")


class GpuBench:
    """Measures each kind of case; keeps the logits of our full prefills for the comparison with PyTorch."""

    def __init__(
        self, record: CheckRecord, scale: GpuScale, params: Params, engines: Engines, prompts: Prompts
    ) -> None:
        self._record, self._scale, self._params = record, scale, params
        self._engines, self._prompts = engines, prompts
        self._peer: gpu_torch.TorchPeer | None = None
        self._given: dict[int, tuple[list[int], np.ndarray]] = {}

    def measure(self, case: GpuCase) -> dict[str, Any]:
        """The figures of a case."""
        if case.kind == "torch":
            return self._torch(case)
        engine = self._engines.of(case)
        return self._decode(case, engine) if case.kind == "decode" else self._prefill(case, engine)

    def _prefill(self, case: GpuCase, engine: Engine) -> dict[str, Any]:
        """Time to the first token of every request."""
        reuse = "off" if case.kind == "full" else "bounded"

        def once() -> Run:
            if case.tier is not None:
                self._engines.place(engine, case.tier)
            return run_prompts(engine, self._prompts.of(case), reuse=reuse)

        _warm_up(once)
        runs, late = [], 0
        for _ in range(2):
            before = compilations().count
            runs = [once() for _ in range(gpu_plan.repetitions(case, self._scale))]
            late = compilations().count - before  # if not 0, some run includes compiling: once more
            if not late:
                break
        row = self._speed(case, [max(run.first_s) for run in runs])
        row["mean_first_s"] = statistics.median(statistics.mean(run.first_s) for run in runs)
        reports = [response.reuse for response in runs[-1].responses]
        row["computed_tokens"] = sum(report.computed_tokens for report in reports)
        row["recomputed_tokens"] = sum(report.recomputed_tokens for report in reports)
        row["late_compilations"] = late
        if case.kind == "full" and case.batch == 1:
            (segments,) = self._prompts.of(case)
            answer = run_prompts(engine, [segments], reuse=reuse, first_logits=True).responses[0]
            assert answer.first_logits is not None
            self._given[case.context] = [token for segment in segments for token in segment], answer.first_logits
        if case.tier is not None:
            row |= _loading(self._record, engine, case, runs)
            reports = [response.reuse for run in runs for response in run.responses]
            row["as_named"] = all(is_as_named(report, case, self._scale) for report in reports)
            if not row["as_named"] and case.tier != DISK:
                self._record.fail(f"{case.name}: the KV reused, or its tier, is not what the case's name says")
        return row

    def _decode(self, case: GpuCase, engine: Engine) -> dict[str, Any]:
        """Time between tokens while all requests decode."""
        steps: list[float] = []
        for _ in range(_MOST_WARM_UPS):  # each is a prefill and a whole answer
            before = compilations().count
            steps = run_prompts(engine, self._prompts.of(case), reuse="off", num_tokens=self._scale.steps).step_s
            if compilations().count == before:
                break
        if len(steps) < _LEAST_STEPS:
            raise ValueError(f"steps: wanted at least {_LEAST_STEPS} in which all requests decode, got {len(steps)}")
        step_s, num_bytes = statistics.median(steps), gpu_plan.decode_bytes(case, self._scale)
        row = {"prompt_tokens": self._scale.prompt_tokens(case.context), "step_s": step_s, "runs_s": steps}
        rate = num_bytes / step_s / 1e9
        row |= {"bytes": num_bytes, "gbps": rate, "tokens_per_s": case.batch / step_s}
        return row | {"share_of_copy": _share(self._record, rate, "copy_gbps")}

    def _torch(self, case: GpuCase) -> dict[str, Any]:
        """The same prompts through PyTorch; for one request also compares the logits with ours."""
        if self._peer is None:
            self._peer = gpu_torch.TorchPeer(self._params, self._scale.config)
        ids = [[token for segment in segments for token in segment] for segments in self._prompts.of(case)]
        seconds = [self._peer.prefill(ids)[0] for _ in range(gpu_plan.repetitions(case, self._scale) + 1)][1:]
        row = self._speed(case, seconds)
        if case.batch == 1 and case.context in self._given:
            token_ids, logits = self._given[case.context]
            row["logits_distance"] = distance = relative_distance(logits, self._peer.prefill([token_ids])[1][0])
            if not distance <= SAME:
                self._record.fail(f"{case.name}: logits are {distance:.3g} from ours, wanted at most {SAME}")
        gpu_torch.release()
        return row

    def _speed(self, case: GpuCase, runs_s: list[float]) -> dict[str, Any]:
        ttft_s, flops = statistics.median(runs_s), gpu_plan.prefill_flops(case, self._scale)
        tflops = flops / ttft_s / 1e12
        row = {"prompt_tokens": self._scale.prompt_tokens(case.context), "ttft_s": ttft_s, "runs_s": runs_s}
        share = _share(self._record, tflops, "matmul_tflops")
        return row | {"flops": flops, "tflops": tflops, "share_of_matmul": share}


def relative_distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """Euclidean distance of two vectors, relative to the second one's length."""
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64)))


def _warm_up(once: Callable[[], Run]) -> None:
    """Runs until nothing more is compiled."""
    for _ in range(_MOST_WARM_UPS):
        before = compilations().count
        once()
        if compilations().count == before:
            return


def _loading(record: CheckRecord, engine: Engine, case: GpuCase, runs: list[Run]) -> dict[str, Any]:
    """Loads of a run: bytes, seconds waited for them, and the rates, measured by the engine, of merging KV into a
    layer's context on the device and of reading the disk."""
    last = [response.reuse for response in runs[-1].responses]
    num_bytes = sum(report.loaded_bytes for report in last)
    row: dict[str, Any] = {"loaded_bytes": num_bytes}
    row["load_wait_s"] = statistics.median(
        max(response.reuse.load_wait_s for response in run.responses) for run in runs
    )
    row["tiers"] = sorted({str(document.tier) for report in last for document in report.per_document})
    row["given_up_loads"] = sum(report.given_up_loads for report in last)
    row["failed_loads"] = sum(report.failed_loads for report in last)
    for tier, name in ((HOST, "merge_gbps"), (DISK, "read_gbps")):
        seconds = engine.rates.load_s(tier, num_bytes) if case.tier in (HOST, DISK) and num_bytes else None
        if seconds:
            row[name] = num_bytes / seconds / 1e9
    if "merge_gbps" in row:
        row["share_of_transfer"] = _share(record, row["merge_gbps"], "transfer_gbps")
    return row


def is_as_named(report: ReuseReport, case: GpuCase, scale: GpuScale) -> bool:
    """True if every passage came from the case's tier and the recomputed share is the case's ratio. In a batch of
    several packs, the reads of the first one promote passages to the device."""
    tiers = {str(document.tier) for document in report.per_document}
    allowed = {str(case.tier)} | ({DEVICE} if case.batch > 1 else set())
    recomputed = gpu_plan.recomputed_tokens(case, scale)
    wanted = recomputed, gpu_plan.computed_tokens(case, scale) - recomputed
    return tiers <= allowed and (report.recomputed_tokens, report.computed_tokens) == wanted


def _share(record: CheckRecord, value: float, name: str) -> float | None:
    best = ceiling(record, name)
    return None if best is None else value / best


def shapes(scale: GpuScale) -> dict[str, Any]:
    """Model and prompts, for the head of the results."""
    config, names = scale.config, ("system_tokens", "passage_tokens", "question_tokens")
    model = {"model": scale.name, **shapes_of(config), "head_dim": config.head_dim, "vocab": config.vocab_size}
    prompts = {name: getattr(scale, name) for name in (*names, "max_num_batched_tokens", "short", "long")}
    return {**model, "dtype": "bfloat16", **prompts}


def keep_executables(folder: Path) -> None:
    """Keeps compiled steps for later runs on the same machine."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
