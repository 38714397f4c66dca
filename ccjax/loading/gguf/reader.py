"""Reads GGUF files with the `gguf` package, after checking every length against the file's size."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import ReaderField, ReaderTensor

from ccjax.models.llama3.leaves import CheckpointError, listed

SUPPORTED_TYPES = tuple(
    getattr(GGMLQuantizationType, name)
    for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
)
_MOST_VALUES = 1 << 23
"""Limit of values in a header: the reader keeps some 150 bytes for each. Llama 3's vocabulary has 800,000."""
_MOST_AXES = 4
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
}
Value = TypeVar("Value", str, bool, int, float)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open GGUF file, or all parts of a split one.

    Attributes:
      paths: the file, or its parts in order.
      tensors: name -> the part that it is in, and the tensor, whose data is memory-mapped.
    """

    paths: tuple[Path, ...]
    fields: Mapping[str, ReaderField]
    tensors: Mapping[str, tuple[Path, ReaderTensor]]

    @property
    def path(self) -> Path:
        """The file, or the first part, which has the metadata; used in messages."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """The file's name without extension and part number."""
        part = _PART.fullmatch(self.path.name)
        return part[1] if part else self.path.stem

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """The metadata under `key`, or the default.

        Raises:
          CheckpointError: it has another type, or there is neither a value nor a default.
        """
        value = self.find(key, kind)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: {key}: wanted {_KINDS[kind]}, got no such key")
        return value

    def find(self, key: str, kind: type[Value]) -> Value | None:
        """The metadata under `key`, or None.

        Raises:
          CheckpointError: it has another type.
        """
        value: Any = self._contents(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise CheckpointError(f"{self.path}: {key}: wanted {_KINDS[kind]}, got {_shown(value)}")
        return value

    def find_all(self, key: str, kind: type[Value]) -> list[Value] | None:
        """The array under `key`, or None.

        Raises:
          CheckpointError: it is not an array of that type.
        """
        values = self._contents(key)
        if values is not None and not (isinstance(values, list) and all(type(value) is kind for value in values)):
            raise CheckpointError(f"{self.path}: {key}: wanted an array of {_KINDS[kind]} each, got {_shown(values)}")
        return values

    def _contents(self, key: str) -> Any:
        field = self.fields.get(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {key}: wanted UTF-8, got {error}") from error


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file; one named NAME-00001-of-0000N.gguf together with its other parts in the same directory.

    Reads no tensor.

    Raises:
      CheckpointError: a file is missing, is not a GGUF file or is truncated, a part does not match the others, or a
        tensor has an unsupported type.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        reader = _read(path)
        count = _split_value(path, reader, "split.count")
        if count > 1:
            raise CheckpointError(
                f"{path}: wanted the name NAME-00001-of-{count:05d}.gguf, because it is one of {count} parts"
            )
        return _joined((path,), [reader])
    number, count = int(match[2]), int(match[3])
    first = path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
    if number != 1:
        raise CheckpointError(f"{path}: wanted the first part, {first.name}, got part {number} of {count}")
    paths, readers = [], []
    for number in range(1, max(count, 1) + 1):
        part = path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        paths.append(part)
        readers.append(_read(part))
        for key, wanted in (("split.count", count), ("split.no", number - 1)):
            got = _split_value(part, readers[-1], key)
            if got != wanted:
                raise CheckpointError(f"{part}: {key}: wanted {wanted}, as its name says, got {got}")
    file = _joined(tuple(paths), readers)
    wanted = _split_value(path, readers[0], "split.tensors.count")
    if len(file.tensors) != wanted:
        raise CheckpointError(f"{path}: split.tensors.count: wanted {wanted} in all parts, got {len(file.tensors)}")
    return file


def _joined(paths: tuple[Path, ...], readers: Sequence[_CheckedReader]) -> GgufFile:
    tensors: dict[str, tuple[Path, ReaderTensor]] = {}
    for path, reader in zip(paths, readers, strict=True):
        twice = [tensor.name for tensor in reader.tensors if tensor.name in tensors]
        if twice:
            raise CheckpointError(f"{path}: wanted each tensor once, got {listed(twice)} again")
        tensors |= {tensor.name: (path, tensor) for tensor in reader.tensors}
    return GgufFile(paths, readers[0].fields, tensors)


def _split_value(path: Path, reader: _CheckedReader, key: str) -> int:
    return GgufFile((path,), reader.fields, {}).get(key, int, 0)


def _read(path: Path) -> _CheckedReader:
    try:
        return _CheckedReader(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: wanted a GGUF file, got no such file") from None
    except RecursionError:
        raise CheckpointError(f"{path}: wanted a GGUF file, got arrays of arrays without end") from None
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path}: wanted a whole GGUF file, got {reason}") from error


class _CheckedReader(gguf.GGUFReader):
    """The package's reader, which does not check the file's lengths, with checks.

    All reads of a header go through `_get` or `_texts`, which check bounds. They use plain buffers instead of slices of
    `np.memmap`, and read arrays at once: SmolLM2's header takes 0.2 s instead of 4.7 s.
    """

    _num_values = 0

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.byte_order != "I":
            raise ValueError("one in big-endian byte order")
        self._count(1)
        wanted = int(count)
        self._check_end(int(offset) + wanted * np.dtype(dtype).itemsize, self.data.size)
        return np.frombuffer(self.data, dtype, wanted, int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            start = orig_offs + 12
            if kind[0] == GGUFValueType.STRING:
                texts, end = self._texts(start, int(count[0]))
                types = [GGUFValueType.ARRAY, GGUFValueType.STRING]
                return end - orig_offs, [kind, count, *texts], list(range(2, 2 + len(texts))), types
            number = next((to for of, to in self.gguf_scalar_to_np.items() if of == kind[0]), None)
            if number is not None:
                values = self._get(start, number, count[0])
                types = [GGUFValueType.ARRAY, GGUFValueType(int(kind[0]))]
                return 12 + values.nbytes, [kind, count, values], [2], types
        return super()._get_field_parts(orig_offs, raw_type)

    def _texts(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """The strings of an array, which make up most of a header, and the offset of their end."""
        content, size, texts = self.data.data, self.data.size, []
        self._count(count)
        for _ in range(count):
            begin = start + 8
            start = begin + int.from_bytes(content[start:begin], "little")
            self._check_end(max(begin, start), size)
            texts.append(content[begin:start])
        return texts, start

    def _count(self, values: int) -> None:
        self._num_values += values
        if self._num_values > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values in its header")

    @staticmethod
    def _check_end(end: int, size: int) -> None:
        if end > size:
            raise ValueError(f"one of {size} bytes, where a value ends at byte {end}")

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            self._check_tensor(int(start_offs), field)
        super()._build_tensors(start_offs, fields)

    def _check_tensor(self, start: int, field: ReaderField) -> None:
        *_, axes, raw_type, offset = field.parts
        shape = [int(length) for length in reversed(axes.tolist())]
        name = f"tensor {field.name!r}"
        if not 0 < len(shape) <= _MOST_AXES or min(shape) < 1:
            raise ValueError(f"{name} of shape {shape}")
        kind = next((kind for kind in GGMLQuantizationType if kind == raw_type[0]), None)
        if kind is None or kind not in SUPPORTED_TYPES:
            wanted = ", ".join(supported.name for supported in SUPPORTED_TYPES)
            raise ValueError(f"{name} of type {kind.name if kind else raw_type[0]}, where {wanted} are supported")
        per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block:
            raise ValueError(f"{name} of shape {shape}, whose rows are not in whole {kind.name} blocks of {per_block}")
        end = start + int(offset[0]) + math.prod(shape) // per_block * num_bytes
        if end > self.data.size:
            raise ValueError(f"one of {self.data.size} bytes, where {name} ends at byte {end}: it is truncated")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
