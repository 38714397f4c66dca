"""Tokenizers, chat prompts and streamed text."""

from ccjax.text.byte_tokenizer import BYTE_TEMPLATE, ByteTokenizer
from ccjax.text.cutting import has_context
from ccjax.text.grammar import Grammars, Matcher
from ccjax.text.prompt import PromptBuilder, PromptParts
from ccjax.text.stream import IncrementalDecoder, StopStrings
from ccjax.text.template import ChatTemplate, TemplateRejectedError
from ccjax.text.tokenizer import Tokenizer
from ccjax.text.tokenizer_files import load_tokenizer
from ccjax.text.tool_calls import CallForm, CallParser, ToolCall, read_calls

__all__ = [
    "BYTE_TEMPLATE",
    "ByteTokenizer",
    "CallForm",
    "CallParser",
    "ChatTemplate",
    "Grammars",
    "IncrementalDecoder",
    "Matcher",
    "PromptBuilder",
    "PromptParts",
    "StopStrings",
    "TemplateRejectedError",
    "Tokenizer",
    "ToolCall",
    "has_context",
    "load_tokenizer",
    "read_calls",
]
