"""Reads and writes the file of one prefix snapshot: safetensors, with a digest of all it holds."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxserve.errors import ModelLoadError
from models.loading.safetensors import DTYPES, SafetensorsFile
from models.loading.strict_json import parse_json_object

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DIGEST = "sha256"


def write_snapshot(
    path: Path, metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]
) -> None:
    """Write a file under a temporary name, and rename it when all of it is on the disk.

    Args:
      path: of the file; one that is there is replaced. Its folder is made for this user alone.
      metadata: without a digest, which is added.
      tensors: each contiguous.

    Raises:
      OSError: the file cannot be written; nothing is left of it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    header: dict[str, object] = {
        "__metadata__": {**metadata, _DIGEST: _digest(metadata, tensors)},
    }
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


class SnapshotFile:
    """A snapshot that is opened: its header is checked in full, its tensors not yet.

    Attributes:
      metadata: without the digest.
      tensors: views into the file.
    """

    def __init__(self, path: Path):
        """Map a file.

        Raises:
          ModelLoadError: it is missing, cut short, or no safetensors file.
        """
        file = SafetensorsFile(path)
        with path.open("rb") as opened:
            text = opened.read(int.from_bytes(opened.read(8), "little"))
        metadata = parse_json_object(text, str(path)).get("__metadata__", {})
        self._path, self._expected = path, metadata.pop(_DIGEST, "")
        self.metadata: dict[str, str] = metadata
        self.tensors = {name: file.array(name) for name in file.entries}

    def check_digest(self) -> None:
        """Read all of it.

        Raises:
          ModelLoadError: it is not what was written.
        """
        got = _digest(self.metadata, self.tensors)
        if got != self._expected:
            raise ModelLoadError(
                f"{self._path} must have the checksum {self._expected[:16]}; got {got[:16]}; "
                f"the file is damaged, save the prefix again"
            )


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the metadata and, by name, each tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, tensor.dtype.name, tensor.shape]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: np.ndarray) -> memoryview:
    return memoryview(tensor.reshape(-1).view(np.uint8))


def _sync_folder(folder: Path) -> None:
    """Make the new name outlive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
