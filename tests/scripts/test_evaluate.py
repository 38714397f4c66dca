"""The command lines of evaluate.py and calibrate.py, from questions to page, plot and a calibration that is obeyed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest

from ccjax.cli import calibrate, evaluate
from ccjax.evaluation import tables
from ccjax.evaluation.measure import Answered, Forced, WayResults
from ccjax.evaluation.questions import QAQuestion
from ccjax.evaluation.summary import figures
from ccjax.evaluation.ways import DEFAULT, FULL, Way
from ccjax.types import Document
from tests.scripts import in_process

MAINS = {"evaluate": evaluate.main, "calibrate": calibrate.main}


def run(script, *options):
    model = [] if "--model" in options else ["--model", "demo"]
    return in_process.run(MAINS[script], *model, *options)


@pytest.mark.parametrize("command", MAINS)
def test_a_command_that_takes_long_wants_its_model_named(monkeypatch, command):
    monkeypatch.setattr("ccjax.loading.model.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    done = in_process.run(MAINS[command])
    assert done.returncode == 2 and "--model: wanted the model to ask" in done.stderr and "demo" in done.stderr


def answered(text, answers=("red boat",), *, kind="", share=0.5, ttft=1.0, kl=0.1, same=False, forced=None):
    question = QAQuestion("q", "Who?", answers, (Document("d"),), kind)
    return Answered(question, text, (), share, 0.5, ttft, kl, same, forced=forced)


class TestFigures:
    FULL = WayResults(
        FULL, tuple(answered(text, same=True, kl=0.0, share=1.0) for text in ("red boat", "red boat", "blue"))
    )
    OWN = WayResults(
        Way("auto", 0.15), (answered("red boat", same=True, ttft=3.0), answered("boat", ttft=2.0), answered("blue"))
    )

    def test_figures_match_values_computed_by_hand(self):
        full, own = figures([self.FULL, self.OWN])
        assert (full["way"], own["way"], own["series"], own["ratio"]) == ("full", "auto:0.15", "auto", 0.15)
        assert own["gold"]["exact_match"]["mean"] == pytest.approx(1 / 3)
        assert own["gold"]["f1"]["mean"] == pytest.approx((1 + 2 / 3 + 0) / 3)
        assert own["gold"]["jaccard"]["mean"] == pytest.approx((1 + 1 / 2 + 0) / 3)
        assert own["against_full"]["exact_match"]["mean"] == pytest.approx(2 / 3), "wrong like full prefill"
        assert own["of_full"]["mean"] == pytest.approx(0.5) and own["of_full"]["score"] == "contains"
        assert (full["of_full"]["score"], full["of_full"]["mean"]) == ("contains", 1.0)
        assert own["same_share"]["mean"] == pytest.approx(1 / 3) and own["first_kl"]["mean"] == pytest.approx(0.1)
        assert (own["ttft_s"], own["computed_share"], full["computed_share"]) == (2.0, 0.5, 1.0)
        for interval in own["gold"].values():
            assert interval["low"] <= interval["mean"] <= interval["high"]

    def test_f1_is_compared_if_no_exact_match_and_nothing_without_references(self):
        words = WayResults(FULL, (answered("red"), answered("red")))
        assert figures([words])[0]["of_full"]["score"] == "f1"
        unknown = WayResults(FULL, (answered("x", ()), answered("y", ())))
        (found,) = figures([unknown])
        assert found["gold"] == {} and found["of_full"] is None and found["against_full"]["f1"]["mean"] == 1.0

    def test_reference_within_a_longer_answer_counts_as_contained(self):
        full = WayResults(FULL, tuple(answered(text) for text in ("It is the red boat.", "Red boat, sir.", "A boat.")))
        own = WayResults(DEFAULT, tuple(answered(text) for text in ("A red boat it is.", "A red", "The red boat")))
        whole, found = figures([full, own])
        assert whole["gold"]["contains"]["mean"] == found["gold"]["contains"]["mean"] == pytest.approx(2 / 3)
        assert whole["gold"]["exact_match"]["mean"] == 0.0 and found["of_full"]["mean"] == 1.0

    def test_forced_answers_are_compared_question_by_question(self):
        nlls = [(1.0, 1.5), (9.0, 9.5), (None, None), (4.0, 4.5)]
        full = WayResults(FULL, tuple(answered("x", forced=Forced(0.0, 1.0, whole)) for whole, _ in nlls))
        scores = zip((0.1, 0.2, 0.3, 1.0), (1.0, 1.0, 0.5, 0.5), nlls, strict=True)
        own = WayResults(DEFAULT, tuple(answered("x", forced=Forced(kl, share, nll)) for kl, share, (_, nll) in scores))
        found = figures([full, own])[1]["forced"]
        assert (found["kl"]["mean"], found["median_kl"], found["agreement"]["mean"]) == pytest.approx((0.4, 0.25, 0.75))
        assert found["nll"]["mean"] == pytest.approx(15.5 / 3) and found["nll"]["low"] < found["nll"]["high"]
        # In pairs nothing varies, however much answers differ in how likely they are.
        assert tuple(found["nll_difference"].values()) == pytest.approx((0.5, 0.5, 0.5))
        assert figures([self.FULL, self.OWN])[1]["forced"] is None
        unknown = WayResults(FULL, tuple(answered("x", forced=Forced(0.0, 1.0, None)) for _ in range(2)))
        assert figures([unknown])[0]["forced"]["nll"] is figures([unknown])[0]["forced"]["nll_difference"] is None

    def test_every_table_begins_with_the_default_options(self):
        full = WayResults(FULL, tuple(answered("red boat", kind=kind) for kind in "aabb"))
        others = [
            WayResults(way, full.answers, state) for state in ("alone", "seen") for way in (Way("reuse"), DEFAULT)
        ]
        found = tables._tables({"ways": figures([full, *others])})
        assert len(found) == 6, "for each state against full prefill, against right answers and by kind"
        for _, head, rows in found:
            assert [row[0] for row in rows] == ["default", "full", "reuse"]
            assert {len(row) for row in rows} == {len(head)}
        texts = zip(("red boat", "x", "x", "x"), "aabb", strict=True)
        own = WayResults(Way("reuse"), tuple(answered(text, kind=kind) for text, kind in texts))
        kinds = figures([full, own])[1]["kinds"]
        assert {kind: scores["exact_match"]["mean"] for kind, scores in kinds.items()} == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (("evaluate",), "rouge-score"),
        (("evaluate", "--plot", "x.svg"), "matplotlib"),
        (("calibrate", "--score", "rouge_l"), "rouge-score"),
    ],
)
def test_missing_package_is_reported_before_any_work(monkeypatch, command, package):
    find_spec = importlib.util.find_spec
    missing = package.replace("-", "_")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setattr("ccjax.loading.model.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    done = run(*command)
    assert done.returncode == 2
    assert f"{package}, which is not installed: pip install 'ccjax[evaluate]'" in done.stderr


def test_one_run_writes_a_page_and_a_plot(tmp_path):
    page, plot = tmp_path / "quality.md", tmp_path / "quality.svg"
    options = ["--passages", 3, "--limit", 1, "--kinds", "single", "pronoun"]
    options += ["--ways", "reuse", "auto", "--ratios", 0.15, 0.3, "--cached", "prepared", "--prompt", "Short."]
    done = run("evaluate", *options, "--json", "--markdown", page, "--plot", plot, "--title", "Harbour")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [way["way"] for way in result["ways"]] == ["full", "reuse", "auto:0.15", "auto:0.3"]
    assert [way["state"] for way in result["ways"]] == [None, *["prepared"] * 3]
    assert all(way["forced"]["agreement"]["mean"] <= 1.0 and way["forced"]["nll"] for way in result["ways"])
    assert result["evaluation"]["num_questions"] == 2
    text = page.read_text()
    assert text.startswith("# Harbour\n") and "(quality.svg)" in text and text.count("| auto:0.15 |") == 3
    assert "system prompt `Short.`" in text and "## Passages prepared\n" in text
    assert plot.read_text().count("</svg>") == 1
    for way in result["ways"]:
        assert f"| {way['way']} |" in text and f"{way['computed_share']:.1%}" in text
    more = ["--limit", 2, "--kinds", "single", "--ways", "default", "--cached", "empty"]
    again = run("evaluate", *options[:2], *more, "--markdown", page, "--append")
    assert again.returncode == 0, again.stderr
    assert page.read_text().startswith(text) and "# Answer quality" in page.read_text()


def test_evaluate_runs_on_a_question_file_with_random_weights(tmp_path):
    lines = [
        {"question": f"Who is {name}?", "docs": [{"text": f"{name} is a tree."}, {"text": "Trees are old."}]}
        for name in ("Ash", "Oak", "Elm")
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ["--questions", path, "--limit", 2, "--cached", "alone"]
    done = run("evaluate", *options, "--ways", "reuse", "random:1.0", "--json")
    assert done.returncode == 0, done.stderr
    full, naive, whole = json.loads(done.stdout.splitlines()[-1])["ways"]
    assert full["forced"]["nll"] is None and whole["forced"]["kl"]["mean"] < 1e-9 < naive["forced"]["kl"]["mean"]
    assert full["gold"] == {} and naive["computed_share"] == 0.0 and whole["same_share"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("evaluate", ["--ways", "best"], "way: wanted one of default"),
        ("evaluate", ["--limit", "0"], "--limit: wanted a positive integer"),
        ("evaluate", ["--limit", "1", "--kinds", "single"], "at least two questions"),
        ("evaluate", ["--kinds", "hard"], "--kinds: wanted values, each one of ('single'"),
        ("evaluate", ["--questions", "/absent.jsonl"], "questions: wanted a JSONL file"),
        ("evaluate", ["--questions", "squad5"], "--data: wanted a folder with qa/squad_xquad_en.jsonl"),
        ("evaluate", ["--markdown", "/absent/page.md"], "--markdown: wanted a file in a directory"),
        ("evaluate", ["--plot", "/absent/plot.svg"], "--plot: wanted a file in a directory"),
        ("calibrate", ["--output", "/absent/c.json", "--limit", "2"], "--output: wanted a file in a directory"),
        ("evaluate", ["--model", "/absent"], "model: wanted"),
        ("evaluate", ["--model", "random:4x100"], "wanted LAYERSxWIDTH[xHEADS] with a width"),
        ("calibrate", ["--strategies", "full"], "--strategies: wanted"),
        ("calibrate", ["--strategies", "default"], "--strategies: wanted"),
        ("calibrate", ["--strategies", "auto:0.1"], "--strategies: wanted"),
        ("calibrate", ["--worlds", "2", "--questions", "/some.jsonl"], "--worlds: wanted only with the demo"),
        ("calibrate", ["--target", "1.5", "--limit", "2"], "target"),
        ("calibrate", ["--confidence", "1", "--limit", "2"], "confidence"),
        (
            "calibrate",
            ["--focus-windows", "3", "0", "--limit", "2"],
            "--focus-windows: wanted values, each an integer above 0",
        ),
        ("evaluate", ["--passages", "4", "0"], "--passages: wanted values, each an integer above 0"),
        ("evaluate", ["--passages", "4", "5", "--questions", "/some.jsonl"], "--passages: wanted one number"),
    ],
)
def test_error_names_the_bad_argument(script, options, message, monkeypatch):
    monkeypatch.delenv("CCJAX_TEST_DATA", raising=False)
    done = run(script, *options)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith(f"ccjax {script}: error: ") and message in last


class TestTrials:
    def outcome(self, way, *texts, share=0.5):
        return WayResults(way, tuple(answered(text, share=share, same=text == "red boat") for text in texts))

    def test_answers_no_worse_than_full_prefill_count_as_kept(self):
        full = self.outcome(FULL, "red boat", "red boat", "blue", "boat")  # exact match: the first two answered
        own = self.outcome(Way("auto", 0.3), "red boat", "boat", "red boat", "red boat", share=0.25)
        others = [Way("reuse"), Way("auto", 0.5, fixes_positions=False), Way("auto", 0.5, (0,))]  # or not as served
        outcomes = [full, own, *(self.outcome(way, *"abcd") for way in others)]
        (trial,) = calibrate.trials("auto", outcomes, "exact_match")
        assert (trial.num_answers, trial.num_kept) == (2, 1)
        assert (trial.computed_share, trial.recompute_ratio, trial.alpha) == (0.25, 0.3, 1.0)
        (by_f1,) = calibrate.trials("auto", [full, own], "f1")  # "boat" is worth 2/3
        assert (by_f1.num_answers, by_f1.num_kept) == (3, 2)

    def test_agreement_is_the_ratio_of_matching_tokens(self):
        full = self.outcome(FULL, "red boat", "boat")
        own = self.outcome(Way("auto", 0.3), "red boat", "boat")
        shares = [(full, (1.0, 1.0)), (own, (0.5, 1.0))]
        full, own = (
            dataclasses.replace(
                results,
                answers=tuple(
                    dataclasses.replace(answer, forced=Forced(0.1, share, None))
                    for answer, share in zip(results.answers, kept, strict=True)
                ),
            )
            for results, kept in shares
        )
        (agreed,) = calibrate.trials("auto", [full, own], "agreement")
        assert (agreed.num_answers, agreed.num_kept, agreed.shares) == (2, 1, (0.5, 1.0))

    def test_naive_reuse_recomputes_nothing(self):
        full = self.outcome(FULL, "red boat", "red boat")
        (trial,) = calibrate.trials("reuse", [full, self.outcome(Way("reuse"), "x", "red boat")], "exact_match")
        assert (trial.num_kept, trial.recompute_ratio) == (1, 0.0)

    def test_trials_without_any_right_answer_are_rejected(self):
        with pytest.raises(ValueError, match="some that full prefill answers"):
            calibrate.trials("auto", [self.outcome(FULL, "x", "y")], "exact_match")


def test_calibration_is_written_and_applied(tmp_path, monkeypatch):
    """Of what is tried usually, a part."""
    assert len(calibrate.ways_of(["reuse", "cachecraft"], (3,))) == 1 + 7 + 5 + 7
    monkeypatch.setattr(calibrate, "RATIOS", (0.3,))
    monkeypatch.setattr(calibrate, "ALPHAS", (0.35,))
    path = tmp_path / "calibration.json"
    options = ["--limit", 4, "--passages", 3, "--kinds", "single", "--cached", "alone", "--target", 0.2]
    options += ["--strategies", "reuse", "cachecraft"]
    done = run("calibrate", *options, "--score", "exact_match", "--worlds", 1, "--json", "--output", path)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout.splitlines()[-1])
    worlds = value.pop("worlds")
    assert value == json.loads(path.read_text())
    assert [len(shares) for shares in worlds.values()] == [1, 1] and "of 1 new towns" in done.stdout
    assert [len(trials) for trials in value["trials"].values()] == [1, 3]
    cut = [trial for trial in value["trials"]["cachecraft"] if trial["focus_window"] == 3]
    layers = value["settings"]["focus_cut_layers"]
    assert len(cut) == len(layers) == 1 and "cachecraft/entropy3:0.3: first layer behind the cut" in done.stdout
    assert all(sum(counts.values()) == 4 for counts in layers.values())
    assert {layer for counts in layers.values() for layer in counts} - {"none"}, "the focus settles for some question"
    assert value["settings"]["num_questions"] == 4 and "chosen" in done.stdout
    from ccjax import Engine

    with Engine.from_pretrained("demo", calibration=str(path), strategy="reuse") as engine:
        assert engine.calibration is not None and engine.calibration.choose("reuse") is not None
    # 2 answers cannot show that 95 % of their tokens are kept: nothing is promised, and the exit code says so
    done = run("calibrate", "--limit", 2, *options[2:-5], "--strategies", "reuse", "--output", path)
    assert done.returncode == 1 and "served as without a calibration" in done.stdout
    assert "reuse: 2 answers cannot show it even if all are kept" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_calibration_takes_the_results_of_an_evaluation(tmp_path, monkeypatch):
    results, path = tmp_path / "results.jsonl", tmp_path / "calibration.json"
    options = ["--limit", 2, "--passages", 3, "--kinds", "single", "--seed", "test"]
    states = ["--cached", "alone", "prepared"]
    done = run("evaluate", *options, *states, "--ways", "default", "auto:0.3", "--resume", results)
    assert done.returncode == 0, done.stderr

    def refuse(*args, **kwargs):
        raise AssertionError("asked again")

    monkeypatch.setattr("ccjax.evaluation.parts.measure", refuse)
    resumed = [*options, "--resume", results, "--output", path]
    done = run("calibrate", *resumed, "--strategies", "auto", "--target", 0.1)
    assert done.returncode == 0, done.stderr
    value = json.loads(path.read_text())
    (part,) = [json.loads(line) for line in results.read_text().splitlines()[1:]]
    shares = [
        [answer["forced"]["agreement"] for answer in result["answers"]]
        for result in part["results"]
        if result["state"] == "prepared"
    ]
    assert [trial["shares"] for trial in value["trials"]["auto"]] == shares and len(shares) == 2
    assert [trial["recompute_ratio"] for trial in value["trials"]["auto"]] == [None, 0.3]
    assert value["settings"]["cached"] == "prepared" and value["settings"]["num_questions"] == 2
    for wrong, message in (
        (["--strategies", "cachecraft"], "--strategies: wanted some of the ways default, auto:0.3, got cachecraft"),
        (["--cached", "seen"], f"--cached: wanted one of alone, prepared, as in {results}, got seen"),
        (["--prompt", "Short."], "resume: wanted results with prompt 'Short.'"),
        (["--resume", path], "resume: wanted a file of an earlier evaluation"),
    ):
        done = run("calibrate", *resumed, *wrong)
        assert done.returncode == 2 and message in done.stderr, done.stderr
