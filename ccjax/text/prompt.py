"""Token ids of a prompt as [system][document]...[question].

Documents are at the start of the first user turn, so that system prompt and documents remain one unchanged prefix
during a conversation, and each is tokenized on its own, so that its ids never depend on what surrounds it. Without
documents the ids are those of the whole text as the template renders it, as with transformers' `apply_chat_template`,
except that contents never yield control tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ccjax.text.chat import (
    Form,
    Message,
    checked_messages,
    checked_tools,
    hidden_messages,
    hidden_tools,
    in_text,
)
from ccjax.text.cutting import blocks_of, has_context
from ccjax.text.placeholders import HiddenTexts, Part, Piece, pieces_of
from ccjax.text.template import ChatTemplate, TemplateRejectedError
from ccjax.text.tokenizer import Follows, Tokenizer
from ccjax.text.tool_calls import CallForm, call_form
from ccjax.types import Document, Rendering

_TAG, _WORD = re.compile(r"<[^<>]*>"), re.compile(r"\w+")
LEAST_BLOCK = 24
"""Tokens of the shortest passage that is looked for in a content."""
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "bos_token", "eos_token")
"""Variables of templates that are given anyway."""
_AS_A_CHAT = Rendering()
SYSTEM_PROMPT = "Answer the question from the passages."
_Parts = list[Part]


@dataclasses.dataclass(frozen=True)
class PromptParts:
    """Token ids by segment, in prompt order."""

    system: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    borders: tuple[int, ...] = ()
    """Offsets in the question at which a message, or a part of a message's content, begins."""
    num_opening: int = 0
    """Number of tokens before the first content: what every prompt begins with."""
    asking: tuple[int, int] = (0, 0)
    """First and last token (exclusive) of the last content, in `system` and `question` together, unless somebody else
    than the user said it or there are documents."""
    blocks: tuple[tuple[int, int], ...] = ()
    """First and last token (exclusive) of each passage that a content has, in `system` and `question` together; beside
    documents those in `system` only if it has retrieved context."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt."""
        return self.system + tuple(token_id for ids in self.documents for token_id in ids) + self.question


class PromptBuilder:
    """Builds `PromptParts` from chats or plain prompts; stateless."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system_prompt: str | None = None,
    ):
        """Args:
        system_prompt: used if the messages have none; "" for none at all. None for `SYSTEM_PROMPT` beside documents,
          and none without.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._system_prompt = system_prompt if system_prompt is None else system_prompt.strip()
        names = {token_id: name for name, token_id in tokenizer.special_names.items()}
        self._special_tokens = {
            "bos_token": "" if tokenizer.bos_id is None else names.get(tokenizer.bos_id, ""),
            "eos_token": next((names[token_id] for token_id in sorted(tokenizer.eos_ids) if token_id in names), ""),
        }

    @property
    def call_form(self) -> CallForm:
        """The form in which the model is expected to call tools."""
        return call_form(self._template)

    def build_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Document] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        rendering: Rendering = _AS_A_CHAT,
    ) -> PromptParts:
        """Ids of a chat up to the start of the assistant's answer.

        Args:
          messages: `{"role", "content"}` as in the OpenAI API; content is a string or a list of text parts, each on a
            line of its own, or None beside `tool_calls`. Beside documents, leading and trailing white space of contents
            is dropped.
          rendering: whether the answer begins, or the last message goes on.
          tools: definitions as in the OpenAI API. If the template knows nothing of tools, they are written into the
            system message, and calls and results into messages of assistant and user.

        Raises:
          ValueError: a message or tool is malformed, there is no user message, or the template refuses; names
            `messages[i]` or `tools[i]`.
        """
        chat, tools = checked_messages(messages), checked_tools(tools)
        self._check_rendering(rendering, chat[-1])
        if documents:
            chat = [message.stripped() for message in chat]
        system_prompt = self._system_prompt
        if system_prompt is None:
            system_prompt = SYSTEM_PROMPT if documents else ""
        if system_prompt and not any(message.role == "system" for message in chat):
            chat.insert(0, Message("system", (system_prompt,)))
        if not self._template.takes_tools:
            chat, tools = in_text(chat, tools), []
        head, rest = self._split_chat(chat, tools, rendering, moves_system=not documents)
        # A space before the first user text belongs to its first word: "[INST] Hello" has a token " Hello".
        if head and head[-1].trusted:
            text = head[-1].text
            head[-1] = Part(text.rstrip(" "))
            rest.insert(0, Part(" " * (len(text) - len(head[-1].text))))
        if documents:
            return self._with_documents(head, documents, rest)
        return self._whole(head, rest, is_asked=chat[-1].role == "user")

    def build_completion(self, prompt: str, documents: Sequence[Document] = ()) -> PromptParts:
        """Ids of bos, the documents and `prompt` verbatim, without a template.

        Raises:
          ValueError: `prompt` is not a string or is blank.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompt: wanted a non-empty string, got {prompt!r}")
        head, rest = [Part(self._special_tokens["bos_token"])], [Part(prompt, trusted=False, is_content=True)]
        if documents:
            return self._with_documents(head, documents, rest)
        return self._whole(head, rest, is_asked=True)

    def says_more_than(self, num_words: int, token_ids: Sequence[int]) -> bool:
        """True if a text has more words, besides tags."""
        return len(_WORD.findall(_TAG.sub(" ", self._tokenizer.decode(token_ids)))) > num_words

    def least_tokens(self, value: Any) -> int:
        """A number of tokens that the texts in a JSON value have at least, known without tokenizing them."""
        longest = self._tokenizer.longest_token
        return 0 if longest is None else sum(len(text.strip()) // longest for text in _strings(value))

    def document_ids(self, document: Document) -> tuple[int, ...]:
        """Ids of one document, independent of its place in the prompt; never a control token. The title is in front,
        unless the text's first line begins with it, alone or followed by ` > ` and a heading."""
        title, text = (document.title or "").strip(), document.text.strip()
        if title and not f"{text.partition(chr(10))[0]} > ".startswith(f"{title} > "):
            text = f"{title}\n{text}"
        return tuple(self._tokenizer.encode(f"{text}\n\n", allow_special=False))

    def _whole(self, head: _Parts, rest: _Parts, *, is_asked: bool) -> PromptParts:
        """The parts of a prompt without documents, tokenized as one text. A token across the border belongs to
        `head`.

        Args:
          is_asked: the last content is the user's.
        """
        parts = [*head, Part("", trusted=False), *rest]
        num_behind = sum(1 for _ in itertools.takewhile(lambda part: part.trusted, reversed(parts)))
        before = reversed(parts[: len(parts) - num_behind])
        num_last = sum(1 for _ in itertools.takewhile(lambda part: not part.trusted, before))
        parts.insert(len(parts) - num_behind, Part("", trusted=False))
        ids, (*begins, end) = self._tokenizer.encode_parts(_pairs(parts)), self._tokenizer.borders(_pairs(parts))
        num_contents = sum(not part.trusted for part in head)
        num_system, borders = begins[num_contents], _of_contents(begins[num_contents + 1 :], rest)
        return PromptParts(
            system=tuple(ids[:num_system]),
            documents=(),
            question=tuple(ids[num_system:]),
            borders=tuple(dict.fromkeys(border - num_system for border in borders)) if len(borders) > 1 else (),
            num_opening=begins[0],
            asking=(begins[-num_last], end) if is_asked else (0, 0),
            blocks=tuple(self._blocks(parts, "start", 0)),
        )

    def _with_documents(self, head: _Parts, documents: Sequence[Document], rest: _Parts) -> PromptParts:
        system = self._tokenizer.encode_parts(_pairs(head))
        borders = _of_contents(self._tokenizer.borders(_pairs(rest), follows="text"), rest)
        is_cut = has_context("".join(part.text for part in head if part.is_content))
        blocks = self._blocks(head, "start", 0) if is_cut else []
        blocks += self._blocks(rest, "text", len(system))
        opening = self._tokenizer.borders(_pairs(head))
        return PromptParts(
            system=tuple(system),
            documents=tuple(self.document_ids(document) for document in documents),
            question=tuple(self._tokenizer.encode_parts(_pairs(rest), follows="text")),
            borders=tuple(dict.fromkeys(borders)) if len(borders) > 1 else (),
            num_opening=opening[0] if opening else len(system),
            blocks=tuple(blocks),
        )

    def _blocks(self, parts: _Parts, follows: Follows, start: int) -> list[tuple[int, int]]:
        """The passages in the contents of `parts`, whose first token has the offset `start`."""
        pieces: list[tuple[str, bool]] = []
        numbers = []  # of the pieces that are passages, among the untrusted ones
        count = 0
        for part in parts:
            last = 0
            for begin, end in blocks_of(part.text) if part.is_content else ():
                pieces += [(part.text[last:begin], False), (part.text[begin:end], False)]
                numbers.append(count + 1)
                count, last = count + 2, end
            pieces.append((part.text[last:], part.trusted))
            count += not part.trusted
        begins = self._tokenizer.borders(pieces, follows=follows)
        spans = [(start + begins[number], start + begins[number + 1]) for number in numbers]
        return [(begin, end) for begin, end in spans if end - begin >= LEAST_BLOCK]

    def _check_rendering(self, rendering: Rendering, last: Message) -> None:
        if rendering.continue_final_message:
            if last.role != "assistant" or last.calls or not "".join(last.parts or ()).strip():
                message = f"wanted a text of the assistant as the last message, got one of {last.role!r}"
                raise ValueError(f"continue_final_message: {message}")
            if rendering.add_generation_prompt:
                raise ValueError("continue_final_message: wanted add_generation_prompt=false beside it, got true")
        for name in rendering.variables:
            if name in _OWN_VARIABLES:
                raise ValueError(f"chat_template_kwargs.{name}: wanted a variable that only the template knows")
        names = self._tokenizer.special_names
        for text in _strings(rendering.variables):
            if any(name in text for name in names):
                raise ValueError(f"chat_template_kwargs: wanted no control tokens, got {text!r:.80}")

    def _split_chat(
        self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]], rendering: Rendering, *, moves_system: bool
    ) -> tuple[_Parts, _Parts]:
        """The chat before the first user content, and the rest from it on, which has the system prompt only if
        `moves_system` and the template puts it there."""
        refused = None
        for form in Form.all_of(chat):
            try:
                return self._render(chat, tools, form, rendering, moves_system=moves_system)
            except TemplateRejectedError as error:
                failed = error
            if chat[0].role == "system":
                try:
                    before, after = self._render(chat[1:], tools, form, rendering, moves_system=moves_system)
                    gap = Part("\n\n", trusted=False)
                    system = [Part(part, trusted=False, is_content=True) for part in chat[0].parts or ()]
                    return [*before, *system, Part(chat[0].definitions, trusted=False), gap], after
                except TemplateRejectedError as error:
                    failed = error
            refused = refused or failed
        raise ValueError(f"messages: {refused}") from refused

    def _render(
        self,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        form: Form,
        rendering: Rendering,
        *,
        moves_system: bool,
    ) -> tuple[_Parts, _Parts]:
        """Renders with a placeholder for each text, so that none can influence the template's own."""
        texts = HiddenTexts()
        messages, starts = hidden_messages(chat, form, texts)
        hidden = hidden_tools(tools, texts)
        render = functools.partial(self._rendered, rendering=rendering)
        pieces = pieces_of(render(messages, hidden))
        numbers = [piece.number for piece in pieces]
        first_user = next(number for number, message in enumerate(chat) if message.role == "user")
        if starts[first_user] not in numbers:
            raise TemplateRejectedError("chat_template: it leaves out the content of 'user' messages")
        border = numbers.index(starts[first_user])
        if chat[0].role == "system" and 0 not in numbers[: None if moves_system else border]:
            # Some templates leave it out, some put it into the LAST user turn, where it would move with every turn.
            raise TemplateRejectedError("chat_template: the system prompt is not before the first user text")
        parts = _trimmed(pieces, texts, lambda: render(texts.shown(messages), texts.shown(hidden)))
        if rendering.continue_final_message:
            last, number = [(at, number) for at, number in enumerate(numbers) if number is not None][-1]
            if number < starts[-1]:
                raise TemplateRejectedError("chat_template: it leaves out the content of the last message")
            parts = parts[: last + 1]
        return parts[:border], parts[border:]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], rendering: Rendering
    ) -> str:
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=rendering.add_generation_prompt,
            variables={**rendering.variables, **self._special_tokens},
        )


def _trimmed(pieces: Sequence[Piece], texts: HiddenTexts, render: Callable[[], str]) -> _Parts:
    """The parts that the pieces stand for, without the white space around texts that the template takes away; where
    that depends on what a text says, white space stays. `render` renders the texts themselves."""
    used = [texts.part(piece) for piece in pieces]
    if all(part.trusted or part.text == part.text.strip() for part in used):
        return used
    try:
        whole = render()
    except TemplateRejectedError:
        return used
    found, end = list[Part](), 0
    for number, piece in enumerate(pieces):
        follows = pieces[number + 1].text if number + 1 < len(pieces) else ""
        given = [piece.text] if piece.number is None else _with_less_space(texts.text(piece.number))
        possible = (texts.part(piece, text) for text in given)
        fits = (part for part in possible if whole.startswith(part.text + follows, end))
        kept = next(fits, None)
        if kept is None:
            return used
        found.append(kept)
        end += len(kept.text)
    return found if end == len(whole) else used


def _strings(value: Any) -> Iterator[str]:
    """All strings and keys of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(_strings(item) for pair in value.items() for item in pair)
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_strings, value))


def _pairs(parts: _Parts) -> list[tuple[str, bool]]:
    """Texts and whether they are trusted, as tokenizers take them."""
    return [(part.text, part.trusted) for part in parts]


def _of_contents(borders: Sequence[int], parts: _Parts) -> list[int]:
    """The borders of the untrusted parts that are contents."""
    untrusted = (part for part in parts if not part.trusted)
    return [border for border, part in zip(borders, untrusted, strict=True) if part.is_content]


def _with_less_space(text: str) -> Iterator[str]:
    """The text without none, the line breaks, or all of the white space at either end, the most text first."""
    starts = 0, len(text) - len(text.lstrip("\n")), len(text) - len(text.lstrip())
    ends = len(text), len(text.rstrip("\n")), len(text.rstrip())
    spans = sorted(set(itertools.product(starts, ends)), key=lambda span: span[0] - span[1])
    return (text[start:end] for start, end in spans)
