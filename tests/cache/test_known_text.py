"""The index of known text against comparing everything with everything, and on text made to slow it down."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ccjax.cache import known_text
from ccjax.cache.known_text import LEAST_KNOWN, KnownText
from ccjax.prompts import chunk_id, tenant_tag
from ccjax.types import ChunkId, ChunkSlice, KnownSlice

VOCABULARY = 5000


def drawn(random: np.random.Generator, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    return random.integers(0, vocabulary, count).tolist()


def index_of(*texts: list[int], tenant: str = "") -> KnownText:
    index = KnownText()
    for ids in texts:
        index.add(chunk_id(ids, tenant), ids)
    return index


def whole(text: list[int]) -> KnownSlice:
    return KnownSlice(0, len(text), ChunkSlice(chunk_id(text), 0))


def common_runs(prompt: list[int], texts: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """(start, end, text, offset) of every longest possible run of equal tokens."""
    found = []
    for number, text in enumerate(texts):
        for shift in range(-len(prompt) + 1, len(text)):
            run = 0
            first = max(0, -shift)
            last = min(len(prompt), len(text) - shift)
            for at in range(first, last + 1):
                if at < last and prompt[at] == text[at + shift]:
                    run += 1
                    continue
                if run >= LEAST_KNOWN:
                    found.append((at - run, at, number, at - run + shift))
                run = 0
    return found


def longest_first(prompt: list[int], texts: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """The definition of `find`, slowly."""
    left, taken = common_runs(prompt, texts), []
    while left:
        left.sort(key=lambda run: (run[0] - run[1], run[3] != 0, run[2], run[0]))
        start, end, number, offset = left.pop(0)
        taken.append((start, end, number, offset))
        cut = []
        for first, last, other, place in left:
            for begin, stop in ((first, min(last, start)), (max(first, end), last)):
                if stop - begin >= LEAST_KNOWN and (begin, stop) not in [run[:2] for run in cut if run[2] == other]:
                    cut.append((begin, stop, other, place + begin - first))
        left = cut
    return sorted(taken)


def as_found(found: list[KnownSlice], texts: list[list[int]]) -> list[tuple[int, int, int, int]]:
    ids = [chunk_id(text) for text in texts]
    return [(run.start, run.end, ids.index(run.source.chunk_id), run.source.offset) for run in found]


@pytest.mark.parametrize("seed", range(12))
def test_finds_what_comparing_everything_finds(seed):
    random = np.random.default_rng(seed)
    texts = [drawn(random, int(random.integers(10, 120))) for _ in range(12)]
    texts.append(texts[3][20:] + texts[4][:60])  # overlaps two others
    prompt: list[int] = []
    for _ in range(8):
        text = texts[int(random.integers(len(texts)))]
        start = int(random.integers(len(text)))
        prompt += text[start : start + int(random.integers(1, 120))] + drawn(random, int(random.integers(0, 30)))
    if random.integers(2):
        prompt[len(prompt) // 2] = VOCABULARY  # an edit
    found = as_found(index_of(*texts).find(prompt), texts)
    assert found == longest_first(prompt, texts)
    assert found or seed, "the first seed has known text"


@pytest.mark.parametrize("length", [LEAST_KNOWN, LEAST_KNOWN + 1, 60])
def test_every_run_of_the_least_length_is_found_wherever_it_stands(length):
    random = np.random.default_rng(length)
    text = drawn(random, 200)
    index = index_of(drawn(random, 100), text, drawn(random, 100))
    for offset in range(0, 200 - length, 7):
        before = drawn(random, offset % 40)
        prompt = before + text[offset : offset + length] + drawn(random, 9)
        (run,) = index.find(prompt)
        # A token before or behind it may be the same by chance, so it is at least that long.
        assert run.source.chunk_id == chunk_id(text) and run.start <= len(before) and run.end >= len(before) + length
        assert text[run.source.offset : run.source.offset + run.end - run.start] == prompt[run.start : run.end]
    assert not index.find(drawn(random, 30) + text[50 : 50 + LEAST_KNOWN - 1] + drawn(random, 30))


def test_too_short_texts_and_prompts_have_no_runs():
    random = np.random.default_rng(0)
    text = drawn(random, LEAST_KNOWN)
    index = index_of(text, text[1:])
    assert len(index) == 1 and chunk_id(text[1:]) not in index
    assert [run.end - run.start for run in index.find(text)] == [LEAST_KNOWN]
    assert index.find(text[:-1]) == [] == index.find([]) and KnownText().find(text) == []


def test_the_beginning_of_a_chunk_is_preferred_to_the_same_text_inside_another():
    random = np.random.default_rng(1)
    head, text = drawn(random, 40), drawn(random, 80)
    index = index_of(head + text, text)
    (run,) = index.find(drawn(random, 10) + text + drawn(random, 10))
    assert (run.source.chunk_id, run.source.offset) == (chunk_id(text), 0)


def test_known_text_is_found_when_it_was_added_in_many_steps():
    random = np.random.default_rng(2)
    index, texts = KnownText(), []
    for _ in range(400):
        texts.append(drawn(random, 50))
        index.add(chunk_id(texts[-1]), texts[-1])
        index.add(chunk_id(texts[-1]), texts[-1])  # once more changes nothing
        (run,) = index.find(texts[int(random.integers(len(texts)))])
        assert run.end - run.start == 50
    assert len(index) == 400 and len(index._runs) <= 4
    for text in texts:
        assert index.find(text) == [whole(text)]


def test_removed_chunks_are_not_found_and_their_tokens_and_memory_go():
    random = np.random.default_rng(3)
    texts = [drawn(random, 60) for _ in range(100)]
    index = index_of(*texts)
    before = index.nbytes
    for number in random.permutation(100)[:80].tolist():
        index.remove(chunk_id(texts[number]))
        assert index.find(texts[number]) == [] and chunk_id(texts[number]) not in index
        assert not np.isin(texts[number], index._tokens[: index._num_tokens]).all()
        texts[number] = []
    index.remove(ChunkId("unknown"))
    for text in filter(None, texts):
        assert index.find(text) == [whole(text)]
    assert len(index) == 20 and index.nbytes < 0.5 * before


def test_a_removed_chunk_may_come_back():
    text = drawn(np.random.default_rng(4), 60)
    index = index_of(text)
    index.remove(chunk_id(text))
    assert index.find(text) == []
    index.add(chunk_id(text), text)
    assert index.find(text) == [whole(text)]


def test_tenants_do_not_find_each_others_text():
    text = drawn(np.random.default_rng(5), 60)
    tenants = ["", tenant_tag("a"), tenant_tag("b")]
    index = index_of(text, tenant=tenants[1])
    assert [len(index.find(text, tenant)) for tenant in tenants] == [0, 1, 0]
    index.add(chunk_id(text), text)
    for tenant, own in ((tenants[0], chunk_id(text)), (tenants[1], chunk_id(text, tenants[1]))):
        assert [run.source.chunk_id for run in index.find(text, tenant)] == [own]


def test_tenants_are_kept_apart_even_if_all_their_anchors_collide(monkeypatch):
    monkeypatch.setattr(known_text, "_salt", lambda tenant: 0)
    text = drawn(np.random.default_rng(6), 60)
    assert index_of(text, tenant=tenant_tag("a")).find(text) == []


REPEATS = {
    "one token": [7] * 4000,
    "a short period": list(range(5)) * 800,
    "a period of the window": list(range(12)) * 330,
    "lines that repeat": [*range(100, 140), *range(60)] * 40,
    "few tokens": np.random.default_rng(7).integers(0, 2, 4000).tolist(),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repetitive_text_costs_little_and_what_is_found_is_there(name):
    text = REPEATS[name]
    chunks = [text[at : at + 200] for at in range(0, 3800, 10)]
    index = index_of(*chunks)
    assert index.nbytes < 8 * 200 * len(index)
    ids = {chunk_id(chunk): chunk for chunk in chunks}
    prompt = text + [VOCABULARY] + text
    started = time.thread_time()
    found = index.find(prompt)
    assert time.thread_time() - started < 1.0  # measured: 0.1
    assert found
    for run, following in zip(found, [*found[1:], None], strict=True):
        chunk = ids[run.source.chunk_id]
        length = run.end - run.start
        assert length >= LEAST_KNOWN
        assert chunk[run.source.offset : run.source.offset + length] == prompt[run.start : run.end]
        assert following is None or run.end <= following.start


def test_text_that_every_chunk_has_keeps_few_anchors():
    random = np.random.default_rng(8)
    header = drawn(random, 60)
    texts = [header + drawn(random, 60) for _ in range(300)]
    index = index_of(*texts)
    prompt = drawn(random, 20) + header + drawn(random, 20)
    (run,) = index.find(prompt)
    assert (run.start, run.end, run.source.offset) == (20, 80, 0)
    for text in texts[::30]:
        assert index.find(text) == [whole(text)]
