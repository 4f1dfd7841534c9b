"""Tests of jaxserve/progress.py, and of what a start reports to it."""

from typing import Any

import pytest

from jaxserve import progress
from jaxserve.llm import LLM
from jaxserve.progress import PromptProgress, StartProgress
from models.loading.source import open_model
from tests.tiny_llm import MODEL, SETTINGS


class Bar:
    """Takes the place of tqdm."""

    made: list["Bar"] = []

    def __init__(self, total: int, desc: str, **_: Any):
        self.total, self.desc, self.n, self.is_closed = total, desc, 0, False
        Bar.made.append(self)

    def update(self, count: int) -> None:
        assert not self.is_closed and count >= 0
        self.n += count

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch) -> list[Bar]:
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(progress.tqdm, "tqdm", Bar)
    return Bar.made


def test_each_long_stage_has_a_bar_that_is_closed_before_the_next(bars):
    with StartProgress() as start:
        for stage in ("load", "plan", "compile"):
            start(stage, 0, 1)
            for done in range(3):
                start(stage, done + 1, 3)
        assert [(bar.desc, bar.n, bar.is_closed) for bar in bars] == [
            ("loading tensors", 3, True),
            ("compiling steps", 3, False),
        ]
    assert bars[-1].is_closed


def test_a_start_without_news_shows_nothing(bars):
    with StartProgress() as start:
        start("load", 0, 1)
    assert bars == []


def test_a_start_reports_every_tensor(bars):
    LLM(MODEL, skip_tokenizer_init=True, **SETTINGS)
    assert bars[0].desc == "loading tensors"
    assert bars[0].n == bars[0].total == open_model(MODEL, "auto").source.num_tensors


def test_prompts_are_counted_by_what_the_user_gives(bars):
    with PromptProgress(Bar, 4) as prompts:
        prompts(3)
        prompts(0)
    assert [(bar.total, bar.n, bar.is_closed) for bar in bars] == [(4, 3, True)]
    with PromptProgress(False, 4) as prompts:
        prompts(3)
    assert len(bars) == 1
