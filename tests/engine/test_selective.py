"""Selective recompute, focus cut and captured metadata against the slow float64 oracle."""

import numpy as np
import pytest

from ccjax.cache.capture import capture_variants
from ccjax.policy.focus import FocusState, observe
from ccjax.runner.plan_rows import mass_columns, question_stats
from ccjax.types import ChunkId, LayerStats, PlannedSegment, PrefillPlan, VariantId, VariantMeta
from tests.engine.helpers import TOLERANCE, TinyModel, run_plan, run_reusing, selective_oracle
from tests.oracles import llama_forward

MODEL = TinyModel(seed=1, num_hidden_layers=5)
LENGTHS = {"s": 6, "a": 37, "b": 20, "c": 51, "d": 33, "q": 8}


class World:
    """Chunks captured by the oracle in prompt s a b c d, reused in prompt s d new b a c question."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.tokens = {name: random.integers(0, 97, length) for name, length in (LENGTHS | {"n": 25}).items()}
        before = "sabcd"
        _, layers = llama_forward(MODEL.weights, MODEL.raw, np.concatenate([self.tokens[name] for name in before]))
        starts = np.cumsum([0, *(LENGTHS[name] for name in before)])
        self.kv = {
            name: np.stack([np.stack([layer.key[a:b], layer.value[a:b]]) for layer in layers])
            for name, a, b in zip(before, starts[:-1], starts[1:], strict=True)
        }
        self.order = "sdnbacq"
        self.prompt = np.concatenate([self.tokens[name] for name in self.order]).astype(np.int32)
        self.random = random

    def plan(self, share: float, **settings) -> PrefillPlan:
        segments, start = [], 0
        for name in self.order:
            length = len(self.tokens[name])
            kind = {"action": "compute", "fidelity": "exact" if name == "s" else "approx"}
            if name not in "nq":
                count = 0 if name == "s" else round(share * length)
                offsets = tuple(sorted(int(x) for x in self.random.choice(length, count, replace=False)))
                kind |= {"action": "reuse", "variant_id": VariantId(name), "recompute_offsets": offsets}
            role = {"s": "instructions", "q": "question"}.get(name, "passage")
            chunk = None if name == "q" else ChunkId(name)
            segments.append(PlannedSegment(role=role, start=start, num_tokens=length, chunk_id=chunk, **kind))
            start += length
        return PrefillPlan(tuple(segments), **settings)

    def read_layers(self, variant, first, last):
        return self.kv[variant][first:last].astype(np.float32)

    def cached(self):
        """Per layer, keys and values of the whole prompt; NaN if not stored."""
        missing = np.full((5, 2, 25, *self.kv["a"].shape[3:]), np.nan)
        question = np.full((*missing.shape[:2], LENGTHS["q"], *missing.shape[3:]), np.nan)
        parts = [self.kv.get(name, question if name == "q" else missing) for name in self.order]
        return [tuple(layer) for layer in np.concatenate(parts, axis=2)]


def computed_offsets(plan, dropped=()):
    rows = []
    for index, segment in enumerate(plan.segments):
        inside = range(segment.num_tokens) if segment.action == "compute" else segment.recompute_offsets
        rows += [] if index in dropped else [segment.start + offset for offset in inside]
    return np.asarray(rows)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.4, 0.9])
def test_selective_recompute_matches_the_oracle(share):
    world = World(seed=round(share * 100))
    plan = world.plan(share)
    result = run_reusing(MODEL.device_model(), world.prompt, plan, world.read_layers)
    rows = [computed_offsets(plan)] * 5
    wanted, _ = selective_oracle(MODEL.weights, MODEL.raw, world.prompt, world.cached(), rows)
    np.testing.assert_allclose(result.last_logits[-1], wanted, atol=TOLERANCE)
    assert result.computed_token_layers == 5 * len(rows[0])
    full = llama_forward(MODEL.weights, MODEL.raw, world.prompt)[0][-1]
    assert np.abs(full - wanted).max() > 100 * TOLERANCE  # the plan matters: the result differs from a full prefill


def test_one_recomputed_token_more_or_less_exceeds_the_tolerance():
    world = World(seed=2)
    plan = world.plan(0.3)
    rows = computed_offsets(plan)
    got = run_reusing(MODEL.device_model(), world.prompt, plan, world.read_layers).last_logits[-1]
    fewer = [np.delete(rows, 3)] * 5  # a token of d
    wrong, _ = selective_oracle(MODEL.weights, MODEL.raw, world.prompt, world.cached(), fewer)
    assert np.abs(got - wrong).max() > 10 * TOLERANCE


@pytest.mark.parametrize(("window", "rule"), [(1, "entropy"), (2, "entropy"), (2, "largest_gap"), (3, "largest_gap")])
def test_focus_cut_matches_the_oracle(window, rule):
    world = World(seed=10 + window)
    plan = world.plan(0.5, focus_window=window, focus_rule=rule)
    result = run_reusing(MODEL.device_model(), world.prompt, plan, world.read_layers, collect=True)

    # The oracle's own attention, layer by layer, determines the cut; then the oracle runs with it.
    documents = [index for index, segment in enumerate(plan.segments) if segment.role == "passage"]
    rows, state, cut = [computed_offsets(plan)] * 5, FocusState(), None
    _, attentions = selective_oracle(MODEL.weights, MODEL.raw, world.prompt, world.cached(), rows)
    for layer in range(3):  # masses are read one layer late, so those of the last two layers come too late
        question = attentions[layer].mean(1)[-LENGTHS["q"] :].sum(0)
        spans = [plan.segments[index] for index in documents]
        mass = tuple(float(question[s.start : s.start + s.num_tokens].sum()) for s in spans)
        state = observe(state, LayerStats(layer, mass), window=window, rule=rule)
        if state.decided is not None:
            cut = layer + 2
            break
    assert cut is not None and state.decided is not None
    unfocused = [
        index
        for number, index in enumerate(documents)
        if number not in state.decided and plan.segments[index].action == "reuse"
    ]
    after = computed_offsets(plan, dropped=unfocused)
    rows = rows[:cut] + [after] * (5 - cut)
    wanted, _ = selective_oracle(MODEL.weights, MODEL.raw, world.prompt, world.cached(), rows)

    assert result.focused == state.decided
    assert result.focus_cut_layer == (cut if unfocused else None)
    assert result.computed_token_layers == sum(map(len, rows))
    assert len(after) < len(rows[0]), "a case without any cut would prove nothing"
    np.testing.assert_allclose(result.last_logits[-1], wanted, atol=TOLERANCE)


@pytest.mark.parametrize("ranking_layers", [None, (0,), (1, 2)])
def test_captured_kv_and_metadata_match_the_oracle(ranking_layers):
    world = World(seed=20)
    names = "sabcdq"
    prompt = np.concatenate([world.tokens[name] for name in names]).astype(np.int32)
    segments, start = [], 0
    for name in names:
        role = {"s": "instructions", "q": "question"}.get(name, "passage")
        chunk = None if name == "q" else ChunkId(name)
        segments.append(
            PlannedSegment(role=role, action="compute", start=start, num_tokens=LENGTHS[name], chunk_id=chunk)
        )
        start += LENGTHS[name]
    plan = PrefillPlan(tuple(segments))
    captured = dict(
        (meta.chunk_id, (meta, kv.read_layers(0, 5)))
        for meta, kv in capture_variants(
            plan, run_plan(MODEL.device_model(), prompt, plan, collect=True), {}, ranking_layers=ranking_layers
        )
    )
    assert list(captured) == list("sabcd")

    _, layers = llama_forward(MODEL.weights, MODEL.raw, prompt)
    attention = np.stack([layer.attention.mean(0) for layer in layers])  # [L, n, n], mean over heads
    attention[:, :, :4] = 0.0  # the sink, whose mass does not count
    span = {str(s.chunk_id): slice(s.start, s.start + s.num_tokens) for s in segments[:-1]}
    for name, (meta, kv) in captured.items():
        rows = span[name]
        wanted_kv = np.stack([np.stack([layer.key[rows], layer.value[rows]]) for layer in layers])
        np.testing.assert_allclose(kv, wanted_kv, atol=TOLERANCE)
        prefix = "sabcd"[: "sabcd".index(name)]
        assert meta.prefix_ids == tuple(prefix) and meta.fidelity == "exact" and meta.num_tokens == LENGTHS[name]
        # CacheCraft eq. 3, 4, 9, 10, 11; the instructions are no prefix chunk
        inter = [attention[:, rows, span[other]].sum((1, 2)).mean() * (other != "s") for other in prefix]
        np.testing.assert_allclose(meta.inter_by_prefix, inter, atol=1e-4)
        block = attention[:, rows, rows]
        intra = np.tril(block, -1).sum((1, 2)).mean()
        size = LENGTHS[name]
        a = sum(mass / (size * LENGTHS[other]) for mass, other in zip(inter, prefix, strict=True))
        b = intra / size**2
        np.testing.assert_allclose((meta.a_mean, meta.b_mean), (a, b), rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(meta.cci, 1 / (1 + np.exp(-a / b)), rtol=1e-4)
        # eq. 14, ranked by mass on prior passages; the system prompt does not count
        chosen = attention if ranking_layers is None else attention[list(ranking_layers)]
        scores = sum((chosen[:, rows, span[other]].mean(0).sum(-1) for other in prefix[1:]), np.zeros(size))
        ranked = scores[list(meta.token_ranking)]
        assert np.all(np.diff(ranked) < 1e-5) and sorted(meta.token_ranking) == list(range(size))
    with_diagonal = np.tril(attention[:, span["b"], span["b"]]).sum((1, 2)).mean() / LENGTHS["b"] ** 2
    assert with_diagonal / captured["b"][0].b_mean > 1.01  # the mutant: eq. 4 with its diagonal


def test_masses_on_passages_are_the_same_whether_or_not_text_has_columns_of_its_own():
    world = World(seed=40)
    names, results = "sabtctdttq", []
    tokens = np.array_split(world.prompt, len(names))
    for text in ("text", "passage"):
        segments, start = [], 0
        for index, own in enumerate(tokens):
            role = {"s": "instructions", "t": text, "q": "question"}.get(names[index], "passage")
            chunk = None if role == "question" else ChunkId(str(index))
            segments.append(PlannedSegment(role, "compute", start, len(own), chunk))
            start += len(own)
        plan = PrefillPlan(tuple(segments))
        outcome = run_plan(MODEL.device_model(), np.concatenate(tokens), plan, collect=True)
        metas = {meta.chunk_id: meta for meta, _ in capture_variants(plan, outcome, {})}
        results.append((mass_columns(plan), metas, question_stats(plan, outcome.layers[1])))
    (shared, fewer, focus), (each, metas, all_focus) = results
    assert shared.tolist() == [0, 1, 2, 5, 3, 5, 4, 5, 5, 5] and each.tolist() == list(range(10))
    passages = [index for index, name in enumerate(names) if name in "abcd"]
    assert focus.question_mass_by_chunk == pytest.approx(
        [all_focus.question_mass_by_chunk[index - 1] for index in passages], rel=1e-4
    )
    for index in passages:
        got, wanted = fewer[ChunkId(str(index))], metas[ChunkId(str(index))]
        assert got.token_ranking == wanted.token_ranking and got.b_mean == pytest.approx(wanted.b_mean, rel=1e-4)
        of_texts = [wanted.inter_by_prefix[other] for other in range(index) if names[other] == "t"]
        inter = [0.0 if names[other] == "t" else mass for other, mass in enumerate(wanted.inter_by_prefix)]
        assert got.inter_by_prefix == pytest.approx(inter, rel=1e-4) and all(mass > 0.01 for mass in of_texts)


@pytest.mark.parametrize("window", [None, 1])
def test_captured_repaired_kv_matches_the_oracle(window):
    world = World(seed=30)
    plan = world.plan(0.4, focus_window=window)
    result = run_reusing(MODEL.device_model(), world.prompt, plan, world.read_layers, collect=True)
    parents = {name: [_parent(name, world)] for name in "sabcd"}
    captured = {meta.chunk_id: (meta, kv.read_layers(0, 5)) for meta, kv in capture_variants(plan, result, parents)}
    whole = [str(s.chunk_id) for i, s in enumerate(plan.segments[:-1]) if i not in result.partly_recomputed]
    assert (window is None) == (not result.partly_recomputed)
    assert sorted(captured) == sorted(name for name in whole if name != "s")

    rows = [computed_offsets(plan)] * 5
    if window is not None:
        after = computed_offsets(plan, dropped=result.partly_recomputed)
        rows = rows[: result.focus_cut_layer] + [after] * (5 - result.focus_cut_layer)
    repaired = []
    selective_oracle(MODEL.weights, MODEL.raw, world.prompt, world.cached(), rows, contexts=repaired)
    for name, (meta, kv) in captured.items():
        segment = plan.segments[world.order.index(name)]
        where = slice(segment.start, segment.start + segment.num_tokens)
        wanted = np.stack([np.stack([keys[where], values[where]]) for keys, values in repaired])
        np.testing.assert_allclose(kv, wanted, atol=TOLERANCE)
        assert meta.fidelity == "approx" and meta.prefix_ids == tuple(world.order[: world.order.index(name)])
        if name not in "nd":  # (d has no passage before it) a token that was not recomputed has no mass and ranks last
            count = len(segment.recompute_offsets)
            assert sorted(meta.token_ranking[:count]) == list(segment.recompute_offsets)
            assert np.abs(kv - world.kv[name]).max() > 100 * TOLERANCE  # the mutant: kept as read


def _parent(name, world):
    length = LENGTHS[name]
    return VariantMeta(
        VariantId(name), ChunkId(name), (ChunkId("z"),), (1.0,), 0.1, 0.1, 0.7, tuple(range(length)), length, 1
    )
