"""Many concurrent requests: each gets the same answer as alone, whatever happens to the others."""

import collections
import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ccjax.engine import Request, SamplingParams
from ccjax.engine.batch import loop as loop_module
from ccjax.engine.batch.failures import CancelledError
from ccjax.runner import pack as pack_module
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments
from tests.polling import wait_until
from tests.runner.test_batch import prompts

MODEL = TinyModel(seed=21)
PAGE = MODEL.page_bytes
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
    with engine._loop.exclusive():
        pass
    wait_until(lambda: not len(engine._loop._sequences), timeout_s=120)
    assert engine._chunks.store.flush(120)  # what is being copied to host memory holds its pages
    with engine._loop.exclusive():
        assert engine.batch_counts.running == engine.batch_counts.waiting == 0
        assert not engine._chunks.store._pins


def filled(engine, asked, count=3):
    for segments in asked[:count]:
        engine.run(ask(segments))
    engine._chunks.planner.read_only = True  # so that reuse does not depend on the order of arrival


def check(got, wanted):
    assert got.token_ids == wanted.token_ids
    np.testing.assert_allclose(
        [token.logprob for token in got.logprobs], [token.logprob for token in wanted.logprobs], atol=TOLERANCE
    )


def test_queued_request_reuses_chunks_computed_by_the_one_before_it():
    segments = draw_segments(np.random.default_rng(2), [40, 30, 50])
    with MODEL.engine(max_num_seqs=1) as engine:
        with engine._loop.exclusive():
            clients = [Client(engine, ask(segments)) for _ in range(4)]
        shares = [client.response().reuse.reused_tokens for client in clients]
        assert shares == [0] + [7 + 40 + 30 + 50] * 3


def test_requests_packed_together_store_only_their_own_chunks():
    crowd = [draw_segments(np.random.default_rng(seed), [40, 30]) for seed in (2, 3, 4)]
    with MODEL.engine(max_num_seqs=4) as engine:
        with engine._loop.exclusive():
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
        with engine._loop.exclusive():
            questions = [draw_segments(random, [])[-1] for _ in range(12)]
            clients = [Client(engine, ask([*shared, question], "exact", tokens=1)) for question in questions]
        reused = [client.response().reuse.reused_tokens for client in clients]
        most = max(slots for _, slots, _ in engine._device.compiled.compiled("pack"))
        assert all(count > 90 for count in reused)
        assert most == engine._device.sizes.context_tokens < sum(reused)


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
        patch.setattr(pack_module.Pack, "wait", wait)
        first, second = answer_and_prefill(engine, random, [30], tokens=20)
        second.response()
        first.response()
    # Each step moves the mean by a tenth of the difference: by 0.2 s if it included two more seconds.
    moved = [after - before for before, after in zip(steps_s, steps_s[1:], strict=False)]
    assert waits and moved and max(moved) < 0.1


def test_decoding_continues_between_the_layers_of_a_long_prefill():
    random = np.random.default_rng(3)
    events = []
    run_layer = pack_module.Pack.run_layer

    def noted(pack):
        events.append("layer")
        run_layer(pack)

    with MODEL.engine(max_decode_gap_ms=0.0) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module.Pack, "run_layer", noted)
        first, second = answer_and_prefill(engine, random, [300, 200], 20, on_delta=lambda: events.append("token"))
        second.response()
        first.response()
    layers = [number for number, event in enumerate(events) if event == "layer"][MODEL.config.num_layers :]
    assert len(layers) == MODEL.config.num_layers
    assert all("token" in events[a:b] for a, b in zip(layers, layers[1:], strict=False))


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_short_prompt_runs_before_the_next_layer_of_a_long_one(is_awaited):
    """Also while a thread waits for the end of the long one, to use what requests use."""
    random = np.random.default_rng(9)
    long, short = draw_segments(random, [300, 200]), draw_segments(random, [10])
    ends, others, run_layer = [], [], pack_module.Pack.run_layer
    with MODEL.engine(max_num_batched_tokens=128) as engine, pytest.MonkeyPatch.context() as patch:
        wanted = [engine.run(ask(segments, "off")) for segments in (long, short)]

        def pause():
            with engine._loop.exclusive():
                ends.append("pause")

        waiting = threading.Thread(target=pause)

        def noted(pack):
            run_layer(pack)
            if not others:
                if is_awaited:
                    waiting.start()
                    wait_until(lambda: engine._loop._pauses.num_pausing)
                others.append(Client(engine, ask(short, "off"), lambda: ends.append("short")))

        patch.setattr(pack_module.Pack, "run_layer", noted)
        first = Client(engine, ask(long, "off"), lambda: ends.append("long"))
        got = [first.response(), others[0].response()]
        for one, other in zip(got, wanted, strict=True):
            check(one, other)
        assert ends[0] == "short", "the long prompt has packs of 128 of its 500 tokens"
        if is_awaited:
            waiting.join()
            assert "pause" in ends
        settled(engine)


def test_prompts_start_before_the_end_of_a_long_one_that_a_thread_waits_for():
    """Then the thread has its turn, before a prompt that is longer still."""
    random = np.random.default_rng(9)
    lengths = {"long": [300, 200], "other": [60], "longer": [300, 300, 300]}
    asked = {name: draw_segments(random, length) for name, length in lengths.items()}
    events, clients, run_layer = [], {}, pack_module.Pack.run_layer
    with MODEL.engine(max_num_batched_tokens=128) as engine, pytest.MonkeyPatch.context() as patch:

        def pause():
            with engine._loop.exclusive():
                events.append("pause")

        waiting = threading.Thread(target=pause)

        def submit(name):
            request = dataclasses.replace(ask(asked[name], "off", tokens=1), flow=name)
            clients[name] = Client(engine, request, lambda: events.append(name))

        def noted(pack):
            run_layer(pack)
            if len(clients) == 1:
                waiting.start()
                wait_until(lambda: engine._loop._pauses.num_pausing)
                submit("longer")
                submit("other")

        patch.setattr(pack_module.Pack, "run_layer", noted)
        submit("long")
        for name in lengths:
            wait_until(lambda name=name: name in clients, timeout_s=120)
            clients[name].response()
        waiting.join()
        assert list(dict.fromkeys(events)) == ["other", "long", "pause", "longer"]
        settled(engine)


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
        scheduler = engine._loop._scheduler
        assert not scheduler._queue_limit.num_queued and not scheduler._sequences and not scheduler._queue._queues
        assert scheduler._deadlines.least() is None
    assert all(client.done.is_set() for client in gone)
    assert sum(isinstance(client.error, CancelledError) for client in gone) > 900
    assert min(stages[stage] for stage in ("line", "prefill", "decode")) > 20, stages


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
    for _ in range(2):
        engine.close()
    assert all(client.done.is_set() and client.error is None for client in clients)
    with pytest.raises(RuntimeError, match="closed"):
        engine.run(ask(draw_segments(random, [30])))


def test_requests_without_a_seed_draw_different_answers():
    request = ask(draw_segments(np.random.default_rng(10), [30]), "off", tokens=30, temperature=1.5)
    with MODEL.engine() as engine:
        assert len({engine.run(request).token_ids for _ in range(3)}) > 1
