"""Capture after a prefill: metadata against naive sums of eq. 3-11 over softmax weights, ids, the decision."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from ccjax.policy.capture import LEAST_TEXT, make_variant_id, should_capture, variant_meta, variants_to_compute
from ccjax.policy.planner import plan_prefill
from ccjax.policy.settings import PlannerSettings
from ccjax.types import ChunkId, PlannedSegment, VariantId
from tests.policy import oracles_policy as oracle
from tests.policy.builders import ids, prompt, question, variant

GOOD = {
    "chunk_id": ChunkId("X"),
    "prefix_ids": ids("AB"),
    "prefix_lengths": (2, 5),
    "inter_by_prefix": (1.6, 1.0),
    "intra": 0.8,
    "token_scores": (0.3, 0.9, 0.9, 0.5),
    "num_bytes": 64,
}


class TestMeta:
    def test_variant_meta_matches_hand_computed_values(self):
        # a = 1.6/(4*2) + 1.0/(4*5) = 0.25, b = 0.8/16 = 0.05, CCI = 1/(1 + e^-5); scores 0.9, 0.9, 0.5, 0.3
        meta = variant_meta(**GOOD)
        assert (meta.a_mean, meta.b_mean) == pytest.approx((0.25, 0.05))
        assert meta.cci == pytest.approx(0.9933071490757153)
        assert meta.token_ranking == (1, 2, 3, 0)
        assert (meta.num_tokens, meta.num_bytes, meta.frequency_reuse, meta.fidelity) == (4, 64, 0.0, "exact")
        assert meta.inter_by_prefix == (1.6, 1.0) and meta.prefix_ids == ids("AB")
        assert meta.variant_id == make_variant_id(ChunkId("X"), ids("AB"), "exact")

    def test_normalising_the_mean_equals_averaging_normalised_layers(self):
        weights = oracle.attention_weights(num_layers=3, num_tokens=16, seed=0)
        chunks = [range(0, 3), range(3, 9), range(9, 16)]
        own = chunks[-1]
        mean = weights.mean(0)
        scores = [float(mean[token, : own.start].sum()) for token in own]
        meta = variant_meta(
            chunk_id=ChunkId("X"),
            prefix_ids=ids("AB"),
            prefix_lengths=[3, 6],
            inter_by_prefix=[oracle.inter(mean, keys, own) for keys in chunks[:-1]],
            intra=oracle.intra(mean, own),
            token_scores=scores,
            num_bytes=0,
        )
        a, b = oracle.a_b_mean(weights, chunks)
        assert (meta.a_mean, meta.b_mean) == pytest.approx((a, b), rel=1e-12)
        assert meta.cci == pytest.approx(oracle.cci(a, b), rel=1e-12)
        assert list(meta.token_ranking) == np.argsort(-np.asarray(scores)).tolist()

    def test_without_a_prefix_tokens_rank_by_position(self):
        meta = variant_meta(
            **{**GOOD, "prefix_ids": (), "prefix_lengths": (), "inter_by_prefix": (), "token_scores": (0.0, 1e-9, 0.0)}
        )
        assert meta.token_ranking == (0, 1, 2)
        assert meta.cci == 0.5

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"prefix_lengths": (2,)}, "prefix_ids, prefix_lengths, inter_by_prefix"),
            ({"inter_by_prefix": (1.0, 1.0, 1.0)}, "prefix_ids, prefix_lengths, inter_by_prefix"),
            ({"token_scores": ()}, "token_scores"),
            ({"token_scores": (0.1, float("nan"))}, r"token_scores\[1\]"),
            ({"num_bytes": -1}, "num_bytes"),
            ({"intra": -0.5}, "intra"),
        ],
    )
    def test_bad_arguments_are_named(self, change, name):
        with pytest.raises(ValueError, match=name):
            variant_meta(**{**GOOD, **change})


class TestVariantId:
    def test_variant_id_is_sha256_of_the_documented_text(self):
        text = '["ccjax-variant-1","X",["A","B"],"exact"]'
        assert make_variant_id(ChunkId("X"), ids("AB"), "exact") == hashlib.sha256(text.encode()).hexdigest()

    def test_variant_id_depends_on_every_part_and_on_prefix_order(self):
        made = [
            make_variant_id(ChunkId(chunk), [ChunkId(p) for p in prefix], fidelity)
            for chunk, prefix in [("X", "AB"), ("X", "BA"), ("X", ["AB"]), ("X", ""), ("XA", "B"), ("Y", "AB")]
            for fidelity in ("exact", "approx")
        ]
        assert len(set(made)) == len(made)


COMPUTED = PlannedSegment(role="passage", action="compute", start=0, num_tokens=10, chunk_id=ChunkId("X"))
FIXED = dataclasses.replace(
    COMPUTED,
    action="reuse",
    variant_id=VariantId("X|C|exact"),
    recompute_offsets=(3,),
    cfo=0.1,
    fidelity="approx",
)


class TestShouldCapture:
    @pytest.mark.parametrize(
        ("fidelity", "existing", "expected"),
        [
            ("exact", [], True),
            ("exact", [variant("X", "A"), variant("X", "BA"), variant("Y", "AB")], True),
            ("exact", [variant("X", "AB", fidelity="approx")], True),  # an exact one is better
            ("exact", [variant("X", "AB")], False),
            ("approx", [], True),
            ("approx", [variant("X", "AB")], False),
            ("approx", [variant("X", "AB", fidelity="approx")], False),
        ],
    )
    def test_computed_chunk_is_captured_unless_an_equal_or_better_variant_exists(self, fidelity, existing, expected):
        segment = dataclasses.replace(COMPUTED, fidelity=fidelity)
        assert should_capture(segment, existing, ids("AB")) is expected

    @pytest.mark.parametrize(
        ("change", "existing", "expected"),
        [
            ({}, [variant("X", "C")], True),
            ({"recompute_offsets": ()}, [variant("X", "C")], False),
            ({}, [variant("X", "C", variant_id="X|C|exact", fidelity="approx")], False),  # approx is never a parent
            ({}, [variant("X", "D")], False),  # the parent is gone, so exactness is not known
            ({}, [variant("X", "C"), variant("X", "AB")], False),
            ({}, [variant("X", "C"), variant("X", "AB", fidelity="approx")], False),
            ({}, [variant("X", "C"), variant("Y", "AB")], True),
        ],
    )
    def test_recomputed_chunk_is_captured_only_with_an_exact_parent_variant(self, change, existing, expected):
        assert should_capture(dataclasses.replace(FIXED, **change), existing, ids("AB")) is expected

    def test_text_and_instructions_are_captured_only_exact(self):
        for role in ("text", "instructions", "passage"):
            computed = dataclasses.replace(COMPUTED, role=role, num_tokens=LEAST_TEXT)
            assert should_capture(computed, [], ids("AB"))
            shorter = dataclasses.replace(computed, num_tokens=LEAST_TEXT - 1)
            assert should_capture(shorter, [], ids("AB")) == (role != "text")
            is_passage = role == "passage"
            assert should_capture(dataclasses.replace(computed, fidelity="approx"), [], ids("AB")) is is_passage

    def test_exact_reuse_and_the_question_are_never_captured(self):
        exact = dataclasses.replace(COMPUTED, action="reuse", variant_id=VariantId("X|AB|exact"), cfo=0.0)
        assert not should_capture(exact, [variant("X", "AB")], ids("AB"))
        assert not should_capture(
            PlannedSegment(role="question", action="compute", start=0, num_tokens=3), [], ids("AB")
        )


class TestVariantsToCompute:
    def planned(self, known):
        chunks = prompt("ABC", 10)
        return plan_prefill([*chunks, question()], known, mode="bounded", settings=PlannerSettings())

    def test_all_chunks_of_a_new_prompt_are_listed_in_order_with_their_prefix(self):
        found = variants_to_compute(self.planned({}), {})
        expected = [(name, ids("ABC"[:index])) for index, name in enumerate("ABC")]
        assert list(found) == [make_variant_id(ChunkId(name), prefix, "exact") for name, prefix in expected]
        assert list(found.values()) == [10, 10, 10]

    def test_reused_chunks_are_omitted_and_chunks_after_approximate_ones_are_approx(self):
        known = {ChunkId("B"): (variant("B", "D"),)}
        found = variants_to_compute(self.planned(known), known)
        assert list(found) == [
            make_variant_id(ChunkId("A"), (), "exact"),
            make_variant_id(ChunkId("C"), ids("AB"), "approx"),
        ]

    def test_already_stored_variants_are_not_listed(self):
        known = {ChunkId("B"): (variant("B", "A"),)}
        plan = self.planned({})
        assert make_variant_id(ChunkId("B"), ids("A"), "exact") not in variants_to_compute(plan, known)
        assert len(variants_to_compute(plan, known)) == 2
