"""Calibration files beside a model: what requests recompute and report; damaged files and files of other models."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest

from ccjax.engine import Engine, EngineConfig, Request
from ccjax.errors import ConfigError
from ccjax.loading import calibration as calibration_module
from ccjax.loading.calibration import CALIBRATION_FILE, read_calibration, write_calibration
from ccjax.loading.model import load_model
from ccjax.policy.calibration import Calibration, Trial
from tests.engine.helpers import TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=5)
SEGMENTS = draw_segments(np.random.default_rng(0), [40, 60])
SHUFFLED = permuted(SEGMENTS, [1, 0])
CALIBRATION = Calibration(
    model=MODEL.loaded.fingerprint,
    questions="q",
    score="exact_match",
    target=0.9,
    confidence=0.95,
    trials={
        "cachecraft": (Trial(0.1, 100, 90, recompute_ratio=0.1), Trial(0.3, 100, 99, recompute_ratio=0.3)),
        "random": (Trial(0.5, 100, 60, recompute_ratio=0.5),),
    },
)


@pytest.fixture
def directory(tmp_path):
    write_calibration(tmp_path / CALIBRATION_FILE, CALIBRATION)
    return tmp_path


def report(directory, *, reuse="bounded", target=None, **settings):
    loaded = dataclasses.replace(MODEL.loaded, directory=directory)
    with Engine(loaded, EngineConfig(**{"max_model_len": 512, "strategy": "cachecraft", **settings})) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        request = Request(segments=SHUFFLED, reuse=reuse, quality_target=target)
        return engine.run(request).reuse


def promised(report):
    return report.recomputed_tokens, report.calibrated, report.quality_target, report.quality_bound


def test_bounded_mode_recomputes_the_calibrated_share(directory):
    found = report(directory)
    assert promised(found) == (12 + 18, True, 0.9, pytest.approx(0.9534, abs=1e-4)) and found.mode == "bounded"


@pytest.mark.parametrize(("cached", "bound"), [("alone", 0.9534), ("seen", 0.9534), ("prepared", None), ("idle", None)])
def test_bound_for_prepared_passages_is_not_reported_for_others(directory, cached, bound):
    write_calibration(directory / CALIBRATION_FILE, dataclasses.replace(CALIBRATION, settings={"cached": cached}))
    found = report(directory)
    assert found.calibrated and found.recomputed_tokens == 12 + 18
    assert found.quality_bound == (None if bound is None else pytest.approx(bound, abs=1e-4))


def test_bound_for_prepared_passages_is_reported_for_prepared_ones(tmp_path):
    model = load_model("demo", dtype="float32")
    trials = {"auto": (Trial(0.1, 100, 100, recompute_ratio=0.1, shares=(1.0,) * 100),)}
    calibration = dataclasses.replace(
        CALIBRATION, model=model.fingerprint, score="agreement", trials=trials, settings={"cached": "prepared"}
    )
    write_calibration(tmp_path / CALIBRATION_FILE, calibration)
    documents = [{"text": f"{name} sings in the {name} choir."} for name in ("Anna", "Bob", "Carla")]
    with Engine(model, EngineConfig(calibration=str(tmp_path / CALIBRATION_FILE))) as engine:
        engine.documents.warm(documents)
        found = engine.generate("Who sings?", documents, max_new_tokens=1).reuse
    assert found.calibrated and not found.exact
    assert found.quality_bound == trials["auto"][0].kept_at_least(0.95) > 0.9


def test_shipped_calibration_is_used_if_the_model_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_module, "shipped_path", lambda model: tmp_path / f"{model}.json")
    assert not report(None).calibrated
    write_calibration(tmp_path / f"{CALIBRATION.model}.json", CALIBRATION)
    assert report(None).calibrated


def test_request_may_set_a_lower_or_higher_quality_target(directory):
    assert promised(report(directory, target=0.8)) == (4 + 6, True, 0.8, pytest.approx(0.8363, abs=1e-4))
    found = report(directory, target=0.99)
    assert promised(found) == (0, False, 0.99, 1.0) and found.exact and found.computed_tokens > 100


def test_strategy_that_failed_calibration_is_served_uncalibrated(directory):
    for reuse, target in (("bounded", 0.9), ("fast", None)):
        found = report(directory, reuse=reuse, strategy="random")
        plain = report(None, reuse=reuse, strategy="random")
        assert promised(found) == (plain.recomputed_tokens, False, target, None) and not found.exact
        assert found.mode == reuse


def test_report_says_if_there_is_no_calibration(tmp_path):
    found = report(tmp_path)
    assert found.recomputed_tokens > 0 and promised(found)[1:] == (False, None, None)
    assert promised(report(tmp_path, target=0.5)) == (0, False, 0.5, 1.0)
    assert promised(report(directory=None)) == promised(found)


def test_exact_reuse_reports_a_quality_bound_of_one(directory):
    loaded = dataclasses.replace(MODEL.loaded, directory=directory)
    with Engine(loaded, EngineConfig(max_model_len=512, strategy="cachecraft")) as engine:
        for _ in range(2):
            found = engine.generate_from_tokens(SEGMENTS, max_new_tokens=1).reuse
            assert promised(found) == (0, False, 0.9, 1.0)


def test_calibration_of_other_weights_is_not_used(directory, caplog):
    path = directory / CALIBRATION_FILE
    write_calibration(path, dataclasses.replace(CALIBRATION, model="other"))
    with caplog.at_level(logging.WARNING):
        assert report(directory).quality_bound is None
    assert "of other weights or another dtype: it is not used" in caplog.text
    with pytest.raises(ConfigError, match="calibration: wanted one of this model here"):
        report(None, calibration=str(path))


def test_calibration_file_can_be_set_by_path(directory, tmp_path):
    assert report(None, calibration=str(directory / CALIBRATION_FILE)).calibrated
    with pytest.raises(ConfigError, match="calibration: .*absent"):
        report(None, calibration=str(tmp_path / "absent"))


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({**CALIBRATION.to_json(), "version": 9})])
def test_damaged_calibration_file_prevents_the_start(directory, text):
    (directory / CALIBRATION_FILE).write_text(text)
    with pytest.raises(ConfigError, match="calibration: wanted a file that ccjax calibrate wrote"):
        report(directory)


def test_failed_write_keeps_the_old_calibration_file(directory, monkeypatch):
    def broken(self, *args):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_calibration(directory / CALIBRATION_FILE, dataclasses.replace(CALIBRATION, target=0.5))
    monkeypatch.undo()
    assert read_calibration(directory / CALIBRATION_FILE) == CALIBRATION
    assert [path.name for path in directory.iterdir()] == [CALIBRATION_FILE]
