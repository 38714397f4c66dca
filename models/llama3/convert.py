"""Reads and writes Hugging Face checkpoint directories, one tensor at a time."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.leaves import CheckpointError, StoredTensor, listed, load_leaves
from ccjax.models.llama3.params import Params, ParamSpec, build_params
from ccjax.models.llama3.sources import Source, sources_of, specs_of

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
_FLOAT_TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtype in safetensors -> bytes per value."""

_FINGERPRINT_FORMAT = b"ccjax-weights-2"


def stored_dtype(directory: str | os.PathLike[str]) -> str | None:
    """The dtype of the weights that `directory/config.json` names, as "bfloat16"; None if it names none.

    Raises:
      CheckpointError: as `load_config`.
    """
    raw = _read_json(Path(directory) / CONFIG_FILE)
    named = raw.get("dtype", raw.get("torch_dtype"))
    return named if isinstance(named, str) else None


def load_config(directory: str | os.PathLike[str]) -> LlamaConfig:
    """The architecture in `directory/config.json`.

    Raises:
      CheckpointError: the file is missing, is not a JSON object, or has an unsupported architecture or option.
    """
    path = Path(directory) / CONFIG_FILE
    raw = _read_json(path)
    try:
        return LlamaConfig.from_hf(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_params(
    directory: str | os.PathLike[str],
    config: LlamaConfig | None = None,
    *,
    dtype: Any,
    quantization: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    sharding: Callable[[ParamSpec], jax.sharding.Sharding] | None = None,
) -> Params:
    """The weights of a Hugging Face directory, single-file or sharded safetensors, cast to `dtype`.

    Besides the finished leaves, at most one tensor is in memory (as read, and transposed to our layout), for experts
    also the leaf that they are stacked in; with `sharding` only one device's part of these. Experts may have the names
    that transformers 4 and 5 write, or be stacked in transformers 5's own layout (`save_original_format=False`).

    Args:
      config: configuration that the weights must match; None to read it from the directory.
      quantization: key of `WEIGHT_FORMATS`: weights of matrix products are rounded to it from their stored dtype.
      progress: called with (bytes read, bytes of all tensors) after each tensor.
      sharding: layout of a weight, such as `ccjax.models.llama3.sharding.param_sharding` of a mesh; each part is read
        separately for its device, except for weights to be rounded to 8 bits. None for the default device.

    Raises:
      CheckpointError: a file or tensor is missing, truncated, unknown, or of another shape or dtype. Tensors of older
        exporters that carry no weights (`rotary_emb.inv_freq`) and a copy of a tied `lm_head` are ignored.
    """
    directory = Path(directory)
    config = load_config(directory) if config is None else config
    files = _tensor_files(directory)
    sources = sources_of(config, files)
    _check_names(directory, config, files, {part.tensor for parts in sources.values() for part in parts})
    with _open_all(files) as handles:
        return load_leaves(
            config,
            sources,
            lambda part: _stored_tensor(files[part.tensor], handles[files[part.tensor]], part),
            total_bytes=sum(path.stat().st_size for path in set(files.values())),
            dtype=dtype,
            quantization=quantization,
            progress=progress,
            sharding=sharding,
        )


def save_pretrained(
    params: Params,
    config: LlamaConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes `config.json` and safetensors that Hugging Face transformers loads as the same model.

    One shard is in memory at a time. Files are renamed into place when complete, `config.json` last; weight files of an
    earlier save in `directory` are removed.

    Args:
      dtype: dtype of the written tensors; None to keep that of each leaf.
      max_shard_bytes: maximum size of a shard; a larger tensor gets a shard of its own.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: wanted a positive number of bytes, got {max_shard_bytes}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    specs = specs_of(config)
    names = build_params(config, lambda name, _: name)
    if jax.tree.structure(names) != jax.tree.structure(params):
        raise ValueError(f"params: wanted the tree of {config}, got {jax.tree.structure(params)}")
    leaves = dict(zip(jax.tree.leaves(names), jax.tree.leaves(params), strict=True))
    parts: dict[str, list[tuple[str, int]]] = {}
    for name, sources in sources_of(config).items():
        for number, source in enumerate(sources):
            parts.setdefault(source.tensor, []).append((name, number))
    sizes = {
        tensor: sum(_num_bytes(leaves[name], dtype) // max(specs[name].num_experts, 1) for name, _ in inside)
        for tensor, inside in parts.items()
    }
    shards = _plan_shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for tensor in names:
            inside = [_to_hf(name, leaves[name], specs[name], expert, dtype) for name, expert in parts[tensor]]
            tensors[tensor] = inside[0] if len(inside) == 1 else np.concatenate(inside)
        weight_map |= dict.fromkeys(names, file)
        with _replacing(directory / file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    kept = set(weight_map.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        with _replacing(directory / INDEX_FILE) as temporary:
            temporary.write_text(json.dumps(index, indent=2) + "\n")
        kept.add(INDEX_FILE)
    for stale in directory.glob("model*.safetensors*"):
        if stale.name not in kept:
            stale.unlink()
    written = jnp.dtype(jax.tree.leaves(params)[0].dtype if dtype is None else dtype).name
    with _replacing(directory / CONFIG_FILE) as temporary:
        temporary.write_text(json.dumps(config.to_hf() | {"torch_dtype": written}, indent=2) + "\n")


def fingerprint(directory: str | os.PathLike[str]) -> str:
    """sha256 (hex) that identifies configuration and weights of a directory, for use in the keys of stored KV.

    Every byte of every weight file is hashed. Sampling would be faster but unsafe: a fine-tune at a low learning rate
    leaves most bfloat16 values unchanged, and KV of another model gives wrong answers. sha256 runs at 1.7 GB/s per core
    with SHA instructions, shards in parallel, about as fast as an SSD; the files are then in the page cache. The same
    weights with other shards or file names get another fingerprint, which only costs a cold cache. The configuration
    is hashed as `LlamaConfig.kv_identity`, so other keys of config.json have no effect.

    Raises:
      CheckpointError: as `load_params`, for errors that are detected without reading tensors.
    """
    directory = Path(directory)
    config = load_config(directory)
    paths = sorted(set(_tensor_files(directory).values()))
    return fingerprint_files(config, {path.name: path for path in paths})


def fingerprint_files(config: LlamaConfig, files: Mapping[str, Path]) -> str:
    """sha256 (hex) of a configuration and its weight files, each with its name and all its bytes."""
    with concurrent.futures.ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_file_digest, files.values()))
    total = hashlib.sha256(_FINGERPRINT_FORMAT + config.kv_identity.encode())
    for name, digest in zip(files, digests, strict=True):
        total.update(f"{name}\0{digest}\0".encode())
    return total.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: wanted a JSON file, got no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: wanted a JSON object, got {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(raw).__name__}")
    return raw


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the single file or else the index of shards, as in transformers."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        with _open_all({"": single}) as handles:
            return dict.fromkeys(handles[single].keys(), single)
    if not index.exists():
        others = sorted(path.name for path in directory.glob("*.bin")) or sorted(
            path.name for path in directory.glob("*.safetensors")
        )
        raise CheckpointError(
            f"{directory}: wanted {SINGLE_FILE} or {INDEX_FILE}, got {', '.join(others[:4]) or 'neither'}"
            + ("; convert PyTorch .bin weights to safetensors first" if any(".bin" in name for name in others) else "")
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: wanted an object under 'weight_map', got {weight_map!r}")
    files = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name!r}: wanted a file name in the same directory, got {file!r}")
        files[name] = directory / file
    with _open_all(files) as handles:
        held = {path: set(handle.keys()) for path, handle in handles.items()}
    for name, path in files.items():
        if name not in held[path]:
            raise CheckpointError(f"{path}: tensor {name!r}: wanted here by {INDEX_FILE}, got no such tensor")
    return files


@contextmanager
def _open_all(files: Mapping[str, Path]) -> Iterator[dict[Path, Any]]:
    handles: dict[Path, Any] = {}
    with ExitStack() as stack:
        for path in dict.fromkeys(files.values()):
            try:
                handles[path] = stack.enter_context(safe_open(path, framework="numpy"))
            except FileNotFoundError:
                raise CheckpointError(f"{path}: wanted a shard named in {INDEX_FILE}, got no such file") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: wanted a whole safetensors file, got {error}") from error
        yield handles


def _check_names(directory: Path, config: LlamaConfig, files: Mapping[str, Path], wanted: set[str]) -> None:
    missing = sorted(wanted - set(files))
    if missing:
        raise CheckpointError(f"{directory}: wanted {listed(missing)}, got no such tensor ({len(files)} others)")

    def harmless(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")

    unknown = sorted(name for name in set(files) - wanted if not harmless(name))
    if unknown:
        raise CheckpointError(
            f"{files[unknown[0]]}: wanted only tensors of {config.num_layers} {config.model_type} layers, "
            f"got {listed(unknown)}"
        )


def _stored_tensor(path: Path, handle: Any, part: Source) -> StoredTensor:
    tensor, name = handle.get_slice(part.tensor), part.tensor
    got_shape, got_type = tuple(tensor.get_shape()), tensor.get_dtype()
    if got_shape != part.shape:
        raise CheckpointError(f"{path}: tensor {name!r}: wanted shape {list(part.shape)}, got {list(got_shape)}")
    if got_type not in _FLOAT_TYPES:
        raise CheckpointError(f"{path}: tensor {name!r}: wanted one of {', '.join(_FLOAT_TYPES)}, got {got_type}")
    return StoredTensor(path, tensor, math.prod(part.part_shape) * _FLOAT_TYPES[got_type])


def _num_bytes(leaf: Any, dtype: Any) -> int:
    return leaf.size * jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize


def _plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _to_hf(name: str, leaf: Any, spec: ParamSpec, expert: int, dtype: Any) -> np.ndarray:
    if leaf.shape != spec.shape:
        raise ValueError(f"params: {name}: wanted shape {spec.shape} of the config, got {leaf.shape}")
    return np.ascontiguousarray(spec.to_hf(leaf, expert), dtype=dtype)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the directory of `path`, renamed to `path` when the block ends without an exception."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
