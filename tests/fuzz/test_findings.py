"""What fuzzing found, so that it stays found: each is refused by the error that its parser promises."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ccjax.models.llama3.config import LlamaConfig
from ccjax.retrieval.documents import DocumentError, parse_document
from ccjax.store.catalog import CatalogError, decode_part
from ccjax.store.errors import ShardCorruptError
from ccjax.store.records import decode_record
from ccjax.store.spec import KVSpec, StoreIdentity
from tests.fuzz.targets import TARGETS
from tests.retrieval.opened import open_retriever

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")


def seed(name: str) -> dict:
    """The first good input of a parser."""
    return json.loads(TARGETS[name].seeds[0])


def record_with(**changes: object) -> bytes:
    """A record under a right checksum; None takes a field out."""
    body = {
        name: value for name, value in (seed("record") | changes).items() if value is not None and name != "checksum"
    }
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["checksum"] = hashlib.sha256(text).hexdigest()
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def decoded(raw: bytes):
    return decode_record(raw, variant_id="v", identity=StoreIdentity("f" * 64), kv_spec=SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": None},
        {"checksums": None},
        {"checksums": ["g", "h"]},
        {"checksums": ["1"]},
        {"kv_dtype": None},
        {"kv_dtype": "fp8"},
        {"kv_dtype": ["auto"]},
        {"num_tokens": "3"},
        {"object_id": "../../../etc"},
        {"object_id": ""},
        {"object_id": 5},
        {"object_id": "a/b"},
        {"meta": None},
    ],
)
def test_record_with_impossible_values_is_corrupt(changes):
    assert decoded(record_with()).object_id == "0" * 32
    with pytest.raises(ShardCorruptError, match="record of variant v: "):
        decoded(record_with(**changes))


def catalog_of(table: object) -> bytes:
    text = json.dumps(table).encode()
    head = {"namespace": "n", "table_bytes": len(text)}
    head["table_sha256"] = hashlib.sha256(text).hexdigest()
    return json.dumps(head).encode() + b"\n" + text


def test_catalog_with_invalid_ids_is_rejected():
    row = {"variant_id": ["v"], "chunk_id": ["c"], "num_tokens": [3], "object_id": ["o"], "charge_bytes": [1]}
    row |= {"is_lossy": [False], "crc32": [0], "record_bytes": [0]}
    (known,) = decode_part(catalog_of(row), "n")
    assert known.object_id == "o"
    for name in ("variant_id", "chunk_id", "object_id"):
        for bad in ("../../x", "", None, 5):
            with pytest.raises(CatalogError, match=f"{name} is no id"):
                decode_part(catalog_of(row | {name: [bad]}), "n")
    for table in ([], 5, {}):
        with pytest.raises(CatalogError):
            decode_part(catalog_of(table), "n")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"hidden_size": float("inf")},
        {"rope_theta": float("nan")},
        {"rms_norm_eps": -1},
        {"rope_scaling": [1], "rope_parameters": None},
        {"model_type": ["llama"]},
        {"vocab_size": "many"},
    ],
)
def test_malformed_model_config_is_rejected_with_the_key_named(changes):
    config = seed("model-config")
    LlamaConfig.from_hf(config)
    with pytest.raises(ValueError, match="config.json|rope_theta|rms_norm_eps|invalid literal"):
        LlamaConfig.from_hf(config | changes)


def test_page_with_nul_bytes_is_rejected():
    with pytest.raises(DocumentError, match="contains NUL bytes"):
        parse_document(Path("x.html"), b'<meta charset="a\0b">text')


def test_deeply_nested_line_does_not_break_the_collection(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b"[" * 2000 + b'\n{"_id": "a", "text": "b"}\n')
    retriever = open_retriever(tmp_path)
    ((_, reason),) = retriever.report.failed
    assert "recursion" in reason and retriever.document_ids == ("c.jsonl/a",)
