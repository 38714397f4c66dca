"""Profiles of prefills: the measurements, the file beside the model, and their use by eviction."""

from __future__ import annotations

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest

from ccjax.cache.costs import MeasuredCosts
from ccjax.cache.rates import Rates
from ccjax.engine import Engine, EngineConfig
from ccjax.engine.prefill_measurement import measure_prefills
from ccjax.errors import ConfigError
from ccjax.loading.prefill_profile import PROFILE_FILE, PrefillProfile, write_profile
from ccjax.policy.prefill_cost import PrefillGrid
from scripts import profile_prefill
from tests.engine.helpers import TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=6)
GRID = PrefillGrid((0, 1000), (100, 200), ((1.0, 2.0), (3.0, 6.0)))
PROFILE = PrefillProfile(MODEL.loaded.fingerprint, jax.devices()[0].device_kind, GRID, {"attention": None})
SEGMENTS = draw_segments(np.random.default_rng(0), [40, 60])


def engine(directory, **settings):
    loaded = dataclasses.replace(MODEL.loaded, directory=directory)
    return Engine(loaded, EngineConfig(**{"max_model_len": 512, "eviction_policy": "pgdsf", **settings}))


def test_prefills_are_measured_behind_cached_prefixes():
    steps = []
    with MODEL.engine(max_model_len=512) as engine:
        asked = []
        generate = engine.generate_from_tokens
        engine.generate_from_tokens = lambda segments, **options: (
            asked.append(segments) or generate(segments, **options)
        )
        grid = measure_prefills(
            engine, (0, 32, 64), (8, 40), repetitions=2, progress=lambda *numbers: steps.append(numbers)
        )
    assert (grid.cached, grid.new) == ((0, 32, 64), (8, 40)) and all(value > 0 for row in grid.seconds for value in row)
    assert steps == [(done, 18) for done in range(1, 19)]
    sizes = [tuple(map(len, segments)) for segments in asked]
    assert sizes[:4] == [(0, 8), (0, 8), (0, 8), (0, 40)] and sizes.count((0, 64, 40)) == 3


def test_profile_of_another_model_or_device_is_not_used(tmp_path, caplog):
    path = tmp_path / PROFILE_FILE
    write_profile(path, PROFILE)
    assert PrefillProfile.from_json(json.loads(path.read_text())) == PROFILE
    for change, reason in (
        ({"model": "x"}, "of other weights"),
        ({"device": "TPU v9"}, "measured on 'TPU v9', not on"),
    ):
        write_profile(path, dataclasses.replace(PROFILE, **change))
        with caplog.at_level(logging.WARNING), engine(tmp_path):
            assert reason in caplog.text
        with pytest.raises(ConfigError, match="prefill_profile: wanted one of this model here"):
            engine(None, prefill_profile=str(path))
    with pytest.raises(ConfigError, match="prefill_profile: wanted a file that scripts/profile_prefill"):
        engine(None, prefill_profile=str(tmp_path / "absent.json"))
    for damaged in ("", "[]", json.dumps({**PROFILE.to_json(), "model": 3}), json.dumps({"version": 1})):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="prefill_profile"):
            engine(tmp_path)


def test_compute_cost_uses_the_profile_or_else_the_time_per_token():
    costs = MeasuredCosts(Rates(), GRID)
    assert costs.compute_s(50, 0, 100) == pytest.approx(0.5)
    assert costs.compute_s(50, 500, 150) == pytest.approx(50 * 3.0 / 150)
    rates = Rates()
    for count in (100, 200, 300):
        rates.compute.add(count, 0.1 + 0.01 * count)
    assert MeasuredCosts(rates).compute_s(50, 500, 150) == pytest.approx(0.5)


def test_chunk_value_depends_on_the_prefill_that_computed_or_reused_it(tmp_path):
    """PGDSF values an entry by the cost of its misses per token (RAGCache eq. 4)."""
    write_profile(tmp_path / PROFILE_FILE, PROFILE)
    with engine(tmp_path, strategy="reuse", focus_window=None) as one:
        one.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        policy = one._chunks.variants._placement._policies["host"]
        num_new = sum(map(len, SEGMENTS))
        cost = GRID.prefill_s(0, num_new) / num_new
        assert [entry.uses.value for entry in policy._entries.values()] == pytest.approx([cost] * len(policy._entries))
        one.generate_from_tokens(permuted(SEGMENTS, [1, 0]), max_new_tokens=1)
        (system, *chunks), num_question = SEGMENTS[:-1], len(SEGMENTS[-1])
        reused = [len(chunk) for chunk in (system, *chunks)]
        for entry in policy._entries.values():
            if entry.uses.num_uses > 1:  # it would have been computed with the question, after the others
                tokens = entry.info.num_tokens
                wanted = GRID.prefill_s(sum(reused) - tokens, num_question + tokens) / (num_question + tokens)
                assert entry.info.compute_s == pytest.approx(tokens * wanted)
        assert sum(entry.uses.num_uses > 1 for entry in policy._entries.values()) == 3


def test_command_line_tool_writes_the_profile(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert profile_prefill.main(["--max-model-len", "513", "--repetitions", "1", "--output", str(path)]) == 0
    found = PrefillProfile.from_json(json.loads(path.read_text()))
    assert (found.grid.cached, found.grid.new) == ((0, 256), (16, 64, 256)) and found.settings["max_model_len"] == 513
    assert "256 new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "512"], "--max-model-len: wanted at least 513"),
        (["--repetitions", "0"], "--repetitions: wanted a positive integer"),
        (["--output", "/absent/p.json"], "--output: wanted a file in a directory"),
        (["--model", "/absent"], "model: wanted"),
    ],
)
def test_invalid_options_are_named_in_the_error(options, message, capsys):
    assert profile_prefill.main(options) == 2
    assert message in capsys.readouterr().err
