"""Random histories of two tiers on one root, with catalogs that crash, go stale and rot: no record is ever wrong."""

import contextlib
import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ccjax.store.catalog
import ccjax.store.commits
from ccjax.store import ShardNotFoundError, TensorStoreTier
from tests.store.kv import OURS, SPEC, assert_same_bytes, make_kv, make_record, namespace_of, url_of

WHO = st.integers(0, 1)
WHICH = st.sampled_from(("a", "b", "c", "d", "e"))
STEPS = ("replace", "delete")


class CatalogHistory(RuleBasedStateMachine):
    """Two tiers on one root. `truth` is variant id -> (tokens, writer) of what its record commits."""

    @initialize()
    def begin(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ccjax.store.commits, "LEAST_CHANGES", 1)
        self.patch.setattr(ccjax.store.catalog, "RECORDS_PER_PART", 2)
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.path = Path(self.folder.name)
        self.truth: dict[str, tuple[int, int]] = {}
        self.count = 0
        self.tiers = [TensorStoreTier(url_of(self.path), SPEC, OURS) for _ in range(2)]

    @rule(who=WHO, variant_id=WHICH, num_tokens=st.integers(1, 4))
    def write(self, who, variant_id, num_tokens):
        self.count += 1
        won = self.tiers[who].write(
            make_record(variant_id, num_tokens), make_kv(variant_id, num_tokens, writer=self.count)
        )
        assert won == (variant_id not in self.truth)
        if won:
            self.truth[variant_id] = (num_tokens, self.count)
        assert variant_id in self.tiers[who]

    @rule(who=WHO, variant_id=WHICH)
    def evict(self, who, variant_id):
        known = self.tiers[who]._commits.get(variant_id)
        self.tiers[who].remove([variant_id])
        record = namespace_of(self.path) / "records" / f"{variant_id}.json"
        if known is not None and not record.exists():
            self.truth.pop(variant_id, None)
        assert record.exists() == (variant_id in self.truth)

    @rule(who=WHO)
    def refresh(self, who):
        self.tiers[who].refresh()
        assert {summary.variant_id for summary in self.tiers[who].summaries()} == set(self.truth)

    @rule(who=WHO)
    def reopen(self, who):
        self.tiers[who] = TensorStoreTier(url_of(self.path), SPEC, OURS)
        assert {summary.variant_id for summary in self.tiers[who].summaries()} == set(self.truth)

    @rule(who=WHO)
    def write_catalog(self, who):
        self.tiers[who].tidy()

    @rule(who=WHO, step=st.sampled_from(STEPS), after=st.integers(0, 3))
    def crash_while_writing_the_catalog(self, who, step, after):
        root = self.tiers[who]._root
        left = [after]
        go_on = getattr(root, step)

        class Killed(BaseException):
            pass

        def dies(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return go_on(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(root, step, dies)
            with contextlib.suppress(Killed):
                self.tiers[who].tidy()
        self.reopen(who)

    @rule(who=WHO, position=st.integers(0, 100_000), bit=st.integers(0, 7))
    def damage_the_catalog(self, who, position, bit):
        folder = namespace_of(self.path) / "catalog"
        parts = sorted(folder.iterdir()) if folder.exists() else []
        if parts:
            part = parts[position % len(parts)]
            raw = bytearray(part.read_bytes())
            raw[position % len(raw)] ^= 1 << bit
            part.write_bytes(raw)

    @rule(who=WHO, variant_id=WHICH)
    def read(self, who, variant_id):
        tier = self.tiers[who]
        for _ in range(2):  # the first read of an outdated entry may miss, and then the new variant is there
            if variant_id not in tier:
                return
            try:
                kv = tier.open(variant_id).wait(0, 3)
            except ShardNotFoundError:
                continue
            num_tokens, writer = self.truth[variant_id]
            assert_same_bytes(kv, make_kv(variant_id, num_tokens, writer=writer))
            assert tier.get_record(variant_id) == make_record(variant_id, num_tokens)
            return
        assert variant_id not in self.truth and variant_id not in tier

    @invariant()
    def nothing_is_held_for_corrupt(self):
        if hasattr(self, "tiers"):
            assert all(tier.num_corrupt == 0 for tier in self.tiers)
            for tier in self.tiers:
                assert tier.budget.used_bytes == sum(known.charge_bytes for known in tier._commits.all())

    def teardown(self):
        if hasattr(self, "tiers"):
            for who in range(2):
                self.reopen(who)
                for variant_id in self.truth:
                    self.read(who, variant_id)
                    assert variant_id in self.tiers[who]
            self.patch.undo()
            self.folder.cleanup()


TestCatalogHistory = CatalogHistory.TestCase
TestCatalogHistory.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
