"""Parses the header of one GGUF file (keys, tensor infos) and refuses what a healthy one lacks.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. The limits are our own; every loop is
linear in the bytes of the file, and no count is trusted before it was compared with them.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from models.errors import ModelLoadError

MAX_KEYS = MAX_TENSORS = 65_536
MAX_KEY_BYTES = 64 << 10
MAX_STRING_BYTES = 16 << 20

Value = int | float | bool | str | list[str] | np.ndarray

GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml type id -> (name, values in a block, bytes of a block)."""

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
      name: GGUF's own name.
      shape: in numpy's order, the contiguous axis last.
      type_name, block_values, block_bytes: of its ggml type.
      start: first byte, counted from the start of the file.
      num_bytes: of its data.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    block_values: int
    block_bytes: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """One opened file: its bytes, its keys and where its tensors lie."""

    data: mmap.mmap
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Map a GGUF file into memory and parse its header.

    Raises:
      ModelLoadError: "file: key: reason": not a little-endian GGUF of version 2 or 3, cut or
        longer than its tensors, a key or tensor twice, a count or length beyond the file or the
        limits above, an unknown type, rows that are no whole blocks, tensors out of place.
    """
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path}: file: must be a regular file that exists")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelLoadError(f"{path}: header: must have at least 24 bytes; got {size}")
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path}: file: must be readable; {error.strerror}") from error
    return _Parser(data, str(path)).parse()


def shortened(text: str, length: int) -> str:
    """A text of a file for an error: at most `length` characters, and on one line."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= length else f"{text[:length]}..."


class _Parser:
    """Walks over the header once, from the first byte to the last tensor info."""

    def __init__(self, data: mmap.mmap, source: str):
        self._data, self._source = data, source
        self._size, self._position = len(data), 0

    def parse(self) -> GgufHeader:
        num_tensors, num_keys = self._preamble()
        metadata: dict[str, Value] = {}
        for index in range(num_keys):
            key = self._string(f"key {index}", MAX_KEY_BYTES)
            if not key or key in metadata:
                self._refuse(key or f"key {index}", "a key must be given once and not be empty")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        raw = [self._tensor_info(index) for index in range(num_tensors)]
        tensors = self._place(raw, alignment)
        return GgufHeader(data=self._data, metadata=metadata, tensors=tensors)

    def _preamble(self) -> tuple[int, int]:
        magic = self._take(4, "magic")
        if magic != b"GGUF":
            self._refuse("magic", f"must be b'GGUF'; got {magic!r}")
        version = self._u32("version")
        if version in (2 << 24, 3 << 24):
            self._refuse("version", "big-endian files are not supported; convert the file")
        if version not in (2, 3):
            self._refuse("version", f"must be 2 or 3; got {version}")
        num_tensors, num_keys = self._u64("tensor count"), self._u64("key count")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            self._refuse("counts", f"must be at most {MAX_KEYS}; got {num_tensors}, {num_keys}")
        return num_tensors, num_keys

    def _value(self, key: str) -> Value:
        type_id = self._u32(key)
        if type_id == _STRING:
            return self._string(key, MAX_STRING_BYTES)
        if type_id == _ARRAY:
            return self._array(key)
        if type_id != _BOOL and type_id not in _NUMBERS:
            self._refuse(key, f"unknown value type {type_id}")
        return self._numbers(key, type_id, 1)[0].item()

    def _array(self, key: str) -> list[str] | np.ndarray:
        type_id, count = self._u32(key), self._u64(key)
        if type_id == _STRING:
            return self._strings(key, count)
        if type_id != _BOOL and type_id not in _NUMBERS:
            self._refuse(key, f"array elements must be numbers or strings; got type {type_id}")
        return self._numbers(key, type_id, count)

    def _numbers(self, key: str, type_id: int, count: int) -> np.ndarray:
        dtype = np.dtype(_NUMBERS.get(type_id, "<u1"))
        raw = self._take(count * dtype.itemsize, key)
        numbers = np.frombuffer(raw, dtype)
        if type_id != _BOOL:
            return numbers
        if count and numbers.max() > 1:
            self._refuse(key, f"a boolean must be 0 or 1; got {numbers.max()}")
        return numbers.astype(bool)

    def _strings(self, key: str, count: int) -> list[str]:
        if count > (self._size - self._position) // 8:
            self._refuse(key, f"{count} strings do not fit the rest of the file")
        return [self._string(key, MAX_STRING_BYTES) for _ in range(count)]

    def _string(self, key: str, max_bytes: int) -> str:
        length = self._u64(key)
        if length > max_bytes:
            self._refuse(key, f"a string must have at most {max_bytes} bytes; got {length}")
        try:
            return self._take(length, key).decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(key, "a string must be UTF-8")

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in [1 << n for n in range(3, 17)]:
            self._refuse("general.alignment", f"must be 2**n in [8, 65536]; got {alignment!r}")
        return alignment

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type id and offset, as they stand in the file."""
        name = self._string(f"tensor {index}", MAX_KEY_BYTES)
        num_dims = self._u32(name)
        if not 1 <= num_dims <= 4:
            self._refuse(name, f"must have 1 to 4 dimensions; got {num_dims}")
        dims = [self._u64(name) for _ in range(num_dims)]
        if min(dims) == 0:
            self._refuse(name, f"dimensions must be above 0; got {dims}")
        return name, tuple(reversed(dims)), self._u32(name), self._u64(name)

    def _place(
        self, raw: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, TensorInfo]:
        """Check sizes and offsets: as in ggml, tensors follow each other without gaps."""
        data_start = self._skip_padding(alignment)
        tensors: dict[str, TensorInfo] = {}
        end = expected = 0
        for name, shape, type_id, offset in raw:
            if name in tensors:
                self._refuse(name, "a tensor must be given once")
            info = self._make_info(name, shape, type_id, data_start + offset)
            if offset != expected:
                self._refuse(name, f"offset must be {expected}, after the last; got {offset}")
            end = info.start + info.num_bytes
            expected = -(-(offset + info.num_bytes) // alignment) * alignment
            if end > self._size:
                self._refuse(name, f"must end within the {self._size} bytes of the file; got {end}")
            tensors[name] = info
        end = end or self._position
        if self._size not in range(end, data_start + expected + 1):
            self._refuse("file", f"must end with its last tensor at {end}; got {self._size} bytes")
        return tensors

    def _skip_padding(self, alignment: int) -> int:
        """Where the tensors begin; a value that was read too short would leave bytes before it."""
        data_start = -(-self._position // alignment) * alignment
        if any(self._data[self._position : data_start]):
            self._refuse("padding", f"must be zeros from byte {self._position} to {data_start}")
        return data_start

    def _make_info(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorInfo:
        if type_id not in GGML_TYPES:
            self._refuse(name, f"unknown ggml type {type_id}")
        type_name, block_values, block_bytes = GGML_TYPES[type_id]
        if shape[-1] % block_values:
            rule = f"rows of {type_name} must be a multiple of {block_values}"
            self._refuse(name, f"{rule}; got {shape[-1]}")
        num_values = 1
        for dim in shape:  # Python's integers do not overflow
            num_values *= dim
        return TensorInfo(
            name=name,
            shape=shape,
            type_name=type_name,
            block_values=block_values,
            block_bytes=block_bytes,
            start=start,
            num_bytes=num_values // block_values * block_bytes,
        )

    def _u32(self, key: str) -> int:
        return _U32.unpack(self._take(4, key))[0]

    def _u64(self, key: str) -> int:
        return _U64.unpack(self._take(8, key))[0]

    def _take(self, count: int, key: str) -> bytes:
        start = self._position
        end = start + count
        if end > self._size:
            self._refuse(key, f"the file must not end before byte {end}; it has {self._size}")
        self._position = end
        return self._data[start:end]

    def _refuse(self, key: str, reason: str) -> NoReturn:
        raise ModelLoadError(f"{self._source}: {shortened(repr(key[:200]), 100)}: {reason}")
