"""Small engines for tests, and the loop that drives them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine_builder import BuiltEngine, build_engine
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import SequenceUpdate


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
    return [
        tuple(token for u in updates[str(index), 0] for token in u.new_token_ids)
        for index in range(len(prompts))
    ]
