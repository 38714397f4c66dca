"""`bench.py gpu` without an accelerator: its counts by hand, and every code path with a tiny model. What it says of
speed only a device shows."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ccjax.models.llama3 import LLAMA3_8B, abstract_params, init_params
from scripts.benchmarks import gpu_cases, gpu_plan, gpu_report, gpu_torch
from scripts.benchmarks.common import BenchmarkError, fill_in
from scripts.benchmarks.gpu_engines import _steps
from scripts.benchmarks.gpu_plan import LLAMA3_8B_SCALE, QUICK_SCALE, GpuCase, cases
from scripts.gpucheck.record import CheckRecord
from tests.scripts import in_process

ROOT = Path(__file__).resolve().parents[2]
LARGE = LLAMA3_8B_SCALE
H100_BYTES, H100_TORCH_BYTES = int(0.75 * 85.5e9), int(0.24 * 85.5e9)
"""What JAX takes of an H100 by default, and what that leaves."""


def process_of(code, *options):
    """What to call for `bench.py gpu` with other code in front, and where: one device is there."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    how = {"cwd": ROOT, "env": {**os.environ, "XLA_FLAGS": " ".join(flags)}}
    return [sys.executable, "-c", code, "gpu", *options], how


def test_weight_counts_match_the_model():
    params = abstract_params(LLAMA3_8B)
    matrices = [leaf for leaf in jax.tree.leaves(params.layers) if leaf.ndim > 1]
    assert gpu_plan.layer_weights(LLAMA3_8B) == sum(leaf.size for leaf in matrices)
    tables = params.embedding.size + params.lm_head.size
    assert gpu_plan.weight_bytes(LARGE) == 2 * (sum(leaf.size for leaf in matrices) + tables)
    case = GpuCase("decode", 8192)
    context = LARGE.prompt_tokens(8192) + LARGE.steps // 2
    table_bytes = 2 * params.embedding.size
    assert gpu_plan.decode_bytes(case, LARGE) == gpu_plan.weight_bytes(LARGE) - table_bytes + 131072 * context


@pytest.mark.parametrize(
    "case", [GpuCase("full", 8192), GpuCase("reuse", 8192, 1, 0.15, "device")], ids=lambda c: c.kind
)
def test_flops_match_rows_and_their_visible_pairs(case):
    """Counted token by token, with recomputed ones drawn: within 1 %, which attention over everything exceeds."""
    length, config = LARGE.prompt_tokens(8192), LLAMA3_8B
    rows = np.arange(length)
    if case.kind == "reuse":
        chosen = np.random.default_rng(0).choice(length - 16, 8 * math.ceil(0.15 * 1012), replace=False)
        rows = np.concatenate([chosen, np.arange(length - 16, length)])
    products = 2 * len(rows) * gpu_plan.layer_weights(config) + 2 * config.d_model * config.vocab_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * (rows + 1).sum()
    flops = gpu_plan.prefill_flops(case, LARGE)
    assert flops == pytest.approx(products + attention, rel=0.01)
    everything = 4 * config.num_layers * config.num_heads * config.head_dim * len(rows) * length
    assert flops != pytest.approx(products + everything, rel=0.01)
    assert gpu_plan.prefill_flops(dataclasses.replace(case, batch=4), LARGE) == 4 * flops


def test_oversized_cases_are_reported_with_their_size():
    planned = cases(LARGE)
    left_out = {case: gpu_plan.too_large(case, LARGE, H100_BYTES, H100_TORCH_BYTES) for case in planned}
    assert [case for case in planned if left_out[case]] == [GpuCase("torch", 32768, 4)]
    on_40_gb = [case for case in planned if gpu_plan.too_large(case, LARGE, int(0.75 * 42.4e9), int(0.24 * 42.4e9))]
    assert GpuCase("reuse", 32768, 4, 0.15, "device") in on_40_gb and GpuCase("full", 8192) not in on_40_gb
    told = str(gpu_plan.too_large(GpuCase("full", 8192), LARGE, 16 * 10**9, None))
    assert re.fullmatch(r"does not fit: needs \d+\.\d GB of device memory, 16\.0 GB are there", told)
    assert gpu_plan.too_large(GpuCase("full", 8192), LARGE, None, None) is None


def test_page_pool_is_large_enough_for_every_case():
    planned = cases(LARGE)
    pool = gpu_plan.pool_bytes(planned, LARGE, 0)
    assert all(gpu_plan.kv_bytes(LARGE, gpu_plan.pool_tokens(case, LARGE)) <= pool for case in planned)
    # 32 passages of 64 pages for each of four requests and once for the tier, system, question and a new page.
    widest = GpuCase("reuse", 32768, 4, 0.15, "device")
    assert gpu_plan.pool_tokens(widest, LARGE) == 16 * (4 * (32 * 64 + 2 + 1 + 1) + (32 + 4) * 64)
    assert gpu_plan.pool_bytes([], LARGE, 7) == 7


def test_decode_steps_count_only_while_all_requests_decode():
    fast, slow = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 3.5, 4.5, 5.5, 9.0]
    assert _steps([fast, slow]) == [1.0, 1.0]  # between 2 and 6, the first gap of each left out


def results(*rows, is_complete=True, is_quick=False, **changes):
    """A results file with some rows; those of cases as `row` makes them."""
    suites = {"cases": list(rows), "ceilings": [{"name": "matmul_tflops", "value": 700.0}]}
    head = {"benchmark": "gpu", "device": "Slide Rule", "date": "2026-01-01", "commit": "abc", "elapsed_s": 500.0}
    head |= {"versions": {"jax": "0.11.2"}, "shapes": gpu_cases.shapes(LARGE), "is_quick": is_quick}
    return {**head, "is_complete": is_complete, "failures": [], "suites": suites, **changes}


def row(case, **figures):
    return {**case.identity(), **figures}


FULL, LONG = GpuCase("full", 8192), GpuCase("full", 32768)
DEVICE, HOST = (GpuCase("reuse", 8192, 1, 0.15, tier) for tier in ("device", "host"))


def test_targets_without_results_are_reported_as_not_measured():
    measured = [
        row(FULL, ttft_s=0.30, share_of_matmul=0.61),
        row(LONG, note="not run: out of time"),
        row(DEVICE, ttft_s=0.061),
        row(HOST, ttft_s=0.067),
        row(GpuCase("decode", 8192), step_s=0.008, gbps=2000.0, share_of_copy=0.70),
    ]
    found = gpu_report.targets(results(*measured))
    verdicts = ["reached", "NOT reached", "not measured"]
    assert [target.verdict for target in found] == [*verdicts, "reached", "not measured", "reached"]
    assert found[1].got == pytest.approx(0.30 / 0.061) and found[3].got == pytest.approx(61 / 67)
    faster = [row(DEVICE, ttft_s=0.059), *measured[:1]]
    assert gpu_report.targets(results(*faster))[1].verdict == "reached"
    other = [row(DEVICE, ttft_s=0.01, as_named=False), *measured[:1]]
    assert gpu_report.targets(results(*other))[1].got is None, "the case did not do what its name says"


def test_tables_show_every_result_and_notes_list_every_gap():
    found = results(
        row(FULL, ttft_s=0.30, share_of_matmul=0.61),
        row(DEVICE, ttft_s=0.06),
        row(LONG, note="not run: out of time"),
        row(GpuCase("torch", 8192), note="torch is not installed"),
    )
    shown = "\n\n".join(gpu_report.tables(found))
    (line,) = (line for line in shown.splitlines() if line.startswith("| 8,192 x 1"))
    assert [cell.strip() for cell in line.split("|")[2:7]] == ["300", "61", "", "60", "5"]
    assert "32,768 x 1" not in shown and "NOT reached" not in shown and "Decode" not in shown
    assert gpu_report.notes(found) == [
        "not run: full prefill, 32,768 tokens, batch 1",
        "torch is not installed: full prefill, PyTorch SDPA, 8,192 tokens, batch 1",
    ]


BEGIN, END = "<!-- bench.py gpu: begin -->", "<!-- bench.py gpu: end -->"


def test_readme_section_between_the_markers_is_replaced(tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / "results"
    folder.mkdir()
    (folder / "check.json").write_text('{"benchmark": "gpu_check"}')
    (folder / "quick.json").write_text(json.dumps(results(is_quick=True)))
    readme.write_text(f"before\n\n{BEGIN}\nold table\n{END}\n\nafter\n")
    assert fill_in(readme, {gpu_report.PART: gpu_report.section(folder)})
    assert readme.read_text().splitlines() == ["before", "", BEGIN, gpu_report.NO_RESULTS, END, "", "after"]
    assert not fill_in(readme, {gpu_report.PART: gpu_report.section(folder)}), "the second time nothing changes"
    found = results(row(FULL, ttft_s=0.3, share_of_matmul=0.6), is_complete=False)
    (folder / "rule.json").write_text(json.dumps(found))
    done = in_process.bench("gpu", "--readme", readme, "--output", folder)
    assert done.returncode == 0 and "changed" in done.stdout, done.stderr
    text = readme.read_text()
    assert "Slide Rule" in text and "commit abc" in text and "interrupted" in text and "old table" not in text
    for text in ("", BEGIN, f"{END}\n{BEGIN}"):
        readme.write_text(text)
        with pytest.raises(BenchmarkError, match="wanted a page with one line '<!-- bench.py gpu: begin -->'"):
            fill_in(readme, {"bench.py gpu": "text"})
        assert readme.read_text() == text


def few_cases(scale):
    """What the targets are judged by, and each other kind, tier, batch and ratio in some."""
    planned = cases(scale)
    twice = [case for case in planned if case.batch == 2 and case.context == scale.short and case.ratio != 0.30]
    disk = GpuCase("reuse", scale.short, 1, 0.30, "disk")
    torch = next(case for case in planned if case.kind == "torch")
    return list(dict.fromkeys([*planned[:7], torch, *twice, disk]))


def test_every_code_path_runs_on_a_cpu(tmp_path, monkeypatch):
    config = dataclasses.replace(QUICK_SCALE.config, vocab_size=128, num_layers=2, d_model=64, d_ff=128)
    scale = dataclasses.replace(QUICK_SCALE, config=config)
    monkeypatch.setattr(gpu_plan, "QUICK_SCALE", scale)
    monkeypatch.setattr(gpu_plan, "cases", few_cases)
    assert {case.kind for case in few_cases(scale)} == {case.kind for case in cases(scale)}
    options = ["--output", tmp_path, "--compile-cache", tmp_path / "cache", "--time-limit-s", 1e6]
    _, found = in_process.figures("gpu", *options)
    (path,) = tmp_path.glob("*-quick.json")
    assert json.loads(path.read_text())["suites"] == found["suites"] and found["is_complete"]
    assert {"date", "commit", "machine", "device", "python", "versions", "shapes", "gpu"} <= found.keys()
    rows = {row["case"]: row for row in found["suites"]["cases"]}
    assert list(rows) == [case.name for case in few_cases(scale)]
    for case in few_cases(scale):
        got = rows[case.name]
        if case.kind == "torch" and "note" in got:
            assert got["note"] == "torch is not installed"
            continue
        assert "note" not in got and got["compile_s"] >= 0.0
        if case.kind == "decode":
            assert got["gbps"] == got["bytes"] / got["step_s"] / 1e9 and len(got["runs_s"]) >= 4
            continue
        assert got["tflops"] == got["flops"] / got["ttft_s"] / 1e12
        if case.kind == "torch" and case.batch == 1:
            assert got["logits_distance"] <= gpu_cases.SAME
        if case.kind == "reuse" and (case.batch == 1 or case.tier == "device"):
            assert got["failed_loads"] == 0
            if got["given_up_loads"]:  # on a busy machine so small a model computes sooner than it loads
                assert case.tier != "device"
                continue
            assert got["late_compilations"] == 0
            assert got["tiers"] == [case.tier] and got["as_named"]
            assert got["recomputed_tokens"] == case.batch * gpu_plan.recomputed_tokens(case, scale)
            assert got["loaded_bytes"] == case.batch * gpu_plan.kv_bytes(
                scale, scale.prompt_tokens(case.context) - scale.question_tokens
            ) - case.batch * gpu_plan.kv_bytes(scale, scale.system_tokens) * (case.tier == "device")
            assert ("merge_gbps" in got) == (case.tier in ("host", "disk"))
    assert sum(row["compilations"] for row in found["suites"]["cases"] if "compilations" in row) > 10
    assert [row["verdict"] for row in found["suites"]["targets"]].count("not measured") == 0
    assert (tmp_path / "cache").is_dir(), "there what was compiled is kept"


def test_without_time_every_case_is_noted_and_ceilings_are_measured(tmp_path):
    options = ["--time-limit-s", 0, "--output", tmp_path, "--compile-cache", tmp_path / "c"]
    lines, found = in_process.figures("gpu", *options)
    ceilings = {row["name"]: row["value"] for row in found["suites"]["ceilings"]}
    assert ceilings.keys() >= {"matmul_tflops", "copy_gbps", "transfer_gbps"} and min(ceilings.values()) > 0.0
    notes = {row["kind"]: row["note"] for row in found["suites"]["cases"]}
    assert len(found["suites"]["cases"]) == len(cases(QUICK_SCALE))
    assert notes == dict.fromkeys(notes, "not run: out of time") | {"torch": gpu_torch.missing() or notes["full"]}
    assert "not run: full prefill, 128 tokens, batch 1; " in "\n".join(lines)


def test_failed_case_is_recorded_and_the_next_runs(tmp_path):
    record = CheckRecord(tmp_path / "found.json", {}, is_quick=True, limit_s=60.0)

    def breaks():
        raise RuntimeError("no such instruction")

    gpu_cases.attempt(record, FULL, breaks)
    gpu_cases.attempt(record, LONG, lambda: {"ttft_s": 1.0})
    first, second = json.loads(record.path.read_text())["suites"]["cases"]
    assert first["note"] == "failed: RuntimeError: no such instruction" and second["ttft_s"] == 1.0
    assert record.failures == [f"{FULL.name}: {first['note']}"]


def test_run_without_an_accelerator_is_skipped_successfully(tmp_path):
    done = in_process.bench("gpu", "--output", tmp_path / "out")
    assert done.returncode == 0 and "skipped, jax sees no accelerator" in done.stdout
    assert not (tmp_path / "out").exists()


_BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
sys.argv[0] = "scripts/bench.py"
sys.path.insert(0, "scripts")
import bench
{more}
bench.main()
"""
_ONE_LAYER = """
import dataclasses
from scripts.benchmarks import gpu_plan
quick = gpu_plan.QUICK_SCALE
one_layer = dataclasses.replace(quick.config, num_layers=1)
gpu_plan.QUICK_SCALE = dataclasses.replace(quick, config=one_layer, contexts=(128,), long=128)
"""
NOT_NEEDED = (
    *("faiss", "fastapi", "starlette", "uvicorn", "prometheus_client", "semantic_text_splitter", "bs4"),
    *("yaml", "pypdf", "ray", "redis", "optax", "transformers", "matplotlib", "httpx"),
)


def test_gpu_benchmark_runs_with_only_the_listed_packages(tmp_path):
    """As on a machine with an accelerator, where little else is installed."""
    options = ("--quick", "--only", "15% recomputed, KV on disk, 128", "--output", str(tmp_path))
    options += ("--compile-cache", str(tmp_path / "c"))
    command, how = process_of(_BLOCK.format(blocked={*NOT_NEEDED, "torch"}, more=_ONE_LAYER), *options)
    done = subprocess.run(command, **how, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = tmp_path.glob("*.json")
    assert len(json.loads(path.read_text())["suites"]["cases"]) == 2


@pytest.mark.peers
def test_pytorch_peer_matches_and_a_wrong_mask_is_detected():
    config = QUICK_SCALE.config
    params = init_params(config, jax.random.key(3), jnp.bfloat16)
    peer = gpu_torch.TorchPeer(params, config)
    from ccjax.models.llama3.forward import forward

    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 100))
    wanted = np.asarray(forward(params, config, jnp.asarray(ids))[:, -1])
    seconds, right = peer.prefill(ids.tolist())
    _, wrong = peer.prefill(ids.tolist(), is_causal=False)
    assert seconds > 0.0
    for number in range(2):
        assert gpu_cases.relative_distance(right[number], wanted[number]) < gpu_cases.SAME / 3
        assert gpu_cases.relative_distance(wrong[number], wanted[number]) > 3 * gpu_cases.SAME
