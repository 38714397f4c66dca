"""Runs of tokens: what is stored of prompts and answers, and what another prompt finds of it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from ccjax.cache.chunk_tokens import ChunkTokens
from ccjax.cache.prefix_runs import PrefixRuns, is_run
from ccjax.cache.run_capture import KVOrigin, RunCapture, _pieces
from ccjax.prompts import Prompt, as_chunk
from ccjax.runner.pool import PAGE_TOKENS
from ccjax.types import ChunkId, Segment, VariantMeta


class Paged:
    """KV of tokens, each of one number: its id."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots, self.num_bytes = slots, slots.nbytes

    def part(self, first: int, last: int) -> Paged:
        return Paged(self.slots[first:last])


class Index:
    """An index of variants with nothing but its runs. `kv[variant]` is what was stored."""

    def __init__(self) -> None:
        self.tokens = ChunkTokens()
        self.runs = PrefixRuns(self.tokens)
        self.kv: dict[str, np.ndarray] = {}
        self.metas: dict[str, VariantMeta] = {}

    def add(self, meta, kv, prompt, *, pinned, seen, erasures) -> bool:
        assert is_run(meta)
        assert meta.variant_id not in self.metas
        self.metas[meta.variant_id], self.kv[meta.variant_id] = meta, kv.slots
        self.tokens.hold(meta)
        for chunk in prompt.chunks:
            self.tokens.learn(chunk.chunk_id, chunk.token_ids)
        self.runs.note(meta)
        return True

    def drop(self, variant_id: str) -> None:
        meta = self.metas.pop(variant_id)
        self.runs.forget(meta)
        self.tokens.release(meta)

    def keep(
        self, prompt: list[int], answer: list[int] = (), *, num_exact: int | None = None, tenant: str = ""
    ) -> None:
        segments = (Segment("question", as_chunk(tuple(prompt), None, tenant)),)
        ids = np.asarray([*prompt, *answer])
        kv = Paged(ids[: len(prompt) + max(0, len(answer) - 1)])
        exact = len(prompt) if num_exact is None else num_exact
        RunCapture(self).keep(Prompt(segments, 8), list(answer), kv, KVOrigin(exact, frozenset()))

    def found(self, prompt: list[int], mode="bounded", tenant: str = "") -> int:
        """How many of a prompt's first tokens are found; checks that the KV found is theirs."""
        segments = (Segment("question", as_chunk(tuple(prompt), None, tenant)),)
        cut = self.runs.cut(Prompt(segments, 8), mode)
        start = 0
        for run, segment in zip(cut.runs, cut.prompt.segments, strict=False):
            own = self.kv[run.meta.variant_id][: run.num_tokens]
            assert own.tolist() == prompt[start : start + run.num_tokens] == list(segment.chunk.token_ids)
            assert run.meta.start == start
            start += run.num_tokens
        assert tuple(cut.prompt.token_ids.tolist()) == tuple(prompt)
        return start


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_second_turn_finds_prompt_and_answer_of_the_first() -> None:
    index, prompt, answer = Index(), text(1, 700), text(2, 40)
    index.keep(prompt, answer)
    assert index.found([*prompt, *answer, *text(3, 50)]) == 739
    assert index.found([*prompt, *answer, *text(3, 50)], "exact") == 699
    assert {meta.roles[-1] for meta in index.metas.values()} == {"text", "answer"}
    index.keep([*prompt, *answer, *text(3, 50)], text(4, 20))
    assert index.found([*prompt, *answer, *text(3, 50), *text(4, 20), 1, 2]) == 700 + 40 + 50 + 19
    assert sum(meta.num_tokens for meta in index.metas.values()) == 700 + 40 + 50 + 19


@pytest.mark.parametrize("common", [16, 17, 31, 100, 511, 512, 600])
def test_prompts_share_what_they_begin_with_token_by_token(common: int) -> None:
    index, shared = Index(), text(1, common)
    index.keep([*shared, 1000, *text(2, 300)])
    assert index.found([*shared, 1001, *text(3, 300)]) == common
    index.keep([*shared, 1001, *text(3, 300)])
    assert index.found([*shared, 1001, *text(3, 300), 5, 6]) == common + 300
    assert index.found([*shared, 1000, *text(2, 300), 5, 6]) == common + 300
    assert index.found([*shared, 1002, *text(4, 300)]) == common


def test_less_than_a_page_is_not_found_and_the_last_token_is_always_left() -> None:
    index = Index()
    index.keep(text(1, 100))
    assert index.found([*text(1, 100)[:15], *text(2, 100)]) == 0
    assert index.found(text(1, 100)) == 99
    assert index.found(text(1, 100)[:17]) == 16


def test_prompt_with_approximate_kv_is_found_as_a_whole_or_up_to_its_exact_part() -> None:
    index, prompt, answer = Index(), text(1, 300), text(2, 30)
    index.keep(prompt, answer, num_exact=120)
    assert index.found([*prompt[:-2], *text(3, 9)]) == 120
    assert index.found([*prompt, *answer, *text(3, 9)]) == 329
    assert index.found([*prompt, *answer[:20], *text(3, 9)]) == 320
    assert index.found(prompt) == 299
    assert index.found([*prompt, *answer], "exact") == 120
    index.keep(prompt, answer)  # as mode exact computes it
    assert index.found([*prompt, *answer], "exact") == 299
    assert index.found([*prompt[:-2], *text(3, 9)]) == 298


def test_evicted_runs_are_not_found_and_leave_nothing_behind() -> None:
    index = Index()
    for seed in range(8):
        index.keep([*text(0, 64), *text(seed + 1, 200)], text(seed + 20, 40), num_exact=264 if seed % 2 else 100)
    for variant_id in tuple(index.metas):
        index.drop(variant_id)
    assert index.found([*text(0, 64), *text(1, 200)]) == 0
    assert not index.runs._by_page and not index.runs._by_end and not index.runs._held and not index.tokens.known()


def test_tenants_find_only_their_own() -> None:
    index, a, b = Index(), "a" * 32, "b" * 32
    index.keep(text(1, 100), tenant=a)
    assert (index.found(text(1, 100), tenant=a), index.found(text(1, 100), tenant=b), index.found(text(1, 100))) == (
        99,
        0,
        0,
    )


def test_random_conversations_find_what_any_earlier_one_shares() -> None:
    draw, index, stored = random.Random(5), Index(), list[list[int]]()
    for _ in range(150):
        prompt = list(draw.choice(stored))[: draw.randrange(400)] if stored and draw.random() < 0.8 else []
        prompt += draw.choices(range(50), k=draw.randrange(1, 200))
        shared = max((_common(prompt[:-1], other) for other in stored), default=0)
        found = index.found(prompt)
        assert found <= shared
        assert found > shared - PAGE_TOKENS  # what is shorter than a page at the end of a run may be missing
        answer = draw.choices(range(50), k=draw.randrange(1, 60))
        index.keep(prompt, answer)
        stored.append([*prompt, *answer[:-1]])


def _common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize(
    ("start", "exact", "prompt", "end", "wanted"),
    [
        (0, 100, 99, 120, [(0, 99, "text"), (99, 120, "answer")]),
        (0, 1200, 1199, 1205, [(0, 512, "text"), (512, 1024, "text"), (1024, 1199, "text")]),
        (0, 520, 519, 540, [(0, 519, "text"), (519, 540, "answer")]),
        (0, 8, 99, 120, [(0, 99, "text"), (99, 120, "answer")]),
        (0, 40, 99, 105, [(0, 40, "text"), (40, 99, "text")]),
        (99, 200, 110, 150, [(99, 150, "answer")]),
        (120, 100, 110, 150, [(120, 150, "answer")]),
        (0, 10, 10, 12, []),
    ],
)
def test_pieces_end_where_exact_kv_and_the_prompt_end(start, exact, prompt, end, wanted) -> None:
    assert list(_pieces(start, exact, prompt, end)) == wanted


def test_only_text_behind_everything_before_it_is_a_run() -> None:
    index = Index()
    index.keep(text(1, 600))
    meta = next(iter(index.metas.values()))
    assert is_run(meta)
    assert not is_run(dataclasses.replace(meta, roles=("passage",)))
    assert not is_run(dataclasses.replace(meta, roles=("instructions", "text"), prefix_ids=(ChunkId("a"),)))
