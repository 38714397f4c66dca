"""Parsers of untrusted input. Each accepts any bytes and may raise only its own error."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ccjax.cache.document_registry import DocumentRegistry
from ccjax.cli.options import StartupError
from ccjax.cli.serving.options import serve_options
from ccjax.loading.gguf import config_of, load_gguf, open_gguf, text_of
from ccjax.loading.prefill_profile import PrefillProfile
from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.convert import CheckpointError, load_config, load_params
from ccjax.policy.calibration import Calibration, Trial
from ccjax.policy.prefill_cost import PrefillGrid
from ccjax.retrieval.documents import DocumentError, parse_document
from ccjax.retrieval.filters import parse_filter
from ccjax.retrieval.jsonl import lines, parse_line
from ccjax.server.body import parse_body
from ccjax.server.completions import CompletionBody
from ccjax.server.errors import ApiError
from ccjax.server.schemas import ChatBody, PinBody, WarmBody
from ccjax.server.tokens import TokenizeBody
from ccjax.store.catalog import CatalogError, decode_part, encode_part
from ccjax.store.errors import ShardCorruptError
from ccjax.store.formats import ObjectLayout
from ccjax.store.notes import Notes
from ccjax.store.objects import open_root
from ccjax.store.records import decode_known, decode_record, encode_record, known_from_raw
from ccjax.store.spec import KVSpec, ShardRecord, StoreIdentity
from ccjax.text.tokenizer_files import read_settings
from tests.loading.gguf_files import Kind, Shape, Words, byte_level_words, hugging_face_tensors, write_gguf

_TEMPORARY = tempfile.TemporaryDirectory(prefix="ccjax-fuzz-")
_FOLDER = Path(_TEMPORARY.name)
_SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
_IDENTITY = StoreIdentity(model_fingerprint="f" * 64, tenant_salt="")
_CONFIG = LlamaConfig(
    vocab_size=16, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8, max_position_embeddings=64
)


class FuzzTarget(NamedTuple):
    """A parser, the errors that it promises for invalid input, and valid inputs to begin from."""

    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


def _as_json(data: bytes) -> Any:
    """Parses JSON as callers of the JSON targets do; anything else becomes a string."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("latin-1")


def _document(suffix: str) -> Callable[[bytes], object]:
    path = Path(f"file{suffix}")
    return lambda data: parse_document(path, data)


def _jsonl(data: bytes) -> None:
    path = _FOLDER / "lines.jsonl"
    path.write_bytes(data)
    for line in lines(path, 4096):
        with contextlib.suppress(ValueError, RecursionError):
            document_id, document = parse_line(line or b"", "lines.jsonl")
            assert document_id and document.text.strip()


def _body(model: Any) -> Callable[[bytes], object]:
    return lambda data: parse_body(model, data)


def _filter(data: bytes) -> None:
    import sqlite3

    parsed = parse_filter(_as_json(data))
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE documents (document_id TEXT, metadata TEXT)")
        database.execute(f"SELECT * FROM documents WHERE {parsed.sql}", parsed.parameters)


def _record(data: bytes) -> None:
    """Parses the bytes themselves, and their content under a valid checksum."""
    value = _as_json(data)
    raws = [data]
    if isinstance(value, dict):
        value.pop("checksum", None)
        try:
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
            signed = {**value, "checksum": hashlib.sha256(text).hexdigest()}
            raws.append(json.dumps(signed, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
        except ValueError:  # NaN
            pass
    for raw in raws:
        try:
            decode_record(raw, variant_id="v", identity=_IDENTITY, kv_spec=_SPEC)
        except ShardCorruptError:
            continue


def _catalog(data: bytes) -> None:
    """Parses the bytes themselves, and as the table of a part with a valid checksum."""
    head = {"namespace": "n", "table_bytes": len(data)}
    head["table_sha256"] = hashlib.sha256(data).hexdigest()
    for raw in (data, json.dumps(head).encode() + b"\n" + data):
        try:
            for known in decode_part(raw, "n"):
                try:
                    decode_known(known, identity=_IDENTITY, kv_spec=_SPEC)
                except ShardCorruptError:
                    continue
        except CatalogError:
            continue


def _notes(data: bytes) -> None:
    value = _as_json(data)
    registry = DocumentRegistry(Notes(open_root(_FOLDER.as_uri()), "notes"))
    notes = value if isinstance(value, dict) else {"link-0": value}
    added = {str(name): note for name, note in notes.items() if isinstance(note, dict)}
    registry.apply_changes(added, [])
    sorted((link.document_id, link.version or "", link.passage_id) for _, link in registry.links())
    registry.pinned_chunks()
    registry.outdated()
    registry.apply_changes({}, list(added))


def _config_file(data: bytes) -> None:
    path = _FOLDER / "serve.yaml"
    path.write_bytes(data)
    serve_options(["--config", str(path)])


def _model_file(data: bytes, name: str, read: Callable[[Path], object]) -> None:
    folder = _FOLDER / name.partition(".")[0]
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    read(folder)


def _weights() -> bytes:
    import jax

    from ccjax.models.llama3.convert import save_pretrained
    from ccjax.models.llama3.params import init_params

    folder = _FOLDER / "seed"
    save_pretrained(init_params(_CONFIG, jax.random.key(0)), _CONFIG, folder)
    return (folder / "model.safetensors").read_bytes()


def _gguf_seed(words: Words, kind: Kind) -> bytes:
    path = _FOLDER / "seed.gguf"
    shape = Shape(num_layers=1, d_model=32, num_heads=2, num_kv_heads=1, d_ff=32, context=64)
    write_gguf(path, shape, hugging_face_tensors(shape, len(words.tokens), tied=True), words, kind=kind)
    return path.read_bytes()


def _gguf(data: bytes) -> None:
    path = _FOLDER / "model.gguf"
    path.write_bytes(data)
    file = open_gguf(path)
    config = config_of(file)
    text_of(file)
    load_gguf(file, config, dtype="float32")


def _json_seed(value: Any) -> bytes:
    return json.dumps(value).encode()


def _pdf() -> bytes:
    import pypdf
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer, text, name = pypdf.PdfWriter(), DecodedStreamObject(), NameObject
    text.set_data(b"BT /F 12 Tf (Anna in Paris) Tj ET")
    page = writer.add_blank_page(72, 72)
    font = DictionaryObject({name("/Type"): name("/Font"), name("/Subtype"): name("/Type1")})
    font[name("/BaseFont")] = name("/Helvetica")
    fonts = DictionaryObject({name("/F"): font})
    page[name("/Resources")] = DictionaryObject({name("/Font"): fonts})
    page[name("/Contents")] = writer._add_object(text)
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def _record_seed() -> bytes:
    record = ShardRecord("v", "c", 3, 3 * 128, {"fidelity": "exact"})
    layout = ObjectLayout("auto", (1, 2))
    return encode_record(record, identity=_IDENTITY, kv_spec=_SPEC, object_id="0" * 32, layout=layout)


def _catalog_seeds() -> tuple[bytes, ...]:
    known = known_from_raw(_record_seed(), variant_id="v", identity=_IDENTITY, kv_spec=_SPEC)
    whole = encode_part([known], "n")
    return whole, whole.partition(b"\n")[2]


_WORDS = Words(
    ("<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "▁a"), (2, 3, 3, 6, 1, 1, 1), scores=(0.0,) * 7, model="llama"
)
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hm?"}]}]
_LINK = {"document_id": "d", "version": None, "chunk_id": "c", "passage_id": "p", "at": 1.0}
_ERASURE = {"chunk_ids": ["c"], "links": ["link-0"], "whole": True, "at": 1.0}
_CALIBRATION = Calibration(
    "m", "q", "f1", 0.9, 0.95, {"cachecraft": (Trial(0.5, 10, 9, focus_window=3),)}, {"top_k": 5}
)
_PROFILE = PrefillProfile("m", "cpu", PrefillGrid((0, 64), (16, 64), ((0.1, 0.2), (0.2, 0.4))), {"dtype": "float32"})

TARGETS: dict[str, FuzzTarget] = {
    "markdown": FuzzTarget(
        _document(".md"),
        (DocumentError,),
        (b"---\ntitle: A\nyear: 2020\nday: 2020-01-02\n---\n# B\n\ntext", b"B\n===\n\n```\n# no\n```\ntext"),
    ),
    "html": FuzzTarget(
        _document(".html"),
        (DocumentError,),
        (b"<title>A</title><h1>B</h1><p>c<br>d<pre> e </pre><table><tr><td>f</table>", b'<meta charset="utf-8">a'),
    ),
    "csv": FuzzTarget(_document(".csv"), (DocumentError,), (b'a;b\n1;"2"\n', b"a,b\n1\n")),
    "rst": FuzzTarget(_document(".rst"), (DocumentError,), (b"====\nTop\n====\n\nText.\n\nSub\n---\nMore.",)),
    "notebook": FuzzTarget(
        _document(".ipynb"),
        (DocumentError,),
        (_json_seed({"cells": [{"cell_type": "code", "source": ["x"], "outputs": [{"text": "1"}]}]}),),
    ),
    "mail": FuzzTarget(
        _document(".eml"),
        (DocumentError,),
        (b"From: a@b\nSubject: =?utf-8?q?x?=\nContent-Type: text/html; charset=utf-8\n\n<p>text",),
    ),
    "pdf": FuzzTarget(_document(".pdf"), (DocumentError,), (_pdf(),)),
    "jsonl": FuzzTarget(_jsonl, (), (_json_seed({"_id": 1, "title": "A", "text": "b", "metadata": {"year": 2020}}),)),
    "filter": FuzzTarget(
        _filter,
        (ValueError,),
        (
            _json_seed({"type": "eq", "key": "year", "value": 2020}),
            _json_seed({"type": "and", "filters": [{"type": "in", "key": "document_id", "value": ["a", "b"]}]}),
        ),
    ),
    "chat": FuzzTarget(
        _body(ChatBody),
        (ApiError,),
        (_json_seed({"messages": _MESSAGES, "documents": [{"text": "a", "id": "b"}], "max_tokens": 2, "stop": ["a"]}),),
    ),
    "completion": FuzzTarget(
        _body(CompletionBody), (ApiError,), (_json_seed({"prompt": "a", "temperature": 0.5, "n": 2}),)
    ),
    "tokenize": FuzzTarget(_body(TokenizeBody), (ApiError,), (_json_seed({"prompt": "a"}),)),
    "warm": FuzzTarget(_body(WarmBody), (ApiError,), (_json_seed({"documents": [{"text": "a", "id": "b"}]}),)),
    "pin": FuzzTarget(_body(PinBody), (ApiError,), (_json_seed({"ttl_s": 5.0}),)),
    "record": FuzzTarget(_record, (), (_record_seed(),)),
    "catalog": FuzzTarget(_catalog, (), _catalog_seeds()),
    "notes": FuzzTarget(_notes, (), (_json_seed({"link-0": _LINK, "erasing-1": _ERASURE, "pin-2": _LINK}),)),
    "config-file": FuzzTarget(
        _config_file,
        (StartupError,),
        (b"port: 80\nwarmup: false\ndisk-cache-bytes: 2GiB\n", b"replica-resources: {GPU: 1}\nreplicas: 2:3\n"),
    ),
    "model-config": FuzzTarget(
        lambda data: _model_file(data, "config.json", load_config), (CheckpointError,), (_json_seed(_CONFIG.to_hf()),)
    ),
    "safetensors": FuzzTarget(
        lambda data: _model_file(
            data, "model.safetensors", lambda folder: load_params(folder, _CONFIG, dtype="float32")
        ),
        (CheckpointError,),
        (_weights(),),
    ),
    "gguf": FuzzTarget(
        _gguf, (CheckpointError,), (_gguf_seed(byte_level_words(), Kind.Q4_0), _gguf_seed(_WORDS, Kind.Q8_0))
    ),
    "tokenizer-settings": FuzzTarget(
        lambda data: _model_file(data, "tokenizer_config.json", read_settings),
        (ValueError,),
        (_json_seed({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"}),),
    ),
    "calibration": FuzzTarget(
        lambda data: Calibration.from_json(_as_json(data)), (ValueError,), (_json_seed(_CALIBRATION.to_json()),)
    ),
    "prefill-profile": FuzzTarget(
        lambda data: PrefillProfile.from_json(_as_json(data)), (ValueError,), (_json_seed(_PROFILE.to_json()),)
    ),
}
