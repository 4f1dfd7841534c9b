"""Reads safetensors files through mmap: names to numpy arrays, bfloat16 and float8 included.

The format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then
the tensors, little-endian, without gaps. Every header is checked in full when a file is opened;
an array is a view into the file, and only the pages that are touched are read.
"""

import functools
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.errors import ModelLoadError
from models.loading.foreign_weights import describe_start, refuse_foreign_weights
from models.loading.mapped_memory import release
from models.loading.model_paths import check_inside
from models.loading.stored_tensor import StoredTensor
from models.loading.strict_json import parse_json_object, read_json_object

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32  # of one tensor; numpy stops at 64
MAX_INT = 2**63 - 1

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": "<u1",
        "I8": "<i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "C64": "<c8",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }.items()
}
"""All of the format but its dtypes of less than a byte (F4, F6_E2M3, F6_E3M2)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `[begin, end)` are byte offsets in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One .safetensors file.

    Attributes:
      path: of the file.
      entries: name -> TensorEntry, in the order of the data.
    """

    def __init__(self, path: str | Path):
        """Map the file and check its whole header.

        Raises:
          ModelLoadError: the file is missing, cut short, or breaks any rule of the format.
        """
        self.path = Path(path)
        try:
            if not self.path.is_file():
                raise ModelLoadError(f"{path} must be a file; it is missing or something else")
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise ModelLoadError(f"{path} must have at least 8 bytes; got {size}")
                self._bytes = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} must be readable; {error.strerror}") from error
        self.entries = _read_entries(self._bytes, str(path))

    def array(self, name: str) -> np.ndarray:
        """A read-only view of a tensor, which may be unaligned; KeyError for an unknown name."""
        entry = self.entries[name]
        count = (entry.end - entry.begin) // entry.dtype.itemsize
        if not count:
            return np.empty(entry.shape, entry.dtype)
        flat = np.frombuffer(self._bytes, entry.dtype, count, entry.begin)
        return flat.reshape(entry.shape)

    def tensor(self, name: str) -> StoredTensor:
        """A tensor that is not read yet; KeyError for an unknown name."""
        entry = self.entries[name]
        return StoredTensor(
            entry.shape,
            entry.dtype,
            array=functools.partial(self.array, name),
            release=functools.partial(release, self._bytes, entry.begin, entry.end),
        )


class SafetensorsFolder:
    """The config.json and weights of a model folder, or of one .safetensors file's folder.

    The weights are `model.safetensors` or, where that is missing, the shards of
    `model.safetensors.index.json`.
    """

    def __init__(self, path: str | Path):
        """Open the weights and check every header.

        Args:
          path: a folder, or one file whose name ends with `.safetensors`.

        Raises:
          ModelLoadError: no safetensors weights there, or any that break a rule of the format.
        """
        path = Path(path)
        is_single_file = path.suffix == ".safetensors" and not path.is_dir()
        self.folder = path.parent if is_single_file else path
        self._files = [SafetensorsFile(path)] if is_single_file else _open_folder(path)
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.entries:
                if name in self._file_of:
                    raise ModelLoadError(
                        f"tensor {name!r} must stand in one file; "
                        f"got {self._file_of[name].path} and {file.path}"
                    )
                self._file_of[name] = file

    def config_dict(self) -> dict[str, Any]:
        """The content of config.json; ModelLoadError where it is missing or broken."""
        path = self.folder / "config.json"
        check_inside(path, self.folder)
        return read_json_object(path)

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, file by file in the order of their data."""
        return tuple(self._file_of)

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of one tensor; slice it to read only that slice from disk.

        Raises:
          ModelLoadError: no tensor has this name.
        """
        if name not in self._file_of:
            raise ModelLoadError(f"{self.folder} must hold tensor {name!r}; it does not")
        return self._file_of[name].array(name)

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """All tensors, none of them read yet, file by file in the order of their data."""
        for name, file in self._file_of.items():
            yield name, file.tensor(name)

    @property
    def num_tensors(self) -> int:
        """How many `tensors` gives."""
        return len(self._file_of)


def _open_folder(folder: Path) -> list[SafetensorsFile]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        check_inside(single, folder)
        return [SafetensorsFile(single)]
    if index.exists():
        check_inside(index, folder)
        return _open_shards(folder, index)
    parts = sorted(folder.glob("model-?????-of-?????.safetensors"))
    if parts:
        raise ModelLoadError(
            f"{folder} must hold model.safetensors.index.json beside {parts[0].name}; it does not; "
            f"fetch the whole repository"
        )
    refuse_foreign_weights(folder)
    raise ModelLoadError(
        f"{folder} must hold model.safetensors or model.safetensors.index.json; got none"
    )


def _open_shards(folder: Path, index: Path) -> list[SafetensorsFile]:
    """Open each shard that the index names, and check that each named tensor stands in its own."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} must have a weight_map of tensor names to shards")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ModelLoadError(
                f"{index}: the shard of {name!r} must be a .safetensors file name; got {shard!r}"
            )
    shards = sorted(set(weight_map.values()))
    if len({shard.lower() for shard in shards}) != len(shards):
        raise ModelLoadError(f"{index} must not name shards that differ only in case")
    for shard in shards:
        check_inside(folder / shard, folder)
    files = {shard: SafetensorsFile(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in files[shard].entries:
            raise ModelLoadError(f"{folder / shard} must hold tensor {name!r}, as {index} says")
    return list(files.values())


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not any(part in name for part in ("/", "\\", "\0"))


def _read_entries(data: mmap.mmap, source: str) -> dict[str, TensorEntry]:
    """Check the header, and that the tensors fill the rest of the file exactly."""
    header_bytes = int.from_bytes(data[:8], "little")
    limit = min(len(data) - 8, MAX_HEADER_BYTES)
    if not 0 < header_bytes <= limit or data[8:9] != b"{":
        raise ModelLoadError(
            f"{source} must start with the length (at most {limit}) of a JSON header; "
            f"got {header_bytes}, then {data[8:9]!r}{describe_start(data[:8])}"
        )
    data_begin = 8 + header_bytes
    header = parse_json_object(data[8:data_begin], f"the header of {source}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise ModelLoadError(f"{source}: __metadata__ must hold strings only")
    entries = {name: _read_entry(name, e, data_begin, source) for name, e in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = data_begin
    for name, entry in entries.items():
        if entry.begin != position:
            raise ModelLoadError(
                f"{source}: tensor {name!r} must begin at byte {position}, where the one "
                f"before it ends; got {entry.begin}"
            )
        position = entry.end
    if position != len(data):
        raise ModelLoadError(
            f"{source} must end with its last tensor at byte {position}; got {len(data)} bytes"
        )
    return entries


def _read_entry(name: str, value: object, data_begin: int, source: str) -> TensorEntry:
    where = f"{source}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{where} must have dtype, shape and data_offsets alone")
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ModelLoadError(f"{where}: dtype must be one of {', '.join(DTYPES)}; got {dtype_name}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelLoadError(f"{where}: shape must be up to {MAX_DIMENSIONS} sizes; got {shape}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelLoadError(f"{where}: data_offsets must be [begin, end]; got {offsets}")
    if math.prod(size or 1 for size in shape) * dtype.itemsize > MAX_INT:
        raise ModelLoadError(f"{where}: shape must fit 63 bits; got {shape}")
    num_bytes = math.prod(shape) * dtype.itemsize
    begin, end = offsets
    if end - begin != num_bytes:
        raise ModelLoadError(f"{where} must have {num_bytes} bytes; got offsets {offsets}")
    return TensorEntry(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_sizes(value: object) -> bool:
    """Whether it is a list of ints in 0..2^63-1; True is no int here."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= MAX_INT for x in value)
