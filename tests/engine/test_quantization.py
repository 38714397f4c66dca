"""Weights in 8 bits in the engine: the identities of exact weights hold, and KV of different weights is never mixed."""

from __future__ import annotations

import json
import shutil

import pytest

from ccjax.engine import Engine
from ccjax.loading.devices import with_dtype
from ccjax.loading.model import DEMO_MODEL, load_model, read_model_files
from ccjax.models.llama3.quantized import WEIGHT_FORMATS

FORMATS = tuple(WEIGHT_FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_demo_model_gives_the_same_answer(name):
    documents = [{"title": "", "text": "Notes on Ada Lunt: Tool of Ada Lunt: chisel. The bells ring at noon."}]
    with Engine.from_pretrained("demo", quantization=name) as packed, Engine.from_pretrained("demo") as plain:
        asked = "Which tool does Ada Lunt own?"
        assert packed.generate(asked, documents=documents).text == plain.generate(asked, documents=documents).text
    weight = load_model("demo", dtype="float32", quantization=name).params.layers[0].wq
    assert weight.rows.dtype == WEIGHT_FORMATS[name].dtype and weight.scales is not None


def test_kv_is_never_shared_between_weight_formats(tmp_path):
    files = read_model_files("demo")
    formats = (None, *FORMATS)
    assert len({files.fingerprint(dtype, name) for name in formats for dtype in ("float32", "bfloat16")}) == 6
    documents = [{"title": "Ash", "text": "A tree."}]
    url = tmp_path.as_uri()
    reused = []
    for name in ("int8", "int8", None, "fp8"):
        with Engine.from_pretrained("demo", store=url, quantization=name) as engine:
            reused.append(
                engine.generate("Who?", documents=documents, reuse="exact", max_new_tokens=1).reuse.reused_tokens > 0
            )
    assert reused == [False, True, False, False]


def test_cpus_say_what_they_compute_bfloat16_in(caplog, tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    for stored, is_told in (("bfloat16", True), ("float32", False)):
        config.write_text(json.dumps({**json.loads(config.read_text()), "torch_dtype": stored}))
        caplog.clear()
        load_model(tmp_path / "model", **with_dtype({}))
        assert ("stored in bfloat16, runs in float32" in caplog.text) == is_told
    assert not caplog.messages and with_dtype({"dtype": "bfloat16"})["dtype"] == "bfloat16"
    assert "slower than float32" in caplog.text


def test_fingerprints_of_unquantized_weights_are_stable():
    """Stored KV survives an upgrade; golden values of the embedded model."""
    files = read_model_files(DEMO_MODEL)
    assert files.fingerprint("float32") == GOLDEN["float32"] and files.fingerprint("bfloat16") == GOLDEN["bfloat16"]


GOLDEN = {
    "float32": "dad915c9e1493807b984e4ffe7f27a7e7c23219af95b569527a29131c064589e",
    "bfloat16": "667b8c4d9aacd47010958e2b1f4c1ad66bc4e6c9f5547162ec07728a3d4c0c39",
}
