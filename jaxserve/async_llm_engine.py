"""AsyncLLMEngine: the asynchronous door; the engine is a process of its own."""

import asyncio
import contextlib
import dataclasses
import enum
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self

from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import (
    AbortRequest,
    AddRequest,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    RequestRefused,
    StartProgressed,
    StartRefused,
    StepNews,
)
from jaxserve.distributed.socket_client import SocketClient
from jaxserve.errors import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    RequestTooLongError,
)
from jaxserve.front_end import FrontEnd
from jaxserve.model_files import localize
from jaxserve.outputs import RequestOutput
from jaxserve.prompts import Message, Prompt
from jaxserve.request import Request
from jaxserve.request_loop import Submission
from jaxserve.request_maker import Params, RequestMaker
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_TEXT_THREADS = 4
"""Threads that render and tokenize; the event loop does neither."""
WATCHDOG_SECONDS = 30.0
"""An engine with work that brings nothing for so long counts as stalled."""


class EngineState(enum.StrEnum):
    """Where an engine stands."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineObserver(Protocol):
    """Hears what happens in an engine, for metrics. What it raises is logged, and no more."""

    def added(self, request: Request) -> None:
        """A request was sent to the engine."""
        ...

    def stepped(self, stats: EngineStats) -> None:
        """A step is done."""
        ...

    def gave(self, request: Request, output: RequestOutput) -> None:
        """A request has an output; the last one is `finished`."""
        ...

    def aborted(self, request: Request) -> None:
        """A request's client has gone before its end."""
        ...


class AsyncLLMEngine:
    """A model in another process: requests in, streams of outputs back.

    Everything runs on one event loop, but text is made of prompts in threads.

    Attributes:
      config: as given.
      front_end: the text side.
      model_config: the model's numbers.
      state: where the engine stands.
      progress: stage, done and total of a start.
      info: what is known of the engine since it is ready, else None.
      stats: after its newest step.
      observers: hear of what happens.
      is_refused: whether the engine has refused its model or settings.
    """

    def __init__(self, config: EngineConfig, *, front_end: FrontEnd | None = None):
        """Read what is small; `start` starts the process.

        Raises:
          ModelLoadError: a file is missing or refused.
          EngineConfigError: a setting does not fit.
        """
        self.config = config
        self.front_end = front_end or FrontEnd.open(config)
        self.model_config = self.front_end.model_config
        self.state, self.progress = EngineState.NEW, ("load", 0, 1)
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.observers: list[EngineObserver] = []
        self.is_refused = False
        self._processor = self.front_end.output_processor()
        self._inboxes: dict[str, _Inbox] = {}
        self._text_threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")
        self._started = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._last_news_seconds = time.monotonic()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """An engine under vLLM's name of the constructor."""
        return cls(engine_args)

    async def start(self) -> None:
        """Start the engine process and return; `wait_until_ready` waits for it."""
        self.state = EngineState.STARTING
        self._client = await SocketClient.start(localize(self.config, self.front_end.opened))
        self._receiving = asyncio.create_task(self._receive_all(), name="engine news")

    async def wait_until_ready(self) -> EngineInfo:
        """Wait for the engine to take requests.

        Raises:
          EngineDeadError: it has refused its model or settings, or has ended.
        """
        await self._started.wait()
        if self.info is None or self._error is not None:
            raise self._error or EngineDeadError("the engine process has ended")
        return self.info

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose clients wait."""
        return len(self._inboxes)

    @property
    def error(self) -> EngineDeadError | None:
        """What ended the engine."""
        return self._error

    @property
    def seconds_since_news(self) -> float:
        """Age of the engine's newest message; 0 while it has nothing to do."""
        return time.monotonic() - self._last_news_seconds if self._inboxes else 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has work and has been silent for too long."""
        return self.state is EngineState.READY and self.seconds_since_news > WATCHDOG_SECONDS

    @property
    def process_id(self) -> int:
        """Of the engine process."""
        return self._client.process_id

    async def prepare_prompts(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        request_id: str | None = None,
        is_stream: bool = True,
    ) -> list[Submission]:
        """Tokenize and check prompts, in a thread; nothing runs yet.

        Args:
          prompts: as those of `LLM.generate`.
          sampling_params: one for all, or one a prompt; the model's defaults if not given.
          request_id: of one prompt; several get it with their index behind it.
          is_stream: outputs hold what is new; otherwise one comes at the end.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        prepare = self._maker().of_prompts
        return await self._prepare(prepare, prompts, sampling_params, _kind(is_stream), request_id)

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        is_stream: bool = True,
        **options: Any,
    ) -> Submission:
        """Render, tokenize and check one conversation; `options` are those of `encode_chat`.

        Raises:
          InvalidRequestError: a message or parameter breaks a rule, or there is no template.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        prepare = functools.partial(self._maker().of_chats, **options)
        kind = _kind(is_stream)
        return (await self._prepare(prepare, messages, sampling_params, kind, request_id))[0]

    async def in_text_thread[T](self, work: Callable[[], T]) -> T:
        """Run text work without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    async def stream(self, submission: Submission) -> AsyncGenerator[RequestOutput]:
        """The outputs of a prepared request; leaving early ends it in the engine.

        Outputs that come faster than they are taken are joined.

        Raises:
          EngineDeadError: the engine has ended.
        """
        request, text = submission
        self._check_alive()
        inbox = _Inbox(request)
        self._processor.add(request, text)
        self._inboxes[request.request_id] = inbox
        if len(self._inboxes) == 1:
            self._last_news_seconds = time.monotonic()
        self._client.send(AddRequest.of(request))
        self._tell("added", request)
        try:
            is_finished = False
            while not is_finished:
                output = await inbox.take()
                is_finished = output.finished
                yield output
        finally:
            self._leave(request.request_id)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Continue one prompt, under vLLM's name and in the form that `output_kind` asks for.

        Raises:
          InvalidRequestError: the prompt or a parameter breaks a rule.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        kind = RequestOutputKind.CUMULATIVE
        if isinstance(sampling_params, SamplingParams):
            kind = sampling_params.output_kind
        prepare = self._maker().of_prompts
        submissions = await self._prepare(prepare, prompt, sampling_params, kind, request_id)
        if len(submissions) != 1:
            rule = "must be one, since its outputs are streamed"
            raise InvalidRequestError.for_field("prompt", rule, len(submissions))
        async with contextlib.aclosing(self.stream(submissions[0])) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with an output whose finish reason is "abort"."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None:
            self._client.send(AbortRequest(request_id))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          InvalidRequestError: the engine was made with `skip_tokenizer_init`.
        """
        if self.front_end.tokenizer is None:
            raise InvalidRequestError("get_tokenizer must have a tokenizer; it was not loaded")
        return self.front_end.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self.front_end.default_params.clone()

    async def close(self) -> None:
        """End the engine process; unfinished requests end with EngineDeadError."""
        if self.state is not EngineState.NEW:
            was_ready = self.state is EngineState.READY
            self._die(EngineDeadError("the engine was closed"))
            self._receiving.cancel()
            await self._client.close(at_once=not was_ready)
        self._text_threads.shutdown(wait=False, cancel_futures=True)

    def kill(self) -> None:
        """End the engine process at once."""
        if self.state in (EngineState.STARTING, EngineState.READY):
            self._client.kill()

    def _maker(self) -> RequestMaker:
        self._check_alive()
        return self._request_maker

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self.state is not EngineState.READY:
            raise EngineNotReadyError("the engine must be ready; it is still starting")

    async def _prepare(
        self,
        prepare: Callable[[Any, Any, RequestOutputKind], list[Submission]],
        prompts: Any,
        params: Any,
        kind: RequestOutputKind,
        request_id: str | None,
    ) -> list[Submission]:
        max_tokens = self._max_tokens_per_sequence

        def work() -> list[Submission]:
            submissions = prepare(prompts, params, kind)
            for request, _ in submissions:
                check_pool_length(request, max_tokens)
            return _named(submissions, request_id)

        return await self.in_text_thread(work)

    async def _receive_all(self) -> None:
        try:
            while True:
                self._take(await self._client.receive())
        except EngineDeadError as error:
            self._die(self._error or error)

    def _take(self, message: FromEngine) -> None:
        self._last_news_seconds = time.monotonic()
        match message:
            case StepNews():
                self._take_step(message)
            case StartProgressed():
                self.progress = (message.stage, message.done, message.total)
            case EngineReady():
                self._become_ready(message.info)
            case StartRefused():
                self._error, self.is_refused = EngineDeadError(message.message), True
            case RequestRefused():
                self._refuse(message)

    def _become_ready(self, info: EngineInfo) -> None:
        self.info, self.state = info, EngineState.READY
        self._max_tokens_per_sequence = info.max_tokens_per_sequence
        self._request_maker = self.front_end.request_maker(info.max_model_len)
        logger.info("%s, ready after %.1f s", info.memory_bill, sum(info.seconds.values()))
        self._started.set()

    def _take_step(self, news: StepNews) -> None:
        self.stats = news.stats
        step = self._processor.process(news.updates)
        for stop in step.aborts:
            self._client.send(stop)
        for output in step.outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                self._tell("gave", inbox.request, output)
                inbox.put(output)
        self._tell("stepped", news.stats)

    def _refuse(self, message: RequestRefused) -> None:
        """The door's checks should have refused it; so a client never waits for what is not run."""
        self._processor.drop(message.request_id)
        inbox = self._inboxes.get(message.request_id)
        if inbox is not None:
            inbox.fail(InvalidRequestError(message.message))

    def _leave(self, request_id: str) -> None:
        """A stream has ended, at its end or before."""
        inbox = self._inboxes.pop(request_id)
        if self._processor.drop(request_id) and self._error is None:
            self._client.send(AbortRequest(request_id))
            self._tell("aborted", inbox.request)

    def _die(self, error: EngineDeadError) -> None:
        """Tell all who wait."""
        if self.state is EngineState.DEAD:
            return
        self.state, self._error = EngineState.DEAD, error
        for inbox in self._inboxes.values():
            inbox.fail(error)
        self._started.set()

    def _tell(self, event: str, *arguments: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(*arguments)
            except Exception:
                logger.exception("an observer failed in %s", event)


class _Inbox:
    """The outputs of one request that nobody has taken yet, joined into one."""

    def __init__(self, request: Request):
        self.request = request
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        if self._output is None:
            self._output = output
        else:
            is_delta = self.request.sampling_params.output_kind is RequestOutputKind.DELTA
            self._output.add(output, aggregate=is_delta)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Raise an error where outputs are taken; outputs before it are still given."""
        self._error = error
        self._has_news.set()

    async def take(self) -> RequestOutput:
        """All outputs since the last call; waits for one."""
        await self._has_news.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_news.clear()
        return output


def check_pool_length(request: Request, max_tokens_per_sequence: int) -> None:
    """Refuse at the door what the engine would: a request that can never fit its pages."""
    num_prompt, num_output = len(request.prompt_token_ids), request.sampling_params.max_tokens or 1
    if num_prompt + num_output > max_tokens_per_sequence:
        raise RequestTooLongError(
            f"prompt and max_tokens must fit the KV cache of {max_tokens_per_sequence} tokens; got "
            f"{num_prompt} + {num_output}; lower max_tokens or shorten the prompt",
            parameter="max_tokens",
            value=num_output,
        )


def _kind(is_stream: bool) -> RequestOutputKind:
    return RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY


def _named(submissions: list[Submission], request_id: str | None) -> list[Submission]:
    if request_id is None:
        return submissions
    if len(submissions) == 1:
        names = [request_id]
    else:
        names = [f"{request_id}-{index}" for index in range(len(submissions))]
    return [
        (dataclasses.replace(request, request_id=name), text)
        for (request, text), name in zip(submissions, names, strict=True)
    ]
