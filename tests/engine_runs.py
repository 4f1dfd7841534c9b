"""Small engines for tests, and the loop that drives them."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine, build_engine
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SequenceUpdate
from tests.goldens_loader import GOLDENS_FOLDER


def make_engine(folder: Path, **settings: Any) -> BuiltEngine:
    """An engine with one decode bucket and one mixed bucket unless told otherwise."""
    defaults: dict[str, Any] = {
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "row_buckets": (8,),
        "token_buckets": (64,),
        "max_model_len": 256,
    }
    return build_engine(EngineConfig(model=str(folder), **(defaults | settings)))


@functools.cache
def shared_engine() -> BuiltEngine:
    """The engine of llama_gqa, compiled once a process, for tests that leave it idle."""
    return make_engine(GOLDENS_FOLDER / "llama_gqa")


def with_scheduler(
    built: BuiltEngine, *, num_pages: int = 257, seed: int = 0, **limits: Any
) -> Engine:
    """A new engine over the programs and arrays of an idle one, with other limits.

    Args:
      built: where programs and arrays come from; nothing is compiled.
      num_pages: of the pool, the null page included; at most the cache's.
      seed: of requests without a seed.
      limits: fields of SchedulerConfig that differ.
    """
    old = built.engine
    assert not old.has_unfinished
    config = dataclasses.replace(old.scheduler._config, **limits)
    scheduler = Scheduler(config, (PagePool(num_pages, 16),))
    in_flight = config.max_steps_in_flight
    return Engine(scheduler, old._builder, old.runner, max_steps_in_flight=in_flight, seed=seed)


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
