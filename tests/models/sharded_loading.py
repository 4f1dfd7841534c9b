"""What tests/models/test_loading_shares.py runs in a process that has four virtual CPU devices.

Prints one JSON object.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.loading.checkpoint import CheckpointLoader
from models.loading.pieces import Index, ParameterPieces
from models.loading.source import open_model
from models.loading.stored_tensor import StoredTensor
from models.sharding import MESH_AXIS_OF, Sharder, make_mesh, share_kv_heads
from models.weight_layout import Stack, WeightStore
from tests.goldens_loader import GOLDEN_NAMES, load_golden
from tests.models.four_devices import write_odd_model
from tests.models.stored_tensors import plain_parameter, read_folder
from tests.models.tiny_models import make_layout

DEVICES = (1, 2, 4)
STACKS_OF: tuple[tuple[str, Stack], ...] = (("bfloat16", "vectors"), ("float16", "all"))

COPIED: list[int] = []
"""Elements of each tile that was read of a stored tensor."""


class Watched(np.ndarray):
    """A tensor that notes how much of it is copied."""

    def __array_function__(self, func, types, args: Any, kwargs):
        if func is np.copyto:
            COPIED.append(args[1].size)
        return super().__array_function__(func, types, args, kwargs)


class WatchedPieces(ParameterPieces):
    """A parameter that notes the index and the elements of each read."""

    def __init__(self, inner: ParameterPieces):
        self.shape, self._inner = inner.shape, inner
        self.reads: list[tuple[str, int]] = []

    def read(self, index: Index, dtype: np.dtype) -> np.ndarray:
        COPIED.clear()
        array = self._inner.read(index, dtype)
        self.reads.append((str(index), sum(COPIED)))
        return array


class WatchedStore(WeightStore):
    """A store that notes the reads of each parameter."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.reads: dict[str, list[tuple[str, int]]] = {}

    def put(self, path: str, value: ParameterPieces) -> None:
        watched = WatchedPieces(value)
        super().put(path, watched)
        self.reads[path] = watched.reads


def watched(tensors: Iterator[tuple[str, StoredTensor]]) -> Iterator[tuple[str, StoredTensor]]:
    for name, tensor in tensors:
        yield name, replace(tensor, array=lambda t=tensor: t.array().view(Watched))


def load(
    folder: Path, num_devices: int, dtype: str, stack: Stack
) -> tuple[ModelConfig, WatchedStore]:
    opened = open_model(str(folder), "auto")
    config, sharder = (
        share_kv_heads(opened.model_config(), num_devices),
        Sharder(make_mesh(num_devices)),
    )
    layout = make_layout(config, stack, dtype)
    layout.abstract(sharder)
    store = WatchedStore(layout, sharder)
    CheckpointLoader(config, store).load(watched(opened.source.tensors()))
    return config, store


def differing(folder: Path, num_devices: int, dtype: str, stack: Stack) -> list[str] | str:
    """Paths of parameters that are not, bit for bit, what whole tensors give; or the refusal."""
    try:
        config, store = load(folder, num_devices, dtype, stack)
    except ValueError as error:
        return str(error)
    tensors, leaves = read_folder(folder), store.leaves()
    found = []
    for parameter in store.layout.parameters:
        index, layer = store.layout.locate(parameter.path)
        got = np.asarray(leaves[index] if layer is None else leaves[index][layer])
        want = plain_parameter(config, tensors, parameter.path).astype(got.dtype)
        if got.shape != want.shape or got.tobytes() != want.tobytes():
            found.append(parameter.path)
    return found


def reads(folder: Path, num_devices: int) -> list:
    """(path, whether it is to be split, elements, reads) of each parameter."""
    _, store = load(folder, num_devices, "bfloat16", "none")
    split = {axis for axis, mesh_axis in MESH_AXIS_OF.items() if mesh_axis == "model"}
    return [
        (p.path, bool(split.intersection(p.axes)), math.prod(p.shape), store.reads[p.path])
        for p in store.layout.parameters
    ]


def main() -> None:
    """Run everything."""
    with tempfile.TemporaryDirectory() as odd:
        write_odd_model(Path(odd))
        folders = {name: load_golden(name).folder for name in GOLDEN_NAMES} | {"odd": Path(odd)}
        found = {
            "differing": {
                f"{name} {count}": differing(folder, count, "float32", "none")
                for name, folder in folders.items()
                for count in DEVICES
            },
            "stacked": {
                f"{name} {stack}": differing(folders[name], 2, dtype, stack)
                for name in ("odd", "phi3_longrope")
                for dtype, stack in STACKS_OF
            },
            "reads": {count: reads(folders["llama_gqa"], count) for count in DEVICES},
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
