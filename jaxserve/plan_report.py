"""report_plan: what a start would decide, found out without loading a weight."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine_builder import model_for, set_up
from jaxserve.errors import EngineConfigError, describe_value
from jaxserve.execution.engine_plan import (
    EnginePlan,
    count_weight_bytes,
    find_longest,
    plan_engine,
    scheduler_config,
)
from jaxserve.execution.memory_plan import DeviceMemory
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.temporaries import ESTIMATE_METHOD
from jaxserve.processing.model_files import open_configured_model
from jaxserve.scheduling.page_pool import PagePool
from models.loading.hub import is_hub_id
from models.loading.model_paths import is_there
from models.loading.source import OpenedModel

MAX_DEVICE_BYTES = 1 << 40
"""More than any GPU has: a slip in the unit shall not fill the host with lists of pages."""
TEMPORARIES = {
    "compiled": "what the largest step needs that was compiled at an earlier start",
    "estimated": ESTIMATE_METHOD,
    "not counted": "the number of pages is given, or the device does not tell its memory",
}
USUAL_LENGTHS = (1024, 4096, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFit:
    """How many requests of one length there can be.

    Attributes:
      num_tokens: of each, prompt and output.
      num_in_pages: that the pages hold at the same time.
      num_running: that run at the same time: no more than `max_num_seqs` either.
    """

    num_tokens: int
    num_in_pages: int
    num_running: int


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan and what it means.

    Attributes:
      path: where the model's config came from.
      setup: the model on its devices, which may not be there.
      plan: what a start would decide.
      device_kind: such as "NVIDIA H200" or "cpu"; None = a GPU that need not be there.
      device_memory: bytes of such a GPU; None = this machine's own devices.
      longest: what `max_model_len="auto"` would choose.
      requests: of several lengths.
    """

    path: Path
    setup: ModelSetup
    plan: EnginePlan
    device_kind: str | None
    device_memory: int | None
    longest: int
    requests: tuple[RequestFit, ...]

    @property
    def temporaries(self) -> str:
        """Where the bill's temporaries come from: a key of `TEMPORARIES`."""
        if not self.plan.bill.reserved_bytes:
            return "not counted"
        return "estimated" if self.plan.is_estimated else "compiled"

    @property
    def temporaries_are(self) -> str:
        """The same in a sentence's words."""
        return TEMPORARIES[self.temporaries]


def report_plan(
    config: EngineConfig,
    *,
    device_memory: int | None = None,
    request_tokens: Sequence[int] | None = None,
) -> PlanReport:
    """Plan an engine by the code that a start runs, and load no weight.

    On a GPU it reserves the memory. Where no start is remembered, temporaries are estimated, as a
    start does that has not compiled yet.

    Args:
      config: the settings.
      device_memory: bytes of a GPU that need not be there; `gpu_memory_utilization` of them are
        used, and temporaries are estimated. None = this machine's own devices.
      request_tokens: lengths to count requests of; None takes usual ones.

    Raises:
      ModelLoadError: the model is not found, or its config is refused.
      EngineConfigError: a value breaks its rule, or the settings do not fit model or memory.
    """
    if device_memory is not None and not 1 <= device_memory <= MAX_DEVICE_BYTES:
        rule = f"must be in [1, {MAX_DEVICE_BYTES}] bytes"
        raise EngineConfigError(f"device_memory {rule}; got {describe_value(device_memory)}")
    opened = _open(config)
    if device_memory is None:
        setup, cache_dir = set_up(config, opened)
        memory = DeviceMemory.of_devices(setup.sharder.mesh.local_devices)
        device_kind = jax.devices()[0].device_kind
    else:
        model = model_for(config, opened)
        setup = ModelSetup.choose(config, model, for_absent_gpu=True)
        cache_dir = device_kind = None
        limit_bytes = int(device_memory * config.gpu_memory_utilization)
        memory = DeviceMemory(limit_bytes=limit_bytes, free_bytes=limit_bytes)
    if memory is not None:
        memory = memory.less(count_weight_bytes(setup))
    plan = plan_engine(setup, memory, cache_dir)
    return PlanReport(
        path=opened.path,
        setup=setup,
        plan=plan,
        device_kind=device_kind,
        device_memory=device_memory,
        longest=find_longest(setup, plan, memory),
        requests=_count_requests(setup, plan, request_tokens),
    )


def _open(config: EngineConfig) -> OpenedModel:
    """The model; of a repository no weights are fetched, unless a GGUF file holds the config."""
    name = config.model
    is_remote = name is not None and not is_there(Path(name).expanduser()) and is_hub_id(name)
    if is_remote and config.load_format != "gguf":
        config = dataclasses.replace(config, load_format="dummy")
    return open_configured_model(config)


def _count_requests(
    setup: ModelSetup, plan: EnginePlan, asked: Sequence[int] | None
) -> tuple[RequestFit, ...]:
    longest = plan.limits.max_model_len
    if asked is None:
        asked = (*(length for length in USUAL_LENGTHS if length < longest), longest)
    for length in asked:
        if not 1 <= length <= longest:
            rule = f"must be in [1, {longest}], the tokens of the longest request"
            raise EngineConfigError(f"request_tokens {rule}; got {describe_value(length)}")
    max_row_tokens = scheduler_config(setup, plan.limits, plan.buckets).max_row_tokens
    fits = []
    for length in asked:
        in_pages = min(_count_in_pool(pool, length, max_row_tokens) for pool in plan.pools)
        fit = RequestFit(
            num_tokens=length,
            num_in_pages=in_pages,
            num_running=min(in_pages, plan.limits.max_num_seqs),
        )
        fits.append(fit)
    return tuple(fits)


def _count_in_pool(pool: PagePool, num_tokens: int, max_row_tokens: int) -> int:
    """Sequences of a length in one pool: one computes a full row of its prompt, the rest decode.

    The two differ only behind a sliding window, where a prompt's row holds more pages.
    """
    in_prompt = pool.max_held_pages(num_tokens, max_row_tokens)
    return max(0, 1 + (pool.num_usable - in_prompt) // pool.max_held_pages(num_tokens, 1))
