"""What passes between the HTTP process and the engine process: typed frames of msgpack.

A frame is its length, four bytes little endian, and one message. Nothing else is ever decoded:
no pickle, no code. Prompts travel as packed int32, since they may hold 100,000 ids.
"""

import struct
from typing import Any

import msgspec
import numpy as np

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import SequenceUpdate, StopAbort

MAX_FRAME_BYTES = 1 << 28
"""A longer frame is no message of ours."""
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the users of an engine must know of it, once it is ready.

    Attributes:
      max_model_len: tokens of prompt and output together.
      max_num_seqs: sequences that run at the same time.
      max_num_batched_tokens: tokens of one step.
      page_size: tokens in a page.
      num_pages: for each cache group, the null page included.
      max_tokens_per_sequence: tokens that the pages can hold for one sequence alone.
      device_kind: such as "NVIDIA H200" or "cpu".
      memory_bill: where the device's memory goes, for people.
      seconds: start-up time by stage.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: tuple[int, ...]
    max_tokens_per_sequence: int
    device_kind: str
    memory_bill: str
    seconds: dict[str, float]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The state of an engine after a step; counts are since its start.

    Attributes:
      num_running, num_waiting: sequences now.
      kv_cache_usage: share of the pages that are held, in [0, 1].
      num_preemptions, num_steps, num_tokens: counts; tokens are those that steps computed.
      num_bad_frames: frames from outside that were no messages.
      num_generation_tokens: output tokens that steps have given out.
      num_padded_tokens: tokens of the buckets that the steps were padded to.
      num_compilations: programs that XLA has compiled in the engine's process since it was ready.
      num_prefix_queries, num_prefix_hits: prompt tokens that were looked up in the prefix cache,
        and those that were found there.
      num_host_prefix_hits: how many of these had to be fetched from the host's memory.
      num_copied_pages: that were copied for a sequence which shares their first tokens.
      num_offloaded_bytes, num_fetched_bytes: of pages copied to the host, and back.
      sleep_level: 1 or 2 while the engine sleeps, else 0.
      schedule_seconds, build_seconds, dispatch_seconds, collect_seconds, commit_seconds: of the
        host by stage of the step, see `StepTimes`; `collect_seconds` is mostly spent waiting for
        the device.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_bad_frames: int = 0
    num_generation_tokens: int = 0
    num_padded_tokens: int = 0
    num_compilations: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_host_prefix_hits: int = 0
    num_copied_pages: int = 0
    num_offloaded_bytes: int = 0
    num_fetched_bytes: int = 0
    sleep_level: int = 0
    schedule_seconds: float = 0.0
    build_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    collect_seconds: float = 0.0
    commit_seconds: float = 0.0


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """The first message to an engine process: the fields of its EngineConfig."""

    config: dict[str, Any]


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A Request; `prompt_token_ids` is packed int32."""

    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival_seconds: float
    priority: int
    cache_salt: str | None
    timeout_seconds: float | None
    ttft_goal_seconds: float | None
    tpot_goal_seconds: float | None

    @classmethod
    def of(cls, request: Request) -> "AddRequest":
        """Pack a request."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=np.asarray(request.prompt_token_ids, "<i4").tobytes(),
            sampling_params=request.sampling_params,
            eos_token_ids=request.eos_token_ids,
            arrival_seconds=request.arrival_seconds,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_seconds=request.timeout_seconds,
            ttft_goal_seconds=request.ttft_goal_seconds,
            tpot_goal_seconds=request.tpot_goal_seconds,
        )

    def request(self) -> Request:
        """Unpack it."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=tuple(np.frombuffer(self.prompt_token_ids, "<i4").tolist()),
            sampling_params=self.sampling_params,
            eos_token_ids=self.eos_token_ids,
            arrival_seconds=self.arrival_seconds,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_seconds=self.timeout_seconds,
            ttft_goal_seconds=self.ttft_goal_seconds,
            tpot_goal_seconds=self.tpot_goal_seconds,
        )


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """The client of a request has gone."""

    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all computed prefixes; PrefixCacheReset answers."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Free the device's memory, see `Engine.sleep`; MemoryChanged answers.

    Mode "wait" waits for the unfinished requests, and later commands of memory wait behind it.
    """

    level: int
    mode: str


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Bring arrays back to the device, see `Engine.wake_up`; MemoryChanged answers."""

    tags: tuple[str, ...]


class ReleaseCache(msgspec.Struct, frozen=True, tag=True):
    """Free the memory of the KV cache, see `Engine.release_cache`; MemoryChanged answers."""


type MemoryCommand = Sleep | WakeUp | ReleaseCache


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave in order."""


class StartProgressed(msgspec.Struct, frozen=True, tag=True):
    """News of a start: a stage and how far it is."""

    stage: str
    done: int
    total: int


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Requests are taken from now on."""

    info: EngineInfo


class StartRefused(msgspec.Struct, frozen=True, tag=True):
    """The model or a setting cannot be served; the process leaves."""

    message: str


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """A request that the engine did not take."""

    request_id: str
    message: str
    is_not_ready: bool = False
    """The engine cannot take any request now; the request itself is not at fault."""


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    """The oldest ResetPrefixCache without an answer is done."""


class MemoryChanged(msgspec.Struct, frozen=True, tag=True):
    """The oldest command of memory without an answer is done, or was refused.

    Attributes:
      stats: of the engine now.
      error: why it was refused; None = it is done.
      is_refusal: it must not be asked for in this state; otherwise it did not work out.
    """

    stats: EngineStats
    error: str | None = None
    is_refusal: bool = False


class StepNews(msgspec.Struct, frozen=True, tag=True):
    """One step: its updates, and the engine's state after it."""

    updates: list[SequenceUpdate]
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that cannot go on: why; the process leaves."""

    message: str


type ToEngine = (
    StartEngine
    | AddRequest
    | AbortRequest
    | StopAbort
    | ResetPrefixCache
    | Sleep
    | WakeUp
    | ReleaseCache
    | Shutdown
)
type FromEngine = (
    StartProgressed
    | EngineReady
    | StartRefused
    | RequestRefused
    | PrefixCacheReset
    | MemoryChanged
    | StepNews
    | EngineFailed
)

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine.__value__)
_from_engine = msgspec.msgpack.Decoder(FromEngine.__value__)


class BadFrameError(ValueError):
    """Bytes that are no frame of ours."""


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message, its length in front.

    Raises:
      BadFrameError: it is too long.
      OverflowError: an integer has more than 64 bits.
      TypeError: a value is of no type that messages hold.
    """
    body = _encoder.encode(message)
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes of the message behind a header.

    Raises:
      BadFrameError: it is too long to be one.
    """
    (length,) = _LENGTH.unpack(header)
    _check_length(length)
    return length


def decode_to_engine(body: bytes) -> ToEngine:
    """A message from the HTTP process.

    Raises:
      BadFrameError: it is none.
    """
    return _decode(_to_engine, body)


def decode_from_engine(body: bytes) -> FromEngine:
    """A message from the engine process.

    Raises:
      BadFrameError: it is none.
    """
    return _decode(_from_engine, body)


def _check_length(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise BadFrameError(f"frames must have at most {MAX_FRAME_BYTES} bytes; got {length}")


def _decode(decoder: msgspec.msgpack.Decoder, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadFrameError(
            f"frames must hold a message; got {len(body)} bytes: {error}"
        ) from error
