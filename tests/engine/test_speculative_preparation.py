"""An answer begun early whose passages change: the passages of both lists are prepared once, though it is cancelled."""

from __future__ import annotations

import threading

import pytest

from ccjax.engine import Request
from ccjax.engine.batch.failures import CancelledError
from ccjax.engine.batch.group import SequenceGroup
from ccjax.engine.speculation import SpeculativeAnswer
from ccjax.requests import SamplingParams
from ccjax.runner.pack import Pack
from tests.engine.documents import ANNA, BOB, CARLA, DINO
from tests.polling import wait_until

FRAME = "She paints houses by the river.\n\nHis oven is in Paris."


def request_of(documents) -> Request:
    messages = [{"role": "user", "content": "Who sings?"}]
    return Request(messages=messages, documents=tuple(documents), sampling=SamplingParams(4, ignore_eos=True))


@pytest.mark.parametrize("is_final", [False, True])
def test_passages_of_both_lists_are_prepared_once(start, tmp_path, monkeypatch, is_final):
    (tmp_path / "frame.txt").write_text(FRAME)
    held, go_on, prepared, kept = threading.Event(), threading.Event(), [], []
    preparing, run_layer = SequenceGroup.preparing, Pack.run_layer

    def noted(group, prompt):
        prepared.append(prompt.chunks[-1].chunk_id)
        return preparing(group, prompt)

    def hold(pack):
        if pack.layer == 1 and len(prepared) == 3 and not held.is_set():
            held.set()
            assert go_on.wait(120)
        return run_layer(pack)

    engine = start(frame=str(tmp_path / "frame.txt"))
    other = start(frame=str(tmp_path / "frame.txt"))
    engine.run(request_of([DINO]))  # so that the frame is stored
    monkeypatch.setattr(SequenceGroup, "preparing", noted)
    monkeypatch.setattr(Pack, "run_layer", hold)
    add = engine._chunks.variants.add

    def noted_add(meta, *more, **how):
        kept.append(meta.chunk_id)
        return add(meta, *more, **how)

    monkeypatch.setattr(engine._chunks.variants, "add", noted_add)
    search = SpeculativeAnswer(engine.submit, request_of, lambda: 0, max_pending=1)
    search.offer([ANNA, BOB, CARLA])
    assert held.wait(120)
    first, wanted, events = search._attempt, [CARLA, DINO, ANNA], []
    if not is_final:
        search.offer(wanted)
    else:
        search.start(request_of(wanted), events.append, on_start=lambda: None)
    go_on.set()
    wait_until(lambda: first.held and isinstance(first.held[-1], CancelledError), timeout_s=120)
    if not is_final:
        search.start(request_of(wanted), events.append, on_start=lambda: None)
    wait_until(lambda: events and (isinstance(events[-1], Exception) or events[-1].response), timeout_s=120)
    prompts = [engine.assemble(request_of([one])) for one in (ANNA, BOB, CARLA, DINO)]
    anna, bob, carla, dino = (prompt.passages[0].chunk_id for prompt in prompts)
    assert prepared == [anna, bob, carla, dino]  # none again for the second list
    assert {anna, carla, dino} <= {*kept} and bob not in kept
    monkeypatch.undo()
    assert not engine._chunks.variants._placement.awaited
    assert events[-1].response.token_ids == other.run(request_of(wanted)).token_ids
