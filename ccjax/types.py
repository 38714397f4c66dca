"""Types shared by retrieval, policy, store, models and the engine: frozen, JSON-able values.

Stdlib only. Axes and symbols follow docs/architecture.md: L layers, T tokens of a chunk, C chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NewType

ChunkId = NewType("ChunkId", str)
"""sha256 (hex) of a chunk's token ids: the same in every process and for every model with that tokenizer. For a request
with a cache salt, the salt is hashed with them and its tag is appended (`ccjax.prompts.chunk_id`)."""
VariantId = NewType("VariantId", str)
"""sha256 (hex) of chunk id, ordered prefix chunk ids and fidelity; the store adds model fingerprint and tenant salt."""

ReuseMode = Literal["off", "exact", "bounded", "fast"]
REUSE_MODES: tuple[ReuseMode, ...] = ("off", "exact", "bounded", "fast")
Fidelity = Literal["exact", "approx"]
SegmentRole = Literal["instructions", "passage", "text", "answer", "question"]
"""What a part of a prompt is: instructions (the system prompt), a passage, other text (an earlier turn, text between
passages), an answer that was generated, or the question at the end. Only passages are reused behind other text than
they were computed behind; a question is not cached."""
REUSED_ANYWHERE: frozenset[SegmentRole] = frozenset({"passage"})
"""Roles whose chunks are also reused behind other chunks than they were computed behind."""
SegmentAction = Literal["compute", "reuse"]
ComputeCause = Literal["question", "new", "edited", "short", "prefix", "mode", "load", "failed", "evicted"]
"""Why tokens were computed: the question always is; no KV of the text is stored (new), for want of space none, or none
any more (evicted); the stored text in front of it goes on differently (edited); it is text between passages, too short
to be stored (short); its KV is stored only behind other text (prefix), or the request's reuse mode or the strategy does
not use it (mode); loading it would have taken longer than computing it (load), or did not succeed (failed)."""


@dataclasses.dataclass(frozen=True)
class Rendering:
    """How the chat template writes messages, in transformers' terms.

    Attributes:
      add_generation_prompt: end with the beginning of the assistant's answer.
      continue_final_message: end within the last message, the assistant's, so that the answer continues it.
      variables: further variables of the template (`chat_template_kwargs`).
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A passage from the caller or the retriever: the unit of caching, versioning and reporting.

    `source_id` is the document that contains the passage if `id` names only the passage.
    """

    text: str
    id: str | None = None
    title: str | None = None
    version: str | None = None
    score: float | None = None
    source_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Token ids of one prompt segment, which is tokenized on its own, and their origin."""

    chunk_id: ChunkId
    token_ids: tuple[int, ...]
    text: str | None = None
    document_id: str | None = None
    version: str | None = None
    title: str | None = None
    source_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSlice:
    """Where a segment's tokens stand in a stored chunk: from its token `offset` on."""

    chunk_id: ChunkId
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class KnownSlice:
    """Tokens `[start, end)` of a prompt are those of a stored chunk from `source.offset` on."""

    start: int
    end: int
    source: ChunkSlice


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt: a chunk and its role.

    Attributes:
      source: the stored chunk whose tokens from `offset` on begin with this segment's, so that a slice of its KV can be
        reused; None if only KV of the segment's own chunk can be.
      borders: ascending offsets of the tokens at which another message, or another part of a message's content, begins;
        tokenization does not depend on them.
    """

    role: SegmentRole
    chunk: Chunk
    borders: tuple[int, ...] = ()
    source: ChunkSlice | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class VariantMeta:
    """Metadata of a stored variant: the KV of a chunk as computed after `prefix_ids`.

    Attributes:
      prefix_ids: ordered ids of the chunks before it.
      roles: the roles of the chunks before it, then its own. Instructions at the beginning of a prompt contain the
        attention sink, which receives mass from every token regardless of content, and they are the same in every
        prompt; so they do not count as prefix chunks in CacheCraft eq. 6, 7 and 9.
      inter_by_prefix: CacheCraft eq. 3, mean over layers: softmax mass that this chunk's queries put on each prefix
        chunk; aligned with `prefix_ids`. 0 for instructions at the beginning: see `roles`; and for text, which is no
        prefix chunk in these equations either: the mass on all text of a prompt is one number, which counts in the
        ranking of tokens only.
      a_mean, b_mean: CacheCraft eq. 9-10, inter and intra mass normalised by chunk lengths, mean over layers.
      cci: CacheCraft eq. 11, in [0.5, 1].
      token_ranking: in-chunk offsets, the most contextualised token first; all `num_tokens` of them.
      token_deviations: distance of each token's KV from that of the chunk after another prefix, relative to the norm
        of such rows; empty if there was nothing to compare with.
      token_received: softmax mass that each token received from all tokens of the prompt, mean over layers and heads;
        empty unless the engine is configured to measure it (strategy "h2o").
      start: position of the first token in the prompt that the variant was computed in; None if unknown.
      platform: JAX's name of the platform that computed it, such as "cpu"; None for this process's own.
      frequency_reuse: CacheCraft sec. 3.3 `f_r`, the sum over uses of one over the share that was recomputed.
      fidelity: `exact` if every KV row equals that of a full prefill, else `approx`.
    """

    variant_id: VariantId
    chunk_id: ChunkId
    prefix_ids: tuple[ChunkId, ...]
    inter_by_prefix: tuple[float, ...]
    a_mean: float
    b_mean: float
    cci: float
    token_ranking: tuple[int, ...]
    num_tokens: int
    num_bytes: int
    frequency_reuse: float = 0.0
    fidelity: Fidelity = "exact"
    token_deviations: tuple[float, ...] = ()
    token_received: tuple[float, ...] = ()
    start: int | None = None
    platform: str | None = None
    roles: tuple[SegmentRole, ...] = ()

    @property
    def num_instructions(self) -> int:
        """Number of instructions that the prefix begins with."""
        return leading_instructions(self.roles[: len(self.prefix_ids)])

    @property
    def chunks_before(self) -> int:
        """Number of chunks before it, without instructions and text."""
        before = self.roles[: len(self.prefix_ids)]
        return len(self.prefix_ids) - sum(role not in REUSED_ANYWHERE for role in before)


def leading_instructions(roles: Iterable[SegmentRole]) -> int:
    """Number of instructions that a prompt or prefix with these roles begins with."""
    return sum(1 for _ in itertools.takewhile(lambda role: role == "instructions", roles))


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A segment of a prompt and what the prefill does with it.

    Attributes:
      start: offset of the first token in the prompt.
      role, chunk_id: the segment's. `chunk_id` is None for a question, which is never cached.
      variant_id: the variant to merge, only if `action == "reuse"`.
      chunk_offset: the variant's row that the segment begins with; `num_tokens` rows from there on are merged.
      recompute_offsets: ascending offsets in the segment to recompute, only if `action == "reuse"`.
      cfo: CacheCraft eq. 12, the share of tokens that the policy chose to recompute; None if nothing is reused.
      key_shift: extra positions by which stored keys are rotated: 0, except in experiments that leave positions
        uncorrected.
      fidelity: fidelity of the segment's KV after this prefill.
    """

    role: SegmentRole
    action: SegmentAction
    start: int
    num_tokens: int
    chunk_id: ChunkId | None = None
    variant_id: VariantId | None = None
    recompute_offsets: tuple[int, ...] = ()
    cfo: float | None = None
    key_shift: int = 0
    fidelity: Fidelity = "exact"
    chunk_offset: int = 0

    @property
    def rows(self) -> slice:
        """The rows of the variant that are merged."""
        return slice(self.chunk_offset, self.chunk_offset + self.num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The decisions for one prefill that are made before any device work; can be executed and tested without the
    policy. The question's attention may choose tokens again before the first layer (`ccjax.policy.question`); the focus
    cut and the choice by deviation drop some between layers.

    Attributes:
      segments: in prompt order, covering the prompt without gaps; the last one is always computed.
      focus_window: CacheCraft alg. 1 `w`: layers for which the focused set must stay unchanged before tokens of
        unfocused chunks are dropped; None disables the focus cut.
      focus_rule: which gap rule alg. 1 uses (see ccjax.policy.focus).
      hkvd_counts_by_layer: CacheBlend sec. 4.3: number of tokens to recompute in each layer, those whose KV deviates
        most; the first entry is all of them. Empty: all run through every layer.
      chosen_by_question: indices of the reused segments whose tokens to recompute the question's attention chooses
        again, as many in all; those listed only determine the number.
      early_question: first and last (exclusive) token of a part of the question that stands before passages; it takes
        part in choosing as if it stood right before the last segment. Computed.
      preload_depth: CacheCraft eq. 16, number of layers whose KV is read before it is merged; the engine sets it from
        measured rates.
      pin: variants that must stay in their tier until the prefill is done.
    """

    segments: tuple[PlannedSegment, ...]
    focus_window: int | None = None
    focus_rule: str = "entropy"
    hkvd_counts_by_layer: tuple[int, ...] = ()
    chosen_by_question: tuple[int, ...] = ()
    early_question: tuple[int, int] = (0, 0)
    preload_depth: int = 1
    pin: tuple[VariantId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt in tokens."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def is_divisible(self) -> bool:
        """False if the result depends on which tokens are computed together."""
        return self.focus_window is None and not self.hkvd_counts_by_layer

    def recomputed_tokens(self, segment: PlannedSegment) -> float:
        """Tokens of a reused segment to recompute, in equivalents of all layers; ignores the focus cut."""
        counts = self.hkvd_counts_by_layer
        return len(segment.recompute_offsets) * (sum(counts) / (len(counts) * counts[0]) if counts else 1.0)

    def computed_tokens(self, segment: PlannedSegment) -> float:
        """Tokens of a segment to compute or recompute, in equivalents of all layers; ignores the focus cut."""
        return segment.num_tokens if segment.action == "compute" else self.recomputed_tokens(segment)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStats:
    """Per-layer statistics that the focus cut (CacheCraft alg. 1) reads during a prefill.

    `question_mass_by_chunk` is the softmax mass of the question's tokens on every passage, summed over question tokens
    and averaged over heads, in prompt order. The instructions are left out: their first token is an attention sink,
    which receives mass from every query regardless of the question, so it would always be the only focused chunk.
    """

    layer: int
    question_mass_by_chunk: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentReuse:
    """Reuse of one chunk of a prompt (a passage, the instructions, text); the three token counts add up to
    `num_tokens`. `framed`: its KV was prepared after the frame. `cause`: why it was computed, None if it was reused."""

    role: SegmentRole
    chunk_id: ChunkId | None
    num_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    tier: str | None = None
    cfo: float | None = None
    exact: bool = True
    focused: bool | None = None
    framed: bool = False
    document_id: str | None = None
    version: str | None = None
    title: str | None = None
    cause: ComputeCause | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseReport:
    """Reuse in one request, and what it cost; `computed + recomputed + reused == prompt_tokens`.

    Attributes:
      computed_tokens: tokens without stored KV, which ran through every layer (question included).
      recomputed_tokens: tokens of reused chunks that were computed again.
      reused_tokens: tokens whose stored KV was used unchanged.
      computed_share: token-layers computed / (prompt_tokens * L), at least 0: counts the focus cut, and the question
        twice if it ran first to choose tokens.
      exact: True if the answer equals that of a full prefill.
      focus_cut_layer: first layer that ran without the unfocused chunks, or None.
      per_document: every chunk of the prompt, in its order; all but the question.
      loaded_bytes: KV bytes merged into the context, from any tier.
      preloaded_bytes: bytes of disk variants that were in memory before the prefill began.
      load_wait_s: seconds that the device waited for KV.
      load_s: seconds that loading this KV takes on its own at the measured rates, 0 before there are any; the share `1
        - load_wait_s / load_s` was hidden behind queueing or computing.
      failed_loads: variants that were computed because reading them failed or took too long.
      given_up_loads: variants whose text was computed because loading them would have taken longer.
      calibrated: a calibration of this model determined how much was recomputed; False also for exact reuse.
      quality_target: share of full prefill's answers to keep, as set by the request or the calibration.
      quality_bound: share that the calibration showed to be kept, with its confidence; 1 if reuse was exact, None if
        unknown, as for passages that were not prepared if the calibration used prepared ones.
    """

    mode: ReuseMode
    strategy: str
    prompt_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    reused_tokens: int
    computed_share: float
    exact: bool
    per_document: tuple[DocumentReuse, ...] = ()
    focus_cut_layer: int | None = None
    loaded_bytes: int = 0
    load_wait_s: float = 0.0
    plan_s: float = 0.0
    prefill_s: float = 0.0
    failed_loads: int = 0
    preloaded_bytes: int = 0
    load_s: float = 0.0
    given_up_loads: int = 0
    calibrated: bool = False
    quality_target: float | None = None
    quality_bound: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return dataclasses.asdict(self)


LONGEST_ID = 1024
"""Characters of the longest id or version of a document, so that any can be named where documents are erased."""


def document_from_mapping(value: Mapping[str, Any], *, argument: str = "documents") -> Document:
    """A `Document` from `{"text", "id"?, "title"?, "version"?}`.

    Raises:
      ValueError: `text` is missing or empty, a field is not a string, or an id or a version is empty or too long; the
        message names `argument`.
    """
    text = value.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{argument}: wanted a non-empty string under 'text', got {text!r}")
    fields: dict[str, str | None] = {}
    for name in ("id", "title", "version"):
        field = value.get(name)
        if field is not None and not isinstance(field, str | int):
            raise ValueError(f"{argument}: wanted a string under {name!r}, got {type(field).__name__}")
        fields[name] = None if field is None else str(field)
        if field is not None and name != "title" and not 0 < len(str(field)) <= LONGEST_ID:
            message = f"wanted 1 to {LONGEST_ID} characters under {name!r}, got {len(str(field))}"
            raise ValueError(f"{argument}: {message}")
    return Document(text, fields["id"], fields["title"], fields["version"])
