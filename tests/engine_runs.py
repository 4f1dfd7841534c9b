"""Small engines for tests, and the loop that drives them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine, build_engine
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.programs import ProgramKey, ProgramTable
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SequenceUpdate
from tests.goldens_loader import GOLDENS_FOLDER, load_golden


class ProgramsAtFirstUse(dict[ProgramKey, Compiled]):
    """Compiles a planned program when a step first asks for it; any other key is an error.

    Most tests use half of an engine's programs. That a start compiles all of them, and that nothing
    is compiled later, is what tests of LLM and of the engine process show.
    """

    def __init__(self, table: ProgramTable):
        """Of one table, which holds these programs from then on."""
        super().__init__()
        self._table = table

    def __missing__(self, key: ProgramKey) -> Compiled:
        if key not in self._table.keys():
            raise KeyError(key)
        self[key] = self._table._compile(key, self._table._lower(key), None)[1]
        return self[key]


def _compile_nothing_yet(table: ProgramTable, **_: object) -> None:
    table._programs = ProgramsAtFirstUse(table)


def make_engine(folder: Path, *, compile_all: bool = False, **settings: Any) -> BuiltEngine:
    """An engine with one decode bucket and one mixed bucket unless told otherwise.

    Args:
      folder: of the model.
      compile_all: compile every program now, as a real start does.
      settings: fields of EngineConfig that differ.
    """
    defaults: dict[str, Any] = {
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "row_buckets": (8,),
        "token_buckets": (64,),
        "max_model_len": 256,
        "dtype": "float32",
    }
    config = EngineConfig(model=str(folder), **(defaults | settings))
    if compile_all:
        return build_engine(config)
    with mock.patch.object(ProgramTable, "compile_all", _compile_nothing_yet):
        return build_engine(config)


@functools.cache
def shared_engine() -> BuiltEngine:
    """The engine of llama_gqa, compiled once a process, for tests that leave it idle."""
    return make_engine(GOLDENS_FOLDER / "llama_gqa", compile_all=True)


def with_scheduler(
    built: BuiltEngine, *, num_pages: int | tuple[int, ...] = 257, seed: int = 0, **limits: Any
) -> Engine:
    """A new engine over the programs and arrays of an idle one, with other limits.

    Args:
      built: where programs and arrays come from; nothing is compiled.
      num_pages: of each pool, or of every one, the null page included; at most the cache's.
      seed: of requests without a seed.
      limits: fields of SchedulerConfig that differ.
    """
    old = built.engine
    assert not old.has_unfinished
    config = dataclasses.replace(old.scheduler._config, **limits)
    old_pools = old.scheduler._roster.page_pools
    counts = (num_pages,) * len(old_pools) if isinstance(num_pages, int) else num_pages
    pools = tuple(
        PagePool(count, 16, sliding_window=pool.sliding_window, num_host_pages=pool.host.num_slots)
        for count, pool in zip(counts, old_pools, strict=True)
    )
    scheduler = Scheduler(config, pools)
    in_flight = config.max_steps_in_flight
    return Engine(scheduler, old._builder, old.runner, max_steps_in_flight=in_flight, seed=seed)


def with_empty_cache(engine: Engine, leaves: Sequence[jax.Array] | None = None) -> Engine:
    """The engine with a cache and a state of its own, both zeros, and perhaps other weights."""
    old = engine.runner
    cache, state = jax.tree.map(jnp.zeros_like, (old._cache, old._state))
    index = next(i for i, leaf in enumerate(old._leaves) if leaf is old._head)
    weights = old._leaves if leaves is None else leaves
    engine.runner = ModelRunner(
        weights, cache, state, old._programs, head_index=index, page_mover=old.page_mover
    )
    return engine


def greedy(max_tokens: int = 64, **settings: Any) -> SamplingParams:
    """Greedy parameters that ignore the end of sequence, as the goldens do."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def add_request(
    engine: Engine, request_id: str, prompt: Sequence[int], params: SamplingParams, **fields: Any
) -> None:
    """Queue one request."""
    request = Request(
        request_id=request_id,
        prompt_token_ids=tuple(map(int, prompt)),
        sampling_params=params,
        **fields,
    )
    engine.add(request)


def drain(engine: Engine) -> dict[tuple[str, int], list[SequenceUpdate]]:
    """Step until nothing is left; the updates of each sequence."""
    updates: dict[tuple[str, int], list[SequenceUpdate]] = {}
    while engine.has_unfinished:
        for update in engine.step():
            updates.setdefault((update.request_id, update.index), []).append(update)
        engine.scheduler.check_invariants()
    return updates


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]
) -> list[tuple[int, ...]]:
    """Output tokens of each prompt, all run together."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for index, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        add_request(engine, str(index), prompt, p)
    updates = drain(engine)
    return [tokens_of(updates[str(index), 0]) for index in range(len(prompts))]


def tokens_of(updates: Sequence[SequenceUpdate]) -> tuple[int, ...]:
    """All output tokens of one sequence's updates."""
    return tuple(token for update in updates for token in update.new_token_ids)


def sampled(seed: int | None = 5, **fields: Any) -> SamplingParams:
    """Seeded parameters that ignore the end of sequence."""
    defaults = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": seed}
    return SamplingParams(**(defaults | fields))


def final_of(updates: list[SequenceUpdate]) -> SequenceUpdate:
    """The last update, which alone has a finish reason."""
    finals = [update for update in updates if update.finish_reason is not None]
    assert finals == updates[-1:]
    return finals[0]


def step_until(engine: Engine, condition: Callable[[], bool]) -> list[SequenceUpdate]:
    """Step until the engine is in a state; the updates on the way."""
    updates: list[SequenceUpdate] = []
    for _ in range(400):
        if condition():
            return updates
        updates += engine.step()
        engine.scheduler.check_invariants()
    raise AssertionError("the state was never reached")


def assert_idle_and_sane(engine: Engine) -> None:
    """Nothing is held any more, and the next requests get the golden tokens of llama_gqa."""
    golden = load_golden("llama_gqa")
    engine.scheduler.check_invariants()
    assert not engine.has_unfinished and engine.scheduler.kv_cache_usage == 0
    roster = engine.scheduler._roster
    assert all(pool.num_free == pool.num_usable for pool in roster.page_pools)
    assert roster.slot_pool.num_free == roster.slot_pool.max_num_seqs
    outputs = generate(engine, [case.prompt for case in golden.mixed[:7]], greedy())
    assert outputs == [case.tokens for case in golden.mixed[:7]]
