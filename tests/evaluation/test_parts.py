"""Evaluations some questions at a time, interrupted and resumed."""

from __future__ import annotations

import dataclasses

import pytest

from ccjax.evaluation import parts
from ccjax.evaluation.measure import measure
from ccjax.evaluation.parts import ResultsFile, measure_in_parts
from ccjax.evaluation.questions import demo_questions
from ccjax.evaluation.towns import KINDS
from ccjax.evaluation.ways import FULL, Way

QUESTIONS = demo_questions(1, (3,), kinds=KINDS[:2])
WAYS = [Way("cachecraft", 0.3, (0,))]
OPTIONS = {"states": ("prepared",), "max_new_tokens": 4, "with_forced": True}


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    monkeypatch.setattr(parts, "QUESTIONS_PER_PART", 1)


def untimed(results):
    return [
        (one.way, one.state, [dataclasses.replace(answer, ttft_s=0.0) for answer in one.answers]) for one in results
    ]


class Interrupted(Exception):
    pass


def test_interrupted_evaluation_resumes_where_it_stopped(model, tmp_path):
    path, done = tmp_path / "results.jsonl", []

    def interrupt(stage, count, total):
        if len(done) > total * 3 // 4:
            raise Interrupted
        done.append((count, total))

    measured = {"model": "demo", "ways": ["reuse"]}
    with pytest.raises(Interrupted):
        measure_in_parts(
            model, QUESTIONS, WAYS, tmp_path / "1", resume=ResultsFile(path, measured), progress=interrupt, **OPTIONS
        )
    with path.open("a") as file:
        file.write('[{"way"')  # killed while it wrote
    counts = []
    resumed = measure_in_parts(
        model,
        QUESTIONS,
        WAYS,
        tmp_path / "2",
        resume=ResultsFile(path, measured),
        progress=lambda stage, count, total: counts.append((count, total)),
        **OPTIONS,
    )
    total = done[0][1]
    assert counts[-1] == (total, total) and 1 < counts[0][0] and len(counts) < total, (
        "the first part is not asked again"
    )
    assert [one.way for one in resumed] == [FULL, *WAYS]
    assert untimed(resumed) == untimed(measure(model, QUESTIONS, WAYS, tmp_path / "3", **OPTIONS))
    kept = measure_in_parts(model, QUESTIONS, WAYS, tmp_path / "4", resume=ResultsFile(path, measured), **OPTIONS)
    assert kept == resumed, "all is read, times included"


def test_evaluation_of_more_questions_reuses_earlier_results(model, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "QUESTIONS_PER_PART", 2)
    path, questions = tmp_path / "results.jsonl", demo_questions(2, (3,), kinds=KINDS[:2])[:4]

    def asked(some):
        counts = []
        measure_in_parts(
            model,
            some,
            WAYS,
            tmp_path / f"{len(list(tmp_path.iterdir()))}",
            resume=ResultsFile(path, {"model": "demo"}),
            progress=lambda stage, done, total: counts.append(done),
            **OPTIONS,
        )
        return len(counts)

    three = asked(questions[:3])
    assert asked(questions[:3]) == 0 and asked(questions[:1]) == 0, "all is known"
    assert 0 < asked(questions) < three, "the full part is kept, the one of a single question is measured again"
    assert asked(questions) == 0
    with pytest.raises(ValueError, match="resume: wanted results of the same questions in .*results.jsonl"):
        asked(questions[::-1])
    with pytest.raises(ValueError, match="resume: wanted results of the same questions"):
        asked([dataclasses.replace(one, answers=("another",)) for one in questions])
    assert asked(questions) == 0, "and nothing is lost"


@pytest.mark.parametrize(
    ("first_line", "message"),
    [
        ('{"model": "demo", "ways": ["auto"]}\n[]\n', r"wanted results with ways \['reuse'\].*got \['auto'\]"),
        ('{"model": "demo"}\n', r"wanted results with ways \['reuse'\].*got None"),
        ('["demo"]', "wanted a file of an earlier evaluation"),
        ("# Notes", "wanted a file of an earlier evaluation"),
    ],
)
def test_results_file_of_another_evaluation_is_rejected_and_left_intact(tmp_path, first_line, message):
    path = tmp_path / "results.jsonl"
    path.write_text(first_line)
    with pytest.raises(ValueError, match=message):
        ResultsFile(path, {"model": "demo", "ways": ["reuse"]})
    assert path.read_text() == first_line
