"""The curriculum of the demo model: from copying, over short registers, to eight passages.

Order and thresholds are measured: if it starts with five passages, a model of this size remains for thousands of steps
at the level of guessing among the values present.

The shipped weights are from a run of `scripts/train_demo.py`: 4,000 steps, 90 minutes on two Xeon cores shared with
other work. Register passed at step 941, two passages ended at 1,241, only hops at 2,136, three passages at 2,436, five
at 2,643. Two hops remain at guessing until they are most questions of a batch and the middle layers get the bridge as a
hint (`Stage.hint_weight`).
"""

from __future__ import annotations

from ccjax.demo.world import KINDS, Difficulty, Kind
from scripts.demo_model.batches import Rows, Stage


def _mix(**weights: float) -> tuple[tuple[str, float], ...]:
    return tuple(weights.items())


_REGISTER = _mix(register=1)
_HOP_KINDS: tuple[Kind, ...] = ("alias", "two_hop")
_CROSSING: tuple[Kind, ...] = ("pronoun", "alias", "two_hop")
_DIRECT = (0.8, 0.4, 0.2)
_PLAIN = _mix(register=1, portrait=3, pair=1)
_HOPS = _mix(nickname=1, place=1)
_ALL = _mix(register=1, portrait=2, pair=1, follow=1.5, nickname=1.6, place=1.6)
_STRAY = _mix(register=1, portrait=3, pair=1, gossip=1.2, nickname=0.5, place=1)


def _registers(*direct_ratios: float) -> tuple[Difficulty, ...]:
    return tuple(Difficulty(1, _REGISTER, direct_ratio=ratio, num_relations=1) for ratio in direct_ratios)


_TWO = Rows(
    240,
    20,
    (
        *_registers(0.3),
        Difficulty(2, _mix(register=2, portrait=1, pair=2), direct_ratio=0.3, num_relations=2),
        Difficulty(2, _HOPS, direct_ratio=0.6, num_relations=1, kinds=KINDS),
        Difficulty(2, _HOPS, direct_ratio=0.3, num_relations=1, kinds=KINDS),
    ),
)
STAGES = (
    Stage("induction", (Rows(64, 32),), min_steps=50),
    Stage("recall", (Rows(128, 32, _registers(1.0)),), recall_ratio=1.0),
    Stage("questions", (Rows(176, 24, _registers(1.0, 0.4)),), recall_ratio=0.4, advance_ratio=0.75),
    Stage("register", (Rows(176, 24, _registers(0.15)),), recall_ratio=0.3),
    Stage("two passages", (_TWO,), recall_ratio=0.2, advance_ratio=0.88, max_steps=300, hint_weight=0.5),
    Stage(
        "only hops",
        (
            Rows(
                160,
                30,
                (
                    *(Difficulty(2, _HOPS, direct_ratio=ratio, num_relations=1, kinds=_HOP_KINDS) for ratio in _DIRECT),
                    Difficulty(2, _mix(register=2, portrait=1, pair=2), direct_ratio=0.3, num_relations=2),
                ),
            ),
        ),
        num_questions=4,
        recall_ratio=0.1,
        advance_ratio=0.85,
        max_steps=900,
        hint_weight=0.5,
    ),
    Stage(
        "three passages",
        (
            Rows(
                288,
                18,
                (
                    Difficulty(3, _PLAIN, direct_ratio=0.1, num_relations=3),
                    Difficulty(3, _ALL, direct_ratio=0.1, num_relations=3, kinds=KINDS),
                    Difficulty(2, _HOPS, direct_ratio=0.1, num_relations=1, kinds=_HOP_KINDS),
                ),
            ),
        ),
        advance_ratio=0.85,
        max_steps=300,
        hint_weight=0.5,
    ),
    Stage(
        "five passages",
        (
            Rows(
                384,
                14,
                (
                    Difficulty(5, _PLAIN, min_words=27, num_relations=6),
                    Difficulty(5, _ALL, min_words=27, kinds=KINDS),
                    Difficulty(3, _ALL, num_relations=3, kinds=_CROSSING),
                ),
            ),
        ),
        advance_ratio=0.88,
        max_steps=400,
        hint_weight=0.3,
    ),
    Stage(
        "eight passages",
        (
            Rows(
                416,
                13,
                (
                    Difficulty(5, _PLAIN, min_words=24, max_words=80, num_relations=7),
                    Difficulty(5, _STRAY, min_words=24, max_words=60),
                    Difficulty(4, _ALL, min_words=24, max_words=80, kinds=KINDS),
                    Difficulty(4, _ALL, min_words=24, kinds=_CROSSING),
                ),
            ),
            Rows(640, 8, (Difficulty(8, _ALL, min_words=24, max_words=80, kinds=KINDS),)),
        ),
        advance_ratio=1.1,
        hint_weight=0.2,
    ),
)
"""The last stage runs until the steps are used up."""

QUICK_STAGES = (Stage("induction", (Rows(24, 8),), advance_ratio=1.1),)
"""For smoke runs: a few seconds, and the loss still falls."""
