"""Chat templates of Hugging Face model directories, rendered to text."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ccjax.text.placeholders import to_json
from ccjax.text.tokenizer_files import read_settings

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Llama 3 instruct, for directories in Meta's own format, which contain no template."""
PLAIN_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- message['content'] + '\\n\\n' }}
    {%- elif message['role'] == 'user' %}{{- 'Question: ' + message['content'] + '\\n' }}
    {%- else %}{{- 'Answer: ' + message['content'] + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Answer:' }}{%- endif %}
"""
"""For base models, which were not trained on chats."""


class TemplateRejectedError(ValueError):
    """The template refused the messages; the text is the template's own reason."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with the variables of its model.

    Attributes:
      variables: given to every rendering, for instance `bos_token`, or `date_string` to keep a Llama 3.1 prompt (and
        with it the cached system prompt) unchanged over midnight.
      clock: for the templates' `strftime_now`.
      tool_source: for requests with tools, if that is another template.
    """

    source: str
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clock: Callable[[], datetime.datetime] = datetime.datetime.now
    tool_source: str | None = None

    def __post_init__(self) -> None:
        try:
            _compile(self.source)
            if self.tool_source is not None:
                _compile(self.tool_source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat_template: wanted a Jinja template, got {error} in line {error.lineno}") from error

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> ChatTemplate:
        """The template of a model directory.

        `chat_template.jinja` has priority, then `chat_template` in tokenizer_config.json, of a named list the one
        called "default", and "tool_use" for requests with tools. A directory without any gets `LLAMA3_TEMPLATE` if its
        tokenizer is Llama 3's own `tokenizer.model`, else `PLAIN_TEMPLATE`.

        Raises:
          ValueError: no template of that name, or no valid Jinja.
        """
        directory = Path(directory)
        settings = read_settings(directory)
        variables = template_variables(settings)
        file, setting, tool_source = directory / "chat_template.jinja", settings.get("chat_template"), None
        if file.exists():
            return cls(file.read_text(encoding="utf-8"), variables)
        if isinstance(setting, list):
            named = {entry.get("name"): entry.get("template") for entry in setting if isinstance(entry, dict)}
            if "default" not in named:
                raise ValueError(
                    f"{directory}: chat_template: wanted the name 'default', got {sorted(map(str, named))}"
                )
            setting, tool_source = named["default"], named.get("tool_use")
        if isinstance(setting, str):
            return cls(setting, variables, tool_source=tool_source)
        if setting is not None:
            raise ValueError(
                f"{directory}: chat_template: wanted a string or a named list, got {type(setting).__name__}"
            )
        if (directory / "tokenizer.model").exists() and not (directory / "tokenizer.json").exists():
            return cls(LLAMA3_TEMPLATE, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"} | variables)
        return cls(PLAIN_TEMPLATE, variables)

    @property
    def takes_tools(self) -> bool:
        """True if the template renders definitions of tools."""
        return self.tool_source is not None or _takes_tools(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; the template's own variables override `variables`.

        Raises:
          TemplateRejectedError: the template raised an exception on these messages.
        """
        values = {**(variables or {}), **self.variables}
        try:
            return _compile((tools and self.tool_source) or self.source).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                documents=None,
                strftime_now=lambda format: self.clock().strftime(format),
                **values,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateRejectedError(f"chat_template: {error}") from error


def template_variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json, which its template may name."""
    return {key: value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)}


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=32)
def _takes_tools(source: str) -> bool:
    return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(source))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks answers for training, leaves its text as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
