"""The bars that LLM shows: loading and compiling at the start, then finished prompts."""

from collections.abc import Callable
from typing import Any, Self

import tqdm

_STAGES = {"load": "loading tensors", "compile": "compiling steps"}


class StartProgress:
    """Shows each long stage of a start as a bar; a `Progress` of build_engine."""

    def __enter__(self) -> Self:
        self._stage = ""
        self._bar: tqdm.tqdm | None = None
        return self

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take news of a stage."""
        if stage not in _STAGES or total <= 1:
            return
        if stage != self._stage or self._bar is None:
            self._close()
            self._stage = stage
            self._bar = tqdm.tqdm(total=total, desc=_STAGES[stage], leave=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class PromptProgress:
    """Shows how many prompts are finished.

    Args:
      use_tqdm: whether to; or what to call instead of tqdm.
      total: prompts.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int):
        self._bar: Any = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else tqdm.tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __call__(self, num_new: int) -> None:
        """So many more prompts are finished."""
        if self._bar is not None and num_new:
            self._bar.update(num_new)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
