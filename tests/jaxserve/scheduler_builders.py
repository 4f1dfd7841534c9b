"""Small schedulers and sequences, what they should give, and steps committed by hand."""

import time
from collections.abc import Callable

import numpy as np

from jaxserve.request import FinishReason, Request, Sequence
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import FIRST_COME_FIRST_SERVED, Policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SchedulerOutput, StepResult

EOS = 0
STOP_ID = 1
TOKEN = 7
VOCABULARY = 24


def token_at(seed: int, position: int) -> int:
    """The token that the sequence of that seed has at that position, prompt included."""
    mixed = (seed * 2654435761 + position * 40503 + 12345) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) % VOCABULARY


def make_sequence(
    name: str = "r",
    num_prompt_tokens: int = 4,
    max_tokens: int = 8,
    *,
    seed: int = 0,
    shared: tuple[int, int] = (0, 0),
    beginning: tuple[int, ...] = (),
    cache_salt: str | None = None,
    arrival: float = 0.0,
    timeout: float | None = None,
    priority: int = 0,
    **params,
) -> Sequence:
    """A sequence that runs to its length end unless `ignore_eos=False` is given.

    `shared` is another seed and how many leading tokens of the prompt are that seed's; `beginning`
    are leading tokens as they are.
    """
    index = params.pop("index", 0)
    prompt = beginning[:num_prompt_tokens] + tuple(
        token_at(shared[0] if position < shared[1] else seed, position)
        for position in range(len(beginning), num_prompt_tokens)
    )
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=max_tokens, **{"ignore_eos": True, "temperature": 1.0, **params}
        ),
        eos_token_ids=(EOS,),
        cache_salt=cache_salt,
        arrival_seconds=arrival,
        timeout_seconds=timeout,
        priority=priority,
    )
    return Sequence(request=request, index=index, seed=seed, token_ids=list(prompt))


def make_scheduler(
    num_pages: int = 101,
    page_size: int = 4,
    *,
    pools: tuple[PagePool, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    policy: Policy = FIRST_COME_FIRST_SERVED,
    **limits,
) -> Scheduler:
    """A small scheduler with one group, or with the groups of `pools`."""
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "token_buckets": (64,),
        "row_buckets": (4, 8, 16, 32, 64),
        **limits,
    }
    pools = pools or (PagePool(num_pages, page_size),)
    return Scheduler(SchedulerConfig(**config), pools, clock, policy)


def expected_output(sequence: Sequence, max_model_len: int = 256) -> tuple[list[int], FinishReason]:
    """What an engine with endless memory gives, computed without scheduler or device."""
    params, output = sequence.request.sampling_params, []
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    assert params.max_tokens is not None
    room = min(params.max_tokens, max_model_len - sequence.num_prompt_tokens)
    while len(output) < room:
        output.append(token_at(sequence.seed, sequence.num_prompt_tokens + len(output)))
        if output[-1] in stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check_invariants()
    assert output is not None
    return output


def commit(scheduler: Scheduler, output: SchedulerOutput, *tokens: list[int], **result):
    """Commit a step whose rows sampled these tokens."""
    width = max(1, *map(len, tokens), 1)
    padded = [[*row, *[-1] * (width - len(row))] for row in tokens]
    fields = {
        "tokens": np.array(padded, np.int32),
        "num_new": np.array([len(row) for row in tokens], np.int32),
        "is_finite": np.ones(len(tokens), bool),
        **result,
    }
    updates = scheduler.commit(output, StepResult(**fields))
    scheduler.check_invariants()
    return updates


def sizes(output: SchedulerOutput) -> dict[str, int]:
    return {row.sequence.request.request_id: row.num_scheduled_tokens for row in output.rows}
