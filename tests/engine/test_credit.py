"""The value of a use for eviction: it depends on the tokens recomputed, not on eq. 12."""

from __future__ import annotations

import numpy as np
import pytest

from ccjax.engine import EngineConfig
from ccjax.policy.settings import PlannerSettings
from ccjax.policy.strategies import expected_share
from tests.engine.helpers import TinyModel, draw_segments, permuted

MODEL = TinyModel(seed=4)
SEGMENTS = draw_segments(np.random.default_rng(1), [40, 60])


@pytest.mark.parametrize(
    ("strategy", "share"),
    # CacheBlend computes all tokens in the first of three layers, and 19 and 11 % of them in the others.
    [("cachecraft", 0.15), ("auto", 0.15), ("cacheblend", (1 + 0.19 + 0.11) / 3)],
)
def test_f_r_grows_with_the_recomputed_share_not_with_the_cfo(strategy, share):
    with MODEL.engine(strategy=strategy, recompute_ratio=0.15) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        report = engine.generate_from_tokens(permuted(SEGMENTS, [1, 0]), max_new_tokens=1).reuse
        reused = [one for one in report.per_document if one.role == "passage"]
        assert min(one.cfo for one in reused) > 0.4, "eq. 12 would have much more recomputed"
        shares = {}
        for one in reused:
            credit = max(meta.frequency_reuse for meta in engine._chunks.variants if meta.chunk_id == one.chunk_id)
            shares[one.num_tokens] = 1 / credit
        # The question's attention (`auto`) gives one of the passages more of the tokens than the other.
        wanted = pytest.approx(share, rel=0.05)
        assert sum(size * part for size, part in shares.items()) / sum(shares) == wanted
        assert strategy == "auto" or all(part == wanted for part in shares.values())


def test_eviction_policy_gets_recomputed_shares_of_repaired_variants():
    """For the host tier's policy, saving a tenth of a second of computation must count."""
    with MODEL.engine(strategy="auto") as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        engine.generate_from_tokens(permuted(SEGMENTS, [1, 0]), max_new_tokens=1)
        entries = engine._chunks.variants._placement._policies["host"]._entries
        repaired = [entries[meta.variant_id] for meta in engine._chunks.variants if meta.fidelity == "approx"]
        assert repaired and all(np.isfinite(entry.rank[0]) for entry in repaired)
        assert {entry.info.recomputed_share for entry in repaired} == {0.15}
        used = [entry.info.recomputed_share for entry in entries.values() if entry.uses.num_uses > 1]
        assert used and max(used) <= 0.25, "the question chooses 0.15 of both passages together"


def test_new_variant_gets_the_expected_recomputed_share():
    with MODEL.engine(strategy="cachecraft", recompute_ratio=0.3) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1)
        entries = engine._chunks.variants._placement._policies["host"]._entries
        shares = {(meta.roles[-1], entries[meta.variant_id].info.recomputed_share) for meta in engine._chunks.variants}
        assert shares == {("passage", 0.3), ("instructions", 0.0)}, "instructions are only reused exactly"


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"strategy": "auto"}, 0.15),
        ({"strategy": "auto", "alpha": 0.1}, 0.08),
        ({"strategy": "auto", "recompute_cap": 0.4}, 0.4),
        ({"strategy": "auto", "recompute_ratio": 0.3}, 0.3),
        ({"strategy": "cachecraft"}, 0.8),
        ({"strategy": "legolink", "alpha": 0.5}, 0.4),
        ({"strategy": "cacheblend"}, 0.15),
        ({"strategy": "reuse"}, 0.0),
        ({"strategy": "prefix"}, 0.0),
    ],
)
def test_expected_share_follows_from_the_planner_settings(settings, share):
    assert expected_share(PlannerSettings(**settings), 0.8) == pytest.approx(share)
    assert EngineConfig().strategy == "auto"
