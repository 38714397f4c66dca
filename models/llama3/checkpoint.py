"""Weights as Orbax checkpoints, in our own layout and dtype: loading needs no transposing, rounding or sha256.

DIR/config.json, tokenizer files     as in a Hugging Face directory
DIR/weights/ID/00000/                an Orbax checkpoint of up to 256 MiB (one leaf if that is larger)
DIR/ccjax_weights.json               the index, written last and atomically: leaves that it does not list are ignored

A leaf is stored under its Hugging Face name; the suffix "_scale" marks the scales of 8-bit weights. Orbax does not
detect flipped bytes, so the index has a checksum of each leaf and one of itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import xxhash

from ccjax.models.llama3.config import LlamaConfig
from ccjax.models.llama3.convert import CONFIG_FILE, CheckpointError, load_config, replacing, write_config
from ccjax.models.llama3.params import Params, ParamSpec, build_params
from ccjax.models.llama3.quantized import WEIGHT_FORMATS, QuantizedWeight, quantize_on_host

INDEX = "ccjax_weights.json"
_FOLDER = "weights"
_FORMAT_VERSION = 1
_PART_BYTES = 256 << 20
_ID = re.compile(r"[0-9a-f]{32}")


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One array: number of its part, shape, dtype, and xxh3 (128 bits, hex) of its bytes."""

    part: int
    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclasses.dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint holds.

    Attributes:
      source: fingerprint of the weights that were converted.
      dtype: dtype of leaves that are not in 8 bits.
      is_rounded: True if the source has a higher precision than `dtype`.
      quantization: key of `WEIGHT_FORMATS`, or None.
      folder: name of the folder in `weights/`.
      leaves: leaves by name, in the order of `build_params`.
    """

    source: str
    dtype: str
    is_rounded: bool
    quantization: str | None
    folder: str
    leaves: Mapping[str, StoredLeaf]


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """True for a directory that `write_checkpoint` finished."""
    return (Path(directory) / INDEX).is_file()


def read_index(directory: str | os.PathLike[str]) -> CheckpointIndex:
    """The index of a checkpoint. Reads no weights.

    Raises:
      CheckpointError: the index is missing, damaged, of a newer format, or does not match config.json.
    """
    path = Path(directory) / INDEX
    try:
        body = json.loads(path.read_bytes())
        if body["format_version"] != _FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: wanted format version {_FORMAT_VERSION}, got {body['format_version']!r}: upgrade this program"
            )
        if body.pop("checksum") != _digest(body):
            raise ValueError("its checksum failed")
        del body["format_version"]
        if body.pop("config") != load_config(directory).to_hf():
            raise CheckpointError(f"{path}: wanted the config.json that it was written with, got another one")
        leaves = {
            name: StoredLeaf(**{**leaf, "shape": tuple(leaf["shape"])}) for name, leaf in body.pop("leaves").items()
        }
        if not _ID.fullmatch(body["folder"]):
            raise ValueError(f"folder: wanted 32 hex digits, got {body['folder']!r}")
        return CheckpointIndex(**body, leaves=leaves)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: wanted a finished checkpoint, got no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: wanted a checkpoint's index, got a damaged one: {error}") from error


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    produce: Callable[[Callable[[np.ndarray], None]], Any],
    *,
    source: str,
    dtype: str,
    is_rounded: bool,
    quantization: str | None = None,
) -> CheckpointIndex:
    """Writes a checkpoint. An existing one is replaced, and stays intact until the new one is complete; an existing
    config.json is kept.

    Args:
      produce: called with a function that accepts the leaves, in the order of `leaf_names`; leaves are written as soon
        as they fill a part.
      source, dtype, is_rounded, quantization: see `CheckpointIndex`.
    """
    directory = Path(directory)
    folder = uuid.uuid4().hex
    home = directory / _FOLDER / folder
    home.mkdir(parents=True)
    leaves: dict[str, StoredLeaf] = {}
    part: dict[str, np.ndarray] = {}
    number = 0
    names = leaf_names(config, quantization)

    def add(array: np.ndarray) -> None:
        nonlocal number
        if part and sum(held.nbytes for held in part.values()) + array.nbytes > _PART_BYTES:
            _save(home / f"{number:05d}", part)
            part.clear()
            number += 1
        name = names[len(leaves)]
        part[name] = np.ascontiguousarray(array)
        leaves[name] = StoredLeaf(number, array.shape, array.dtype.name, _checksum(part[name]))

    try:
        produce(add)
        if len(leaves) != len(names):
            raise ValueError(f"produce: wanted {len(names)} leaves, got {len(leaves)}")
        _save(home / f"{number:05d}", part)
        index = CheckpointIndex(source, dtype, is_rounded, quantization, folder, leaves)
        body = {
            "format_version": _FORMAT_VERSION,
            "config": config.to_hf(),
            **{field.name: getattr(index, field.name) for field in dataclasses.fields(index)},
            "leaves": {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()},
        }
        if not (directory / CONFIG_FILE).exists():
            write_config(directory, config, dtype)
        with replacing(directory / INDEX) as temporary:
            temporary.write_text(json.dumps({**body, "checksum": _digest(body)}, indent=1) + "\n")
            _sync(temporary)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    for other in (directory / _FOLDER).iterdir():
        if other.name != folder:
            shutil.rmtree(other, ignore_errors=True)
    return index


def write_params(
    params: Params, config: LlamaConfig, quantization: str | None, add: Callable[[np.ndarray], None]
) -> None:
    """Passes the leaves of a tree to `add`, in the order of `leaf_names`."""

    def name_of(name: str, spec: ParamSpec) -> Any:
        is_plain = quantization is None or spec.scales is None
        return name if is_plain else QuantizedWeight(name, name + "_scale")  # pyright: ignore[reportArgumentType]

    names = jax.tree.leaves(build_params(config, name_of))
    leaves = dict(zip(names, jax.tree.leaves(params), strict=True))
    for name in leaf_names(config, quantization):
        add(np.asarray(leaves[name]))


def leaf_names(config: LlamaConfig, quantization: str | None) -> list[str]:
    """Names of all arrays, in the order in which `load_params` creates them."""
    names: list[str] = []

    def add(name: str, spec: ParamSpec) -> None:
        names.extend([name] if quantization is None or spec.scales is None else [name, name + "_scale"])

    build_params(config, add)
    return names


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    dtype: Any,
    quantization: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    put: Callable[[ParamSpec, np.ndarray], Any] | None = None,
) -> Params:
    """The weights of a checkpoint, each leaf verified by its checksum. Besides the finished leaves, at most two parts
    are in memory.

    Args: see `ccjax.models.llama3.convert.load_params`; `quantization` None keeps the stored format.

    Raises:
      CheckpointError: a leaf is missing, damaged, or of another shape; or the checkpoint is quantised in another format
        than `quantization`.
    """
    index, config = read_index(directory), load_config(directory)
    if index.quantization is not None and quantization not in (None, index.quantization):
        raise CheckpointError(
            f"{directory}: wanted weights for {quantization}, got a checkpoint in {index.quantization}"
        )
    place = put or (lambda _, host: jnp.asarray(host))
    total = sum(_num_bytes(leaf) for leaf in index.leaves.values())
    done = 0
    stream = _arrays(Path(directory), index)

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        nonlocal done
        got, array = next(stream, (None, np.empty(0)))
        if got != name or array.shape != shape:
            raise CheckpointError(f"{directory}: wanted {name} {list(shape)}, got {got} {list(array.shape)}")
        done += array.nbytes
        if progress is not None:
            progress(done, total)
        return array

    def make(name: str, spec: ParamSpec) -> Any:
        array = take(name, spec.shape)
        if spec.scales is None or (quantization is None and index.quantization is None):
            return place(spec, np.ascontiguousarray(array, dtype=dtype))
        if index.quantization is not None:
            values, scales = array, take(name + "_scale", spec.scales.shape)
        else:
            assert quantization is not None
            values, scales = quantize_on_host(array, spec.input_axes, quantization)
        return QuantizedWeight(place(spec, values), place(spec.scales, scales))

    with contextlib.closing(stream):
        return build_params(config, make)


def _arrays(directory: Path, index: CheckpointIndex) -> Generator[tuple[str, np.ndarray]]:
    """Yields all leaves in order, verified; the next part is read in the background."""
    home = directory / _FOLDER / index.folder
    parts: dict[int, list[str]] = {}
    for name, leaf in index.leaves.items():
        parts.setdefault(leaf.part, []).append(name)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = None
        for number, following in zip(parts, [*list(parts)[1:], None], strict=True):
            arrays = (pending or pool.submit(_load, home / f"{number:05d}", parts[number])).result()
            pending = None if following is None else pool.submit(_load, home / f"{following:05d}", parts[following])
            for name in parts[number]:
                leaf, array = index.leaves[name], arrays.pop(name, None)
                where = f"{home / f'{number:05d}'}: {name!r}"
                if array is None:
                    raise CheckpointError(f"{where}: wanted a leaf of the checkpoint, got nothing that can be read")
                if _checksum(array) != leaf.checksum or array.size != np.prod(leaf.shape, dtype=int) * (
                    np.dtype(jnp.dtype(leaf.dtype)).itemsize // array.itemsize
                ):
                    raise CheckpointError(f"{where}: wanted checksum {leaf.checksum}, got another one: damaged")
                yield name, array.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape)


def _save(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes one part durably. Dtypes that zarr does not support are written as bytes."""
    plain = {name: array.view(np.uint8) if array.dtype in _AS_BYTES else array for name, array in arrays.items()}
    with _quiet(), contextlib.closing(_checkpointer()) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(plain))
    for path in [*directory.rglob("*"), directory, directory.parent]:
        _sync(path)


def _load(directory: Path, names: list[str]) -> dict[str, np.ndarray]:
    # One at a time: if one of several arrays is damaged, Orbax closes its event loop while the others are being read.
    found: dict[str, np.ndarray] = {}
    with contextlib.closing(_checkpointer()) as checkpointer:
        for name in names:
            args = ocp.args.PyTreeRestore(
                {name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
            )
            try:
                array = checkpointer.restore(directory.absolute(), args=args)[name]
            except Exception as error:  # damage may raise anything: OSError, ValueError, KeyError, a failed assertion
                got = str(error).partition(" [")[0]
                raise CheckpointError(f"{directory}: {name!r}: wanted a leaf of a checkpoint, got {got}") from error
            if isinstance(array, np.ndarray):  # a missing array comes back as the value passed in, here 0
                found[name] = array
    return found


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses Orbax's warning, for every checkpoint without OCDBT, that there is no OCDBT to merge."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().count("Skipping merge of OCDBT checkpoints")

    absl = logging.getLogger("absl")
    absl.addFilter(is_other)
    try:
        yield
    finally:
        absl.removeFilter(is_other)


_AS_BYTES = frozenset(form.dtype for form in WEIGHT_FORMATS.values()) - {np.dtype(np.int8)}


def _checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _num_bytes(leaf: StoredLeaf) -> int:
    return int(np.prod(leaf.shape, dtype=int)) * jnp.dtype(leaf.dtype).itemsize


def _sync(path: Path) -> None:
    """Syncs a file or directory, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
