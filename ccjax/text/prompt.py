"""Token ids of a prompt as [system][document]...[question].

Documents are at the start of the first user turn, so that system prompt and documents remain one unchanged prefix
during a conversation, and each is tokenized on its own, so that its ids never depend on what surrounds it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
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
        system_prompt: str = "Answer the question from the passages.",
    ):
        """Args:
        system_prompt: used if the messages have none; "" for none at all.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._system_prompt = system_prompt.strip()
        names = {token_id: name for name, token_id in tokenizer.special_names.items()}
        self._special_tokens = {
            "bos_token": "" if tokenizer.bos_id is None else names.get(tokenizer.bos_id, ""),
            "eos_token": next((names[token_id] for token_id in sorted(tokenizer.eos_ids) if token_id in names), ""),
        }

    def build_chat(self, messages: Sequence[Mapping[str, Any]], documents: Sequence[Document] = ()) -> PromptParts:
        """Ids of a chat up to the start of the assistant's answer.

        Args:
          messages: `{"role", "content"}` as in the OpenAI API; content is a string or a list of text parts. Leading and
            trailing white space of contents is dropped.

        Raises:
          ValueError: a message is malformed, there is no user message, or the template refuses; names `messages[i]`.
        """
        roles, contents = _checked(messages)
        if "system" not in roles and self._system_prompt:
            roles, contents = ["system", *roles], [[self._system_prompt], *contents]
        head, rest = self._split_chat(roles, contents)
        # A space before the first user text belongs to its first word: "[INST] Hello" has a token " Hello".
        if head and head[-1][1]:
            text = head[-1][0]
            head[-1] = (text.rstrip(" "), True)
            rest.insert(0, (" " * (len(text) - len(head[-1][0])), True))
        return self._assemble(head, documents, rest)

    def build_completion(self, prompt: str, documents: Sequence[Document] = ()) -> PromptParts:
        """Ids of bos, the documents and `prompt` verbatim, without a template.

        Raises:
          ValueError: `prompt` is not a string or is blank.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompt: wanted a non-empty string, got {prompt!r}")
        return self._assemble([(self._special_tokens["bos_token"], True)], documents, [(prompt, False)])

    def document_ids(self, document: Document) -> tuple[int, ...]:
        """Ids of one document, independent of its place in the prompt; never a control token."""
        title = (document.title or "").strip()
        text = "\n".join([title, document.text.strip()] if title else [document.text.strip()])
        return tuple(self._tokenizer.encode(f"{text}\n\n", allow_special=False))

    def _assemble(self, head: _Parts, documents: Sequence[Document], rest: _Parts) -> PromptParts:
        system = self._tokenizer.encode_parts(head)
        follows: Follows = "start"
        if documents or system:
            follows = "control" if not documents and system[-1] in self._tokenizer.special_ids else "text"
        is_divided = sum(not trusted for _, trusted in rest) > 1
        borders = self._tokenizer.borders(rest, follows=follows) if is_divided else ()
        is_cut = not documents or has_context("".join(text for text, trusted in head if not trusted))
        blocks = self._blocks(head, "start", 0) if is_cut else []
        blocks += self._blocks(rest, follows, len(system))
        opening = self._tokenizer.borders(head)
        return PromptParts(
            system=tuple(system),
            documents=tuple(self.document_ids(document) for document in documents),
            question=tuple(self._tokenizer.encode_parts(rest, follows=follows)),
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

    def _split_chat(self, roles: Sequence[str], contents: Sequence[Sequence[str]]) -> tuple[_Parts, _Parts]:
        """The chat before the first user content, and the rest from it on."""
        system = contents[0] if roles[0] == "system" else None
        first_user = roles.index("user")
        try:
            return self._render(roles, contents, first_user)
        except TemplateRejectedError as error:
            if system is None:
                raise ValueError(f"messages: {error}") from error
        try:
            before, after = self._render(roles[1:], contents[1:], first_user - 1)
        except TemplateRejectedError as error:
            raise ValueError(f"messages: {error}") from error
        return [*before, ("".join(system) + "\n\n", False)], after

    def _render(
        self, roles: Sequence[str], contents: Sequence[Sequence[str]], first_user: int
    ) -> tuple[_Parts, _Parts]:
        """Renders with a placeholder for each content, so that no content can influence the template."""
        messages = [{"role": role, "content": _SENTINEL.format(i)} for i, role in enumerate(roles)]
        pieces = _SENTINEL_PATTERN.split(self._template.render(messages, variables=self._special_tokens))
        if str(first_user) not in pieces[1::2]:
            raise TemplateRejectedError(f"chat_template: it leaves out the content of {roles[first_user]!r} messages")
        border = 1 + 2 * pieces[1::2].index(str(first_user))
        if roles[0] == "system" and "0" not in pieces[1:border:2]:
            # Some templates leave it out, some put it into the LAST user turn, where it would move with every turn.
            raise TemplateRejectedError("chat_template: the system prompt is not before the first user text")
        parts: list[_Parts] = [
            [(piece, True)] if number % 2 == 0 else [(part, False) for part in contents[int(piece)]]
            for number, piece in enumerate(pieces)
        ]
        return list(itertools.chain(*parts[:border])), list(itertools.chain(*parts[border:]))


def _checked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Roles and stripped contents, each as its parts, which joined are its text."""
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
        contents.append(_stripped(_content_parts(message.get("content"), f"messages[{i}].content")))
    if "user" not in roles:
        raise ValueError("messages: wanted at least one message with role 'user', got none")
    question = len(roles) - 1 - roles[::-1].index("user")
    if not "".join(contents[question]):
        raise ValueError(f"messages[{question}].content: wanted a question, got blank text")
    return roles, contents


def _stripped(parts: list[str]) -> list[str]:
    """The parts, each but the last followed by a line break, without white space around the whole text."""
    lines = [part + "\n" for part in parts[:-1]] + parts[-1:]
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    if lines:
        lines[0] = lines[0].lstrip()
        lines[-1] = lines[-1].rstrip()
    return lines


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
