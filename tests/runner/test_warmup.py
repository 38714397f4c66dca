"""Engines that compile a few sizes before the first request and the rest in idle time answer as others do."""

import threading
from typing import Any

import jax
import numpy as np
import pytest

from ccjax.engine import Engine
from ccjax.requests import Request, SamplingParams
from ccjax.runner import warmup
from ccjax.runner.compilations import compilations
from ccjax.runner.warmup import StepCompiler
from tests.engine.helpers import TinyModel, draw_segments, permuted

FEW: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 4}
RANDOM = np.random.default_rng(5)
SEGMENTS = draw_segments(RANDOM, [30, 24, 36, 50])
ORDERS = ([0, 1, 2, 3], [2, 1, 0], [3], [1, 0, 2, 3])


def model(hidden_size: int) -> TinyModel:
    """One whose steps no other test has compiled."""
    return TinyModel(seed=3, num_hidden_layers=2, hidden_size=hidden_size, num_attention_heads=2, intermediate_size=24)


def answers(engine: Engine) -> list[tuple[int, ...]]:
    found = []
    for order in ORDERS:
        for reuse in ("off", "exact"):
            response = engine.generate_from_tokens(permuted(SEGMENTS, order), max_new_tokens=6, reuse=reuse)
            found.append(tuple(response.token_ids))
    return found


def taken(engine: Engine) -> tuple[list, list]:
    """Sizes of packs and decode steps that requests take now."""
    sizes = engine._device.compiled
    return [sizes.pack([count], 100, 3) for count in (9, 60, 140)], [sizes.decode(count, 20) for count in (1, 3)]


@pytest.mark.parametrize(
    ("width", "tier"), [pytest.param(56, {}, marks=pytest.mark.slow), (104, {"device_cache_bytes": 4 << 20})]
)
def test_padded_sizes_give_the_same_answers_and_compile_nothing(width, tier):
    tiny = model(width)
    with tiny.engine(**FEW, **tier) as engine:
        wanted, natural = answers(engine), taken(engine)
    seen = []
    with tiny.engine(**FEW, **tier) as engine:
        engine.warmup(lambda stage, done, total: seen.append((stage, done, total)), only_first=True)
        first, listed = engine._device.steps.first(), engine._device.steps.all()
        assert seen == [("compile", done, len(first)) for done in range(1, len(first) + 1)]
        assert engine.num_sizes_left == len(listed) - len(first) > 0
        before = compilations().count
        assert answers(engine) == wanted
        assert compilations().count == before
        padded = taken(engine)
        for padded_size, size in zip([*padded[0], *padded[1]], [*natural[0], *natural[1]], strict=True):
            assert all(map(int.__ge__, padded_size, size))
        assert padded != natural

        left, in_background = engine.num_sizes_left, compilations().background_count
        assert left > len(listed) - len(first) or engine._device.compiled.next() in listed
        while engine.compile_one():
            assert engine.num_sizes_left < left
            left = engine.num_sizes_left
        assert left == 0 and compilations().background_count > in_background
        assert taken(engine) == natural
        assert answers(engine) == wanted
        assert compilations().count == before  # nobody waited for any of them
        assert engine._device.compiled.next() is None


def test_prompt_that_drops_rows_compiles_nothing():
    """Deviations choose the rows, so their numbers are met in the middle of a prefill."""
    tiny = model(120)
    with tiny.engine(**FEW, strategy="cacheblend") as engine:
        engine.warmup(only_first=True)
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1, reuse="exact")
        before, few = compilations().count, 0
        for order in ([2, 1, 0, 3], [1, 2, 3], [2, 3]):
            reuse = engine.generate_from_tokens(permuted(SEGMENTS, order), max_new_tokens=1, reuse="bounded").reuse
            few += reuse.computed_share < 0.9
        assert few > 0 and compilations().count == before


@pytest.mark.parametrize("only_first", [True, False])
def test_prompt_whose_question_chooses_tokens_compiles_nothing(only_first):
    tiny = model(152 if only_first else 136)
    with tiny.engine(**FEW) as engine:
        engine.warmup(only_first=only_first)
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        before = compilations().count
        reuse = engine.generate_from_tokens(permuted(SEGMENTS, [2, 1, 0, 3]), max_new_tokens=1).reuse
        num_runs = 2 * reuse.computed_tokens + reuse.recomputed_tokens  # the question runs twice
        assert reuse.computed_share * reuse.prompt_tokens == pytest.approx(num_runs)
        assert compilations().count == before


def test_request_is_answered_during_background_compilation(monkeypatch):
    tiny = model(40)
    begun, go_on = threading.Event(), threading.Event()
    compile_pack = warmup.compile_pack

    def held(*args) -> None:
        if threading.current_thread().name.startswith("ccjax-compile"):
            begun.set()
            assert go_on.wait(300)
        compile_pack(*args)

    monkeypatch.setattr(warmup, "compile_pack", held)
    with tiny.engine(**FEW) as engine:
        engine.warmup(only_first=True)
        request = Request(segments=SEGMENTS, sampling=SamplingParams(4))
        while not begun.is_set():
            assert engine.compile_one(is_cancelled=begun.is_set)
        left = engine.num_sizes_left
        assert engine.compile_one(is_cancelled=lambda: True)  # it goes on with the one that was begun
        assert len(engine.run(request).token_ids) == 4
        assert engine.num_sizes_left >= left > 0
        go_on.set()
        while engine.compile_one():
            pass
        assert engine.num_sizes_left == 0


def test_compiling_a_pack_does_not_hold_the_pages_lock(monkeypatch):
    """The pool's lock is what the batch waits for."""
    tiny = model(72)
    with tiny.engine(**FEW) as engine:
        was_free = []
        compile_ahead = jax.stages.Lowered.compile

        def watched(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            with engine._device.pool._pages_lock:  # would wait for ever
                was_free.append(lowered.as_text().partition(" attributes")[0])
            return compile_ahead(lowered)

        monkeypatch.setattr(jax.stages.Lowered, "compile", watched)
        engine.warmup(only_first=True)
        assert {f"module @jit_{name}_step" for name in ("paged_layer", "paged_decode", "write_rows")} <= set(was_free)


@pytest.mark.parametrize(("platform", "most"), [("cpu", 2), ("tpu", 2), ("gpu", 1)])
def test_sizes_compile_side_by_side_but_on_the_card_that_times_them_one_by_one(monkeypatch, platform, most):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    both, steps = threading.Barrier(most), object.__new__(StepCompiler)
    threads = set()
    steps.compile = lambda key: (threads.add(threading.get_ident()), both.wait(60))
    steps.warm_up([("batch", (size,)) for size in (1, 2, 4, 8)])
    assert len(threads) == most


@pytest.mark.slow
def test_size_that_fails_to_compile_is_skipped(monkeypatch, caplog):
    tiny = model(88)
    with tiny.engine(**FEW) as engine:
        engine.warmup(only_first=True)

        def fails(*_) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(warmup, "compile_pack", fails)
        while engine.compile_one():
            pass
        assert engine.num_sizes_left == 0 and "out of memory" in caplog.text
        left = len(engine._device.compiled.compiled("pack"))
        assert left == sum(kind == "pack" for kind, _ in engine._device.steps.first())
        answers(engine)  # wants sizes without masses, which are not listed and fail, too
        while engine.compile_one():
            pass
        answers(engine)
        assert engine.num_sizes_left == 0


def test_no_sizes_are_left_after_a_full_warm_up():
    with model(40).engine(**FEW) as engine:
        assert engine.num_sizes_left == 0 and not engine.compile_one()
        engine.warmup()
        assert engine.num_sizes_left == 0 and not engine.compile_one()
