"""scripts/precompute.py that stands still where a test looks: `python -m tests.scripts.held_precompute JSON ARGUMENTS`.

Of the JSON object, `claim_s` is how long a claim lasts at least. A worker stands still once `held_at` records are in
`store`, until it is told to end. With `own` and `other`, a run makes the first file when it has computed something, and
goes on when there is the second. Engines pad to few sizes, and samples are computed once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ccjax.cache.warming import shared as shared_warming
from ccjax.precompute import worker
from ccjax.precompute.compilation import Compilation
from ccjax.precompute.worker import Worker
from scripts.precompute import main
from tests.engine.few_shapes import few_shapes

HOW = json.loads(sys.argv[1])
_is_cancelled, _handle_reply = Worker.is_cancelled, Compilation._handle_reply


def is_cancelled(self: Worker) -> bool:
    """As it was, but not before the worker is told to end, once there are so many records."""
    while not _is_cancelled(self):
        if len([*Path(HOW["store"]).glob("*/records/*.json")]) < HOW["held_at"]:
            return False
        time.sleep(0.01)
    return True


def take_in(self: Compilation, *answer) -> None:
    """As it was, but not back before the other run has computed something, too."""
    _handle_reply(self, *answer)
    if self.report.counts.computed:
        Path(HOW["own"]).touch()
        while not Path(HOW["other"]).exists():
            time.sleep(0.01)


SIZES = few_shapes()
SIZES.__enter__()
worker._ROUNDS = 1
shared_warming.LEAST_CLAIM_S = HOW["claim_s"]
if "held_at" in HOW:
    Worker.is_cancelled = is_cancelled
if "other" in HOW:
    Compilation._handle_reply = take_in

if __name__ == "__main__":  # a worker imports all this under another name
    sys.exit(main(sys.argv[2:]))
