"""A prompt that is longer than a pack, run layer by layer: every layer over the whole prompt before the next one."""

from __future__ import annotations

import jax
import numpy as np

from ccjax.runner.context_loader import ContextLoader
from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import Pack, Piece, Prefilling
from ccjax.runner.pool import DevicePool


class SplitPrompt(Prefilling):
    """One prompt, in packs of consecutive pieces.

    For prompts of which some tokens are dropped on the way: they are chosen among all tokens of the prompt (CacheBlend
    sec. 4.3, CacheCraft alg. 1), and the remaining ones continue in fewer packs. Each call of `run_layer` runs one
    layer of one pack, so that decode steps wait no longer than for other prompts; `layer` is the one that some packs
    have run, or the next.
    """

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        job: PrefillJob,
        *,
        max_rows: int,
        is_loaded: bool = False,
    ) -> None:
        """
        Args:
          max_rows: most tokens of a pack.
          is_loaded: the reused KV is in the prompt's pages.
        """
        super().__init__(model, pool)
        self._job = job
        self._max_rows = max_rows
        contexts = None if is_loaded else job.contexts
        self._loader = None if contexts is None else ContextLoader(model, pool, job, contexts)
        self._packs = self._packed(job.offsets, None)
        self.hidden = self._packs[-1].hidden
        self._next = 0

    @property
    def is_done(self) -> bool:
        return not self._packs or self.layer == self._model.config.num_layers

    def is_ready(self) -> bool:
        return self._next > 0 or self._loader is None or self._loader.is_ready(self.layer)

    def drop(self, job: PrefillJob) -> None:
        if job is self._job:
            self._packs = []

    def run_layer(self) -> None:
        if self._next == 0:
            if self._loader is not None:
                self._loader.write(self.layer)
            if len(self._packs) > 1 and self._job.filters(self.layer):  # a single pack chooses by itself
                self._choose()
        had_focus = self._job.result.focused is not None
        pack = self._packs[self._next]
        self._run_layer_of(pack)
        self._next += 1
        if self._next < len(self._packs):
            return
        self._next, self.layer = 0, self.layer + 1
        if not had_focus and self._job.result.focused is not None and not self.is_done:
            self._keep([self._job.focused_rows(self.layer - 1, _offsets(pack)) for pack in self._packs])

    def logits(self) -> tuple[list[PrefillJob], jax.Array | None]:
        found: tuple[list[PrefillJob], jax.Array | None] = ([], None)
        for pack in self._packs:  # the last one completes the prompt; others may have logits that the job keeps
            found = pack.logits()
        return found

    # -- inside --------------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Keeps the tokens that deviate most among all of the prompt."""
        job, offsets = self._job, [_offsets(pack) for pack in self._packs]
        deviations = np.concatenate([pack.deviations() for pack in self._packs])
        stays = job.most_deviating(self.layer, np.concatenate(offsets), deviations)
        ends = np.cumsum([0, *map(len, offsets)])
        parts = np.split(stays, np.searchsorted(stays, ends[1:-1]))
        self._keep([part - first for part, first in zip(parts, ends, strict=False)])

    def _keep(self, kept: list[np.ndarray]) -> None:
        """Continues with these rows of each pack, in as few packs as possible."""
        num_rows = sum(map(len, kept))
        if -(-num_rows // self._max_rows) == len(self._packs):
            for pack, rows in zip(self._packs, kept, strict=True):
                pack.keep({pack.pieces[0]: rows})
            return
        offsets = np.concatenate([_offsets(pack)[rows] for pack, rows in zip(self._packs, kept, strict=True)])
        hidden = np.concatenate(
            [jax.device_get(pack.hidden)[rows] for pack, rows in zip(self._packs, kept, strict=True)]
        )
        self._packs = self._packed(offsets, hidden)

    def _packed(self, offsets: np.ndarray, hidden: np.ndarray | None) -> list[Pack]:
        """Packs that run the tokens at these offsets, with these hidden states, from the next layer on."""
        packs, firsts = [], range(0, len(offsets), self._max_rows)
        bounds = [0, *np.searchsorted(self._job.offsets, offsets[list(firsts[1:])]), len(self._job.offsets)]
        for first, begin, end in zip(firsts, bounds[:-1], bounds[1:], strict=True):
            rows = slice(first, first + self._max_rows)
            piece = Piece(self._job, int(begin), int(end))
            piece.offsets = offsets[rows]
            part = None if hidden is None else hidden[rows]
            packs.append(Pack(self._model, self._pool, [piece], loaded=(self._job,), layer=self.layer, hidden=part))
        return packs


def _offsets(pack: Pack) -> np.ndarray:
    """Prompt offsets of the rows of a pack's only piece."""
    return pack.pieces[0].offsets
