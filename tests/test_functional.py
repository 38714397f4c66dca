"""ccjax.functional against the engine, full prefills and float64 oracles; the example of its page; transformations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ccjax.engine import Request
from ccjax.functional import (
    KV,
    UNUSED,
    AttentionInputs,
    attention,
    decode,
    deviations,
    generate,
    move_keys,
    partial_prefill,
    prefill,
)
from ccjax.models.llama3.sharding import make_mesh, shard_params
from ccjax.requests import SamplingParams
from tests.engine.helpers import TOLERANCE, TinyModel, draw_segments, permuted, selective_oracle
from tests.oracles import llama_forward

ROOT = Path(__file__).resolve().parent.parent
MODEL = TinyModel(seed=6, num_hidden_layers=3, head_dim=16)
PARAMS, CONFIG = MODEL.loaded.params, MODEL.config
ENGINE_TOLERANCE = 1e-4
SEGMENTS = draw_segments(np.random.default_rng(0), [40, 30, 20])
ORDER = [2, 0, 1]
SHUFFLED = permuted(SEGMENTS, ORDER)


def flat(segments):
    return np.asarray([*itertools.chain(*segments)], np.int32)


def jitted(function, *arguments, **named):
    """One compiled call; what is no array is static."""
    arrays = {key: value for key, value in named.items() if hasattr(value, "dtype")}
    statics = {key: value for key, value in named.items() if key not in arrays}
    return jax.jit(lambda params, arguments, arrays: function(params, CONFIG, *arguments, **arrays, **statics))(
        PARAMS, arguments, arrays
    )


def reordered(kv, *, is_moved=True):
    """The KV of SEGMENTS in the order of SHUFFLED, without the question."""
    starts = np.cumsum([0, *map(len, SEGMENTS)])
    parts, start = [], 0
    for index in (0, *(1 + index for index in ORDER)):
        part = kv[int(starts[index]) : int(starts[index + 1])]
        moved = move_keys(part, int(starts[index]), start)
        parts.append(moved if is_moved else dataclasses.replace(part, positions=moved.positions))
        start += len(SEGMENTS[index])
    return KV.merge(*parts)


def repaired(rows, *, is_moved=True):
    """Logits of SHUFFLED with these rows computed, besides the question, over the KV of SEGMENTS: in one call."""
    tokens, question = flat(SHUFFLED), np.arange(97, 106)
    rows = np.concatenate([rows, question]).astype(np.int32)

    @jax.jit
    def run(params, prompt, tokens, rows):
        _, kv = prefill(params, CONFIG, prompt)
        kv = reordered(kv, is_moved=is_moved).append(jnp.asarray(question))
        return partial_prefill(params, CONFIG, kv, tokens[rows], rows).logits

    return np.asarray(run(PARAMS, flat(SEGMENTS), tokens, rows))


@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_logits_equal_the_engines_for_the_same_plan(ratio):
    settings = {"strategy": "cachecraft", "focus_window": None, "recompute_ratio": ratio, "max_model_len": 512}
    with MODEL.engine(**settings) as engine:
        engine.generate_from_tokens(SEGMENTS, max_new_tokens=1, reuse="exact")
        prompt = engine.assemble(Request(segments=SHUFFLED))
        plan = engine._chunks.planner.plan(prompt, "bounded", engine._chunks.planner.usable(prompt))
        response = engine.run(Request(segments=SHUFFLED, sampling=SamplingParams(1, first_logits=True)))
    assert response.first_logits is not None
    rows = np.concatenate([one.start + np.asarray(one.recompute_offsets, int) for one in plan.segments[:-1]])
    assert (len(rows) > 9) == (ratio > 0)
    np.testing.assert_allclose(repaired(rows), response.first_logits, atol=ENGINE_TOLERANCE)
    broken = {"other rows": repaired(rows[1:] if ratio else [50]), "not moved": repaired(rows, is_moved=False)}
    errors = {name: np.abs(logits - response.first_logits).max() for name, logits in broken.items()}
    assert min(errors.values()) > 10 * ENGINE_TOLERANCE, errors


def test_everything_recomputed_is_a_full_prefill_and_agrees_with_the_oracle():
    tokens = flat(SHUFFLED)
    wanted = llama_forward(MODEL.weights, MODEL.raw, tokens)[0]
    whole, _ = jitted(prefill, tokens)
    np.testing.assert_allclose(whole, wanted[-1], atol=TOLERANCE)
    np.testing.assert_allclose(repaired(np.arange(97)), wanted[-1], atol=TOLERANCE)
    assert np.abs(repaired(np.arange(96)) - wanted[-1]).max() > 10 * TOLERANCE
    every, _ = jitted(prefill, tokens, logits_of=np.arange(len(tokens)))
    np.testing.assert_allclose(every, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "reference", "triton_interpret", "mosaic_tpu_interpret"])
def test_partial_prefill_and_its_mass_match_the_oracle(implementation):
    tokens, rows = flat(SHUFFLED), np.array([3, 8, 20, 33, 60, 61, 90, *range(97, 106)], np.int32)
    _, layers = llama_forward(MODEL.weights, MODEL.raw, flat(SEGMENTS))
    starts = np.cumsum([0, *map(len, SEGMENTS)])
    old = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in (0, *(1 + i for i in ORDER), 4)])
    cached = [(layer.key[old], layer.value[old]) for layer in layers]
    logits, attentions = selective_oracle(MODEL.weights, MODEL.raw, tokens, cached, [rows] * 3)
    segments = np.repeat(np.arange(5), [len(segment) for segment in SHUFFLED])

    _, kv = jitted(prefill, flat(SEGMENTS))
    kv = reordered(kv).append(jnp.arange(97, 106))
    named = {"segments": segments, "num_segments": 5, "implementation": implementation}
    done = jitted(partial_prefill, kv, tokens[rows], rows, **named)
    np.testing.assert_allclose(done.logits, logits, atol=TOLERANCE)
    mass = np.stack([[weights.mean(1)[:, segments == c].sum(-1) for c in range(5)] for weights in attentions])
    wanted = mass.transpose(0, 2, 1)
    np.testing.assert_allclose(done.mass, wanted, atol=1e-5)
    assert np.abs(np.asarray(done.mass)[:, 1:] - wanted[:, :-1]).max() > 1e-2, "the mutant: masses of other rows"


def test_deviations_are_those_of_a_full_prefill():
    tokens = flat(SHUFFLED)[:97]
    _, kv = jitted(prefill, flat(SEGMENTS))
    _, fresh = llama_forward(MODEL.weights, MODEL.raw, tokens)
    _, layers = llama_forward(MODEL.weights, MODEL.raw, flat(SEGMENTS))
    starts = np.cumsum([0, *map(len, SEGMENTS)])
    old = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in (0, *(1 + i for i in ORDER))])
    for number in (0, 1, 2):
        pairs = ((fresh[number].key, layers[number].key[old]), (fresh[number].value, layers[number].value[old]))
        wanted = np.sqrt(sum(np.square(a - b).sum((1, 2)) for a, b in pairs))
        got = jitted(deviations, reordered(kv), tokens, layer=number)
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
        assert number == 0 or wanted.max() > 0.1
    wrong = jitted(deviations, reordered(kv, is_moved=False), tokens, layer=1)
    assert np.abs(np.asarray(wrong) - np.asarray(jitted(deviations, reordered(kv), tokens))).max() > 1e-2


def test_decoded_tokens_are_the_engines_and_those_of_the_oracle():
    tokens = flat(SEGMENTS)
    with MODEL.engine(max_model_len=512) as engine:
        answer = engine.generate_from_tokens(SEGMENTS, max_new_tokens=6, reuse="off").token_ids
    logits, kv = jitted(prefill, tokens)
    ids, kv = jitted(generate, kv, logits.argmax(), num_tokens=6)
    assert ids.tolist() == list(answer)
    assert (kv.num_slots, int(kv.end)) == (len(tokens) + 5, len(tokens) + 5)
    wanted = llama_forward(MODEL.weights, MODEL.raw, np.concatenate([tokens, ids]))[0]
    kv = kv.append(jnp.full(1, UNUSED))
    other, _ = jitted(decode, kv, ids[-1] + 1)
    last, kv = jitted(decode, kv, ids[-1])
    np.testing.assert_allclose(last, wanted[-1], atol=TOLERANCE)
    assert np.abs(np.asarray(other) - wanted[-1]).max() > 100 * TOLERANCE
    full, kept = jitted(decode, kv, ids[-1])
    assert np.isnan(full).all() and kept.positions.tolist() == kv.positions.tolist(), "there is no unused slot"


def test_a_prompt_behaves_the_same_wherever_it_stands_and_moves_there_and_back():
    tokens = flat(SEGMENTS)
    (here, kv), (there, moved) = jitted(prefill, tokens), jitted(prefill, tokens, start=np.int32(500))
    np.testing.assert_allclose(here, there, atol=TOLERANCE)
    for got, wanted in ((move_keys(kv, 0, 500), moved), (move_keys(moved, moved.positions, kv.positions), kv)):
        assert got.positions.tolist() == wanted.positions.tolist()
        question = tokens[-3:], np.arange(103, 106)
        unmoved = dataclasses.replace(kv if got.positions[0] else moved, positions=got.positions)
        ours, theirs, wrong = (jitted(partial_prefill, one, *question).logits for one in (got, wanted, unmoved))
        np.testing.assert_allclose(ours, theirs, atol=ENGINE_TOLERANCE)
        assert np.abs(np.asarray(wrong) - theirs).max() > 100 * ENGINE_TOLERANCE
    padded = kv.append(jnp.full(2, UNUSED))
    assert move_keys(padded, 3, 1).positions.tolist() == [*range(-2, len(tokens) - 2), UNUSED, UNUSED]


def test_vmap_over_two_padded_prompts_equals_one_by_one():
    random, lengths = np.random.default_rng(1), [33, 50]
    prompts = random.integers(0, 97, (2, 50)).astype(np.int32)

    @jax.jit
    @jax.vmap
    def answer(tokens, length):
        logits, kv = prefill(PARAMS, CONFIG, tokens, num_tokens=length)
        return logits, generate(PARAMS, CONFIG, kv, logits.argmax(), 4)[0]

    logits, ids = answer(prompts, jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        alone, kv = jitted(prefill, prompts[row, :length])
        np.testing.assert_allclose(logits[row], alone, atol=TOLERANCE)
        assert np.abs(np.asarray(logits[1 - row]) - alone).max() > 100 * TOLERANCE
        assert ids[row].tolist() == generate(PARAMS, CONFIG, kv, alone.argmax(), 4)[0].tolist()


def test_repairs_of_padded_passages_are_those_of_passages_without_padding_under_vmap():
    random, lengths, question = np.random.default_rng(5), np.array([[19, 30], [30, 12]]), np.arange(7, 12)
    passages = random.integers(0, 97, (2, 2, 30)).astype(np.int32)

    def answer(first, second, num_first, num_second, count, rank=deviations):
        """The recipe of the page."""
        _, a = prefill(PARAMS, CONFIG, first, num_tokens=num_first)
        _, b = prefill(PARAMS, CONFIG, second, num_tokens=num_second)
        merged = KV.merge(a, move_keys(b, 0, a.end)).append(jnp.full(3, UNUSED))
        tokens = jnp.concatenate([first, second, jnp.full(3, 96), question])
        deviation = rank(PARAMS, CONFIG, merged, tokens[: merged.num_slots])
        _, repaired = jax.lax.top_k(deviation, count)
        rows = jnp.concatenate([jnp.sort(repaired), merged.num_slots + jnp.arange(5)])
        kv = merged.append(merged.end + jnp.arange(5))
        return deviation, partial_prefill(PARAMS, CONFIG, kv, tokens[rows], rows).logits

    def ranking_padding_too(params, config, kv, tokens):
        used = dataclasses.replace(kv, positions=jnp.where(kv.positions == UNUSED, kv.end, kv.positions))
        return deviations(params, config, used, tokens)

    def padded(rank):
        run = jax.jit(jax.vmap(lambda *arguments: answer(*arguments, 14, rank)))
        return run(passages[:, 0], passages[:, 1], *lengths.T)

    (deviation, logits), (_, wrong) = padded(deviations), padded(ranking_padding_too)
    for row, (m, n) in enumerate(lengths):
        used = np.concatenate([np.arange(30) < m, np.arange(30) < n, np.zeros(3, bool)])
        assert np.isneginf(deviation[row][~used]).all() and (deviation[row][used] >= 0).all()
        _, alone = answer(passages[row, 0, :m], passages[row, 1, :n], m, n, 14)
        np.testing.assert_allclose(logits[row], alone, atol=TOLERANCE)
        assert np.abs(np.asarray(wrong[row]) - alone).max() > 100 * TOLERANCE


def test_deviations_have_a_gradient_where_they_are_0_and_where_a_slot_is_unused():
    tokens = jnp.asarray(flat(SEGMENTS)[:12])
    _, kv = prefill(PARAMS, CONFIG, tokens, num_tokens=9)

    def total(params, kv):
        found = deviations(params, CONFIG, kv, tokens, layer=0, implementation="reference")
        return jnp.where(kv.positions == UNUSED, 0, found).sum(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(PARAMS, kv)
    assert (found[:9] == 0).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    scaled = dataclasses.replace(kv, _v=kv._v * 1.5)
    gradient = jax.jit(jax.grad(total, has_aux=True))(PARAMS, scaled)[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.abs(gradient.layers[0].wv).max() > 0


def test_a_context_may_start_without_tokens():
    _, kv = prefill(PARAMS, CONFIG, jnp.arange(5))
    ids, _ = generate(PARAMS, CONFIG, kv[:0], jnp.asarray(3), 4)
    logits, _ = prefill(PARAMS, CONFIG, ids[:3])
    assert ids[0] == 3 and ids[3] == logits.argmax()
    assert prefill(PARAMS, CONFIG, jnp.arange(5), logits_of=jnp.arange(0))[0].shape == (0, CONFIG.vocab_size)


def test_gradients_are_those_of_the_training_code():
    from scripts.train_demo import training_logits  # its own layers, attention and rotation

    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 97, 40), jnp.int32)

    def ours(params):
        logits, _ = prefill(params, CONFIG, tokens, logits_of=jnp.arange(40), implementation="reference")
        return -jax.nn.log_softmax(logits)[jnp.arange(39), tokens[1:]].mean()

    def theirs(params, temperature=1.0):
        logits = training_logits(params, CONFIG, tokens[None])[0][0] * temperature
        return -jax.nn.log_softmax(logits)[jnp.arange(39), tokens[1:]].mean()

    wanted, wrong = (
        jax.jit(jax.grad(theirs))(PARAMS),
        jax.jit(jax.grad(functools.partial(theirs, temperature=0.99)))(PARAMS),
    )
    got = jax.jit(jax.grad(ours))(PARAMS)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(one).all() and np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, wrong)), strict=True)) > 1e-5


def test_two_devices_equal_one():
    prompts = np.random.default_rng(3).integers(0, 97, (2, 30)).astype(np.int32)
    wanted = [np.asarray(jitted(prefill, prompt)[0]) for prompt in prompts]

    def answer(params, prompts):
        return jax.vmap(lambda tokens: prefill(params, CONFIG, tokens)[0])(prompts)

    devices, spec = jax.devices()[:2], PartitionSpec("data")
    specs = {"in_specs": (PartitionSpec(), spec), "out_specs": spec, "check_vma": False}
    each = jax.jit(jax.shard_map(answer, mesh=Mesh(np.asarray(devices), "data"), **specs))(PARAMS, prompts)
    mesh = make_mesh(CONFIG, devices)
    split = shard_params(PARAMS, CONFIG, mesh)
    for implementation in (None, "triton_interpret"):
        run = jax.jit(
            lambda params, tokens, how=implementation: repair_all(params, tokens, implementation=how, mesh=mesh)
        )
        np.testing.assert_allclose(run(split, prompts[0]), wanted[0], atol=TOLERANCE)
    for row in range(2):
        np.testing.assert_allclose(each[row], wanted[row], atol=TOLERANCE)
        assert np.abs(np.asarray(each[1 - row]) - wanted[row]).max() > 100 * TOLERANCE


def repair_all(params, tokens, **how):
    """Prefill of two parts, everything recomputed."""
    parts = [prefill(params, CONFIG, part, **how)[1] for part in (tokens[:13], tokens[13:])]
    kv = KV.merge(parts[0], move_keys(parts[1], 0, 13))
    return partial_prefill(params, CONFIG, kv, tokens, jnp.arange(tokens.size), **how).logits


def test_experts_are_computed_too():
    model = TinyModel(seed=2, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    tokens = np.random.default_rng(4).integers(0, 97, 30).astype(np.int32)
    logits, _ = jax.jit(lambda params: prefill(params, model.config, tokens))(model.loaded.params)
    wanted = llama_forward(model.weights, model.raw, tokens)[0]
    np.testing.assert_allclose(logits, wanted[-1], atol=TOLERANCE)
    assert np.abs(np.asarray(logits) - wanted[-2]).max() > 100 * TOLERANCE


def test_attention_has_a_stable_signature():
    q, k, at = jnp.ones((1, 4, 8)), jnp.ones((3, 2, 8)), jnp.arange(3)
    done = attention(q, k, k, AttentionInputs(q_pos=at[-1:], k_pos=at), scale=8**-0.5, implementation="reference")
    np.testing.assert_allclose(done.out, np.ones((1, 4, 8)), atol=1e-6)


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "functional.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(code, "functional.md", "exec"), names)
    return names


def test_the_example_of_the_page_generates_and_with_everything_repaired_as_a_full_prefill(page):
    assert len(page["tokens"]) == 12
    page["SHARE"] = 1.0
    texts = [page["encode"](text) for text in page["texts"]]
    answer = jax.jit(page["answer"].__wrapped__)

    @jax.jit
    def wanted(params, tokens):
        logits, kv = prefill(params, page["config"], tokens)
        return generate(params, page["config"], kv, logits.argmax(), 12)[0]

    assert answer(page["params"], *texts).tolist() == wanted(page["params"], jnp.concatenate(texts)).tolist()


@pytest.mark.peers
def test_logits_match_transformers(tmp_path):
    from tests.models.test_parity import ATOL, make_peer, peer_logits, save_peer, tokens_of

    model = make_peer("llama3 rope")
    params, config = save_peer(model, tmp_path)
    tokens = tokens_of("llama3 rope")
    wanted = peer_logits(model, tokens)
    logits, _ = prefill(params, config, jnp.asarray(tokens, jnp.int32), logits_of=jnp.arange(len(tokens)))
    np.testing.assert_allclose(logits, wanted, atol=ATOL)
    assert np.abs(np.asarray(logits)[:-1] - wanted[1:]).max() > 100 * ATOL
