"""Cache states for measurements: whether passages were computed before, and behind which text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from ccjax.policy.strategies import get_strategy
from ccjax.types import Document

if TYPE_CHECKING:
    from ccjax.engine import EngineConfig
    from ccjax.loading.model import LoadedModel

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


def fill(
    model: LoadedModel,
    config: EngineConfig,
    state: State,
    prompts: Sequence[Sequence[Document]],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Brings the store of `config` into a state.

    Args:
      config: its frame is that of all states but "alone", which has none. What a prompt leaves differs with and without
        a frame, so "seen" has both.
      prompts: the passages of each, in prompt order.
      tick: called after each of `steps`.
    """
    from ccjax.engine import Engine

    is_framed = get_strategy(config.strategy).prepares_behind_frame and config.frame != "none"
    frames = {"alone": ["none"], "seen": [config.frame, "none"] if is_framed else ["none"]}.get(state, [config.frame])
    for frame in frames:
        with Engine(model, config.replace(frame=frame)) as engine:
            for documents in steps(state, prompts):
                if state in _AFTER_PROMPTS:
                    reuse = "exact" if frame == "none" else "bounded"
                    engine.generate("?", documents, max_new_tokens=1, reuse=reuse)
                else:
                    engine.documents.warm(documents)
                if frame == frames[-1]:
                    tick()
            while state == "idle" and engine.cache.repair_one():
                pass
