"""Reads tests/goldens: tiny checkpoints and what float32 transformers answers to them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDENS_FOLDER = Path(__file__).parent / "goldens"
GOLDEN_NAMES = tuple(sorted(path.parent.name for path in GOLDENS_FOLDER.glob("*/goldens.npz")))


@dataclass(frozen=True)
class GreedyCase:
    """A prompt with its 64 greedy tokens; `margins` is best less second logit at each step."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: np.ndarray


@dataclass(frozen=True)
class LogitsCase:
    """A prompt of T tokens with its logits, float32[T, V]."""

    prompt: tuple[int, ...]
    logits: np.ndarray


@dataclass(frozen=True)
class Golden:
    """One checkpoint folder (config.json and safetensors) and its goldens.

    Attributes:
      logits: three prompts of 1, 9 and 40 tokens.
      alone: one prompt, to be run with nothing beside it.
      mixed: 17 prompts of 1 to 150 tokens, to be run together.
    """

    name: str
    folder: Path
    logits: tuple[LogitsCase, ...]
    alone: GreedyCase
    mixed: tuple[GreedyCase, ...]


def load_golden(name: str) -> Golden:
    """The golden of this name; `GOLDEN_NAMES` lists them."""
    folder = GOLDENS_FOLDER / name
    with np.load(folder / "goldens.npz") as file:
        arrays = dict(file)
    prompts = np.split(arrays["mixed_prompts"], np.cumsum(arrays["mixed_lengths"])[:-1])
    rows = zip(prompts, arrays["mixed_tokens"], arrays["mixed_margins"], strict=True)
    return Golden(
        name=name,
        folder=folder,
        logits=tuple(
            LogitsCase(tuple(arrays[f"logits_prompt_{i}"].tolist()), arrays[f"logits_{i}"])
            for i in range(3)
        ),
        alone=_greedy_case(*(arrays[f"alone_{part}"] for part in ("prompt", "tokens", "margins"))),
        mixed=tuple(_greedy_case(*row) for row in rows),
    )


def _greedy_case(prompt: np.ndarray, tokens: np.ndarray, margins: np.ndarray) -> GreedyCase:
    return GreedyCase(tuple(prompt.tolist()), tuple(tokens.tolist()), margins)
