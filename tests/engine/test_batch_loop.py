"""Many concurrent requests: each gets the same answer as alone, whatever happens to the others."""

import collections
import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ccjax.cache.snapshot.cache import kv_spec_of
from ccjax.engine import Request, SamplingParams
from ccjax.engine.batch import loop as loop_module
from ccjax.engine.batch.failures import CancelledError
from ccjax.errors import ContextLengthError
from ccjax.runner.pool import PAGE_TOKENS
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted
from tests.polling import wait_until
from tests.runner.test_batch import prompts

MODEL = TinyModel(seed=21)
PAGE = kv_spec_of(MODEL.config, "float32").num_bytes(PAGE_TOKENS)
REUSES = ("bounded", "exact", "off", "fast")


def ask(segments, reuse="bounded", tokens=8, **sampling):
    return Request(
        segments=segments, sampling=SamplingParams(max_new_tokens=tokens, logprobs=0, **sampling), reuse=reuse
    )


class Client:
    """One request in the batch, its deltas and its end."""

    def __init__(self, engine, request, on_delta=lambda: None, **options):
        self.deltas, self.error, self.done = [], None, threading.Event()
        self.on_delta = on_delta
        self.cancel = engine.submit(request, self._emit, **options)

    def _emit(self, event):
        if isinstance(event, Exception):
            self.error = event
            self.done.set()
            return
        self.deltas.append(event)
        self.on_delta()
        if event.response is not None:
            self.done.set()

    def response(self):
        assert self.done.wait(120), "no answer"
        if self.error is not None:
            raise self.error
        response = self.deltas[-1].response
        assert [token for delta in self.deltas for token in delta.token_ids] == list(response.token_ids)
        return response


class Turns:
    """Decode steps that wait until the test allows them."""

    def __init__(self, engine):
        self.num_given = self.num_queued = 0
        self._may_go, self._decoder, self._step = threading.Semaphore(0), engine._loop._decoder, None

    def __enter__(self):
        self._step = self._decoder.step
        self._decoder.step = self._in_turn
        return self

    def __exit__(self, *_):
        del self._decoder.step
        self._may_go.release(1_000_000)

    def _in_turn(self, *args):
        assert self._may_go.acquire(timeout=120)
        self.num_queued += 1
        return self._step(*args)

    def until(self, condition):
        """Allows one step after the other until `condition` holds."""

        def look():
            if condition():
                return True
            if self.num_given == self.num_queued:
                self.num_given += 1
                self._may_go.release()
            return False

        wait_until(look, timeout_s=120)


def settled(engine):
    """Waits until nothing runs; pages still in use then are leaked."""
    with engine._exclusive():
        pass
    wait_until(lambda: not len(engine._loop._sequences), timeout_s=120)
    with engine._exclusive():
        assert engine.batch_counts.running == engine.batch_counts.waiting == 0
        assert not engine._store._pins


def filled(engine, asked, count=3):
    for segments in asked[:count]:
        engine.run(ask(segments))
    engine._planner.read_only = True  # so that reuse does not depend on the order of arrival


def check(got, wanted):
    assert got.token_ids == wanted.token_ids
    np.testing.assert_allclose(
        [token.logprob for token in got.logprobs], [token.logprob for token in wanted.logprobs], atol=TOLERANCE
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_ratio": 0.3},
        {"recompute_ratio": 0.3, "focus_window": None, "max_num_batched_tokens": 48},
        {"device_cache_bytes": 600 * PAGE, "recompute_ratio": 0.3, "max_decode_gap_ms": 0.0},
        {"device_cache_bytes": 600 * PAGE, "max_num_batched_tokens": 64, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_concurrent_requests_get_the_same_answers_as_alone(settings):
    random = np.random.default_rng(1)
    asked = prompts(random, 12)
    with MODEL.engine(max_model_len=512, **settings) as engine:
        filled(engine, asked)
        requests = [ask(one, REUSES[number % 4]) for number, one in enumerate(asked)]
        wanted = [engine.run(request) for request in requests]
        free = engine._pool.num_free
        clients = []
        for request in requests:
            clients.append(Client(engine, request))
            time.sleep(float(random.exponential(0.002)))
        for client, alone in zip(clients, wanted, strict=True):
            got = client.response()
            check(got, alone)
            assert got.reuse.computed_tokens == alone.reuse.computed_tokens
        settled(engine)
        assert engine._pool.num_free == free


def test_queued_request_reuses_chunks_computed_by_the_one_before_it():
    segments = draw_segments(np.random.default_rng(2), [40, 30, 50])
    with MODEL.engine(max_num_seqs=1) as engine:
        with engine._loop.paused():
            clients = [Client(engine, ask(segments)) for _ in range(4)]
        shares = [client.response().reuse.reused_tokens for client in clients]
        assert shares == [0] + [7 + 40 + 30 + 50] * 3


def test_requests_packed_together_store_only_their_own_chunks():
    crowd = [draw_segments(np.random.default_rng(seed), [40, 30]) for seed in (2, 3, 4)]
    with MODEL.engine(max_num_seqs=4) as engine:
        with engine._loop.paused():
            clients = [Client(engine, ask(segments)) for segments in crowd]
        for client in clients:
            client.response()
        for segments in crowd:
            plain, again = engine.run(ask(segments, "off")), engine.run(ask(segments, "exact"))
            assert again.reuse.reused_tokens == 7 + 40 + 30
            check(again, plain)


def test_compile_time_is_not_measured_as_compute_time():
    segments = draw_segments(np.random.default_rng(2), [40, 30])
    with MODEL.engine() as engine:
        engine.run(ask(segments, "off"))
        assert engine.rates.seconds_per_token is None  # all sizes were new to this engine
        engine.run(ask(segments, "off"))
        assert engine.rates.seconds_per_token is not None


def test_pack_contexts_stay_within_the_precompiled_sizes():
    """Prompts with few computed tokens each: without a limit one pack would contain all of them."""
    random = np.random.default_rng(5)
    shared = draw_segments(random, [40, 50])[:-1]
    with MODEL.engine(max_model_len=128, max_num_batched_tokens=256) as engine:
        engine.generate_from_tokens([*shared, draw_segments(random, [])[-1]], max_new_tokens=1)
        with engine._loop.paused():
            questions = [draw_segments(random, [])[-1] for _ in range(12)]
            clients = [Client(engine, ask([*shared, question], "exact", tokens=1)) for question in questions]
        reused = [client.response().reuse.reused_tokens for client in clients]
        most = max(slots for _, slots, _ in engine._compiled.compiled("pack"))
        assert all(count > 90 for count in reused)
        assert most == engine._sizes.context_tokens < sum(reused)


def answer_and_prefill(engine, random, lengths, tokens, on_delta=lambda: None):
    """An answer of `tokens` tokens, and a request that arrives at the third of them."""
    others, seen = [], itertools.count(1)

    def look() -> None:
        on_delta()
        if next(seen) == 3:
            others.append(Client(engine, ask(draw_segments(random, lengths), "off", tokens=1)))

    first = Client(engine, ask(draw_segments(random, [20]), "off", tokens=tokens), look)
    wait_until(lambda: others, timeout_s=120)
    return first, others[0]


def test_decode_step_time_excludes_the_prefill_layers_before_it():
    random = np.random.default_rng(6)
    now_s, waits, steps_s = [time.perf_counter()], [], []

    def clock() -> float:
        """Advances a millisecond with each call."""
        now_s[0] += 0.001
        return now_s[0]

    def wait(pack) -> None:
        waits.append(pack.layer)
        now_s[0] += 2.0

    with MODEL.engine(max_decode_gap_ms=0.0) as engine, pytest.MonkeyPatch.context() as patch:
        note = engine._loop._scheduler.decode_done
        patch.setattr(
            engine._loop._scheduler,
            "decode_done",
            lambda now_s: (steps_s.append(engine._loop._decode_step_s), note(now_s)),
        )
        patch.setattr(loop_module, "time", SimpleNamespace(perf_counter=clock))
        patch.setattr(loop_module.Pack, "wait", wait)
        first, second = answer_and_prefill(engine, random, [30], tokens=20)
        second.response()
        first.response()
    # Each step moves the mean by a tenth of the difference: by 0.2 s if it included two more seconds.
    moved = [after - before for before, after in zip(steps_s, steps_s[1:], strict=False)]
    assert waits and moved and max(moved) < 0.1


def test_decoding_continues_between_the_layers_of_a_long_prefill():
    random = np.random.default_rng(3)
    events = []
    run_layer = loop_module.Pack.run_layer

    def noted(pack):
        events.append("layer")
        run_layer(pack)

    with MODEL.engine(max_decode_gap_ms=0.0) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module.Pack, "run_layer", noted)
        first, second = answer_and_prefill(engine, random, [300, 200], 20, on_delta=lambda: events.append("token"))
        second.response()
        first.response()
    layers = [number for number, event in enumerate(events) if event == "layer"][MODEL.config.num_layers :]
    assert len(layers) == MODEL.config.num_layers
    assert all("token" in events[a:b] for a, b in zip(layers, layers[1:], strict=False))


def test_requests_preempted_for_lack_of_pages_still_answer_correctly():
    random = np.random.default_rng(4)
    asked = [draw_segments(random, [60, 60]) for _ in range(4)]
    least = 512 // PAGE_TOKENS + 64
    with MODEL.engine(max_model_len=512, device_cache_bytes=least * PAGE, max_num_seqs=8) as engine:
        preempted = []
        sequences, preempt = engine._loop._sequences, engine._loop._sequences._preempt
        sequences._preempt = lambda sequence: preempted.append(sequence.sequence_id) or preempt(sequence)
        filled(engine, asked, 0)
        wanted = [engine.run(ask(one, "off", tokens=80)) for one in asked]
        assert not preempted
        held = engine._pool.allocate([(least - 44) * PAGE_TOKENS])  # four prompts need 4 x 10, each answer 5 more
        with engine._loop.paused():  # all request pages at the same time
            clients = [Client(engine, ask(one, "off", tokens=80)) for one in asked]
        for client, alone in zip(clients, wanted, strict=True):
            check(client.response(), alone)
        assert preempted
        settled(engine)
        del held
        assert engine._pool.num_free == least


def test_a_thousand_cancelled_requests_leave_nothing_behind():
    random = np.random.default_rng(5)
    asked = prompts(random, 6)
    stages = collections.Counter()
    settings = {"device_cache_bytes": 300 * PAGE, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with MODEL.engine(max_model_len=512, **settings) as engine:
        filled(engine, asked)
        wanted = [engine.run(ask(one, "exact")) for one in asked]
        free = engine.batch_counts.free_pages
        there, gone = [], []
        wanted_stage = "line"
        while len(gone) < 1000:
            there = [one for one in there if not one[0].done.is_set()]  # some get their answer earlier
            while len(there) < 24:
                number, begun = len(there) + len(gone), threading.Event()
                fields = {"priority": number % 3, "flow": str(number % 5), "timeout_s": 3600.0}
                one = dataclasses.replace(ask(asked[number % 6], REUSES[number % 4], tokens=100), **fields)
                there.append((Client(engine, one, on_start=begun.set), begun))
            by_stage = {"line": [], "prefill": [], "decode": []}
            for client, begun in there:
                by_stage["decode" if client.deltas else "prefill" if begun.is_set() else "line"].append((client, begun))
            if not by_stage[wanted_stage]:
                time.sleep(0.001)
                continue
            for client, begun in by_stage[wanted_stage][: int(random.integers(1, 5))]:
                client.cancel()
                stages[wanted_stage] += 1
                there.remove((client, begun))
                gone.append(client)
            wanted_stage = str(random.choice(["line", "prefill", "decode"], p=[0.8, 0.1, 0.1]))
        for client, _ in there:
            client.cancel()
        clients = [Client(engine, ask(one, "exact")) for one in asked]
        for client, alone in zip(clients, wanted, strict=True):
            check(client.response(), alone)
        settled(engine)
        assert engine.batch_counts.free_pages == free
        scheduler = engine._loop._scheduler._scheduler
        assert not scheduler._queue_limit.num_queued and not scheduler._sequences and not scheduler._queue._queues
        assert scheduler._deadlines.least() is None
    assert all(client.done.is_set() for client in gone)
    assert sum(isinstance(client.error, CancelledError) for client in gone) > 900
    assert min(stages[stage] for stage in ("line", "prefill", "decode")) > 20, stages


def test_unreadable_variant_does_not_change_the_answer(tmp_path):
    random = np.random.default_rng(6)
    segments = draw_segments(random, [40, 30, 50])
    others = [draw_segments(random, [20, 30]) for _ in range(3)]
    url = f"file://{tmp_path}/store"
    with MODEL.engine(store=url) as engine:
        wanted = [engine.run(ask(one)) for one in (segments, *others)]
        engine.cache.flush()
    for path in sorted((tmp_path / "store").rglob("*")):
        if path.is_file() and path.stat().st_size > 10_000:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    with MODEL.engine(store=url) as engine:
        clients = [Client(engine, ask(one)) for one in (segments, *others)]
        for client, alone in zip(clients, wanted, strict=True):
            check(client.response(), alone)
        assert clients[0].deltas[-1].response.reuse.failed_loads > 0
        settled(engine)


def test_other_threads_can_use_the_engine_while_answers_run():
    random = np.random.default_rng(7)
    asked = prompts(random, 8)
    with MODEL.engine(max_model_len=512) as engine:
        filled(engine, asked)
        wanted = [engine.run(ask(one, "exact", tokens=30)) for one in asked]
        clients = [Client(engine, ask(one, "exact", tokens=30)) for one in asked]
        for _ in range(5):
            engine.cache.refresh()
            assert len(engine.prefill_logits([1, 2, 3])) == 3
            assert not engine.cache.repair_one()  # the engine is in use
        for client, alone in zip(clients, wanted, strict=True):
            check(client.response(), alone)


def test_a_step_that_fails_ends_its_requests_and_no_others(monkeypatch, caplog):
    segments = draw_segments(np.random.default_rng(8), [40, 30])
    with MODEL.engine() as engine:
        wanted = engine.run(ask(segments, "off"))
        free = engine._pool.num_free

        def out_of_memory(*args, **kwargs):
            raise MemoryError("no room on the device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ccjax.runner.decode.paged_decode_step", out_of_memory)
            clients = [Client(engine, ask(segments, "off")) for _ in range(3)]
            for client in clients:
                with pytest.raises(MemoryError, match="no room on the device"):
                    client.response()
        check(Client(engine, ask(segments, "off")).response(), wanted)
        settled(engine)
        assert engine._pool.num_free == free
    assert "no room on the device" in caplog.text


def test_unfinished_stream_does_not_block_other_requests():
    segments = draw_segments(np.random.default_rng(11), [30, 40])
    with MODEL.engine() as engine:
        wanted = engine.run(ask(segments, "exact"))
        stream = engine.stream(ask(segments, "off", tokens=300))
        next(stream)
        check(engine.run(ask(segments, "exact")), wanted)
        stream.close()
        settled(engine)


def test_closing_waits_for_all_answers():
    random = np.random.default_rng(9)
    engine = MODEL.engine()
    clients = [Client(engine, ask(draw_segments(random, [30]), tokens=20)) for _ in range(6)]
    engine.close()
    assert all(client.done.is_set() and client.error is None for client in clients)
    with pytest.raises(RuntimeError, match="closed"):
        engine.run(ask(draw_segments(random, [30])))


def test_seeded_sampling_is_the_same_alone_and_in_a_batch():
    random = np.random.default_rng(10)
    segments = draw_segments(random, [30])
    with MODEL.engine() as engine:
        request = ask(segments, "off", tokens=30, temperature=1.0, seed=5)
        wanted = engine.run(request).token_ids
        others = [Client(engine, ask(permuted(segments, [0]), "off", tokens=30, temperature=1.5)) for _ in range(5)]
        got = Client(engine, request).response()
        assert got.token_ids == wanted
        assert len({client.response().token_ids for client in others}) > 1


def test_a_prompt_that_needs_more_pages_than_there_are_is_refused():
    with MODEL.engine(max_model_len=512, device_cache_bytes=96 * PAGE) as engine:
        segments = [[1] * 2 for _ in range(120)]
        with pytest.raises(ContextLengthError, match="pages"):
            engine.run(ask(segments))
