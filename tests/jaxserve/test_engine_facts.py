"""What is told of an engine after its steps, and that both doors show the same of it."""

import types
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.async_llm_engine import EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.engine_facts import StatsTaker
from jaxserve.distributed.messages import (
    HEADER_BYTES,
    EngineStats,
    StepNews,
    decode_from_engine,
    encode_frame,
)
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.metrics.totals import FOLLOWED
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.v1.metrics.reader import read_metrics
from tests.engine_runs import add_request, greedy, shared_engine, with_scheduler
from tests.goldens_loader import load_golden

GOLDEN = load_golden("llama_gqa")


def follow_run() -> tuple[StatsTaker, list[StepNews]]:
    """The news of a short run; the first have both prompts in the engine."""
    engine = with_scheduler(shared_engine())
    taker, news = StatsTaker(engine), []
    for number, case in enumerate(GOLDEN.mixed[:2]):
        add_request(engine, str(number), case.prompt, greedy(6))
    while engine.has_unfinished:
        updates = engine.step()
        taker.take_in(updates)
        news.append(StepNews(updates, taker.stats()))
    return taker, news


def test_the_state_follows_the_steps():
    taker, news = follow_run()
    first, last = news[0].stats, news[-1].stats
    assert first.num_running == 2 and last.num_running == last.num_waiting == 0
    assert last.num_generation_tokens == 12
    num_prompt = sum(len(case.prompt) for case in GOLDEN.mixed[:2])
    assert num_prompt < last.num_tokens <= last.num_padded_tokens
    assert last.num_compilations == 0
    assert min(last.schedule_seconds, last.build_seconds, last.dispatch_seconds) > 0
    assert min(last.collect_seconds, last.commit_seconds) > 0


def test_a_compilation_while_the_engine_is_ready_is_seen():
    taker = StatsTaker(with_scheduler(shared_engine()))
    jax.jit(lambda x: x * 3 + 7)(jnp.arange(11)).block_until_ready()
    assert taker.stats().num_compilations > 0


def test_prefix_counts_are_those_of_the_scheduler(monkeypatch):
    monkeypatch.setattr(Scheduler, "num_prefix_queries", 48)
    monkeypatch.setattr(Scheduler, "num_prefix_hits", 32)
    stats = StatsTaker(with_scheduler(shared_engine())).stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (48, 32)


def watched(stats: EngineStats) -> Any:
    return types.SimpleNamespace(
        config=EngineConfig(served_model_name=("tiny",)),
        state=EngineState.READY,
        info=None,
        stats=stats,
        seconds_since_news=0.0,
    )


def test_both_doors_show_the_same_of_an_engine():
    _, news = follow_run()
    stats = news[-1].stats
    here, there = EngineMetrics(watched(stats)), EngineMetrics(watched(stats))
    for step in news:
        here.stepped(step.stats)
        frame = decode_from_engine(encode_frame(step)[HEADER_BYTES:])
        assert isinstance(frame, StepNews)
        there.stepped(frame.stats)
    shown = {metric.name: metric for metric in read_metrics(here.collect())}
    assert read_metrics(here.collect()) == read_metrics(there.collect())
    assert shown["vllm:generation_tokens"] == read_counter(there, "vllm:generation_tokens", 12)


def read_counter(metrics: EngineMetrics, name: str, value: int) -> Any:
    (metric,) = [metric for metric in read_metrics(metrics.collect()) if metric.name == name]
    assert getattr(metric, "value", None) == value
    return metric


def test_each_followed_total_is_a_field_of_the_state():
    assert set(FOLLOWED) <= set(EngineStats.__struct_fields__)
