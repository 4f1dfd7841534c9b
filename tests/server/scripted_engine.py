"""An AsyncLLMEngine whose process is a script in the test: real text, real aborts, no model."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import httpx
import msgspec
from starlette.applications import Starlette

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import (
    AbortRequest,
    AddRequest,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    StartProgressed,
    StepNews,
    ToEngine,
)
from jaxserve.distributed.socket_client import SocketClient
from jaxserve.errors import EngineDeadError
from jaxserve.processing.front_end import FrontEnd
from jaxserve.request import FinishReason, Request
from jaxserve.step import SequenceUpdate, TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerConfig
from tests.engine_infos import make_info
from tests.jaxserve.small_tokenizers import byte_level
from tests.tiny_llm import MODEL

VOCAB_SIZE = 300
TEXT = "The answer is 42, not 'é' 😀."
INFO = make_info(
    max_model_len=2048, num_pages=(257,), max_tokens_per_sequence=2048, memory_bill="none"
)

type Script = Callable[[Request, int], list[SequenceUpdate]]


class ScriptedProcess:
    """The socket's end of an engine process that says what a script says.

    Attributes:
      sent: all messages of the server.
      num_running: told as the engine's, whatever runs.
      num_told: messages of the process.
    """

    process_id = 0

    def __init__(self, script: Script):
        self.sent: list[ToEngine] = []
        self._script = script
        self._news: asyncio.Queue[FromEngine | EngineDeadError] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._go = asyncio.Event()
        self._go.set()
        self.num_running = self.num_told = 0

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.sent if isinstance(message, AddRequest)]

    @property
    def aborted(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, AbortRequest)]

    def tell(self, message: FromEngine | EngineDeadError) -> None:
        self.num_told += 1
        self._news.put_nowait(message)

    def hold(self) -> None:
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, AddRequest):
            request = message.request()
            self._running[request.request_id] = asyncio.create_task(self._run(request))
        elif isinstance(message, AbortRequest):
            self._running[message.request_id].cancel()

    async def _run(self, request: Request) -> None:
        params = request.sampling_params
        steps = [self._script(request, index) for index in range(params.n)]
        for updates in zip(*steps, strict=True):
            await self._go.wait()
            self.tell(StepNews(list(updates), EngineStats(num_running=self.num_running)))
            await asyncio.sleep(0)

    async def receive(self) -> FromEngine:
        message = await self._news.get()
        if isinstance(message, EngineDeadError):
            raise message
        return message

    async def close(self, *, at_once: bool = False) -> None:
        for task in self._running.values():
            task.cancel()

    def kill(self) -> None:
        self.tell(EngineDeadError("the engine process has ended by signal 9"))


def say(
    text: str | Callable[[Request], str | list[int]] = TEXT,
    tokenizer: Tokenizer | None = None,
    logprob: float = -0.5,
) -> Script:
    """A script that says a text (or ids) up to the request's limit, then the end token."""
    tokenizer = tokenizer or byte_level()

    def script(request: Request, index: int) -> list[SequenceUpdate]:
        said = text if isinstance(text, str) else text(request)
        ids = tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
        params = request.sampling_params
        eos = None if params.ignore_eos else tokenizer.eos_token_ids[0]
        ids = [*ids, *([] if eos is None else [eos])]
        limit = params.max_tokens or 1
        while eos is None and len(ids) < limit:
            ids = ids + ids
        updates: list[SequenceUpdate] = []
        for position, token_id in enumerate(ids[:limit]):
            reason = FinishReason.LENGTH if position + 1 == limit else None
            reason = FinishReason.STOP if token_id == eos else reason
            entry = TokenLogprobs(logprob, 2, (65, token_id, 66), (-0.25, logprob, float("-inf")))
            updates.append(
                SequenceUpdate(
                    request_id=request.request_id,
                    index=index,
                    new_token_ids=(token_id,),
                    logprobs=None if params.logprobs is None else (entry,),
                    finish_reason=reason,
                )
            )
        return updates

    return script


def time_out(*, num_tokens: int = 0, only: str | None = None) -> Script:
    """A script in which deadlines pass, of all prompts or of one text."""

    def script(request: Request, index: int) -> list[SequenceUpdate]:
        updates = say("abcdefgh")(request, index)
        is_late = only is None or len(request.prompt_token_ids) == len(only)
        if is_late:
            end = SequenceUpdate(
                request_id=request.request_id, index=index, finish_reason=FinishReason.TIMEOUT
            )
            updates = [*updates[:num_tokens], end]
        seconds = None if is_late and not num_tokens else 1.0
        return [msgspec.structs.replace(u, scheduled_seconds=seconds) for u in updates]

    return script


class Served:
    """An application in front of a scripted engine, and a client of it."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        info: EngineInfo = INFO,
        engine_config: dict[str, Any] | None = None,
        **config: Any,
    ):
        self.tokenizer = tokenizer or byte_level()
        engine_settings = EngineConfig(
            model=MODEL,
            skip_tokenizer_init=True,
            **{"served_model_name": ("tiny", "alias"), **(engine_config or {})},
        )
        front_end = FrontEnd.open(engine_settings)
        model_config = dataclasses.replace(front_end.model_config, vocab_size=VOCAB_SIZE)
        front_end = dataclasses.replace(
            front_end,
            tokenizer=self.tokenizer,
            model_config=model_config,
            chat_template=chat_template,
        )
        self.info = info
        self.engine = AsyncLLMEngine(engine_settings, front_end=front_end)
        self.process = ScriptedProcess(script or say(tokenizer=self.tokenizer))
        self.app: Starlette = create_app(self.engine, ServerConfig(**config))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def start(self, *, is_ready: bool = True) -> "Served":
        async def give_process(config: EngineConfig) -> SocketClient:
            return cast(SocketClient, self.process)

        original, SocketClient.start = SocketClient.start, give_process  # pyright: ignore
        try:
            await self.engine.start()
        finally:
            SocketClient.start = original
        self.process.tell(StartProgressed("compile", 3, 7))
        if is_ready:
            self.process.tell(EngineReady(self.info))
            await self.engine.wait_until_ready()
        return self

    async def __aenter__(self) -> "Served":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.engine.close()
        await self.process.close()

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields})
