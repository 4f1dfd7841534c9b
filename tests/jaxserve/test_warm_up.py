from unittest import mock

import jax
import numpy as np

from jaxserve.execution.warm_up import warm_up
from tests.engine_runs import generate, greedy, shared_engine, with_scheduler

PROMPTS = [tuple(range(3, 40)), tuple(range(50, 60))]


def test_every_step_program_runs_and_neither_state_nor_cache_changes():
    built = shared_engine()
    engine = with_scheduler(built)
    before = generate(engine, PROMPTS, greedy(8))
    runner, builder = engine.runner, engine._builder
    programs = runner._programs
    arrays = jax.device_get((runner.cache, runner._state))
    taken = []
    with mock.patch.object(programs, "_programs", _Watched(programs._programs, taken)):
        warm_up(runner, builder, builder._buckets)
    is_step = {"decode", "forward", "sample", "admit", "copy_pages"}
    assert set(taken) == {key for key in programs.keys() if key[0] in is_step}
    after = jax.device_get((runner.cache, runner._state))
    for old, new in zip(*(jax.tree.leaves(tree) for tree in (arrays[1], after[1])), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(*(jax.tree.leaves(tree) for tree in (arrays[0], after[0])), strict=True):
        np.testing.assert_array_equal(old[:, 1:], new[:, 1:])  # but for the null page
    assert generate(with_scheduler(built), PROMPTS, greedy(8)) == before


class _Watched(dict):
    """Notes the keys that are asked for."""

    def __init__(self, programs, taken):
        super().__init__(programs)
        self._taken = taken

    def __getitem__(self, key):
        self._taken.append(key)
        return super().__getitem__(key)
