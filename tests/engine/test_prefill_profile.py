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
from ccjax.engine.background import BackgroundPrefills
from ccjax.engine.prefill_measurement import measure_prefills
from ccjax.errors import ConfigError
from ccjax.loading.prefill_profile import PROFILE_FILE, KeptProfile, PrefillProfile, write_profile
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.prompts import chunk_id
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


@pytest.fixture
def compiled(tmp_path):
    """A directory of compiled steps of its own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_idle_time_measures_a_profile_once_for_all_processes(compiled):
    with engine(None) as one:
        assert not one.profile_one(is_cancelled=lambda: True) and one._chunks.costs.grid is None
        while one.profile_one():
            assert one.cache.num_variants == 0, "random tokens are not stored"
        grid = one._chunks.costs.grid
        assert grid is not None and grid.new == (31, 127, 511) and grid.prefill_s(0, 511) > 0.0
    with engine(None) as other:
        assert other._chunks.costs.grid == grid and not other.profile_one()
    with engine(None, eviction_policy="lru") as without:
        assert without._chunks.costs.grid is None and not without.profile_one(), "it needs none"
    (file,) = compiled.glob("prefill-*.json")
    file.write_text("{")
    with engine(None) as again:
        assert again._chunks.costs.grid is None and again.profile_one()


def test_a_profile_that_cannot_be_measured_is_given_up(compiled, monkeypatch, caplog):
    def fails(*args, **options):
        raise RuntimeError("no memory")

    with engine(None) as one:
        monkeypatch.setattr(BackgroundPrefills, "run", fails)
        assert not one.profile_one() and "cannot be measured" in caplog.text
        caplog.clear()
        assert not one.profile_one() and not caplog.records


def test_a_profile_belongs_to_a_number_of_devices(compiled):
    grid = PrefillGrid((0, 500), (10, 400), ((1.0, 2.0), (1.0, 2.0)))
    KeptProfile("some model", 2).write(grid)
    assert KeptProfile("some model", 2).read() == grid
    assert KeptProfile("some model").read() is None


def test_the_profile_decides_what_is_evicted(compiled):
    """Where a prefill takes a fixed time, a passage that was computed with few other tokens costs more for each of its
    own; where time grows faster than tokens it costs less. Either way the cheapest one is evicted."""
    random = np.random.default_rng(1)
    prompts = [draw_segments(random, lengths, system=0) for lengths in ([40], [40, 300], [40])]
    room = (40 + 40 + 300) * MODEL.token_bytes

    def remaining(seconds):
        KeptProfile(MODEL.loaded.fingerprint).write(PrefillGrid((0, 500), (10, 400), (seconds, seconds)))
        with engine(None, host_cache_bytes=room, strategy="prefix") as one:
            for segments in prompts:
                one.generate_from_tokens(segments, max_new_tokens=1, reuse="exact")
            held = {meta.chunk_id for meta in one._chunks.variants}
        return [chunk_id(segments[-2]) in held for segments in prompts]

    assert remaining((0.01, 4.0)) == [False, True, True]
    assert remaining((1.0, 1.1)) == [True, False, True]


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
