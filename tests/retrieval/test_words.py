"""Words that are searched for: compounds, marks, scripts without blanks, endings, stop words."""

from __future__ import annotations

import pytest

from ccjax.retrieval.catalog import IndexedDocument, IndexSettings
from ccjax.retrieval.index import PassageIndex
from ccjax.retrieval.words import indexed_text, question_terms

SETTINGS = IndexSettings("", 0, 200, ())


@pytest.mark.parametrize(
    ("question", "terms"),
    [
        ("What does E-1040 mean?", ['"e"', '"1040"', '"e 1040"', '"mean"']),
        ("use `--context-tokens`!", ['"use"', '"context"', '"tokens"', '"context tokens"']),
        ("who is it", ['"who"', '"is"', '"it"']),  # nothing else
        ("max_file_bytes=3", ['"max"', '"file"', '"bytes"', '"3"', '"max file bytes 3"']),
        ("東京の天気 now", ['"東京"', '"京の"', '"の天"', '"天気"']),
        ("東 or", ['"東"*']),
        ('say "NEAR(a b)" AND *', ['"say"', '"near"', '"near a"', '"b"']),
        ("ﬁne ＦＵＬＬ", ['"fine"', '"full"']),  # NFKC
        ("pressure of Pump A", ['"pressure"', '"pump"', '"pump a"']),
        ("hepatitis A or B?", ['"hepatitis"', '"hepatitis a"', '"b"']),
        ("ask Bureau IT, or the US", ['"ask"', '"bureau"', '"bureau it"', '"us"']),
        ("who owns locker 44 of quay 52", ['"owns"', '"locker"', '"locker 44"', '"44"', '"quay"', '"quay 52"', '"52"']),
        ("of 1999 in 2000", ['"1999"', '"2000"']),
        ("is A Door open", ['"door"', '"open"']),
        ("WHAT IS PUMP A", ['"pump"']),
        ("हिन्दी", ['"हिन्दी"']),
        ("?!", []),
    ],
)
def test_terms_of_a_question(question: str, terms: list[str]) -> None:
    assert question_terms(question) == terms


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("| Quay | Depth (m) |\n|---|---|\n| 52 | 7.4 |\n| 53 | 9 |", "quay 52 quay 53 depth 9"),
        ("Quay no. | Name\n:--|--:\n 52 | a \\| 7\n\n| 3 | 4 |", "quay 52"),
        ("| | Quay |\n|-|-|\n| 1 | 2 | 3 |", "quay 2"),
        ("| Quay |\n|---|\n| 52 |", ""),
        ("a | b\n5 | 6", ""),
    ],
)
def test_numbers_of_a_table_are_indexed_with_the_name_of_their_column(text: str, added: str) -> None:
    assert indexed_text(text).removeprefix(text.lower()).split() == added.split()


def test_text_without_blanks_is_indexed_in_pairs() -> None:
    assert indexed_text("a 東京都 b").split() == ["a", "東京", "京都", "都", "b"]


TEXTS = {
    "en": "Opening hours of the swimming pools",
    "de": "Die Öffnungszeiten der Übungshalle",
    "hi": "यह हिन्दी की किताब है",
    "th": "ห้องสมุดปิดวันจันทร์",
    "zh": "图书馆星期一关门",
    "ja": "図書館は月曜日に閉まります",
    "ko": "도서관은 월요일에 문을 닫습니다",
    "ar": "كَتَبَ الطَّالِبُ الدَّرْسَ",
    "he": "שָׁלוֹם עוֹלָם",
    "tr": "IĞDIR ilinde ılık hava",
    "el": "Η ΑΘΉΝΑ είναι πρωτεύουσα",
    "ch": "Der Fußgänger auf der Straße",
    "ru": "Ёлка стоит в зале",
    "code": "Set --context-tokens or max_file_bytes, see E-1040.",
    "other": "Nothing of the kind, E-1041 and tokens of a context.",
}


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("When is the pool open?", "en"),
        ("offnungszeiten", "de"),
        ("U\u0308bungshalle", "de"),  # NFD
        ("किताब", "hi"),
        ("วันจันทร์", "th"),
        ("星期一", "zh"),
        ("関 月曜", "ja"),
        ("월요일", "ko"),
        ("الطالب", "ar"),
        ("שלום", "he"),
        ("Iğdır", "tr"),
        ("αθηνα", "el"),
        ("FUSSGANGER", "ch"),
        ("елка", "ru"),
        ("what is E-1040", "code"),
        ("--context-tokens", "code"),
        ("MAX_FILE_BYTES", "code"),
    ],
)
def test_words_of_many_scripts_are_found(question: str, wanted: str) -> None:
    index = PassageIndex(None, SETTINGS)
    index.write([IndexedDocument(name, "", "v", (text,)) for name, text in TEXTS.items()])
    assert index.search(question, None, 1)[0].document_id == wanted


@pytest.mark.parametrize("question", ['"', "' OR 1", "NEAR(", "a*", "text:x", "^", "\x00", "(((", "x AND", "-- ;"])
def test_no_question_is_read_as_a_query(question: str) -> None:
    index = PassageIndex(None, SETTINGS)
    index.write([IndexedDocument("d", "", "v", ("x or and near",))])
    assert len(index.search(question, None, 3)) <= 1
