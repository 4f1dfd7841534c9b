"""RequestPreparer: makes requests of prompts in threads, since the event loop must not wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from jaxserve.errors import EngineDeadError, RequestTooLongError
from jaxserve.processing.request_loop import Submission
from jaxserve.request import Request

NUM_TEXT_THREADS = 4
"""Threads that render and tokenize; the event loop does neither."""


class RequestPreparer:
    """The threads in which text becomes requests; used from one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")
        self._is_closed = False

    async def run[T](self, work: Callable[[], T]) -> T:
        """Run text work without holding up the event loop.

        Raises:
          EngineDeadError: the threads were closed.
          Exception: what the work raises.
        """
        if self._is_closed:
            raise EngineDeadError("the engine was closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def prepare(
        self,
        make: Callable[[], list[Submission]],
        *,
        max_tokens_per_sequence: int,
        request_id: str | None,
    ) -> list[Submission]:
        """Make requests, check that they fit the pages, and name them.

        Args:
          make: a call of RequestMaker.
          max_tokens_per_sequence: of the engine.
          request_id: of one request; several get it with their index behind it.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule.
          EngineDeadError: the threads were closed.
        """

        def work() -> list[Submission]:
            submissions = make()
            for request, _ in submissions:
                check_pool_length(request, max_tokens_per_sequence)
            return _named(submissions, request_id)

        return await self.run(work)

    def close(self) -> None:
        """Take no more work; what was begun goes on to its end, which nobody waits for."""
        self._is_closed = True
        self._threads.shutdown(wait=False)


def check_pool_length(request: Request, max_tokens_per_sequence: int) -> None:
    """Refuse at the door what the engine would: a request that can never fit its pages.

    Raises:
      RequestTooLongError: prompt and `max_tokens` need more tokens.
    """
    num_prompt, num_output = len(request.prompt_token_ids), request.sampling_params.max_tokens or 1
    if num_prompt + num_output > max_tokens_per_sequence:
        raise RequestTooLongError(
            f"prompt and max_tokens must fit the KV cache of {max_tokens_per_sequence} tokens; got "
            f"{num_prompt} + {num_output}; lower max_tokens or shorten the prompt",
            parameter="max_tokens",
            value=num_output,
        )


def _named(submissions: list[Submission], request_id: str | None) -> list[Submission]:
    if request_id is None:
        return submissions
    if len(submissions) == 1:
        names = [request_id]
    else:
        names = [f"{request_id}-{index}" for index in range(len(submissions))]
    return [
        (msgspec.structs.replace(request, request_id=name), text)
        for (request, text), name in zip(submissions, names, strict=True)
    ]
