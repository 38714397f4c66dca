"""When a chunk's variants last changed, and that only who has the chunk is planned again for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.cache import changes as changes_module
from ccjax.cache.changes import Changes
from ccjax.engine.batch.sequence import TokenSequence
from ccjax.requests import Delta, Request, SamplingParams
from ccjax.types import ChunkId
from tests.engine.helpers import TinyModel, draw_segments


@given(st.lists(st.one_of(st.sampled_from("abc"), st.integers(0, 3)), max_size=12), st.sets(st.sampled_from("abcd")))
def test_last_change_counts_changes_of_single_chunks_and_of_all(steps, asked):
    changes, count, last = Changes(), 0, dict.fromkeys("abcd", 0)
    for step in steps:
        if isinstance(step, int):
            changes.note_all(step)
            count += step
            last = dict.fromkeys("abcd", count)
        else:
            changes.note(ChunkId(step))
            count += 1
            last[step] = count
    assert changes.count == count
    assert changes.last(map(ChunkId, asked)) == max((last[key] for key in asked), default=min(last.values()))


def test_number_of_remembered_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(changes_module, "_MOST_CHUNKS", 3)
    changes = Changes()
    for key in "abcd":
        changes.note(ChunkId(key))
    assert changes.last([ChunkId("a")]) == 4  # later than it was, never earlier
    changes.note(ChunkId("e"))
    assert changes.last([ChunkId("a")]) == 4 and changes.last([ChunkId("e")]) == 5


def test_queued_requests_are_replanned_only_when_their_own_chunks_change(monkeypatch: pytest.MonkeyPatch):
    model = TinyModel(seed=5)
    own, others = (draw_segments(np.random.default_rng(seed), (24, 20)) for seed in (1, 2))
    planned: list[str] = []
    plan = TokenSequence.plan

    def counted(sequence: TokenSequence, at: int) -> None:
        planned.append(sequence.sequence_id)
        plan(sequence, at)

    with model.engine(max_num_seqs=1, reorder_window=8) as engine:
        engine.generate_from_tokens(own, max_new_tokens=1)
        monkeypatch.setattr(TokenSequence, "plan", counted)
        ended = [threading.Event() for _ in range(5)]
        with engine._loop.exclusive() as is_paused:
            assert is_paused
            for number, segments in enumerate((others, own, own, own, own)):

                def emit(event: Delta | Exception, number: int = number) -> None:
                    if isinstance(event, Exception) or event.response is not None:
                        ended[number].set()

                sampling = SamplingParams(max_new_tokens=1)
                request = Request(segments=segments, sampling=sampling, priority=min(number, 1))
                engine.submit(request, emit, on_start=lambda: None)
        assert all(event.wait(120) for event in ended)
    # All five once; what the first one stored is nobody else's, and the others store nothing.
    assert len(planned) == len(set(planned)) == 5
