"""Which stored variants may serve a prompt, and which of its passages are still to be prepared."""

from __future__ import annotations

from ccjax.cache.documents.frame import PassageFrame
from ccjax.cache.variants import VariantIndex
from ccjax.policy.capture import make_variant_id
from ccjax.prompts import Prompt
from ccjax.types import REUSED_ANYWHERE, ChunkId, PrefillPlan, VariantId

_LEAST_PASSAGES = 2


class PreparedPassages:
    """The passages that were prepared behind one frame. Not thread-safe, except `allowed`.

    Args:
      prepares: a request prepares the passages that are not prepared.
      max_model_len: longest prompt in tokens.
    """

    def __init__(self, frame: PassageFrame, variants: VariantIndex, *, prepares: bool, max_model_len: int) -> None:
        self._frame = frame
        self._variants = variants
        self._prepares = prepares
        self._max_model_len = max_model_len

    @property
    def are_kept_apart(self) -> bool:
        """True if there is a frame: then a passage is reused as it was prepared, behind the prompt's instructions or
        behind the frame, or exactly. What stood before it in other prompts does not influence this one."""
        return bool(self._frame.documents)

    def allowed(self, prompt: Prompt) -> frozenset[VariantId]:
        """The variants behind the instructions, behind the frame, and behind what stands before them in the prompt."""
        ids = [chunk.chunk_id for chunk in prompt.chunks]
        num_first = len(prompt.instructions)
        in_place = (make_variant_id(own, ids[:index], "exact") for index, own in enumerate(ids))
        first = (make_variant_id(own, ids[:num_first], "exact") for own in prompt.stored_ids)
        return frozenset((*in_place, *first, *self._frame.variant_ids(prompt)))

    def unprepared(self, asked: Prompt, prompt: Prompt, plan: PrefillPlan) -> list[Prompt]:
        """Prompts that prepare the passages of a plan which are not prepared behind the frame; none if the prompt has
        only one passage, which may be no passage at all, but a long message of a chat.

        Args:
          asked: the prompt that was planned as `prompt`, behind its stored runs.
        """
        if not self._prepares or not self.are_kept_apart or len(prompt.passages) < _LEAST_PASSAGES:
            return []
        framed, found = self._frame.variant_ids(asked), dict[ChunkId, Prompt]()
        for segment, own in zip(plan.segments, prompt.segments, strict=True):
            is_exact = segment.action == "reuse" and segment.fidelity == "exact"
            if own.role not in REUSED_ANYWHERE or is_exact or segment.variant_id in framed:
                continue
            around = self._frame.around(Prompt.of_chunks((*asked.instructions, own)))
            if around is None or around.num_tokens > self._max_model_len or self._is_stored(around):
                continue
            found[own.chunk.chunk_id] = around
        prompts = list(found.values())
        # The others then reuse what the first one computes of the frame.
        return prompts[:1] if prompts and not self.has_frame(prompts[0]) else prompts

    def framed(self, prompt: Prompt) -> frozenset[VariantId]:
        """The variants of a prompt's passages behind the frame, stored or not."""
        return self._frame.variant_ids(prompt)

    def has_frame(self, around: Prompt) -> bool:
        """True if all that stands before the passage of a prompt that `unprepared` returned is stored."""
        return self._is_stored(Prompt.of_chunks(around.cached[:-1]))

    def _is_stored(self, prompt: Prompt) -> bool:
        *before, last = (chunk.chunk_id for chunk in prompt.chunks)
        return make_variant_id(last, before, "exact") in self._variants
