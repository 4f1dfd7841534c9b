"""AsyncLLMEngine: the asynchronous door; the engine is a process of its own."""

import asyncio
import contextlib
import enum
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self

from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import (
    AbortRequest,
    AddRequest,
    BadFrameError,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    MemoryChanged,
    MemoryCommand,
    PrefixCacheReset,
    ReleaseCache,
    RequestRefused,
    ResetPrefixCache,
    Sleep,
    StartProgressed,
    StartRefused,
    StepNews,
    WakeUp,
)
from jaxserve.distributed.socket_client import SocketClient
from jaxserve.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError
from jaxserve.field_checks import refuse_given
from jaxserve.memory_commands import MemoryCommands
from jaxserve.observers import Observers
from jaxserve.outputs import RequestOutput
from jaxserve.processing.front_end import FrontEnd, require_tokenizer
from jaxserve.processing.model_files import localize
from jaxserve.processing.open_requests import OpenRequests
from jaxserve.processing.prompts import Message, Prompt
from jaxserve.processing.request_loop import Submission
from jaxserve.processing.request_maker import Params, RequestMaker
from jaxserve.processing.request_options import NO_OPTIONS, Priority, RequestOptions
from jaxserve.processing.request_preparer import RequestPreparer
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.sleep_options import check_sleep, check_wake_tags
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineState(enum.StrEnum):
    """Where an engine stands."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


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
        self.observers = Observers()
        self.is_refused = False
        self._requests = OpenRequests(self.front_end.output_processor())
        self._preparer = RequestPreparer()
        self._resets: deque[asyncio.Future[None]] = deque()
        self._memory_commands = MemoryCommands()
        self._client: SocketClient | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._last_news_seconds = time.monotonic()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """An engine under vLLM's name of the constructor."""
        return cls(engine_args)

    async def start(self) -> None:
        """Start the engine process and return; `wait_until_ready` waits for it.

        Raises:
          EngineDeadError: the process could not be started, or the engine was closed.
          RuntimeError: it was started before.
        """
        self._check_not_dead()
        if self.state is not EngineState.NEW:
            raise RuntimeError(f"start must be called once; got an engine that is {self.state}")
        self.state = EngineState.STARTING
        try:
            client = await SocketClient.start(localize(self.config, self.front_end.opened))
        except OSError as error:
            self._die(EngineDeadError(f"the engine process cannot be started: {error}"))
            raise EngineDeadError(str(self._error)) from error
        if self._error is not None:  # closed in the meantime
            await client.close(at_once=True)
        self._check_not_dead()
        self._client = client
        self._receiving = asyncio.create_task(self._receive_all(client), name="engine news")

    async def wait_until_ready(self) -> EngineInfo:
        """Wait for the engine to take requests.

        Raises:
          EngineDeadError: it has refused its model or settings, or has ended.
        """
        await self._started.wait()
        self._check_not_dead()
        assert self.info is not None
        return self.info

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose clients wait."""
        return len(self._requests)

    @property
    def error(self) -> EngineDeadError | None:
        """What ended the engine."""
        return self._error

    @property
    def seconds_since_news(self) -> float:
        """Age of the engine's newest message; 0 while it has nothing to do.

        What a slow client has not taken yet is no work of the engine, nor is what waits for a
        wake-up.
        """
        if self.stats.sleep_level or not self._requests.num_working:
            return 0.0
        return time.monotonic() - self._last_news_seconds

    @property
    def process_id(self) -> int:
        """Of the engine process."""
        return self._running_client.process_id

    async def prepare_prompts(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        request_id: str | None = None,
        is_stream: bool = True,
        request_options: RequestOptions = NO_OPTIONS,
        priority: Priority = None,
    ) -> list[Submission]:
        """Tokenize and check prompts, in a thread; nothing runs yet.

        Args:
          prompts: as those of `LLM.generate`.
          sampling_params: one for all, or one a prompt; the model's defaults if not given.
          request_id: of one prompt; several get it with their index behind it.
          is_stream: outputs hold what is new; otherwise one comes at the end.
          request_options: of all prompts, where a prompt itself says nothing.
          priority: of all, or one a prompt; lower runs earlier. Only 0 is taken unless the engine
            has `scheduling_policy="priority"`.

        Raises:
          InvalidRequestError: a prompt or parameter breaks a rule.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        make = functools.partial(
            self._maker().of_prompts,
            prompts,
            sampling_params,
            request_options=request_options,
            priority=priority,
        )
        return await self._prepare(make, _kind(is_stream), request_id)

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        is_stream: bool = True,
        **options: Any,
    ) -> Submission:
        """Render, tokenize and check one conversation; `options` are those of `of_chats`.

        Raises:
          InvalidRequestError: a message or parameter breaks a rule, or there is no template.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        make = functools.partial(self._maker().of_chats, messages, sampling_params, **options)
        return (await self._prepare(make, _kind(is_stream), request_id))[0]

    async def in_text_thread[T](self, work: Callable[[], T]) -> T:
        """Run text work without holding up the event loop.

        Raises:
          EngineDeadError: the engine was closed.
          Exception: what the work raises.
        """
        return await self._preparer.run(work)

    async def stream(self, submission: Submission) -> AsyncGenerator[RequestOutput]:
        """The outputs of a prepared request; leaving early ends it in the engine.

        Nothing runs before the first output is asked for. Outputs that come faster than they are
        taken are joined.

        Raises:
          InvalidRequestError: the id is in use, or the request is too large for the engine.
          EngineNotReadyError: the engine sleeps.
          EngineDeadError: the engine has ended.
        """
        self._check_awake()
        inbox = self._requests.open(submission)
        try:
            if self._requests.num_working == 1:
                self._last_news_seconds = time.monotonic()
            self._add(inbox.sent)
            self.observers.tell("added", inbox.request)
            is_finished = False
            while not is_finished:
                output = await inbox.take()
                is_finished = output.finished
                yield output
        finally:
            if self._requests.close(inbox) and self._error is None:
                self._running_client.send(AbortRequest(inbox.sent.request_id))
                self.observers.tell("aborted", inbox.request)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
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
        make = functools.partial(
            self._maker().of_prompts, prompt, sampling_params, priority=priority
        )
        submissions = await self._prepare(make, kind, request_id)
        if len(submissions) != 1:
            rule = "must be one, since its outputs are streamed"
            raise InvalidRequestError.for_field("prompt", rule, len(submissions))
        async with contextlib.aclosing(self.stream(submissions[0])) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with an output whose finish reason is "abort"."""
        engine_id = self._requests.engine_id(request_id)
        if engine_id is not None:
            self._running_client.send(AbortRequest(engine_id))

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all computed prefixes; requests that run keep their pages.

        Args:
          reset_running_requests: not supported in this release.
          reset_connector: not supported in this release.

        Returns:
          True: it was reset, and no request that is sent from now on finds what was there.

        Raises:
          InvalidRequestError: an argument asks for more.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        refuse_given(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self._check_alive()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._running_client.send(ResetPrefixCache())
        await done
        self._check_not_dead()
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory; requests are refused from now on until the wake-up.

        Args:
          level: 1 keeps the weights in the host's memory; 2 drops them, and the wake-up reads the
            model's files again.
          mode: what becomes of unfinished requests: "abort" ends them, "wait" waits for their
            ends, "keep" freezes them.

        Raises:
          InvalidRequestError: the level or the mode is none of these.
          EngineNotReadyError: the engine has not started, or the host has no memory for the
            weights; the engine is then awake.
          EngineDeadError: it has ended.
        """
        check_sleep(level, mode)
        await self._change_memory(Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what `sleep` has freed; requests are taken once all of it is back.

        Args:
          tags: what to bring back, of "weights" and "kv_cache"; None is both.

        Raises:
          InvalidRequestError: a tag is none of these.
          EngineNotReadyError: the engine has not started, or the weights or the cache could not be
            brought back; it can be tried again.
          EngineDeadError: it has ended.
        """
        await self._change_memory(WakeUp(check_wake_tags(tags)))

    async def is_sleeping(self) -> bool:
        """Whether requests are refused because of `sleep`."""
        return bool(self.stats.sleep_level) or self._memory_commands.will_sleep

    async def release_kv_cache_memory(self) -> None:
        """Free the memory of the KV cache; the next request or wake-up takes it again.

        Raises:
          InvalidRequestError: a request is unfinished.
          EngineNotReadyError: the engine has not started.
          EngineDeadError: it has ended.
        """
        await self._change_memory(ReleaseCache())

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          InvalidRequestError: the engine was made with `skip_tokenizer_init`.
        """
        return require_tokenizer(self.front_end.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self.front_end.default_params.clone()

    async def close(self) -> None:
        """End the engine process; unfinished requests end with EngineDeadError."""
        was_ready = self.state is EngineState.READY
        self._die(EngineDeadError("the engine was closed"))
        self._preparer.close()
        if self._receiving is not None:
            self._receiving.cancel()
        if self._client is not None:
            await self._client.close(at_once=not was_ready)

    def kill(self) -> None:
        """End the engine process at once; `close` still waits for its end."""
        if self._client is not None:
            self._client.kill()

    @property
    def _running_client(self) -> SocketClient:
        assert self._client is not None
        return self._client

    async def _change_memory(self, command: MemoryCommand) -> None:
        self._check_alive()
        done = self._memory_commands.expect(command)
        self._running_client.send(command)
        await done
        self._check_not_dead()

    def _maker(self) -> RequestMaker:
        self._check_awake()
        return self._request_maker

    def _check_not_dead(self) -> None:
        if self._error is not None:
            # Without this an error that is raised again and again keeps all frames of all times.
            raise self._error.with_traceback(None)

    def _check_alive(self) -> None:
        self._check_not_dead()
        if self.state is EngineState.NEW:
            raise EngineNotReadyError(
                "the engine must be ready; await its start() and wait_until_ready() first"
            )
        if self.state is not EngineState.READY:
            raise EngineNotReadyError("the engine must be ready; it is still starting")

    def _check_awake(self) -> None:
        self._check_alive()
        if self.stats.sleep_level or self._memory_commands.will_sleep:
            raise EngineNotReadyError("the engine must be awake; it sleeps; wake it up first")

    async def _prepare(
        self,
        make: Callable[[RequestOutputKind], list[Submission]],
        kind: RequestOutputKind,
        request_id: str | None,
    ) -> list[Submission]:
        return await self._preparer.prepare(
            functools.partial(make, kind),
            max_tokens_per_sequence=self._max_tokens_per_sequence,
            request_id=request_id,
        )

    def _add(self, request: Request) -> None:
        """Send a request; what no frame can hold is the client's fault."""
        try:
            self._running_client.send(AddRequest.of(request))
        except (BadFrameError, OverflowError, TypeError) as error:
            raise InvalidRequestError(f"the request must fit a message: {error}") from error

    async def _receive_all(self, client: SocketClient) -> None:
        """Take the engine's news to its end, or to a fault of ours: then nobody waits for ever."""
        try:
            while True:
                self._take(await client.receive())
        except EngineDeadError as error:
            self._die(self._error or error)
        except Exception as error:
            logger.exception("news of the engine could not be taken")
            self._die(EngineDeadError(f"news could not be taken: {type(error).__name__}"))
            client.kill()

    def _take(self, message: FromEngine) -> None:
        self._last_news_seconds = time.monotonic()
        match message:
            case StepNews():
                self._take_step(message)
            case PrefixCacheReset():
                _wake(self._resets.popleft())
            case MemoryChanged():
                self.stats = message.stats
                self._memory_commands.answer(message)
                self.observers.tell("stepped", message.stats)
            case StartProgressed():
                self.progress = (message.stage, message.done, message.total)
            case EngineReady():
                self._become_ready(message.info)
            case EngineFailed():
                self._die(EngineDeadError(message.message))
            case StartRefused():
                self._error, self.is_refused = EngineDeadError(message.message), True
            case RequestRefused():
                # The door's checks should have refused it; no client waits for what is not run.
                kind = EngineNotReadyError if message.is_not_ready else InvalidRequestError
                self._requests.refuse(message.request_id, kind(message.message))

    def _become_ready(self, info: EngineInfo) -> None:
        self.info, self.state = info, EngineState.READY
        self._max_tokens_per_sequence = info.max_tokens_per_sequence
        self._request_maker = self.front_end.request_maker(info.max_model_len)
        logger.info("the engine is ready after %.1f s", sum(info.seconds.values()))
        self._started.set()

    def _take_step(self, news: StepNews) -> None:
        self.stats = news.stats
        step = self._requests.process(news.updates)
        for stop in step.aborts:
            self._running_client.send(stop)
        for output in step.outputs:
            self.observers.tell("gave", self._requests.deliver(output), output)
        self.observers.tell("stepped", news.stats)

    def _die(self, error: EngineDeadError) -> None:
        """Tell all who wait."""
        if self.state is EngineState.DEAD:
            return
        self.state, self._error = EngineState.DEAD, error
        self._requests.fail_all(error)
        for done in self._resets:
            _wake(done)
        self._memory_commands.give_up()
        self._started.set()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # it is done when its caller has gone
        waiter.set_result(None)


def _kind(is_stream: bool) -> RequestOutputKind:
    return RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
