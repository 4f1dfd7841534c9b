"""What passes between an engine that starts and the processes that lower programs for it.

Typed structs of msgpack over a pipe; no pickle. A process answers each `LowerProgram`, and nothing
else, with `ProgramLowered`, or with `LoweringFailed`, after which it leaves.
"""

from multiprocessing.connection import Connection
from typing import Any

import msgspec

from jaxserve.execution.buckets import Bucket, BucketTable
from jaxserve.execution.limits import Limits
from jaxserve.execution.sample_mode import SampleMode
from models.config import ModelConfig
from pallas_kernels.platform import AssumedGpu

MAX_MESSAGE_BYTES = 1 << 28


class LoweringJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an engine has chosen; the programs of a table follow from it.

    Attributes:
      config: the fields of its EngineConfig.
      model: the model's numbers under these settings.
      is_offline: see `ModelSetup`.
      gpu: that will run the programs; None = they run on a CPU.
      jax_settings: those of `jax.config` that programs may depend on.
      limits, buckets, num_pages: of its plan.
      setup: says what follows from all that, so that a difference is found.
    """

    config: dict[str, Any]
    model: ModelConfig
    is_offline: bool
    gpu: AssumedGpu | None
    jax_settings: dict[str, bool | int | float | str | None]
    limits: Limits
    buckets: BucketTable
    num_pages: tuple[int, ...]
    setup: str

    @property
    def platform(self) -> str:
        """What programs are exported for, in JAX's words."""
        return "cpu" if self.gpu is None else "cuda"


class LowerProgram(msgspec.Struct, frozen=True, tag=True):
    """Lower a program of the last job's table; the fields are those of its key."""

    kind: str
    shape: Bucket | int
    mode: SampleMode | None


class ProgramLowered(msgspec.Struct, frozen=True, tag=True):
    """A program as `StepProgram.export` gives it."""

    program: bytes


class LoweringFailed(msgspec.Struct, frozen=True, tag=True):
    """Why the process leaves."""

    reason: str


type ToWorker = LoweringJob | LowerProgram
type FromWorker = ProgramLowered | LoweringFailed

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker.__value__)
_from_worker = msgspec.msgpack.Decoder(FromWorker.__value__)


def send(connection: Connection, message: ToWorker | FromWorker) -> None:
    """Send a message.

    Raises:
      OSError: nobody is there to read it.
      TypeError: a value is of no type that messages hold.
    """
    connection.send_bytes(_encoder.encode(message))


def receive_order(connection: Connection) -> ToWorker:
    """Wait for the next order.

    Raises:
      EOFError: there will be none.
      OSError: likewise.
      msgspec.MsgspecError: it is no message.
    """
    return _to_worker.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))


def receive_answer(connection: Connection, timeout_seconds: float) -> FromWorker:
    """Wait for the next answer.

    Raises:
      TimeoutError: none has come.
      EOFError: there will be none.
      OSError: likewise.
      msgspec.MsgspecError: it is no message.
    """
    if not connection.poll(timeout_seconds):
        raise TimeoutError(f"no answer came within {timeout_seconds:.0f} s")
    return _from_worker.decode(connection.recv_bytes(MAX_MESSAGE_BYTES))
