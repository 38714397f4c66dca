"""Hugging Face checkpoint directories in and out, one tensor at a time. Knows no tokenizer, no device and no store."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
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

from models.llama3.config import LlamaConfig
from models.llama3.params import Params, ParamSpec, build_params

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_FINGERPRINT_FORMAT = b"ccjax-weights-1"


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be read; the message names the file, the tensor, what was wanted and got."""


def load_config(directory: str | os.PathLike[str]) -> LlamaConfig:
    """The architecture in `directory/config.json`.

    Raises:
      CheckpointError: no such file, no JSON object, or an architecture or option that is not supported.
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
    progress: Callable[[int, int], None] | None = None,
    put: Callable[[ParamSpec, np.ndarray], Any] | None = None,
) -> Params:
    """The weights of a Hugging Face directory, single-file or sharded safetensors, cast to `dtype`.

    Beside the finished leaves, never more than one tensor is in memory (as read, and transposed to our layout).

    Args:
      config: what the weights must fit; read from the directory where None.
      progress: called with (bytes read, bytes of all tensors) after each tensor.
      put: makes a leaf from its spec and its host array, for instance sharded over devices; default `jnp.asarray`.

    Raises:
      CheckpointError: a file or tensor is missing, truncated, unknown, or of another shape or kind. Tensors of older
        exporters that carry no weights (`rotary_emb.inv_freq`) and a copy of a tied `lm_head` are passed over.
    """
    directory = Path(directory)
    config = load_config(directory) if config is None else config
    files = _tensor_files(directory)
    _check_names(directory, config, files, set(_specs(config)))
    num_bytes = 0
    total_bytes = sum(path.stat().st_size for path in set(files.values()))
    with _open_all(files) as handles:

        def make(name: str, spec: ParamSpec) -> Any:
            nonlocal num_bytes
            stored = _read_tensor(files[name], handles[files[name]], name, spec)
            num_bytes += stored.nbytes
            leaf = stored if spec.layout == "as_is" else stored.T.reshape(spec.shape)
            leaf = np.ascontiguousarray(leaf, dtype=dtype)
            made = jnp.asarray(leaf) if put is None else put(spec, leaf)
            if progress is not None:
                progress(num_bytes, total_bytes)
            return made

        params = build_params(config, make)
    if progress is not None:
        progress(total_bytes, total_bytes)
    return params


def save_pretrained(
    params: Params,
    config: LlamaConfig,
    directory: str | os.PathLike[str],
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes `config.json` and safetensors that Hugging Face transformers loads as the same model.

    One shard is in memory at a time. Files get their names when complete, `config.json` last; weight files of an
    earlier save in `directory` are removed.

    Args:
      dtype: of the written tensors; that of each leaf where None.
      max_shard_bytes: a shard is closed before it would grow beyond this; a larger tensor gets a shard of its own.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: wanted a positive number of bytes, got {max_shard_bytes}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    specs = _specs(config)
    names = build_params(config, lambda name, _: name)
    if jax.tree.structure(names) != jax.tree.structure(params):
        raise ValueError(f"params: wanted the tree of {config}, got {jax.tree.structure(params)}")
    leaves = dict(zip(jax.tree.leaves(names), jax.tree.leaves(params), strict=True))
    shards = _plan_shards(leaves, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _to_hf(name, leaves[name], specs[name], dtype) for name in names}
        weight_map |= dict.fromkeys(names, file)
        with _replacing(directory / file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    kept = set(weight_map.values())
    if len(shards) > 1:
        total = sum(_num_bytes(leaf, dtype) for leaf in leaves.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
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

    Every byte of every weight file is read. Sampling would be faster but unsafe: a fine-tune at a low learning rate
    leaves most bfloat16 values as they were, and KV of another model is a wrong answer, not a slow one. sha256 runs at
    1.7 GB/s per core with SHA instructions, shards in parallel, near what an SSD delivers; the pages are then warm.
    The same weights sharded or named otherwise get another fingerprint, which costs a cold cache and nothing else.
    The configuration enters as we read it, so a key of config.json that we do not use changes nothing.

    Raises:
      CheckpointError: as `load_params`, for what can be seen without reading tensors.
    """
    directory = Path(directory)
    config = load_config(directory)
    paths = sorted(set(_tensor_files(directory).values()))
    with concurrent.futures.ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_file_digest, paths))
    total = _fingerprint_start(config)
    for path, digest in zip(paths, digests, strict=True):
        total.update(f"{path.name}\0{digest}\0".encode())
    return total.hexdigest()


def fingerprint_params(params: Params, config: LlamaConfig) -> str:
    """sha256 (hex) of configuration and leaf bytes, for weights that have no files: one leaf at a time on the host.

    Another value than `fingerprint` gives for the same weights in files: layout and dtype are hashed as they are.
    """
    total = _fingerprint_start(config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        host = np.ascontiguousarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)}\0{host.dtype.name}\0{host.shape}\0".encode())
        total.update(host.reshape(-1).view(np.uint8))
    return total.hexdigest()


def _specs(config: LlamaConfig) -> dict[str, ParamSpec]:
    """Hugging Face tensor name -> spec, for every weight of the model."""
    specs: dict[str, ParamSpec] = {}
    build_params(config, specs.__setitem__)
    return specs


def _fingerprint_start(config: LlamaConfig) -> Any:
    total = hashlib.sha256(_FINGERPRINT_FORMAT)
    total.update(json.dumps(config.to_hf(), sort_keys=True).encode())
    return total


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: wanted a JSON file, got no such file") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: wanted a JSON object, got {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(raw).__name__}")
    return raw


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the single file or the index of shards; the single file wins, as in transformers."""
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
        raise CheckpointError(f"{directory}: wanted {_listed(missing)}, got no such tensor ({len(files)} others)")

    def harmless(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")

    unknown = sorted(name for name in set(files) - wanted if not harmless(name))
    if unknown:
        raise CheckpointError(
            f"{files[unknown[0]]}: wanted only tensors of {config.num_layers} {config.model_type} layers, "
            f"got {_listed(unknown)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return f"tensor {shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_tensor(path: Path, handle: Any, name: str, spec: ParamSpec) -> np.ndarray:
    header = handle.get_slice(name)
    got_shape, got_type = tuple(header.get_shape()), header.get_dtype()
    if got_shape != spec.hf_shape:
        raise CheckpointError(f"{path}: tensor {name!r}: wanted shape {list(spec.hf_shape)}, got {list(got_shape)}")
    if got_type not in _FLOAT_TYPES:
        raise CheckpointError(f"{path}: tensor {name!r}: wanted one of {', '.join(_FLOAT_TYPES)}, got {got_type}")
    return handle.get_tensor(name)


def _num_bytes(leaf: Any, dtype: Any) -> int:
    return leaf.size * jnp.dtype(leaf.dtype if dtype is None else dtype).itemsize


def _plan_shards(leaves: Mapping[str, Any], dtype: Any, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, leaf in leaves.items():
        size = _num_bytes(leaf, dtype)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _to_hf(name: str, leaf: Any, spec: ParamSpec, dtype: Any) -> np.ndarray:
    if leaf.shape != spec.shape:
        raise ValueError(f"params: {name}: wanted shape {spec.shape} of the config, got {leaf.shape}")
    host = np.asarray(leaf)
    if spec.layout == "linear":
        host = host.reshape(spec.num_inputs, -1).T
    return np.ascontiguousarray(host, dtype=dtype)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
