"""Tokenizer and chat template of a GGUF file, in the same classes as those of a Hugging Face directory."""

from __future__ import annotations

import json

from ccjax.loading.gguf.reader import GgufFile
from ccjax.loading.gguf.vocabulary import vocabulary_of
from ccjax.models.llama3.leaves import CheckpointError
from ccjax.text import ChatTemplate, Tokenizer
from ccjax.text.template import PLAIN_TEMPLATE, template_variables
from ccjax.text.tokenizer_files import tokenizer_of


def text_of(file: GgufFile) -> tuple[Tokenizer, ChatTemplate] | None:
    """Tokenizer and chat template, or None for a file without a vocabulary.

    Raises:
      CheckpointError: the metadata cannot be used; the message names file and key.
    """
    vocabulary = vocabulary_of(file)
    if vocabulary is None:
        return None
    settings, raw = vocabulary.settings, json.dumps(vocabulary.definition, ensure_ascii=False)
    template = settings.get("chat_template", PLAIN_TEMPLATE)
    try:
        words = tokenizer_of(raw, settings, frozenset(vocabulary.eos_ids), where=file.path)
        return words, ChatTemplate(template, template_variables(settings))
    except RecursionError:
        raise CheckpointError(
            f"{file.path}: tokenizer.chat_template: wanted a Jinja template, got one too deep"
        ) from None
    except ValueError as error:
        raise CheckpointError(str(error) if str(file.path) in str(error) else f"{file.path}: {error}") from error
