"""plan_engine: how long sequences, how many of them and how many pages an engine gets."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.errors import EngineConfigError
from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.limits import Limits, choose_buckets, choose_limits
from jaxserve.execution.memory_plan import (
    DEFAULT_CPU_CACHE_BYTES,
    MemoryBill,
    PlanMemory,
    RememberedPlan,
    count_tokens,
    free_mesh_bytes,
)
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.page_plan import (
    PAGE_COUNT_STEP,
    PageDemand,
    count_page_bytes,
    make_demands,
    pages_that_fit,
    plan_pages,
)
from jaxserve.execution.programs import ProgramShapes, ProgramTable
from jaxserve.execution.sampler import choose_draw
from jaxserve.execution.step_functions import StepFunctions
from jaxserve.scheduling.admission import max_sequence_tokens
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from models.kv_cache import abstract_cache
from models.sharding import device_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What is settled between loading and compiling.

    Attributes:
      limits: the sizes chosen.
      buckets: padded sizes of steps.
      num_pages: of each cache group, the null page included.
      pools: of each cache group, all pages free.
      bill: the memory's use.
    """

    limits: Limits
    buckets: BucketTable
    num_pages: tuple[int, ...]
    pools: tuple[PagePool, ...]
    bill: MemoryBill


def plan_engine(setup: ModelSetup, cache_dir: Path) -> EnginePlan:
    """Settle page counts, lengths and buckets; the weights are in memory already.

    Args:
      setup: the model on its devices.
      cache_dir: where plans of earlier starts are kept.

    Raises:
      EngineConfigError: the settings do not fit the memory.
    """
    limits = choose_limits(setup.config, setup.model, is_gpu=setup.is_gpu)
    buckets = choose_buckets(setup.config, limits, is_gpu=setup.is_gpu)
    max_row_tokens = scheduler_config(setup, limits, buckets).max_row_tokens
    demands = make_demands(setup.geometries, setup.sharder, limits, max_row_tokens)
    remembered = _count_pages(setup, limits, buckets, demands, cache_dir)
    pools = tuple(
        PagePool(count, setup.config.block_size, sliding_window=geometry.sliding_window)
        for count, geometry in zip(remembered.num_pages, setup.geometries, strict=True)
    )
    return EnginePlan(
        limits=_fit_max_model_len(setup, limits, pools, max_row_tokens),
        buckets=buckets,
        num_pages=remembered.num_pages,
        pools=pools,
        bill=_make_bill(setup, demands, remembered),
    )


def scheduler_config(setup: ModelSetup, limits: Limits, buckets: BucketTable) -> SchedulerConfig:
    """The limits that the scheduler keeps."""
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        token_buckets=buckets.token_buckets,
        row_buckets=buckets.row_buckets,
        max_steps_in_flight=setup.config.max_steps_in_flight,
        long_prefill_token_threshold=setup.config.long_prefill_token_threshold,
    )


def make_programs(
    setup: ModelSetup, limits: Limits, buckets: BucketTable, num_pages: tuple[int, ...]
) -> tuple[BatchBuilder, ProgramTable]:
    """The table of programs for page counts, and what builds their batches; compiles nothing."""
    builder = BatchBuilder(
        buckets,
        max_num_seqs=limits.max_num_seqs,
        page_size=setup.config.block_size,
        num_pages=num_pages,
        max_pages_per_seq=_max_pages_per_seq(setup, limits),
        vocab_size=setup.model.vocab_size,
    )
    shapes = ProgramShapes(
        leaves=setup.layout.abstract(setup.sharder),
        cache=abstract_cache(setup.geometries, num_pages, setup.sharder),
        state=abstract_state(setup, limits),
        hidden_size=setup.model.hidden_size,
        hidden_dtype=setup.dtype,
    )
    functions = StepFunctions(setup.layout, setup.sharder, choose_draw(setup.backend))
    return builder, ProgramTable(functions, shapes, setup.sharder, builder, buckets)


def abstract_state(setup: ModelSetup, limits: Limits) -> DeviceState:
    """The shapes of the device state."""
    return DeviceState.abstract(
        setup.sharder,
        max_num_seqs=limits.max_num_seqs,
        max_pages=_max_pages_per_seq(setup, limits),
        num_groups=len(setup.geometries),
    )


def _max_pages_per_seq(setup: ModelSetup, limits: Limits) -> int:
    return -(-limits.max_model_len // setup.config.block_size)


def _count_pages(
    setup: ModelSetup,
    limits: Limits,
    buckets: BucketTable,
    demands: tuple[PageDemand, ...],
    cache_dir: Path,
) -> RememberedPlan:
    """Page counts by override, by bytes a device, or by what the devices have left."""
    config, mesh = setup.config, setup.sharder.mesh
    if config.num_gpu_blocks_override is not None:
        count = config.num_gpu_blocks_override + 1
        return RememberedPlan((count,) * len(setup.geometries), 0)
    if config.kv_cache_memory_bytes is not None:
        return RememberedPlan(pages_that_fit(config.kv_cache_memory_bytes, demands), 0)
    free = free_mesh_bytes(mesh.local_devices)
    if free is None:
        return RememberedPlan(pages_that_fit(DEFAULT_CPU_CACHE_BYTES // mesh.size, demands), 0)
    key = (setup.model, limits, buckets, setup.geometries, demands, setup.stack)
    device = (jax.devices()[0].device_kind, mesh.size)
    memory = PlanMemory(cache_dir, *key, setup.dtype, setup.backend, device, jax.__version__)
    small = (PAGE_COUNT_STEP,) * len(setup.geometries)
    return plan_pages(
        memory,
        demands,
        free[0],
        lambda: make_programs(setup, limits, buckets, small)[1].measure_temporaries(),
    )


def _fit_max_model_len(
    setup: ModelSetup, limits: Limits, pools: tuple[PagePool, ...], max_row_tokens: int
) -> Limits:
    """A sequence that runs alone must find pages to its end."""
    wanted, asked = limits.max_model_len, setup.config.max_model_len
    longest = max_sequence_tokens(pools, max_model_len=wanted, max_row_tokens=max_row_tokens)
    if longest == wanted:
        return limits
    if asked is not None:
        raise EngineConfigError(
            f"max_model_len must fit the pages' {longest} tokens; got {asked}; lower it, or "
            f"give the pages more memory"
        )
    logger.warning("max_model_len is lowered to %d, the tokens that the pages hold", longest)
    return dataclasses.replace(limits, max_model_len=longest)


def _make_bill(
    setup: ModelSetup, demands: tuple[PageDemand, ...], plan: RememberedPlan
) -> MemoryBill:
    free = free_mesh_bytes(setup.sharder.mesh.local_devices)
    windows = tuple(geometry.sliding_window for geometry in setup.geometries)
    return MemoryBill(
        device_bytes=free[1] if free else 0,
        weight_bytes=sum(map(device_bytes, setup.layout.abstract(setup.sharder))),
        page_bytes=count_page_bytes(demands, plan.num_pages),
        temporary_bytes=plan.temporary_bytes,
        num_pages=plan.num_pages,
        windows=windows,
        num_tokens=count_tokens(plan.num_pages, windows, setup.config.block_size),
    )
