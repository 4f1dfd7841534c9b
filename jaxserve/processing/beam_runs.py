"""Makes beam searches of prompts, and runs them in the caller's thread or on an event loop."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from jaxserve.field_checks import check_instance, check_int
from jaxserve.outputs import RequestOutput
from jaxserve.processing.beam_requests import PromptSearch
from jaxserve.processing.beam_search import check_beam_width
from jaxserve.processing.prompts import Prompt
from jaxserve.processing.request_loop import RequestLoop, Submission
from jaxserve.processing.request_maker import RequestMaker
from jaxserve.processing.request_preparer import check_pool_length
from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


def make_searches(
    maker: RequestMaker,
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    *,
    max_logprobs: int,
    max_tokens_per_sequence: int,
) -> list[PromptSearch]:
    """The searches of one prompt or many.

    Args:
      maker: parses, tokenizes and checks the prompts.
      prompts: as those of `LLM.generate`.
      params: of all searches; not changed.
      max_logprobs: log-probabilities that the engine gives of a token.
      max_tokens_per_sequence: prompt and output tokens for which it has pages.

    Raises:
      InvalidRequestError: a prompt or parameter breaks a rule.
    """
    check_instance("params", params, BeamSearchParams)
    params = msgspec.structs.replace(params)  # checks the fields again, which may have been set
    check_beam_width("beam_width", params.beam_width, max_logprobs)
    # Tells length and number of the beams to the checks; it is not what is sent.
    asked = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens)
    submissions = maker.of_prompts(prompts, asked, RequestOutputKind.FINAL_ONLY)
    for request, _ in submissions:
        check_pool_length(request, max_tokens_per_sequence)
    return [
        PromptSearch(submission, params, max_logprobs=max_logprobs) for submission in submissions
    ]


def run_searches(
    searches: Sequence[PromptSearch],
    loop: RequestLoop,
    concurrency_limit: int | None,
    show: Callable[[int], None],
) -> None:
    """Run searches to their ends, the steps of several at the same time.

    Args:
      searches: begun in this order.
      loop: runs the requests of their steps.
      concurrency_limit: so many at the same time; None = all.
      show: called after each step with the number of searches that it ended.

    Raises:
      InvalidRequestError: the limit breaks its rule.
    """
    limit = len(searches)
    if concurrency_limit is not None:
        limit = check_int("concurrency_limit", concurrency_limit, 1)
    waiting, running = iter(searches), list[PromptSearch]()
    while running := [*running, *itertools.islice(waiting, limit - len(running))]:
        steps = [search.next_step() for search in running]
        outputs = iter(loop.run(list(itertools.chain.from_iterable(steps)), lambda _: None))
        for search, step in zip(running, steps, strict=True):
            search.take(list(itertools.islice(outputs, len(step))))
        num_running = len(running)
        running = [search for search in running if not search.is_done]
        show(num_running - len(running))


async def run_search(
    search: PromptSearch, stream: Callable[[Submission], AsyncGenerator[RequestOutput]]
) -> None:
    """Run one search to its end; leaving early ends its requests.

    Args:
      search: not begun.
      stream: gives the outputs of a request.

    Raises:
      Exception: what a stream raises.
    """
    while not search.is_done:
        tasks = [asyncio.create_task(_last_output(stream(step))) for step in search.next_step()]
        try:
            search.take(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _last_output(stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
    last: RequestOutput | None = None
    async with contextlib.aclosing(stream):
        async for output in stream:
            last = output
    assert last is not None
    return last
