"""Cache states for measurements: whether passages were computed before, and behind which text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from ccjax.policy.strategies import get_strategy
from ccjax.types import Document

if TYPE_CHECKING:
    from ccjax.engine import EngineConfig
    from ccjax.loading.model import LoadedModel
    from ccjax.requests import Request

State = Literal["empty", "alone", "prepared", "seen", "idle"]
"""Nothing is stored; each passage was computed directly behind the instructions; also behind the frame, as
`Engine.documents.warm` does by default; an earlier prompt had the same passages in the reverse order; or it had, and
then the engine did all its work for idle time."""
STATES: tuple[State, ...] = ("empty", "alone", "prepared", "seen", "idle")
_AFTER_PROMPTS = ("seen", "idle")


def steps(state: State, prompts: Sequence[Sequence[Document]]) -> list[Sequence[Document]]:
    """Passages or prompts to compute, in order, before these prompts are asked."""
    if state == "empty":
        return []
    if state in _AFTER_PROMPTS:
        # Reversed, so that no passage follows one that it followed before.
        return [prompt[::-1] for prompt in prompts]
    return [[passage] for passage in dict.fromkeys(passage for prompt in prompts for passage in prompt)]


def asking(question: str, documents: Sequence[Document], *, pasted: bool) -> Request:
    """Asks about passages: in the field `documents`, or as text of the system message, as clients write that do not
    know this field."""
    from ccjax.requests import Request

    messages = [{"role": "user", "content": question}]
    if not pasted:
        return Request(messages=messages, documents=documents)
    texts = ["\n".join(filter(None, (document.title, document.text))) for document in documents]
    return Request(
        messages=[
            {"role": "system", "content": "\n\n".join(["Answer the question from these passages.", *texts])},
            *messages,
        ]
    )


def fill(
    model: LoadedModel,
    config: EngineConfig,
    state: State,
    prompts: Sequence[Sequence[Document]],
    tick: Callable[[], None] = lambda: None,
    *,
    pasted: bool = False,
) -> None:
    """Brings the store of `config` into a state.

    Args:
      config: its frame is that of all states but "alone", which has none. What a prompt leaves differs with and without
        a frame, so "seen" has both.
      prompts: the passages of each, in prompt order.
      tick: called after each of `steps`.
      pasted: prompts are as `asking` pastes them.
    """
    from ccjax.engine import Engine
    from ccjax.requests import SamplingParams

    is_framed = get_strategy(config.strategy).prepares_behind_frame and config.frame != "none"
    frames = {"alone": ["none"], "seen": [config.frame, "none"] if is_framed else ["none"]}.get(state, [config.frame])
    for frame in frames:
        with Engine(model, config.replace(frame=frame)) as engine:
            for documents in steps(state, prompts):
                if state in _AFTER_PROMPTS:
                    reuse = "exact" if frame == "none" else "bounded"
                    request = asking("?", documents, pasted=pasted)
                    engine.run(dataclasses.replace(request, sampling=SamplingParams(1), reuse=reuse))
                else:
                    engine.documents.warm(documents)
                if frame == frames[-1]:
                    tick()
            while state == "idle" and engine.cache.repair_one():
                pass
