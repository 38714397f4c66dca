"""The order in which the demo model learns: from copying, over short registers, to five passages.

Knows no model and no optimiser. Order and thresholds are measured: started on five passages at once, a model of this
size stays for thousands of steps at the level of guessing among the values present.

The shipped weights took 3,050 steps of about 0.7 s on one CPU core: induction to step 52, recall 202, questions 500,
register 1,541, two passages 1,855, five passages 2,151. Thresholds and mixtures were changed
while it ran, so a fresh run follows the same road without giving the same bytes.
"""

from __future__ import annotations

from ccjax.demo.batches import Stage
from ccjax.demo.world import KINDS, Difficulty


def _mix(**weights: float) -> tuple[tuple[str, float], ...]:
    return tuple(weights.items())


_PLAIN = _mix(register=1, portrait=3, pair=1)
_ALL = _mix(register=1, portrait=2, pair=1, follow=1.7, nickname=1.5, place=1.3)
_STRAY = _mix(register=1, portrait=3, pair=1, gossip=1.2, nickname=0.5, place=1)

STAGES = (
    Stage("induction", num_tokens=64, batch_size=32, min_steps=50),
    Stage(
        "recall",
        num_tokens=128,
        batch_size=32,
        difficulties=(Difficulty(1, _mix(register=1), direct_ratio=1.0, num_relations=1),),
        recall_ratio=1.0,
    ),
    Stage(
        "questions",
        num_tokens=176,
        batch_size=24,
        difficulties=(
            Difficulty(1, _mix(register=1), direct_ratio=1.0, num_relations=1),
            Difficulty(1, _mix(register=1), direct_ratio=0.4, num_relations=1),
        ),
        recall_ratio=0.4,
        advance_ratio=0.75,
    ),
    Stage(
        "register",
        num_tokens=176,
        batch_size=24,
        difficulties=(Difficulty(1, _mix(register=1), direct_ratio=0.15, num_relations=1),),
        recall_ratio=0.3,
    ),
    Stage(
        "two passages",
        num_tokens=240,
        batch_size=20,
        difficulties=(
            Difficulty(1, _mix(register=1), direct_ratio=0.3, num_relations=1),
            Difficulty(2, _mix(register=2, portrait=1, pair=2), direct_ratio=0.3, num_relations=2),
        ),
    ),
    Stage(
        "three passages",
        num_tokens=288,
        batch_size=18,
        difficulties=(
            Difficulty(3, _PLAIN, direct_ratio=0.1, num_relations=3),
            Difficulty(3, _ALL, direct_ratio=0.1, num_relations=3),
        ),
        advance_ratio=0.8,
        min_steps=100,
    ),
    Stage(
        "five passages",
        num_tokens=384,
        batch_size=14,
        difficulties=(Difficulty(5, _PLAIN, min_words=27), Difficulty(5, _ALL, min_words=27)),
        advance_ratio=0.85,
    ),
    Stage(
        "all kinds",
        num_tokens=384,
        batch_size=14,
        difficulties=(
            Difficulty(5, _PLAIN, min_words=27, num_relations=7),
            Difficulty(5, _STRAY, min_words=27),
            Difficulty(5, _ALL, min_words=27, kinds=KINDS),
            Difficulty(3, _ALL, num_relations=3, kinds=KINDS),
        ),
        advance_ratio=1.1,
    ),
)
"""The last stage has no next one: it runs until the steps are used up."""

QUICK_STAGES = (Stage("induction", num_tokens=24, batch_size=8, advance_ratio=1.1),)
"""For smoke runs: a few seconds, and the loss still falls."""
