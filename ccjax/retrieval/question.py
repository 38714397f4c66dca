"""What a message asks: its own words, without what was pasted beside them, and whether they need the turn before."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from ccjax.retrieval.embedding import Embedder
from ccjax.retrieval.words import question_terms

_OTHER_SIGNS = re.compile(r"[!-@\[-`{-~]")
"""ASCII digits, punctuation and symbols: 0 to 8 % of the characters of 40 questions, 16 to 39 % of logs and traces."""
_MOST_OTHER_SIGNS = 0.1
_LEAST_TERMS = 5
"""What asks less ("Why do I get this?") is about the rest of the message."""
_LEAST_WORDS = 4
_FOLLOW_UP_TERMS = 6
"""What asks less after another question ("And for decimals?") is about that one. So do 15 of 18 follow-ups, and 4 of
40 questions that follow none."""
_LONG_WORDS = 100
_MOST_WINDOWS = 8
"""Parts of a long question that are embedded: as many from its beginning as from its end."""
_EARLIER_WEIGHT, _EARLIER_WORDS = 0.25, 100
"""Of the vector of the question before a follow-up; its last words, which count once, those of the follow-up twice."""
_USUAL_SHARE = 1 / 2
"""Share of a question's characters in words of the encoder, from which on its vector counts fully, as in 438 of 440
questions in English (0.9 on average); German has 0.28, Thai 0.03, and their vectors mislead."""
_ASKS = re.compile(r"[?？؟]")


@dataclasses.dataclass(frozen=True)
class Question:
    """What is searched for.

    Attributes:
      earlier: the end of the message before, if `text` says too little; else "".
    """

    text: str
    earlier: str

    @classmethod
    def of(cls, message: str, earlier: str) -> Question:
        """The question of a message behind an `earlier` one."""
        text = own_words(message)
        return cls(text, " ".join(own_words(earlier).split()[-_EARLIER_WORDS:]) if is_follow_up(text) else "")

    @property
    def words(self) -> str | list[str]:
        """The texts to search by words."""
        return [self.earlier, self.text, self.text] if self.earlier else self.text

    def weight(self, embedder: Embedder) -> float:
        """How much its vectors say, 0 to 1."""
        return min(1.0, embedder.known_share(self.text) / _USUAL_SHARE)

    def vectors(self, embedder: Embedder, embed: Callable[[Sequence[str]], np.ndarray]) -> np.ndarray:
        """Of each window, float32 [n, dim], by `embed`."""
        windows = embedder.windows(self.text)
        if len(windows) > _MOST_WINDOWS:
            windows = [*windows[: _MOST_WINDOWS // 2], *windows[-_MOST_WINDOWS // 2 :]]
        if not self.earlier:
            return embed(windows)
        *vectors, before = embed([*windows, embedder.windows(self.earlier)[-1]])
        sums = np.stack(vectors) + _EARLIER_WEIGHT * before
        return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)


def own_words(text: str) -> str:
    """The paragraphs of a message that are prose, of many words only those that ask; without any, the lines before and
    after what is not; the whole message if these hardly say anything."""
    blocks = [block for block in re.split(r"\n[^\S\n]*\n", text) if block.strip()]
    own = [block for block in blocks if _is_prose(block)] or [part for block in blocks for part in _edges(block)]
    if len(" ".join(own).split()) > _LONG_WORDS:
        own = [block for block in own if _ASKS.search(block)] or own
    words = "\n".join(own)
    return words if len(question_terms(words)) >= _LEAST_TERMS else text


def is_follow_up(text: str) -> bool:
    """Whether a question behind another one says too little to be searched for alone."""
    return len(question_terms(text)) < _FOLLOW_UP_TERMS


def _edges(block: str) -> list[str]:
    lines = [line for line in block.split("\n") if line.strip()]
    others = [at for at, line in enumerate(lines) if not _is_prose(line) or len(line.split()) < _LEAST_WORDS]
    return ["\n".join(lines[: others[0]]), "\n".join(lines[others[-1] + 1 :])] if others else [block]


def _is_prose(text: str) -> bool:
    return len(_OTHER_SIGNS.findall(text)) <= _MOST_OTHER_SIGNS * len(text) + 2
