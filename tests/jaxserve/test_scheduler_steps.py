"""How many decode steps one dispatch runs where nobody says it."""

from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.processing.model_files import open_configured_model

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def choose(shape: str, *, is_gpu: bool = True, is_offline: bool = False, **settings) -> ModelSetup:
    config = EngineConfig(model=str(SHAPES / shape), load_format="dummy", **settings)
    model = open_configured_model(config).model_config()
    return ModelSetup.choose(config, model, is_offline=is_offline, for_absent_gpu=is_gpu)


@pytest.mark.parametrize(("shape", "steps"), [("qwen3-0.6b", 5), ("llama-3-8b", 1)])
def test_a_server_starts_so_many_as_take_4_ms(shape: str, steps: int) -> None:
    setup = choose(shape)
    assert (setup.num_scheduler_steps, setup.multi_step_rows) == (steps, 8)


def test_devices_that_share_a_model_take_less_time_for_a_step() -> None:
    assert choose("llama-3-8b", tensor_parallel_size=4).num_scheduler_steps == 2


def test_offline_they_are_many_and_a_cpu_needs_none() -> None:
    setup = choose("llama-3-8b", is_offline=True)
    assert (setup.num_scheduler_steps, setup.multi_step_rows) == (8, 64)
    assert choose("qwen3-0.6b", is_gpu=False, is_offline=True).num_scheduler_steps == 1


def test_what_is_asked_for_is_taken() -> None:
    assert choose("llama-3-8b", num_scheduler_steps=3).num_scheduler_steps == 3
    assert choose("llama-3-8b", is_gpu=False, num_scheduler_steps=16).num_scheduler_steps == 16


def test_prompts_come_first_where_only_the_whole_time_counts() -> None:
    assert choose("llama-3-8b", is_offline=True).prefill_first
    assert not choose("llama-3-8b").prefill_first
    assert not choose("llama-3-8b", is_offline=True, scheduling_policy="slo").prefill_first
    assert not choose("llama-3-8b", is_offline=True, prefill_first=False).prefill_first
    assert choose("llama-3-8b", prefill_first=True).prefill_first
