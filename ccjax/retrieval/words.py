"""Words of passages and of questions, for SQLite's full-text index (FTS5)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import regex

from ccjax.retrieval.markdown import BAR

TOKENIZER = "porter unicode61 remove_diacritics 0 categories 'L* M* N* Co'"
"""Letters with their marks, and numbers; marks are parts of words in Hindi and Thai."""
_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff"
    "\U00020000-\U0003ffff]+"
)
"""Scripts that put no blanks between words, and Korean, whose words have many endings."""
_RULE = re.compile(r"\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?")
_OPTIONAL_MARKS = regex.compile(r"(?<=[\p{Latin}\p{Greek}\p{Cyrillic}\p{Arabic}\p{Hebrew}])\p{M}+|\u0640")
_STOP_WORDS = frozenset(
    """a about above after again against all also am an and any are as at be because been before being below between
    both but by can could did do does doing down during each few for from further had has have having he her here hers
    him his how if in into is it its itself just me more most my no nor not now of off on once only or other our out
    over own same she should so some such than that the their them then there these they this those through to too
    under until up very was we were what when where which while who whom whose why will with would you your""".split()
)


def indexed_text(text: str) -> str:
    """The text as it is indexed: folded, and pairs of characters (of which a word of these scripts has at least one) in
    place of text without blanks. Numbers in tables also stand behind the word that heads their column (`quay 52`)."""
    folded = _folded("\n".join([text, *_numbered(text)]))
    return _WITHOUT_BLANKS.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", folded)


def question_terms(text: str) -> list[str]:
    """What to look for, as FTS5 strings: the words of a question, once each, and its compounds (`E-1040`,
    `--context-tokens`) also as a whole. English stop words are left out unless there is nothing else. Behind another
    word, one of them in capitals (`Pump A`) is looked for together with that, and so is a number (`quay 52`)."""
    text = unicodedata.normalize("NFKC", text)
    terms: dict[str, bool] = {}
    before = ""
    for piece in _WITHOUT_BLANKS.sub(lambda run: f" {run[0]} ", text).split():
        if _WITHOUT_BLANKS.match(piece):
            pairs = _pairs(piece)[:-1]
            terms |= dict.fromkeys((f'"{pair}"' for pair in pairs) if pairs else (f'"{piece}"*',), False)
            before = ""
            continue
        written = "".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in piece).split()
        words = _folded(" ".join(written)).split()
        is_single = len(words) == 1 and before.lower() not in {"", *_STOP_WORDS}
        is_letter = is_single and written[0].isupper() and words[0] in _STOP_WORDS and not text.isupper()
        if is_letter or (is_single and words[0].isdecimal()):
            terms[f'"{_folded(before)} {words[0]}"'] = False
        terms |= {f'"{word}"': word in _STOP_WORDS for word in words}
        if len(words) > 1:
            terms[f'"{" ".join(words)}"'] = False
        before = written[-1] if words and piece.endswith(written[-1]) else ""
    return [term for term, is_stop in terms.items() if not is_stop] or list(terms)


def _numbered(text: str) -> Iterator[str]:
    """The whole numbers in Markdown's tables, each behind the first word of its column's header."""
    before: list[str] = []
    header: list[str] = []
    for line in text.split("\n") if "|" in text else ():
        line = line.strip()
        cells = [cell.strip() for cell in BAR.split(line.removeprefix("|").removesuffix("|"))]
        if len(cells) < 2 or _RULE.fullmatch(line):
            header = before if len(cells) > 1 else []
        for name, cell in zip(header, cells, strict=False):
            if name and cell.isdecimal():
                yield f"{name.split()[0]} {cell}"
        before = cells


def _folded(text: str) -> str:
    """Without case, forms (NFKC), and the marks that many leave out: accents, vowels of Arabic and Hebrew."""
    if text.isascii():
        return text.lower()
    parts = unicodedata.normalize("NFKD", text.casefold()).replace("\u0131", "i")
    return unicodedata.normalize("NFKC", _OPTIONAL_MARKS.sub("", parts))


def _pairs(run: str) -> list[str]:
    return [run[start : start + 2] for start in range(len(run))]
