"""Token ids of a prompt as [system][document]...[question].

Documents are at the start of the first user turn, so that system prompt and documents remain one unchanged prefix
during a conversation, and each is tokenized on its own, so that its ids never depend on what surrounds it. Without
documents the ids are those of the whole text as the template renders it, as with transformers' `apply_chat_template`,
except that contents never yield control tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ccjax.text.cutting import blocks_of, has_context
from ccjax.text.template import ChatTemplate, TemplateRejectedError
from ccjax.text.tokenizer import Follows, Tokenizer
from ccjax.types import Document

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SENTINEL = "ccjaxContent{}z7f3a9"
_SENTINEL_PATTERN = re.compile(r"ccjaxContent(\d+)z7f3a9")
LEAST_BLOCK = 24
"""Tokens of the shortest passage that is looked for in a content."""
SYSTEM_PROMPT = "Answer the question from the passages."
_Parts = list[tuple[str, bool]]
"""Text and whether it is trusted: the template's own text is, contents are not."""


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

    def build_chat(self, messages: Sequence[Mapping[str, Any]], documents: Sequence[Document] = ()) -> PromptParts:
        """Ids of a chat up to the start of the assistant's answer.

        Args:
          messages: `{"role", "content"}` as in the OpenAI API; content is a string or a list of text parts, each on a
            line of its own. Beside documents, leading and trailing white space of contents is dropped.

        Raises:
          ValueError: a message is malformed, there is no user message, or the template refuses; names `messages[i]`.
        """
        roles, contents = _checked(messages)
        if documents:
            contents = [_stripped(parts) for parts in contents]
        system_prompt = self._system_prompt
        if system_prompt is None:
            system_prompt = SYSTEM_PROMPT if documents else ""
        if "system" not in roles and system_prompt:
            roles, contents = ["system", *roles], [[system_prompt], *contents]
        head, rest = self._split_chat(roles, contents, moves_system=not documents)
        # A space before the first user text belongs to its first word: "[INST] Hello" has a token " Hello".
        if head and head[-1][1]:
            text = head[-1][0]
            head[-1] = (text.rstrip(" "), True)
            rest.insert(0, (" " * (len(text) - len(head[-1][0])), True))
        return self._with_documents(head, documents, rest) if documents else self._whole(head, rest)

    def build_completion(self, prompt: str, documents: Sequence[Document] = ()) -> PromptParts:
        """Ids of bos, the documents and `prompt` verbatim, without a template.

        Raises:
          ValueError: `prompt` is not a string or is blank.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompt: wanted a non-empty string, got {prompt!r}")
        head, rest = [(self._special_tokens["bos_token"], True)], [(prompt, False)]
        return self._with_documents(head, documents, rest) if documents else self._whole(head, rest)

    def document_ids(self, document: Document) -> tuple[int, ...]:
        """Ids of one document, independent of its place in the prompt; never a control token."""
        title = (document.title or "").strip()
        text = "\n".join([title, document.text.strip()] if title else [document.text.strip()])
        return tuple(self._tokenizer.encode(f"{text}\n\n", allow_special=False))

    def _whole(self, head: _Parts, rest: _Parts) -> PromptParts:
        """The parts of a prompt without documents, tokenized as one text. A token across the border belongs to
        `head`."""
        parts = [*head, ("", False), *rest]
        ids, begins = self._tokenizer.encode_parts(parts), self._tokenizer.borders(parts)
        num_contents = sum(not trusted for _, trusted in head)
        num_system, borders = begins[num_contents], begins[num_contents + 1 :]
        return PromptParts(
            system=tuple(ids[:num_system]),
            documents=(),
            question=tuple(ids[num_system:]),
            borders=tuple(dict.fromkeys(border - num_system for border in borders)) if len(borders) > 1 else (),
            num_opening=begins[0],
            blocks=tuple(self._blocks(parts, "start", 0)),
        )

    def _with_documents(self, head: _Parts, documents: Sequence[Document], rest: _Parts) -> PromptParts:
        system = self._tokenizer.encode_parts(head)
        is_divided = sum(not trusted for _, trusted in rest) > 1
        borders = self._tokenizer.borders(rest, follows="text") if is_divided else ()
        is_cut = has_context("".join(text for text, trusted in head if not trusted))
        blocks = self._blocks(head, "start", 0) if is_cut else []
        blocks += self._blocks(rest, "text", len(system))
        opening = self._tokenizer.borders(head)
        return PromptParts(
            system=tuple(system),
            documents=tuple(self.document_ids(document) for document in documents),
            question=tuple(self._tokenizer.encode_parts(rest, follows="text")),
            borders=tuple(dict.fromkeys(borders)),
            num_opening=opening[0] if opening else len(system),
            blocks=tuple(blocks),
        )

    def _blocks(self, parts: _Parts, follows: Follows, start: int) -> list[tuple[int, int]]:
        """The passages in the contents of `parts`, whose first token has the offset `start`."""
        pieces: _Parts = []
        numbers = []  # of the pieces that are passages, among the untrusted ones
        count = 0
        for text, trusted in parts:
            if trusted:
                pieces.append((text, True))
                continue
            last = 0
            for begin, end in blocks_of(text):
                pieces += [(text[last:begin], False), (text[begin:end], False)]
                numbers.append(count + 1)
                count, last = count + 2, end
            pieces.append((text[last:], False))
            count += 1
        begins = self._tokenizer.borders(pieces, follows=follows)
        spans = [(start + begins[number], start + begins[number + 1]) for number in numbers]
        return [(begin, end) for begin, end in spans if end - begin >= LEAST_BLOCK]

    def _split_chat(
        self, roles: Sequence[str], contents: Sequence[Sequence[str]], *, moves_system: bool
    ) -> tuple[_Parts, _Parts]:
        """The chat before the first user content, and the rest from it on, which has the system prompt only if
        `moves_system` and the template puts it there."""
        system = contents[0] if roles[0] == "system" else None
        first_user = roles.index("user")
        try:
            return self._render(roles, contents, first_user, moves_system=moves_system)
        except TemplateRejectedError as error:
            if system is None:
                raise ValueError(f"messages: {error}") from error
        try:
            before, after = self._render(roles[1:], contents[1:], first_user - 1, moves_system=moves_system)
        except TemplateRejectedError as error:
            raise ValueError(f"messages: {error}") from error
        return [*before, ("".join(system) + "\n\n", False)], after

    def _render(
        self, roles: Sequence[str], contents: Sequence[Sequence[str]], first_user: int, *, moves_system: bool
    ) -> tuple[_Parts, _Parts]:
        """Renders with a placeholder for each content, so that no content can influence the template's text."""
        pieces = _SENTINEL_PATTERN.split(self._rendered(roles, map(_SENTINEL.format, range(len(roles)))))
        if str(first_user) not in pieces[1::2]:
            raise TemplateRejectedError(f"chat_template: it leaves out the content of {roles[first_user]!r} messages")
        border = 1 + 2 * pieces[1::2].index(str(first_user))
        if roles[0] == "system" and "0" not in pieces[1 : None if moves_system else border : 2]:
            # Some templates leave it out, some put it into the LAST user turn, where it would move with every turn.
            raise TemplateRejectedError("chat_template: the system prompt is not before the first user text")
        contents = self._trimmed(roles, contents, pieces)
        parts: list[_Parts] = [
            [(piece, True)] if number % 2 == 0 else [(part, False) for part in contents[number // 2]]
            for number, piece in enumerate(pieces)
        ]
        return list(itertools.chain(*parts[:border])), list(itertools.chain(*parts[border:]))

    def _rendered(self, roles: Sequence[str], contents: Iterable[str]) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return self._template.render(messages, variables=self._special_tokens)

    def _trimmed(
        self, roles: Sequence[str], contents: Sequence[Sequence[str]], pieces: Sequence[str]
    ) -> list[Sequence[str]]:
        """The contents in the order of the template, without the white space around them that it takes away.

        Args:
          pieces: the template's text, in turn with numbers of contents. Where it depends on what a content says, white
            space stays.
        """
        used = [contents[int(number)] for number in pieces[1::2]]
        texts = ["".join(parts) for parts in contents]
        if all(text == text.strip() for text in texts):
            return used
        try:
            whole = self._rendered(roles, texts)
        except TemplateRejectedError:
            return used
        found, end = list[Sequence[str]](), len(pieces[0])
        if not whole.startswith(pieces[0]):
            return used
        for parts, piece in zip(used, pieces[2::2], strict=True):
            fits = (kept for kept in _with_less_space(parts) if whole.startswith("".join(kept) + piece, end))
            kept = next(fits, None)
            if kept is None:
                return used
            found.append(kept)
            end += len("".join(kept)) + len(piece)
        return found if end == len(whole) else used


def _checked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Roles and contents, each as its parts, which joined are its text."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: wanted a list of messages, got {type(messages).__name__}")
    roles: list[str] = []
    contents: list[list[str]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}]: wanted an object with role and content, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"messages[{i}].role: wanted one of {sorted(_ROLES)}, got {role!r}")
        roles.append(_ROLES[role])
        parts = _content_parts(message.get("content"), f"messages[{i}].content")
        contents.append([part + "\n" for part in parts[:-1]] + parts[-1:])
    if "user" not in roles:
        raise ValueError("messages: wanted at least one message with role 'user', got none")
    question = len(roles) - 1 - roles[::-1].index("user")
    if not "".join(contents[question]).strip():
        raise ValueError(f"messages[{question}].content: wanted a question, got blank text")
    return roles, contents


def _stripped(parts: Sequence[str]) -> list[str]:
    """The parts without white space around the whole text."""
    text = "".join(parts)
    return _between(parts, len(text) - len(text.lstrip()), len(text.rstrip()))


def _with_less_space(parts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The parts without none, the line breaks, or all of the white space at either end, the most text first."""
    text = "".join(parts)
    starts = 0, len(text) - len(text.lstrip("\n")), len(text) - len(text.lstrip())
    ends = len(text), len(text.rstrip("\n")), len(text.rstrip())
    spans = sorted(set(itertools.product(starts, ends)), key=lambda span: span[0] - span[1])
    return (_between(parts, start, end) for start, end in spans)


def _between(parts: Sequence[str], start: int, end: int) -> list[str]:
    """What is between two offsets of the whole text of some parts, without empty parts."""
    first, kept = 0, list[str]()
    for part in parts:
        kept.append(part[max(0, start - first) : max(0, end - first)])
        first += len(part)
    return [part for part in kept if part]


def _content_parts(content: Any, argument: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ValueError(f"{argument}: wanted a string or a list of text parts, got {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{argument}[{i}]: wanted {{'type': 'text', 'text': string}}, got type {kind!r}")
        texts.append(part["text"])
    return texts
