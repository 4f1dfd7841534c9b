"""GgufFile: a GGUF model as a Hugging Face config and checkpoint tensors, read lazily.

Only `dequantize` comes from the gguf package; its own reader needs 2.5 s for the tokenizer arrays
of a 49 152-token vocabulary, `gguf_header` 0.1 s (CPU, 2026-11).
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.errors import ModelLoadError
from models.loading.gguf_config import ROPE_FACTORS, ConfigReader
from models.loading.gguf_header import GgufHeader, TensorInfo, read_header
from models.loading.gguf_layout import ExpectedTensor, expected_tensors
from models.loading.gguf_metadata import GgufMetadata
from models.loading.mapped_memory import release
from models.loading.stored_tensor import StoredTensor

_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NOT_WEIGHTS = frozenset({"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"})
"""ggml types that no float tensor can be made of here."""


class GgufFile:
    """A GGUF model, one file or all parts of a split one.

    The header is checked when the file is opened, names and shapes of tensors when `tensors` is
    called; the bytes stay mapped as long as this object or an array made from them lives.

    Attributes:
      path: the file, or the first part.
      metadata: the keys of the (first) file.
    """

    def __init__(self, path: str | Path):
        """Open and check.

        Args:
          path: the file; of a split model the part 00001.

        Raises:
          ModelLoadError: "file: key: reason": what `read_header` and `check_vocabulary` refuse, a
            part of a split model that is missing or does not fit, a wrong number of tensors.
        """
        self.path = Path(path)
        first = read_header(self.path)
        self.metadata = GgufMetadata(first.metadata, str(self.path))
        self._infos: dict[str, TensorInfo] = {}
        self._part_of: dict[str, GgufHeader] = {}
        for part in self._parts(first):
            for name, info in part.tensors.items():
                if name in self._infos:
                    self.metadata.refuse(name, "a tensor must stand in one part only")
                self._infos[name], self._part_of[name] = info, part
        declared = self.metadata.integer("split.tensors.count")
        if declared is not None and declared != len(self._infos):
            rule = f"must be the {len(self._infos)} tensors found"
            self.metadata.refuse("split.tensors.count", f"{rule}; got {declared}")
        embedding = self._infos.get("token_embd.weight")
        self.metadata.check_vocabulary(embedding.shape[0] if embedding else None)

    def config_dict(self) -> dict[str, Any]:
        """The model's numbers in the form of Hugging Face's config.json.

        Raises:
          ModelLoadError: the architecture is not known, a key is missing, of a wrong type, or
            asks for what is not supported.
        """
        reader = ConfigReader(self.metadata, self._infos)
        present = [name for name in ROPE_FACTORS if name in self._infos]
        return reader.config_dict({name: self._values(name) for name in present})

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Hugging Face name and float32 [out, in] values of each tensor, layer after layer.

        A tensor is decoded whole, since its values stand in blocks, each time its array is asked
        for; that of an F32 tensor may be a read-only view of the file. `ROPE_FACTORS` keep their
        names; their values stand in `config_dict` as well.

        Raises:
          ModelLoadError: at the call, before any value is read: a tensor is missing, unknown,
            of a wrong shape, or of a type that cannot be dequantised.
        """
        config = self.config_dict()
        architecture = config["model_type"]
        expected = expected_tensors(architecture, config, self._infos.__contains__)
        for tensor in expected:
            self._check_tensor(tensor)
        unknown = set(self._infos).difference(tensor.gguf_name for tensor in expected)
        if unknown:
            self.metadata.refuse(min(unknown), f"{architecture} has no such tensor")
        return ((tensor.hf_name, self._stored(tensor)) for tensor in expected)

    @property
    def num_tensors(self) -> int:
        """How many `tensors` gives."""
        return len(self._infos)

    def _parts(self, first: GgufHeader) -> list[GgufHeader]:
        count = self.metadata.integer("split.count") or 1
        if count == 1:
            return [first]
        match = re.fullmatch(r"(.+)-00001-of-(\d{5})\.gguf", self.path.name)
        if not match or int(match[2]) != count or self.metadata.integer("split.no") != 0:
            name = f"NAME-00001-of-{count:05d}.gguf with split.no 0"
            self.metadata.refuse("split.no", f"a split model must be opened by its part {name}")
        parts = [first]
        for number in range(1, count):
            path = self.path.with_name(f"{match[1]}-{number + 1:05d}-of-{count:05d}.gguf")
            part = read_header(path)
            found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
            if found != (number, count):
                rule = f"must be {number}, {count}"
                raise ModelLoadError(f"{path}: split.no, split.count: {rule}; got {found}")
            parts.append(part)
        return parts

    def _check_tensor(self, tensor: ExpectedTensor) -> None:
        name = tensor.gguf_name
        if name not in self._infos:
            self.metadata.refuse(name, "the tensor is missing")
        info = self._infos[name]
        if info.shape != tensor.shape:
            self.metadata.refuse(name, f"must have shape {tensor.shape}; got {info.shape}")
        if info.type_name in NOT_WEIGHTS:
            self.metadata.refuse(name, f"weights of type {info.type_name} cannot be dequantised")

    def _stored(self, tensor: ExpectedTensor) -> StoredTensor:
        info, data = self._infos[tensor.gguf_name], self._part_of[tensor.gguf_name].data
        return StoredTensor(
            tensor.shape,
            np.dtype(np.float32),
            array=functools.partial(self._load, tensor),
            release=functools.partial(release, data, info.start, info.start + info.num_bytes),
        )

    def _load(self, tensor: ExpectedTensor) -> np.ndarray:
        values = self._values(tensor.gguf_name)
        if tensor.added:
            values = values - np.float32(tensor.added)
        if not tensor.permuted_heads:
            return values
        # The converter stores row 2i+j of each head where the checkpoint has row j*H/2+i.
        pairs = values.reshape(tensor.permuted_heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _values(self, name: str) -> np.ndarray:
        """The tensor in float32, with its rows as they stand in the file."""
        info = self._infos[name]
        raw = np.frombuffer(self._part_of[name].data, np.uint8, info.num_bytes, info.start)
        if info.type_name in _FLOATS:
            values = raw.view(_FLOATS[info.type_name]).reshape(info.shape)
            return values.astype(np.float32, copy=False)
        from gguf import GGMLQuantizationType, quants

        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            return quants.dequantize(rows, GGMLQuantizationType[info.type_name])
        except (KeyError, NotImplementedError):
            reason = f"the installed gguf package cannot dequantise {info.type_name}"
            self.metadata.refuse(name, reason)
