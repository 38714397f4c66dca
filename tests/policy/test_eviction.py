"""Eviction policies: orders by hand, a plain recomputation of every score over random traces, and the number of
comparisons at 20,000 entries."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.policy.eviction import POLICIES, EntryInfo, Gdsf, Pgdsf, SavedSeconds, make_policy
from tests.policy.oracles_eviction import Plain

NAMES = tuple(POLICIES)


def build(name) -> Any:
    return make_policy(name)


def info(num_bytes=10, compute_s=1.0, cfo=0.5, *, num_tokens=16, load_s=0.0, below_load_s=None, parent=None):
    return EntryInfo(num_bytes, num_tokens, compute_s, cfo, load_s, below_load_s, parent)


class TestInfo:
    @pytest.mark.parametrize(
        ("compute_s", "cfo", "load_s", "below_load_s", "saved_s"),
        [
            (2.0, 0.25, 0.125, None, 1.375),  # lost: 2; held: 0.125 + 0.5
            (2.0, 0.25, 0.125, 0.5, 0.375),  # below: 0.5 + 0.5 against 0.125 + 0.5
            (2.0, 0.25, 0.125, 9.0, 1.375),  # the copy below is slower than computing
            (2.0, 1.0, 0.125, None, 0.0),  # everything is recomputed: the load is a loss, so nothing is saved
            (0.0, 0.0, 0.0, None, 0.0),
        ],
    )
    def test_saved_seconds_per_use_match_hand_computed_values(self, compute_s, cfo, load_s, below_load_s, saved_s):
        assert info(1, compute_s, cfo, load_s=load_s, below_load_s=below_load_s).saved_s == saved_s

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_bytes", 0),
            ("num_tokens", 0),
            ("compute_s", -1.0),
            ("recomputed_share", 1.5),
            ("load_s", math.inf),
            ("below_load_s", math.nan),
        ],
    )
    def test_bad_fields_are_named(self, name, value):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(info(), **{name: value})


class TestOrders:
    """a, b, c inserted at 0; a hit at 1, 2, 3; b hit at 4; then d inserted at 5."""

    def fill(self, policy, **infos):
        given = {key: infos.get(key, info()) for key in "abcd"}
        for key in "abc":
            policy.on_insert(key, given[key], 0)
        for now, key in enumerate("aaab", 1):
            policy.on_hit(key, given[key], now)
        policy.on_insert("d", given["d"], 5)
        return "".join(policy.victims(sum(one.num_bytes for one in given.values())))

    @pytest.mark.parametrize(
        ("name", "infos", "order"),
        [
            ("lru", {}, "cabd"),
            ("lfu", {}, "cdba"),
            # a: 3 / 0.5 = 6; b: 1 / 0.125 = 8; c, d: never reused, older first
            ("cachecraft_fr", {"b": info(cfo=0.125)}, "cdab"),
            ("cachecraft_fr", {"b": info(cfo=0.0, num_tokens=5)}, "cdba"),  # exact: as many as it has tokens
            # a: 4 * 1 / 40 = 0.1; b: 2 * 1 / 10 = 0.2; c: 1 * 5 / 10 = 0.5; d: 1 * 1 / 5 = 0.2, later than b
            ("gdsf", {"a": info(40), "c": info(compute_s=5.0), "d": info(5)}, "abdc"),
        ],
    )
    def test_order_matches_hand_computed_values(self, name, infos, order):
        assert self.fill(make_policy(name), **infos) == order

    def test_gdsf_clock_is_the_greatest_priority_evicted(self):
        policy = Gdsf()
        for key, compute_s in (("a", 2.0), ("b", 3.0), ("c", 9.0)):
            policy.on_insert(key, info(10, compute_s), 0)
        policy.on_remove("b")  # 0.3
        policy.on_remove("a")  # 0.2: the clock stays
        policy.on_insert("d", info(10, 5.9), 1)  # 0.3 + 0.59 < 0.9
        policy.on_insert("e", info(10, 6.1), 1)  # 0.3 + 0.61
        assert policy.victims(30) == ("d", "c", "e")

    def test_removal_without_eviction_does_not_advance_the_gdsf_clock(self):
        policy = Gdsf()
        policy.on_insert("a", info(10, 100.0), 0)
        policy.on_insert("b", info(10, 2.0), 0)
        policy.on_remove("a", evicted=False)
        policy.on_insert("c", info(10, 1.0), 1)
        assert policy.victims(20) == ("c", "b")

    def test_pgdsf_averages_cost_per_token_over_misses_and_keeps_frequency(self):
        policy = Pgdsf()
        policy.on_insert("a", info(compute_s=16.0, num_tokens=16), 0)
        policy.on_hit("a", info(compute_s=99.0, num_tokens=1), 1)  # hits do not change the mean
        policy.on_remove("a", evicted=False)
        policy.on_insert("a", info(compute_s=48.0, num_tokens=16), 2)  # 3 uses * mean(1, 3) = 6
        policy.on_insert("b", info(compute_s=5.9, num_tokens=1), 2)
        policy.on_insert("c", info(compute_s=6.1, num_tokens=1), 2)
        assert policy.victims(30) == ("b", "a", "c")

    def test_uses_of_evicted_keys_still_count_while_remembered(self):
        for policy, remembered in ((SavedSeconds(num_remembered=1), "b"), (SavedSeconds(num_remembered=0), "")):
            for key in "abc":
                policy.on_insert(key, info(compute_s=1.0 + (key == "c")), 0)
            for key in "ab":  # with space for one, b's uses replace a's
                policy.on_remove(key)
            for key in "ab":
                policy.on_insert(key, info(compute_s=1.5), 1)
            # a and b save 0.75 at time 1, c 1 at time 0; b remembered: 0.5 more
            assert policy.victims(30) == (("a", "c", "b") if remembered else ("a", "b", "c"))


@pytest.mark.parametrize("name", NAMES)
class TestVictims:
    def filled(self, name):
        policy = build(name)
        for now, key in enumerate("abcd"):
            policy.on_insert(key, info(10 + now), now)
        return policy

    @pytest.mark.parametrize(
        ("bytes_wanted", "pinned", "count"),
        [(0, "", 0), (1, "", 1), (46, "", 4), (47, "", None), (1, "ab", 1), (27, "a", 3), (1, "abcd", None)],
    )
    def test_victims_are_the_fewest_in_order_that_free_enough_or_none(self, name, bytes_wanted, pinned, count):
        policy = self.filled(name)
        whole = policy.victims(46)
        victims = policy.victims(bytes_wanted, pinned=pinned)
        if count is None:
            assert victims is None
        else:
            assert victims == tuple(key for key in whole if key not in pinned)[:count]
        assert policy.victims(46) == whole, "asking changes nothing"

    def test_only_saved_seconds_rejects_a_less_valuable_newcomer(self, name):
        policy = build(name)
        policy.on_insert("a", info(10, 0.5), 0)
        policy.on_insert("b", info(10, 8.0), 0)
        policy.on_hit("b", info(10, 8.0), 1)
        policy.on_insert("n", info(100, 10.0), 2)  # 0.05 s per byte: more than a, which alone is too small
        wanted = ("n",) if name == "saved_seconds" else tuple(key for key in policy.victims(120) if key != "n")
        assert policy.victims(20, new_key="n") == wanted
        assert policy.victims(20, new_key="n", pinned="n") == tuple(key for key in policy.victims(120) if key != "n")

    @pytest.mark.parametrize(("saved_s", "is_stored"), [(1.0, False), (39.0, False), (41.0, True)])
    def test_an_only_copy_is_stored_unless_it_is_worth_less_than_a_fourth(self, name, saved_s, is_stored):
        policy = build(name)
        policy.on_insert("a", info(10, 0.5), 0)
        policy.on_insert("b", info(10, 8.0), 0)
        policy.on_hit("b", info(10, 8.0), 0)  # 1.6 s per byte
        policy.on_insert("n", info(100, saved_s), 0)
        others = tuple(key for key in policy.victims(120) if key != "n")
        wanted = ("n",) if name == "saved_seconds" and not is_stored else others
        assert policy.victims(20, new_key="n", is_only_copy=True) == wanted
        assert policy.victims(20, new_key="n", is_only_copy=True, pinned="n") == others
        assert policy.victims(20, new_key="n") == (("n",) if name == "saved_seconds" else others)

    def test_invalid_calls_are_rejected_by_name_and_change_nothing(self, name):
        policy = self.filled(name)
        with pytest.raises(ValueError, match="key.*'a'"):
            policy.on_insert("a", info(), 9)
        with pytest.raises(ValueError, match="bytes_wanted"):
            policy.victims(-1)
        for call in (
            lambda: policy.on_hit("x", info(), 9),
            lambda: policy.on_remove("x"),
            lambda: policy.victims(1, new_key="x"),
        ):
            with pytest.raises(KeyError, match="'x'"):
                call()
        assert len(policy.victims(46)) == 4, "nothing changed"


class TestTree:
    """RAGCache sec. 5.1: only leaves of the knowledge tree are evicted; of two chains a - b - c and d - e."""

    PARENTS = {"a": None, "b": "a", "c": "b", "d": None, "e": "d"}
    COST = {"a": 1.0, "b": 2.0, "c": 9.0, "d": 4.0, "e": 3.0}

    def filled(self, policy, *, insert="abcde"):
        for key in insert:
            policy.on_insert(key, info(10, self.COST[key], parent=self.PARENTS[key]), 0)
        return policy

    def test_pgdsf_evicts_a_node_only_after_its_children(self):
        policy = self.filled(Pgdsf())
        assert [policy.is_leaf(key) for key in "abcde"] == [False, False, True, False, True]
        for count, wanted in enumerate(("e", "ed", "edc", "edcb", "edcba"), 1):
            assert policy.victims(10 * count) == tuple(wanted)
        assert policy.victims(51) is None and self.filled(Gdsf()).victims(30) == ("a", "b", "e")
        assert policy.victims(20, new_key="e") == ("c", "b")

    def test_node_becomes_a_leaf_again_once_its_children_are_gone(self):
        policy = self.filled(Pgdsf())
        policy.on_remove("c")
        policy.on_remove("e", evicted=False)
        assert policy.is_leaf("b") and policy.is_leaf("d") and policy.victims(10) == ("b",)
        policy.on_hit("b", info(10, 2.0), 1)  # its record has no parent now
        assert policy.is_leaf("a") and policy.victims(10) == ("a",)

    def test_children_may_be_known_before_their_parent(self):
        policy = Pgdsf()
        policy.on_adopt({key: info(10, parent=self.PARENTS[key]) for key in "cbed"})
        assert [policy.is_leaf(key) for key in "bcde"] == [False, True, False, True]
        policy.on_insert("a", info(10, 0.0), 0)
        assert policy.victims(40) == ("c", "b", "e", "d")

    def test_parents_are_restored_from_state_after_a_restart(self):
        policy = self.filled(Pgdsf())
        fresh = reopened(policy, 1, {key: info(10, self.COST[key]) for key in "abcde"}, Pgdsf())
        assert fresh.victims(50) == policy.victims(50) == tuple("edcba")
        fresh.on_hit("c", info(10, parent="d"), 2)  # the record's parent counts
        assert fresh.is_leaf("b") and not fresh.is_leaf("d")
        assert "parents" not in self.filled(Gdsf()).state(1)

    @pytest.mark.parametrize("damage", [None, [], {"a": None}, {"a": 3}, {"a": "a"}, {"stranger": "a"}])
    def test_damaged_parents_in_the_state_are_ignored(self, damage):
        fresh = Pgdsf()
        fresh.restore({"uses": {}, "parents": damage}, {"a", "b"})
        fresh.on_adopt({key: info(10) for key in "ab"})
        assert set(fresh.victims(20)) == {"a", "b"} and fresh.state(1)["parents"] == {}


@given(st.data())
def test_tree_eviction_repeatedly_removes_the_least_valuable_leaf(data):
    keys = [f"k{number}" for number in range(data.draw(st.integers(1, 12)))]
    parents = {key: data.draw(st.sampled_from([None, *keys[:number]])) for number, key in enumerate(keys)}
    costs = {key: data.draw(st.integers(0, 9)) for key in keys}
    pinned = set(data.draw(st.lists(st.sampled_from(keys), max_size=2)))
    policy = Pgdsf()
    for key in data.draw(st.permutations(keys)):
        policy.on_insert(key, info(10, float(costs[key]), parent=parents[key]), 0)
    left, wanted = set(keys), []
    while leaves := sorted(
        (costs[key], key) for key in left - pinned if not any(parents[child] == key for child in left)
    ):
        wanted.append(leaves[0][1])
        left.remove(leaves[0][1])
    for count in range(len(keys) + 1):
        chosen = policy.victims(10 * count, pinned=pinned)
        assert chosen == (tuple(wanted[:count]) if count <= len(wanted) else None)


def test_invalid_policy_settings_are_rejected():
    for half_life in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="^half_life: wanted"):
            SavedSeconds(half_life=half_life)
    with pytest.raises(ValueError, match="num_remembered"):
        SavedSeconds(num_remembered=-1)
    with pytest.raises(ValueError, match="'mru'"):
        make_policy("mru")


# -- random traces against plain recomputation (oracles_eviction.py) ---------------------------------------------------

HALF_LIFE = 3.7  # not a whole number of requests: different histories never have equal values


def build_for(name) -> Any:
    return SavedSeconds(half_life=HALF_LIFE) if name == "saved_seconds" else build(name)


def reopened(policy, now, infos, fresh):
    """`fresh` with the state of `policy` restored from a file."""
    fresh.restore(json.loads(json.dumps(policy.state(now), allow_nan=False)), infos)
    for key in sorted(infos):
        fresh.on_adopt({key: infos[key]})
    return fresh


# Sizes, seconds and CFOs with distinct seconds per byte, whose sums are exact in binary.
passages = st.tuples(
    st.sampled_from([5, 7, 11, 13]),
    st.sampled_from([17 / 8, 19 / 8, 23 / 8, 29 / 8]),
    st.sampled_from([None, None, 15 / 16]),
)
cfos = st.sampled_from([0.0, 0.25, 0.5, 1.0])
requests = st.tuples(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("ABCDEFGH"), cfos), min_size=1, max_size=4, unique_by=lambda use: use[0]),
    st.none() | st.sampled_from("ABCDEFGH"),
)


@pytest.mark.parametrize("name", NAMES)
@given(
    corpus=st.lists(passages, min_size=8, max_size=8),
    trace=st.lists(requests, min_size=1, max_size=14),
    budget=st.integers(8, 60),
)
def test_victims_match_a_plain_recomputation_of_all_scores(name, corpus, trace, budget):
    policy = build_for(name)
    plain = Plain(name, HALF_LIFE)
    used, now = 0, 0
    infos: dict[str, EntryInfo] = {}

    def remove(key, evicted):
        plain.remove(key, evicted)
        policy.on_remove(key, evicted=evicted)
        return corpus["ABCDEFGH".index(key)][0]

    for step, uses, damaged in trace:
        now += step
        pinned = {key for key, _ in uses if key in plain.held}
        for key, cfo in sorted(uses, key=lambda use: use[0] not in pinned):  # all pinned look-ups first
            size, seconds, below = corpus["ABCDEFGH".index(key)]
            one = infos[key] = info(size, seconds, cfo, load_s=1 / 8, below_load_s=below)
            (policy.on_hit if key in plain.held else policy.on_insert)(key, one, now)
            plain.use(key, one, now)
            if key in pinned:
                continue
            missing = max(0, used + size - budget)
            victims = policy.victims(missing, pinned=pinned, new_key=key)
            assert victims == plain.victims(missing, pinned, key)
            if victims is None or key in victims:
                remove(key, False)
                continue
            used += size - sum(remove(victim, True) for victim in victims)
            pinned.add(key)
        if damaged in plain.held:
            used -= remove(damaged, False)
        assert used <= budget
        assert policy.victims(used) == plain.victims(used, (), None), "the whole order"
        infos = {key: one for key, one in infos.items() if key in plain.held}
        assert reopened(policy, now, infos, build_for(name)).victims(used) == policy.victims(used), "after a restart"


@pytest.mark.parametrize("first", [1e9, 1e-308])
def test_saved_seconds_of_very_different_magnitudes_add_up(first):
    policy = SavedSeconds()
    for key, seconds in (("a", (first, 1e9 * 1e-308 / first)), ("b", (1e9,)), ("c", (2e9,))):
        policy.on_insert(key, info(compute_s=seconds[0], cfo=0.0), 0)
        for saved_s in seconds[1:]:
            policy.on_hit(key, info(compute_s=saved_s, cfo=0.0), 0)
    assert policy.victims(30)[-1] == "c" and policy.state(0)["uses"]["a"][2] == policy.state(0)["uses"]["b"][2]


@pytest.mark.parametrize("name", NAMES)
class TestRestarts:
    def used(self, name):
        """`often` was used three times, `once` once, both held; `gone` was used four times and evicted."""
        policy, infos = build(name), {key: info(10) for key in ("often", "once", "gone")}
        for key in infos:
            policy.on_insert(key, infos[key], 1)
        for now, key in enumerate(("gone", "gone", "gone", "often", "often"), 2):
            policy.on_hit(key, infos[key], now)
        policy.on_remove("gone")
        return policy, {key: infos[key] for key in ("often", "once")}

    def test_counting_continues_after_a_restart(self, name):
        policy, infos = self.used(name)
        fresh = reopened(policy, 7, infos, build(name))
        for one in (policy, fresh):  # now `once` has as many uses as `often`, and later ones
            for later in (1, 2):
                one.on_hit("once", infos["once"], later + (7 if one is policy else 0))
        assert fresh.victims(20) == policy.victims(20)
        wanted = {key: values for key, values in policy.state(9)["uses"].items() if key in fresh.state(2)["uses"]}
        assert wanted.keys() >= infos.keys()
        assert {key: pytest.approx(values) for key, values in fresh.state(2)["uses"].items()} == wanted

    def test_unknown_key_after_a_restart_is_evicted_first(self, name):
        policy, infos = self.used(name)
        fresh = reopened(policy, 7, infos | {"stranger": info(10)}, build(name))
        assert fresh.victims(30)[0] == "stranger" or name in ("gdsf", "pgdsf", "cachecraft_fr")
        assert set(fresh.victims(30)) == {"often", "once", "stranger"}

    def test_uses_of_an_adopted_key_survive_a_restart(self, name):
        policy = build(name)
        policy.on_adopt({"old": info(10)})
        policy.on_hit("old", info(10), 1)
        fresh = reopened(policy, 2, {"old": info(10)}, build(name))
        assert fresh.state(0)["uses"]["old"][:2] == [1, 0]

    def test_bulk_adoption_gives_the_same_order_as_single_adoptions(self, name):
        infos = {f"{number:04}": info(1 + number % 7) for number in random.Random(1).sample(range(1500), 1500)}
        at_once, singly = build(name), build(name)
        at_once.on_adopt(infos)
        for key in infos:
            singly.on_adopt({key: infos[key]})
        for one in (at_once, singly):
            one.on_hit("0003", infos["0003"], 1)
        assert at_once.victims(5000) == singly.victims(5000)

    def test_adopting_a_held_key_raises_and_adopts_none(self, name):
        policy, infos = self.used(name)
        with pytest.raises(ValueError, match="'once'"):
            policy.on_adopt({"new": info(10), "once": infos["once"]})
        assert "new" not in policy and set(policy.victims(20)) == {"often", "once"}

    def test_only_pgdsf_and_saved_seconds_remember_evicted_keys(self, name):
        policy, infos = self.used(name)
        fresh = reopened(policy, 7, infos, build(name))
        assert ("gone" in fresh.state(0)["uses"]) == (name in ("pgdsf", "saved_seconds"))

    def test_replacement_key_inherits_the_uses_of_its_predecessor(self, name):
        policy, infos = self.used(name)
        policy.inherit("often", "heir")
        policy.on_remove("often", evicted=False)
        policy.on_insert("heir", infos["often"], 8)
        assert policy.state(8)["uses"]["heir"][:2] == [4, 2]
        assert policy.victims(10) == ("once",)
        with pytest.raises(ValueError, match="'heir'"):
            policy.inherit("once", "heir")

    @pytest.mark.parametrize(
        "damage",
        [
            None,
            [],
            {"uses": None},
            {"uses": {"once": None}},
            {"uses": {"once": [1, 1, 0.0, 0.0]}},
            {"uses": {"once": [0, 0, 0.0, 0.0, 0.0]}},
            {"uses": {"once": [1, 2, 0.0, 0.0, 0.0]}},
            {"uses": {"once": [1.5, 1, 0.0, 0.0, 0.0]}},
            {"uses": {"once": [1, 1, math.nan, 0.0, 0.0]}},
            {"uses": {"once": [1, 1, math.inf, 0.0, 0.0]}},
            {"uses": {"once": [1, 1, 0.0, "now", 0.0]}},
            {"uses": {}, "clock": math.nan},
            {"uses": {}, "clock": math.inf},
            {"uses": {}, "clock": -1.0},
            {"uses": {}, "clock": "late"},
        ],
    )
    def test_damaged_state_is_ignored(self, name, damage):
        fresh = build(name)
        fresh.restore(damage, {"once"})
        fresh.on_adopt({"once": info(10)})
        assert fresh.state(0)["uses"] == {} and fresh.victims(10) == ("once",)
        assert fresh.state(0).get("clock", 0.0) == 0.0
        with pytest.raises(ValueError, match="'once'"):
            fresh.on_adopt({"once": info(10)})


# -- growth ------------------------------------------------------------------------------------------------------------


class Counted(float):
    """A value that counts its comparisons: each comparison of two ranks begins with an ==."""

    comparisons = 0

    def __eq__(self, other):
        Counted.comparisons += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__


def counting(name):
    policy = build(name)
    worth = policy.worth
    policy.worth = lambda entry: Counted(worth(entry))
    return policy


def compared(call):
    before = Counted.comparisons
    call()
    return Counted.comparisons - before


@pytest.mark.parametrize("name", NAMES)
def test_operations_on_20_000_entries_take_logarithmic_time(name):
    """A heap compares at most twice per level of its tree, which has 15 levels here."""
    rng = random.Random(0)
    infos = [info(rng.randrange(5, 20), rng.random(), rng.random()) for _ in range(500)]
    policy = counting(name)
    keys = [f"{number * 7919 % 20_011:06d}" for number in range(20_000)]  # distinct, unordered
    worst = 2 * 15

    def fill():
        for now, key in enumerate(keys):
            policy.on_insert(key, infos[now % 499], now)

    assert compared(fill) < 20_000 * worst
    hits = [compared(lambda key=key: policy.on_hit(key, rng.choice(infos), 200_000)) for key in keys[::100]]
    assert max(hits) < worst
    pinned = policy.victims(30)
    for number in range(200):
        policy.on_insert(f"new-{number}", infos[number], 200_001 + number)
        before = Counted.comparisons
        victims = policy.victims(30, pinned=pinned)
        assert 1 < len(victims) < 8
        assert Counted.comparisons - before < (len(victims) + len(pinned) + 1) * 2 * worst
        for victim in victims:
            assert compared(lambda victim=victim: policy.on_remove(victim)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_repeated_hits_do_not_slow_down_victim_selection(name):
    policy = counting(name)
    for key in "abcdefgh":
        policy.on_insert(key, info(), 0)
    for now in range(1, 4001):
        policy.on_hit("abcdefg"[now % 7], info(), now)
    assert compared(lambda: policy.victims(80)) < 500


def test_inner_nodes_are_scanned_only_once_when_choosing_victims():
    """A thousand paths of two, of which only the ends were used again: roots rank first, but may not be evicted."""

    class Counting(Pgdsf):
        num_met = 0

        def _is_current(self, rank):
            self.num_met += 1
            return super()._is_current(rank)

    policy = Counting()
    for number in range(1000):
        policy.on_insert(f"root {number}", EntryInfo(1, 1, 1.0), 0)
        end = EntryInfo(1, 1, 5.0, parent=f"root {number}")
        policy.on_insert(f"end {number}", end, 0)
        policy.on_hit(f"end {number}", end, 1)
    expected = sorted(f"end {number}" for number in range(1000))[0]
    assert policy.victims(1) == (expected,) and policy.num_met >= 1000
    policy.num_met = 0
    assert policy.victims(1) == (expected,) and policy.num_met < 10
    policy.on_remove(expected)
    assert policy.victims(1) == (expected.replace("end", "root"),), "it is a leaf now, and worth least"
    for _ in range(5000):  # until the order is rebuilt
        policy.on_hit("end 8", EntryInfo(1, 1, 5.0, parent="root 8"), 2)
    policy.on_hit("root 7", EntryInfo(1, 1, 1.0), 2)  # used and reordered, while its child protects it
    for number in (5, 7, 8):
        policy.on_remove(f"end {number}", evicted=False)
    assert set(policy.victims(2) or ()) == {"root 0", "root 5"}, "worth least of those that lost their ends"
    everything = policy.victims(1996) or ()
    assert len(everything) == len(set(everything)) == 1996 and policy.victims(1997) is None
