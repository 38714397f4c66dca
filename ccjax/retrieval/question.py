"""What a message asks: its own words, without what was pasted beside them, and whether they need the turn before."""

from __future__ import annotations

import re

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
_ASKS = re.compile(r"[?？؟]")


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
