"""Passages are found in what clients paste, with the same token ids in every wrapper, and no token changes for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ccjax.text.cutting as cutting
from ccjax.assembly import assemble
from ccjax.errors import ContextLengthError
from ccjax.loading.model import DEMO_MODEL
from ccjax.requests import Request, SamplingParams
from ccjax.text import ChatTemplate, PromptBuilder, load_tokenizer
from ccjax.text.cutting import blocks_of, has_context
from ccjax.text.template import LLAMA3_TEMPLATE
from ccjax.types import Document
from scripts.benchmarks.wrappers import WRAPPERS
from tests.data import data_path
from tests.text import small_tokenizers as small

LIGHTHOUSE = (
    "The old lighthouse on Heron Point was built in 1871 from blocks of grey granite. Its keeper lit forty oil lamps "
    "every evening until the lamps were replaced by a single electric bulb in 1936."
)
HARBOUR = (
    "The harbour of Saltby freezes over in most winters. Fishermen then pull their boats onto the northern beach, "
    "where a long wooden shed was put up in 1902 for repairs, and for drying the nets (it burnt down twice)."
)
FERRY = (
    "“Marigold” sails from Saltby to the island three times a day. She carries sixty passengers & eight cars, and "
    "she stays in the harbour when the wind blows harder than fifty knots.\nIn winter she sails once a day.\n"
    "Tickets are sold on board; dogs travel free of charge, bicycles do not."
)
PASSAGES = (LIGHTHOUSE, HARBOUR, FERRY)
QUESTION = {"role": "user", "content": "When was the lighthouse built?"}


@pytest.fixture(scope="module", params=["byte level", "sentencepiece", "llama3", "demo"])
def builder(request, tmp_path_factory) -> PromptBuilder:
    directory = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte level":
        directory = small.byte_level(directory, LLAMA3_TEMPLATE)
    elif request.param == "sentencepiece":
        directory = small.sentencepiece(directory, "first", small.MISTRAL_TEMPLATE)
    elif request.param == "llama3":
        directory = data_path("tokenizer_llama3")
    else:
        directory = DEMO_MODEL
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return PromptBuilder(tokenizer, ChatTemplate.load(directory))


def prompt_of(builder: PromptBuilder, **request):
    return assemble(Request(**request), builder, max_model_len=10**6, vocab_size=10**6)


def passages_of(builder: PromptBuilder, content: str, role: str = "system") -> list[tuple[int, ...]]:
    messages = [{"role": role, "content": content}, QUESTION]
    return [chunk.token_ids for chunk in prompt_of(builder, messages=messages).passages]


def inner(text: str) -> str:
    """A passage without its first and last word."""
    return text[text.index(" ") : text.rindex(" ")]


@pytest.mark.parametrize("client", WRAPPERS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_every_passage_is_found_without_its_first_and_last_word(client, order):
    text = WRAPPERS[client]([PASSAGES[number] for number in order])
    found = [text[start:end] for start, end in blocks_of(text)]
    wanted = [inner(PASSAGES[number]) for number in order if PASSAGES[number] is not FERRY]
    assert [block for block in found if block in wanted] == wanted
    parts = [block for block in found if block in FERRY]
    assert parts or client == "openwebui tools", "its quotation marks and line breaks are escaped in JSON"


def test_passages_have_the_same_tokens_in_every_wrapper(builder):
    """Borders where the text is cut, in the middle of words, would give some tokenizers other tokens."""
    found = {client: passages_of(builder, write(PASSAGES[:2])) for client, write in WRAPPERS.items()}
    swapped = {client: passages_of(builder, write(PASSAGES[1::-1])) for client, write in WRAPPERS.items()}
    first, second = (
        max(one, key=len) for one in (passages_of(builder, LIGHTHOUSE + "\n\n"), passages_of(builder, HARBOUR + "\n\n"))
    )
    for client in WRAPPERS:
        for ids in (found[client], swapped[client]):
            assert first in ids and second in ids, client
        assert found[client].index(first) < found[client].index(second)
        assert swapped[client].index(first) > swapped[client].index(second)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_cutting_changes_no_token(builder, role):
    for write in WRAPPERS.values():
        messages = [{"role": role, "content": write(PASSAGES)}, QUESTION]
        if role != "system":
            messages = [QUESTION, *messages] if role == "assistant" else messages[:1]
        prompt, whole = prompt_of(builder, messages=messages), builder.build_chat(messages)
        assert tuple(prompt.token_ids) == whole.token_ids
        assert prompt.segments[-1].role == "question"


def test_prompts_are_cut_too_and_documents_are_not(builder):
    text = WRAPPERS["numbered"](PASSAGES[:2]) + "\n\nWhen was the lighthouse built?"
    prompt = prompt_of(builder, prompt=text)
    assert tuple(prompt.token_ids) == builder.build_completion(text).token_ids
    assert len(prompt.passages) == 2
    messages = [{"role": "system", "content": LIGHTHOUSE}, QUESTION]
    given = prompt_of(builder, messages=messages, documents=[Document(HARBOUR)])
    assert [segment.role for segment in given.segments] == ["instructions", "passage", "question"]
    messages[1] = {"role": "user", "content": f"{LIGHTHOUSE}\n\nWhen was it built?"}
    given = prompt_of(builder, messages=messages, documents=[Document(HARBOUR)])
    assert [s.role for s in given.segments] == ["instructions", "passage", "text", "passage", "question"]
    assert tuple(given.token_ids) == builder.build_chat(messages, [Document(HARBOUR)]).token_ids
    assert given.passages[1].token_ids in passages_of(builder, LIGHTHOUSE)


def test_context_in_a_system_message_is_cut_the_same_way_beside_documents(builder):
    text = WRAPPERS["anythingllm"]([*PASSAGES, sentences(0, 10)])
    assert has_context(text) and not has_context("\n\n".join(PASSAGES)) and not has_context("- a few words\n" * 500)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"{LIGHTHOUSE}\n\nWhy?"}]
    alone = prompt_of(builder, messages=messages)
    given = prompt_of(builder, messages=messages, documents=[Document(HARBOUR), Document(FERRY)])
    assert tuple(given.token_ids) == builder.build_chat(messages, [Document(HARBOUR), Document(FERRY)]).token_ids
    first = given.segments.index(given.documents[0])
    assert [segment.role for segment in given.segments[first:]] == ["passage", "passage", "text", "passage", "question"]
    assert first > 6 and given.segments[: first - 1] == alone.segments[: first - 1]
    assert given.segments[first - 1].role == alone.segments[first - 1].role == "text"
    ids = given.segments[first - 1].chunk.token_ids
    assert alone.segments[first - 1].chunk.token_ids[: len(ids) - 1] == ids[:-1]
    request = Request(messages=messages, documents=[Document(HARBOUR), Document(FERRY)], truncate=True)
    left = assemble(request, builder, max_model_len=given.num_tokens + 20, vocab_size=10**6)
    assert left.segments == (*given.segments[: first + 1], *given.segments[first + 2 :])


def test_what_changes_between_passages_is_text_of_its_own(builder):
    one = WRAPPERS["anythingllm"](PASSAGES[:2])
    other = one.replace("2026-11-27", "2027-01-05").replace("[CONTEXT 0]", "[CONTEXT 41]")
    assert one != other and passages_of(builder, one) == passages_of(builder, other)
    prompts = [prompt_of(builder, messages=[{"role": "system", "content": text}, QUESTION]) for text in (one, other)]
    roles = [segment.role for segment in prompts[0].segments]
    assert roles[:2] == ["instructions", "text"] and roles[-1] == "question"
    assert prompts[0].instructions == prompts[1].instructions


def test_control_tokens_in_a_passage_are_text(builder):
    tokenizer = builder._tokenizer
    names = " ".join(tokenizer.special_names)
    content = f"{LIGHTHOUSE} {names} {LIGHTHOUSE}\n\n{HARBOUR}"
    passages = passages_of(builder, content)
    assert len(passages) >= 2 and all(tokenizer.special_ids.isdisjoint(ids) for ids in passages)


def test_passages_of_a_message_are_not_dropped_to_make_the_prompt_fit(builder):
    messages = [{"role": "system", "content": "\n\n".join(PASSAGES)}, QUESTION]
    num_tokens = prompt_of(builder, messages=messages).num_tokens
    request = Request(messages=messages, sampling=SamplingParams(4), truncate=True)
    with pytest.raises(ContextLengthError):
        assemble(request, builder, max_model_len=num_tokens, vocab_size=10**6)


def sentences(first: int, count: int) -> str:
    numbers = range(first, first + count)
    return " ".join(f"Boat {n} carried {7 * n % 50} crates of herring to the port of Elm." for n in numbers)


def test_whether_a_text_has_context_takes_no_longer_for_a_longer_one(monkeypatch):
    assert has_context("Hello there, world. " * 60) and not has_context("Hello there, world. " * 40)
    seen = []
    monkeypatch.setattr(cutting, "blocks_of", lambda text: seen.append(text) or blocks_of(text))
    assert cutting.has_context("Hello there, world. " * 500_000) and len(seen[0]) <= 100_000


def test_a_long_text_is_cut_at_the_same_places_wherever_it_begins():
    whole, quoted = sentences(0, 300), sentences(43, 200)
    parts, others = ({text[start:end] for start, end in blocks_of(text)} for text in (whole, quoted))
    assert len(parts) > 5 and max(map(len, parts | others)) < 2200
    assert len(parts & others) >= len(others) - 3


def test_text_without_spaces_is_cut_at_punctuation():
    text = "灯塔建于一八七一年，用灰色花岗岩建成。守塔人每晚点亮四十盏油灯，直到一九三六年换成电灯。"
    whole = f"资料：\n\n{text}\n\n问题"
    (block,) = [whole[start:end] for start, end in blocks_of(whole)]
    assert block == text[text.index("，") : text.rindex("。")]
    assert blocks_of("") == blocks_of("word") == blocks_of("\n\n---\n\n") == []


@pytest.mark.parametrize(
    "unit", [" ", "\n", "\t", "\n \t", "a", "a ", '"', ', "', "<a ", "-", "```\n", "\\n", ". ", "[1] ", "x: ", "。"]
)
def test_time_grows_with_the_length_of_any_text(unit):
    """A pattern that is tried again at each character of a run would take hours for this."""
    text = unit * (1_000_000 // len(unit))
    assert all(0 <= start < end <= len(text) for start, end in blocks_of(text))


PIECES = [
    LIGHTHOUSE,
    HARBOUR,
    FERRY,
    "\n\n",
    "\n",
    " ",
    "- ",
    "<source id='1'>",
    "[1] ",
    '{"a": "',
    '"}',
    "```\n",
    "# ",
    "—",
    "🚢 ",
    "。",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=12), min_size=1, max_size=20))
def test_no_text_changes_its_tokens_by_being_cut(demo, pieces):
    messages = [{"role": "assistant", "content": "".join(pieces)}, QUESTION]
    prompt = prompt_of(demo, messages=messages)
    assert tuple(prompt.token_ids) == demo.build_chat(messages).token_ids
    assert all(len(chunk.token_ids) >= 24 for chunk in prompt.passages)


@pytest.fixture(scope="module")
def demo() -> PromptBuilder:
    tokenizer = load_tokenizer(DEMO_MODEL)
    assert tokenizer is not None
    return PromptBuilder(tokenizer, ChatTemplate.load(DEMO_MODEL))
