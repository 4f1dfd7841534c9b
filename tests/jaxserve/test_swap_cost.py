"""Evicted pages go to the host where that is cheaper, or where it is asked for."""

import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.execution import swap_cost
from jaxserve.execution.swap_cost import PageCosts, seconds_to_compute
from tests.engine_runs import generate, greedy, make_engine
from tests.goldens_loader import GOLDENS_FOLDER


@pytest.mark.parametrize(
    ("mode", "fetch", "compute", "pays"),
    [
        ("auto", 1.0, 2.0, True),
        ("auto", 2.0, 1.0, False),
        ("swap", 2.0, 1.0, True),
        ("recompute", 1.0, 2.0, False),
    ],
)
def test_the_cheaper_way_is_taken_unless_one_is_asked_for(mode, fetch, compute, pays):
    assert PageCosts(fetch, compute).pays(mode) is pays


def test_a_page_costs_two_flops_a_weight_and_token(monkeypatch):
    asked = []
    monkeypatch.setattr(
        swap_cost, "measure_product_rate", lambda width, dtype: asked.append(width) or 1e9
    )
    leaves = [jnp.zeros((1000, 8)), jnp.zeros((3, 8, 32)), jnp.zeros((8, 16)), jnp.zeros(8)]
    seconds = seconds_to_compute(16, leaves, vocab_size=1000)
    assert seconds == pytest.approx(2 * (3 * 8 * 32 + 8 * 16) * 16 / 1e9)
    assert asked == [16]


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_the_engine_drops_pages_that_are_cheaper_to_compute(mode, monkeypatch):
    monkeypatch.setattr("jaxserve.engine_builder.seconds_to_compute", lambda *arguments: 1e-9)
    engine = make_engine(
        GOLDENS_FOLDER / "llama_gqa",
        kv_offloading_size=1 / 64,
        preemption_mode=mode,
        num_gpu_blocks_override=18,  # the programs of test_prefix_snapshots.py
    ).engine
    for first in range(3, 9):  # each prompt evicts the one before
        generate(engine, [tuple(range(first, first + 100))], greedy(2))
    mover = engine.runner.page_mover
    assert mover is not None and (mover.num_offloaded_bytes > 0) is (mode == "swap")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"preemption_mode": "swap"}, "must be given with preemption_mode='swap'"),
        (
            {"preemption_mode": "recompute", "kv_offloading_size": 1},
            "must be 0 with preemption_mode='recompute'",
        ),
        (
            {"enable_prefix_caching": False, "kv_offloading_size": 1},
            "must be 0 without enable_prefix_caching",
        ),
        ({"preemption_mode": "sometimes"}, "preemption_mode must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, rule):
    with pytest.raises(EngineConfigError, match=rule):
        EngineConfig(model="m", **settings)
