"""How the pieces of a pack run: in one pass or two, in one pack or several."""

from __future__ import annotations

from collections.abc import Sequence

from ccjax.runner.device_model import DeviceModel
from ccjax.runner.job import PrefillJob
from ccjax.runner.pack import Pack, Piece, Prefilling
from ccjax.runner.pool import DevicePool
from ccjax.runner.question_first import QuestionFirst, asks_first
from ccjax.runner.split_prompt import SplitPrompt


def pack_pieces(model: DeviceModel, pool: DevicePool, pieces: Sequence[Piece], *, max_rows: int) -> Prefilling:
    """What runs these pieces: first the questions whose attention chooses tokens, then a pack, or several for a prompt
    of more than `max_rows` tokens.

    Args:
      pieces: of `max_rows` tokens at most; or a single one, a whole prompt that drops tokens on the way.
    """

    def last_pass(pieces: Sequence[Piece], loaded: Sequence[PrefillJob] = ()) -> Prefilling:
        if len(pieces[0].offsets) <= max_rows:
            return Pack(model, pool, pieces, loaded=loaded)
        (piece,) = pieces
        return SplitPrompt(model, pool, piece.job, max_rows=max_rows, is_loaded=piece.job in loaded)

    if any(asks_first(piece) for piece in pieces):
        return QuestionFirst(model, pool, pieces, last_pass)
    return last_pass(pieces)
