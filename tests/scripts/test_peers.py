"""llama.cpp as a peer: its answers are those of the engine, and the float32 copy of a file has the same weights."""

from __future__ import annotations

import pytest

from ccjax.engine import Engine
from ccjax.errors import ConfigError
from ccjax.loading.named import gguf_path
from scripts.benchmarks import peers

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """SmolLM2 in float32."""
    try:
        source = gguf_path("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    return source, peers.converted(source, tmp_path_factory.mktemp("gguf") / "float32.gguf")


@pytest.mark.slow
def test_a_copy_has_the_same_weights_and_metadata(file):
    source, copy = map(gguf.GGUFReader, file)
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            assert copy.fields[name].contents() == field.contents(), name
    assert len(copy.tensors) == len(source.tensors) > 200
    for old, new in zip(source.tensors, copy.tensors, strict=True):
        assert old.name == new.name and new.tensor_type == gguf.GGMLQuantizationType.F32
        assert (gguf.dequantize(old.data, old.tensor_type) == new.data).all(), old.name


@pytest.mark.slow
@pytest.mark.peers
def test_engine_answers_match_llama_cpp(file):
    pytest.importorskip("xllamacpp")
    server = peers.LlamaCpp(file[1], 1, 512)
    with Engine.from_pretrained("smollm2", read_only=True) as engine:
        for text in ("The capital of France is", "Once upon a time, a fox", "1, 2, 3, 4, 5,"):
            ids = engine.tokenizer.encode(text, allow_special=False)
            ours = engine.generate_from_tokens([[], ids], max_new_tokens=24)
            theirs = server.answer(ids, 24)
            assert ours.text == theirs["choices"][0]["text"], text
    assert server.tokens_per_s(1, 8, 4) > 0.0
    assert server.prefill_s(8) > 0.0
