"""The GPU check without a GPU: its numerics on interpreted kernels, its counts, its files. What it says of speed on a
device only a device shows."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
import pytest

from ccjax.kernels.attention import attention
from ccjax.models.llama3 import LlamaConfig
from ccjax.runner.context_loader import ContextLoader
from scripts import gpu_check
from scripts.gpucheck import (
    attention_numerics,
    attention_timing,
    decode_numerics,
    engine_identities,
    rope_numerics,
    torch_peers,
)
from scripts.gpucheck.attention_candidates import (
    SCALE,
    AttentionProblem,
    attention_flops,
    candidates,
    visible_pairs,
    work,
)
from scripts.gpucheck.attention_cases import UNUSED, packed
from scripts.gpucheck.attention_numerics import Problem
from scripts.gpucheck.record import CheckRecord
from scripts.gpucheck.serving_case import TOLERANCE, ServingCase
from scripts.gpucheck.timing import Timed, interleaved, ratio, timed_jax
from tests.engine import few_shapes as sizes


@pytest.fixture(scope="module")
def few_shapes():
    """Sizes are those that engines list: what is computed here is small, and bfloat16 is slow on a CPU."""


@pytest.fixture
def record(tmp_path):
    return CheckRecord(tmp_path / "found.json", {"benchmark": "gpu_check"}, is_quick=True, limit_s=600.0)


def on_disk(record):
    return json.loads(record.path.read_text())


def test_kernel_passes_and_every_mutant_is_detected(record):
    """The very list of the device: a packed and rotated batch, all mutants, operands cut to TF32 among them."""
    problem = next(problem for problem in attention_numerics.problems(is_quick=True) if problem.mutants)
    attention_numerics.check(record, ["triton_interpret"], problem)
    rows = on_disk(record)["suites"][attention_numerics.SUITE]
    assert not record.failures and all(row["passed"] for row in rows)
    assert [row["mutant"] for row in rows][0] is None and len(rows) == 1 + len(problem.mutants) >= 9
    assert "operands cut to TF32" in problem.mutants and problem.case.dtype == "float32"
    (shown,) = attention_numerics.tables(record)
    assert "1 of 1" in shown and f"{len(problem.mutants)} of {len(problem.mutants)}" in shown


def test_ineffective_mutant_and_wrong_kernel_both_fail(record):
    case = packed(theta=10000.0, head_dim=16)
    attention_numerics.check(record, ["xla"], Problem("blind", case, 1e-5, {"no change": lambda case: {}}))
    attention_numerics.check(record, ["xla"], Problem("broken", case, 1e-5, changes={"q_pos": case.q_pos - 1}))
    attention_numerics.check(record, ["nonesuch"], Problem("unknown", case, 1e-5))
    assert ["blind", "broken", "unknown"] == [failure.split(": ")[1].split(", ")[1] for failure in record.failures]
    assert on_disk(record)["failures"] == record.failures
    assert "1 of 3" not in attention_numerics.tables(record)[0]


def test_serving_sample_detects_all_mutants_and_a_single_wrong_block(record):
    case = ServingCase(96, 512, theta=500000.0, heads=(4, 2), num_rows=6)
    mutants = attention_numerics.MUTANTS | attention_numerics.ROTATED
    problem = Problem("sampled", case, TOLERANCE, mutants, error=case.relative_error)
    attention_numerics.check(record, ["xla"], problem)
    assert not record.failures
    one_block = np.where(np.arange(512) // 64 == 2, UNUSED, case.k_pos).astype(np.int32)
    attention_numerics.check(
        record, ["xla"], Problem("a block", case, TOLERANCE, changes={"k_pos": one_block}, error=case.relative_error)
    )
    assert len(record.failures) == 1


def test_rope_is_checked_at_the_last_position_of_the_model(record):
    rope_numerics.run(record)
    assert not record.failures
    assert sum(row["mutant"] is not None for row in record.rows[rope_numerics.SUITE]) == 16


def test_decode_check_detects_its_mutants(record, monkeypatch):
    decode_numerics.check(record, "triton_interpret", heads=8, kv_heads=1, head_dim=64, theta=10000.0)
    decode_numerics.check(record, "triton_interpret", mutant="a token too few", head_dim=64, theta=10000.0)
    assert [row["passed"] for row in on_disk(record)["suites"][decode_numerics.SUITE]] == [True, True]
    monkeypatch.setitem(decode_numerics.MUTANTS, "nothing", lambda case: {})
    decode_numerics.check(record, "xla", mutant="nothing", head_dim=64)
    assert len(record.failures) == 1 and "'nothing' beyond" in record.failures[0]
    assert "0 of 1" in decode_numerics.tables(record)[0]


def test_kernel_exception_is_a_failure_and_other_kernels_are_still_checked(record, monkeypatch):
    monkeypatch.setattr(decode_numerics, "SHAPES", ({"head_dim": 16},))
    monkeypatch.setattr(decode_numerics, "MUTANTS", {})
    decode_numerics.run(record, ("triton_interpret", "xla"))
    rows = on_disk(record)["suites"][decode_numerics.SUITE]
    assert [(row["implementation"], row["passed"]) for row in rows] == [
        (name, name == "xla") for name in ("triton_interpret", "xla") for _ in decode_numerics.TOLERANCE
    ]
    assert "NotImplementedError: triton: wanted a head dimension" in record.failures[0]


@pytest.fixture
def small_engine(monkeypatch):
    """Less to compile and to compute, whose numbers say the same."""
    monkeypatch.setattr(engine_identities, "CONFIG", LlamaConfig(512, 128, 2, 4, 2, 32, 256, 500000.0))
    monkeypatch.setattr(engine_identities, "_LENGTHS", (32, 16, 64, 16))
    monkeypatch.setattr(engine_identities, "_TOKENS", 4)
    with sizes.few_shapes():
        yield


def test_reuse_is_checked_through_the_engine(record, small_engine):
    engine_identities.run(record)
    rows = on_disk(record)["suites"][engine_identities.SUITE]
    assert not record.failures and all(row["passed"] for row in rows)
    assert [row["tolerance"] for row in rows if row["mutant"] is None].count(0.0) == 4
    errors = {row["name"]: row["error"] for row in rows}
    assert 3 * errors["all reused behind the same prefix"] < engine_identities.ROUNDING < errors["naive reuse"] / 3
    assert 3 * rows[-2]["error"] < engine_identities.FLOAT32_ROUNDING < rows[-1]["error"] / 3
    assert "broken: nothing recomputed" in engine_identities.tables(record)[0]


def test_missing_reused_kv_is_detected(record, small_engine, monkeypatch):
    monkeypatch.setattr(ContextLoader, "write", lambda loader, layer: loader._contexts.take(layer))
    engine_identities.run(record)
    names = {failure.split(": ")[1].split(",")[0] for failure in record.failures}
    assert "all reused behind the same prefix" in names and "a full prefill" not in names


def test_attention_flops_count_visible_pairs():
    random = np.random.default_rng(0)
    k_pos = random.permutation(60).astype(np.int32)
    k_pos[:7] = UNUSED
    q_pos = np.sort(random.choice(70, 20, replace=False)).astype(np.int32) - 3
    pairs = sum(int(slot <= query) for query, slot in itertools.product(q_pos, k_pos))
    assert visible_pairs(q_pos, k_pos) == pairs
    assert attention_flops(q_pos, k_pos, num_heads=6, head_dim=10) == 2 * (2 * 10) * 6 * pairs
    whole = np.arange(33, dtype=np.int32)
    assert visible_pairs(whole, whole) == 33 * 34 // 2


def test_timed_loop_runs_the_stated_number_of_calls_and_keeps_the_result():
    turns = []

    def function(x):
        jax.debug.callback(lambda: turns.append(1))
        return 2 * x

    timed = timed_jax(function, (jax.numpy.arange(3.0),), calls=5)
    np.testing.assert_array_equal(timed.result, [0.0, 2.0, 4.0])
    assert timed.sample() > 0.0
    jax.effects_barrier()
    assert len(turns) == 2 * 5  # to warm up, and as a sample


def test_timings_are_interleaved_and_ratios_are_paired_by_round():
    order = []
    times = {"slow": iter([99.0, 4.0, 8.0, 12.0]), "fast": iter([99.0, 2.0, 2.0, 3.0])}

    def sampler(name):
        return lambda: order.append(name) or next(times[name])

    seconds = interleaved({name: Timed(sampler(name), None, "") for name in times}, rounds=3)
    assert order == ["slow", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert seconds == {"slow": [4.0, 8.0, 12.0], "fast": [2.0, 2.0, 3.0]}, "the first sample does not count"
    assert ratio([4.0, 8.0, 2.0], [1.0, 4.0, 4.0]) == 2.0  # of 4, 2 and 0.5; that of the medians is 1


def test_missing_peers_are_noted_and_the_rest_is_timed(record, monkeypatch):
    monkeypatch.setattr(attention_timing, "TARGET_CONTEXT", 256)
    monkeypatch.setattr(attention_timing, "_TFLOPS", {"xla": 1e-3})  # of a CPU: two calls make a sample
    record.add("ceilings", name="matmul_tflops", value=1000.0)
    monkeypatch.setattr(torch_peers, "missing", lambda: "torch is not installed")
    competing = [candidate for candidate in candidates(256, ["xla"], is_quick=True) if not candidate.with_mass]
    attention_timing.measure(record, competing)
    assert not record.failures
    rows = on_disk(record)["suites"][attention_timing.SUITE]
    (timed,) = (row for row in rows if "ms" in row)
    assert timed["name"] == "xla" and timed["num_queries"] == 40 and len(timed["samples_ms"]) == 3
    assert timed["tflops"] == pytest.approx(timed["flops"] / timed["ms"] / 1e9)
    notes = {row["name"]: row["note"] for row in rows if "note" in row}
    assert set(notes) == {"cudnn", "torch flash", "torch cudnn"} and "torch" in notes["torch flash"]
    attention_timing.judge(record)
    *_, untimed, target = attention_timing.tables(record)
    assert "torch is not installed" in untimed and "not measured" in target


def test_target_compares_with_the_best_library_kernel_at_the_same_context(record):
    def add(name, computed, flops, ms, is_library, context=16384):
        given = {"name": name, "computed": computed, "flops": flops, "is_library": is_library, "context": context}
        rate = {"ms": ms[1], "tflops": flops / ms[1], "samples_ms": ms}
        record.add(attention_timing.SUITE, **given, **rate, num_queries=1, with_mass=False)

    add("ours", "15 %", 30, [2.0, 2.0, 2.0], False)
    add("library", "100 %", 100, [4.0, 4.0, 4.0], True)
    add("slower", "100 %", 100, [9.0, 9.0, 9.0], True)
    add("elsewhere", "100 %", 100, [1.0, 1.0, 1.0], True, context=2048)
    attention_timing.judge(record)
    (row,) = record.rows[attention_timing.TARGET]
    assert row["best_library"] == "library" and row["ratio"] == 0.6 and row["passed"]
    assert "PASS" in attention_timing.tables(record)[-1]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_torch_kernels_match_our_attention():
    """Their mask and their layout, by PyTorch's CPU kernels; one that is off by one position is told apart."""
    whole, part = work(256, "100 %"), work(256, "15 %")
    rows = attention_timing.sampled_rows(40)

    def own(work: AttentionProblem):
        out = attention(work.q, work.k, work.v, q_pos=work.q_pos, k_pos=work.k_pos, scale=SCALE).out
        return np.asarray(out[rows].astype(jax.numpy.float32))

    def distance(got, wanted):
        return (np.linalg.norm(got - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))).max()

    tensors = [torch_peers.tensor(x) for x in (whole.q, whole.k, whole.v)]
    flash = torch_peers.causal(*tensors, scale=SCALE, backend="FLASH_ATTENTION")()
    assert distance(torch_peers.rows_of(flash, rows), own(whole)) < attention_timing.SAME
    tensors[0] = torch_peers.tensor(part.q)
    for shift, is_same in ((0, True), (1, False)):
        flex = torch_peers.flex(*tensors, part.q_pos - shift, scale=SCALE, is_compiled=False)()
        assert bool(distance(torch_peers.rows_of(flex, rows), own(part)) < attention_timing.SAME) == is_same


def test_gpu_check_without_a_gpu_is_skipped_with_a_message(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert gpu_check.main(["--quick", "--out", str(tmp_path)]) == gpu_check.SKIPPED == 77
    assert "wanted an NVIDIA GPU, but jax" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_listed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_check, "missing_packages", lambda: ["tensorstore", "xxhash"])
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "gpu_check: not installed: tensorstore, xxhash\n"


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """`checked(*suites)` checks a GPU that is not there: the exit status, what is found, and the page."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(gpu_check, "device_kind", lambda: "NVIDIA Slide Rule")

    def run(*suites):
        monkeypatch.setattr(gpu_check, "SUITES", suites)
        status = gpu_check.main(["--quick", "--out", str(tmp_path)])
        (results,) = tmp_path.glob("nvidia-slide-rule-*-quick.json")
        return status, json.loads(results.read_text()), results.with_suffix(".md").read_text()

    return run


@pytest.mark.parametrize(("tolerance", "status"), [(1e-5, 0), (1e-9, 1)])
def test_files_are_written_and_a_numeric_failure_exits_with_1(checked, monkeypatch, capsys, tolerance, status):
    monkeypatch.setattr(rope_numerics, "TOLERANCE", {"float32": tolerance})
    code, found, page = checked("rope_numerics")
    assert {"date", "commit", "machine", "versions", "gpu", "suites", "failures", "elapsed_s"} <= found.keys()
    assert code == status and found["is_complete"] and bool(found["failures"]) is bool(status)
    assert "RoPE at positions" in page and ("FAILED" in capsys.readouterr().out) is bool(status)


def test_crashed_suite_does_not_lose_results_of_other_suites(checked, monkeypatch, capsys):
    def breaks(record):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(attention_numerics, "run", breaks)
    monkeypatch.setattr(rope_numerics, "TOLERANCE", {})
    code, found, page = checked("attention_numerics", "rope_numerics")
    assert code == 1 and "no such instruction" in found["failures"][0] and "RoPE at positions" in page
    assert "no such instruction" in capsys.readouterr().err
