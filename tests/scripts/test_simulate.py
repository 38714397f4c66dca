"""The simulator's command line."""

import json

import pytest

from scripts.simulate import main
from scripts.simulation import paper
from scripts.simulation.paper import RunSize

SMALL = ("--requests", "300", "--passages", "200", "--lists", "300", "--quiet", "--rate", "20")


def run(capsys, *options):
    """What a run prints, and its figures, the last line."""
    assert main([*SMALL, "--json", *options]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_a_run_prints_its_table_and_json(capsys):
    out, found = run(capsys, "--warmup", "100", "--recompute-ratio", "0.3")
    assert "tokens computed" in out and "TTFT" in out
    assert found["figures"]["requests"] == 200 and found["figures"]["answered"] == 200
    assert 0 < found["figures"]["computed_share"] < 1
    assert found["settings"]["model"] == "llama3-8b"


def test_reuse_lowers_mean_ttft_on_every_device(capsys):
    for options in (
        ["--hardware", "v6e"],
        ["--hardware", "a100", "--model", "llama3-70b", "--tensor-parallel-size", "4"],
    ):
        mean = {}
        for strategy in ("full", "cachecraft"):
            _, found = run(capsys, *options, "--strategy", strategy, "--recompute-ratio", "0.15")
            mean[strategy] = found["figures"]["ttft_s"]["mean"]
        assert mean["cachecraft"] < mean["full"]


def test_size_for_finds_the_fewest_replicas_per_budget(capsys):
    options = ["--budgets", "1GB", "20GB", "--most-replicas", "8"]
    out, found = run(capsys, "--size-for", "p99 TTFT < 0.15 s at 40 req/s", *options)
    assert "fewest" in out
    by_budget = {size["host_cache_bytes"]: size["replicas"] for size in found["needed"]}
    assert by_budget[20 * 10**9] <= by_budget[10**9]
    assert all(trial["figures"]["rate"] == pytest.approx(40, rel=0.02) for trial in found["tried"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "tpu9"], "hardware: wanted one of"),
        (["--model", "llama9"], "wanted one of llama3-8b"),
        (["--size-for", "soon"], "size-for: wanted a goal such as"),
        (["--model", "llama3-70b"], "--pool-bytes: wanted"),
        (["--warmup", "300"], "--warmup: wanted fewer than"),
        (["--rate", "0"], "--rate: wanted more than 0"),
        (["--eviction-policy", "none"], "eviction policy: wanted one of"),
        (["--trace", "/nowhere.jsonl"], "No such file"),
        (["--top-k", "500"], "top_k: wanted at most 200"),
    ],
)
def test_errors_name_the_argument(capsys, options, message):
    assert main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err


def test_paper_page_keeps_the_text_around_its_tables(tmp_path, monkeypatch):
    """Of every figure a part, over fewer requests and documents."""
    monkeypatch.setattr(paper, "RunSize", lambda measured, warmup: RunSize(8, 4))
    (name, config, devices, loads, device_bytes), *_ = paper._CRAFT_MODELS
    monkeypatch.setattr(paper, "_CRAFT_MODELS", ((name, config, devices, loads[-2:], device_bytes),))
    monkeypatch.setattr(paper, "_CACHE_MODELS", paper._CACHE_MODELS[:1])
    monkeypatch.setattr(paper, "_DATASETS", tuple((name, about, rates[:2]) for name, about, rates in paper._DATASETS))
    lists = paper._lists
    monkeypatch.setattr(paper, "_lists", lambda passages, count, *of: lists(passages, min(count, 100), *of))
    page = tmp_path / "simulation.md"
    names = ("run", *paper.FIGURES)
    marked = [
        f"Own words on {n}.\n<!-- simulate.py, {n}: begin -->\nold\n<!-- simulate.py, {n}: end -->" for n in names
    ]
    page.write_text("\n".join(marked))
    assert main(["--paper", str(page), "--quick", "--quiet"]) == 0
    text = page.read_text()
    assert all(f"Own words on {name}.\n" in text for name in names) and "\nold\n" not in text
    assert text.count("\n|---|") == 5 and "nan" not in text
    page.write_text("no markers")
    assert main(["--paper", str(page), "--quick"]) == 2 and page.read_text() == "no markers"
