"""The frame: fixed passages that prepared passages are computed behind.

KV of a passage computed directly behind the instructions is inaccurate behind other passages, because its tokens act as
the beginning of a text. Behind a fixed, unrelated text of some 230 tokens they do not. That text is the same for all
tenants, so no tenant's passages influence another one's KV; and the server's own instructions precede it, whatever
those of the prompt are, so that a passage is prepared once, and no client's instructions influence its KV.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path

from ccjax.errors import ConfigError
from ccjax.policy.capture import make_variant_id
from ccjax.prompts import Prompt, as_chunk, tenant_of
from ccjax.text import PromptBuilder
from ccjax.types import Chunk, Document, Segment, VariantId

DEFAULT = "default"
NONE = "none"


def frame_documents(name: str) -> tuple[Document, ...]:
    """The passages of a frame: the built-in one for "default", none for "none", else those of a text file, separated by
    blank lines.

    Raises:
      ConfigError: the file cannot be read, or has no text.
    """
    if name == NONE:
        return ()
    try:
        place = importlib.resources.files("ccjax") / "assets" / "frame.txt" if name == DEFAULT else Path(name)
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"frame: wanted 'default', 'none' or a text file, got {name!r}: {error}") from error
    passages = tuple(Document(part.strip()) for part in re.split(r"\n\s*\n", text) if part.strip())
    if not passages:
        raise ConfigError(f"frame: wanted passages of text, separated by blank lines, got none in {name!r}")
    return passages


class PassageFrame:
    """A frame tokenized for one model's prompts.

    Attributes:
      documents: its passages; empty if passages are prepared without a frame.
    """

    def __init__(self, documents: Sequence[Document], builder: PromptBuilder | None) -> None:
        self.documents = tuple(documents) if builder is not None else ()
        self._token_ids = (
            tuple(builder.document_ids(document) for document in self.documents) if builder is not None else ()
        )
        self._instruction_ids: tuple[int, ...] = ()
        if builder is not None and self.documents:
            self._instruction_ids = builder.build_chat([{"role": "user", "content": "?"}], self.documents).system

    def chunks(self, tenant: str) -> tuple[Chunk, ...]:
        """The frame's passages as chunks of a tenant (`ccjax.prompts.tenant_tag`)."""
        return tuple(as_chunk(ids, None, tenant) for ids in self._token_ids)

    def instructions(self, tenant: str) -> tuple[Segment, ...]:
        """What stands before the frame: the instructions of requests that have none of their own."""
        ids = self._instruction_ids
        return (Segment("instructions", as_chunk(ids, None, tenant)),) if ids else ()

    def around(self, prompt: Prompt) -> Prompt | None:
        """A prompt of one passage with the frame before it; None without a frame, or if the passage is part of it."""
        passage = prompt.cached[-1]
        tenant = tenant_of(passage.chunk.chunk_id)
        instructions, before = self.instructions(tenant), self.chunks(tenant)
        # KV of a passage behind itself is of no use.
        if not before or passage.chunk.chunk_id in {chunk.chunk_id for chunk in before}:
            return None
        return Prompt.of_chunks((*instructions, *(Segment("passage", chunk) for chunk in before), passage))

    def stands_in(self, prompt: Prompt) -> bool:
        """True if exactly the frame stands between the instructions and the last passage of a prompt."""
        between = tuple(chunk.chunk_id for chunk in prompt.chunks[len(prompt.instructions) : -1])
        return bool(between) and between == tuple(chunk.chunk_id for chunk in self.chunks(tenant_of(between[0])))

    def variant_ids(self, prompt: Prompt) -> frozenset[VariantId]:
        """The ids that variants of the prompt's chunks, and of those that it has slices of, have behind the frame."""
        if not self.documents:
            return frozenset()
        tenant = tenant_of(prompt.segments[0].chunk.chunk_id)
        instructions = (segment.chunk for segment in self.instructions(tenant))
        before = tuple(chunk.chunk_id for chunk in (*instructions, *self.chunks(tenant)))
        return frozenset(make_variant_id(chunk_id, before, "exact") for chunk_id in prompt.stored_ids)
