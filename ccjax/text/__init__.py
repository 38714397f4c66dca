"""Tokenizers, chat prompts and streamed text."""

from ccjax.text.byte_tokenizer import BYTE_TEMPLATE, ByteTokenizer
from ccjax.text.cutting import has_context
from ccjax.text.prompt import PromptBuilder, PromptParts
from ccjax.text.stream import IncrementalDecoder, StopStrings
from ccjax.text.template import ChatTemplate, TemplateRejectedError
from ccjax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "BYTE_TEMPLATE",
    "ByteTokenizer",
    "ChatTemplate",
    "IncrementalDecoder",
    "PromptBuilder",
    "PromptParts",
    "StopStrings",
    "TemplateRejectedError",
    "Tokenizer",
    "has_context",
    "load_tokenizer",
]
