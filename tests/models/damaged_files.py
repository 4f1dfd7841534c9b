"""Damages files byte by byte, and loads what is left through the door that users come in by."""

import functools
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from models.config import ModelConfig
from models.errors import ModelLoadError
from models.loading.checkpoint import CheckpointLoader
from models.loading.source import open_model
from models.weight_layout import WeightLayout, WeightStore
from tests.models.tiny_models import make_layout, one_device

MAX_SECONDS = 1.0


@functools.cache
def layout_of(config: ModelConfig) -> WeightLayout:
    return make_layout(config)


def load_model(path: Path) -> tuple[ModelConfig, list[np.ndarray]]:
    """Config and weights, as an engine loads them."""
    opened = open_model(str(path), "auto")
    config = opened.model_config()
    store = WeightStore(layout_of(config), one_device())
    CheckpointLoader(config, store, str(path)).load(opened.source.tensors())
    return config, [np.asarray(leaf) for leaf in store.leaves()]


def outcome(path: Path, original: tuple[ModelConfig, list[np.ndarray]], culprit: str) -> str:
    """What loading a damaged model gives; any error but ModelLoadError is let through.

    Args:
      path: of the model.
      original: what the undamaged one gave.
      culprit: what a refusal must name.

    Returns:
      "refused", "same", "other config" (its weights were found) or "other weights".
    """
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened = open_model(str(path), "auto")
            if opened.model_config() != original[0]:
                opened.source.tensors()
                return "other config"
            leaves = load_model(path)[1]
    except ModelLoadError as error:
        assert culprit in str(error) and "\n" not in str(error), str(error)
        return "refused"
    finally:
        assert time.process_time() - start < MAX_SECONDS
    is_same = all(map(np.array_equal, leaves, original[1]))
    return "same" if is_same else "other weights"


@contextmanager
def replaced(path: Path, start: int, damage: bytes) -> Iterator[None]:
    """The file with these bytes from `start` on; whole again afterwards."""
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        before = file.read(len(damage))
        file.seek(start)
        file.write(damage)
        try:
            yield
        finally:
            file.seek(start)
            file.write(before)


def cut_lengths(size: int, borders: list[int]) -> list[int]:
    """Each percent of a file, and each border with a byte to both sides; the whole size is none."""
    near = {border + step for border in borders for step in (-1, 0, 1)}
    percents = {size * percent // 100 for percent in range(100)}
    return sorted(length for length in near | percents if 0 <= length < size)
