"""plan_engine: how long sequences, how many of them and how many pages an engine gets."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.host_pages import count_host_pages
from jaxserve.execution.limits import Limits, choose_buckets, choose_limits
from jaxserve.execution.memory_plan import (
    DEFAULT_CPU_CACHE_BYTES,
    RESERVED_BYTES,
    DeviceMemory,
    MemoryBill,
    PlanMemory,
    RememberedPlan,
    count_tokens,
)
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.packed_layout import NUM_PAGE_COPIES
from jaxserve.execution.page_mover import MAX_DEVICE_PAGES
from jaxserve.execution.page_plan import (
    PageDemand,
    count_page_bytes,
    fill_memory,
    fits_memory,
    make_demands,
    pages_that_fit,
)
from jaxserve.execution.programs import ProgramShapes, ProgramTable
from jaxserve.execution.sampler import FEW_DRAW_ROWS, choose_draw, choose_greedy_head
from jaxserve.execution.step_functions import StepFunctions
from jaxserve.execution.temporaries import estimate_temporaries
from jaxserve.scheduling.admission import max_sequence_tokens
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.policies import POLICIES, Policy
from models.invariant_kernels import compute_invariant_logits
from models.kv_cache import abstract_cache
from models.sharding import device_bytes
from pallas_kernels.sampling import log_softmax

logger = logging.getLogger(__name__)

ESTIMATE_MARGIN = 1.05


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What is settled between loading and compiling.

    Attributes:
      limits: the sizes chosen.
      buckets: padded sizes of steps.
      num_pages: of each cache group, the null page included.
      pools: of each cache group, all pages free.
      bill: the memory's use.
      is_estimated: the bill's temporaries are an estimate, since no start is remembered that has
        compiled such a plan.
    """

    limits: Limits
    buckets: BucketTable
    num_pages: tuple[int, ...]
    pools: tuple[PagePool, ...]
    bill: MemoryBill
    is_estimated: bool


def plan_engine(
    setup: ModelSetup,
    memory: DeviceMemory | None,
    cache_dir: Path | None,
    *,
    found: RememberedPlan | None = None,
) -> EnginePlan:
    """Settle page counts, lengths and buckets.

    Args:
      setup: the model on its devices.
      memory: what is left beside the weights; None where the devices do not tell.
      cache_dir: where plans of earlier starts are kept. None = the devices are not there, and
        nothing is remembered.
      found: page counts for which this start has compiled its programs, and the bytes that the
        largest step was found to need. The plan keeps these pages, unless that is too much, and
        later starts remember it.

    Raises:
      EngineConfigError: the settings do not fit the memory.
    """
    limits = choose_limits(
        setup.config,
        setup.model,
        is_gpu=setup.is_gpu,
        device_bytes=memory.limit_bytes if memory else None,
    )
    buckets = choose_buckets(
        setup.config,
        limits,
        is_gpu=setup.is_gpu,
        fuses_few_rows=setup.fuses_few_rows,
        fuses_attention=setup.fuses_attention,
        num_scheduler_steps=setup.num_scheduler_steps,
        multi_step_rows=setup.multi_step_rows,
    )
    max_row_tokens = scheduler_config(setup, limits, buckets).max_row_tokens
    demands = make_demands(setup.geometries, setup.sharder, limits, max_row_tokens)
    kept = None if cache_dir is None else _open_plans(setup, limits, buckets, demands, cache_dir)
    pages, is_estimated = _count_pages(setup, buckets, demands, memory, kept, found)
    pools = _make_pools(setup, pages.num_pages)
    return EnginePlan(
        limits=_fit_max_model_len(setup, limits, pools, max_row_tokens),
        buckets=buckets,
        num_pages=pages.num_pages,
        pools=pools,
        bill=_make_bill(setup, demands, pages, memory),
        is_estimated=is_estimated,
    )


def find_longest(setup: ModelSetup, plan: EnginePlan, memory: DeviceMemory | None) -> int:
    """The `max_model_len` that "auto" would choose, whatever the plan was asked for.

    Args:
      setup: what the plan was made for.
      plan: its temporaries count; they hardly depend on the length.
      memory: what the plan was made for.
    """
    if setup.config.fixed_model_len is None:
        return plan.limits.max_model_len
    longest = setup.model.max_position_embeddings
    limits = dataclasses.replace(plan.limits, max_model_len=longest)
    max_row_tokens = scheduler_config(setup, limits, plan.buckets).max_row_tokens
    demands = make_demands(setup.geometries, setup.sharder, limits, max_row_tokens)
    num_pages = _given_pages(setup, demands, memory)
    if num_pages is None:
        assert memory is not None
        num_pages = pages_that_fit(
            memory.free_bytes - plan.bill.temporary_bytes - plan.bill.reserved_bytes, demands
        )
    pools = _make_pools(setup, num_pages)
    return max_sequence_tokens(pools, max_model_len=longest, max_row_tokens=max_row_tokens)


def scheduler_config(setup: ModelSetup, limits: Limits, buckets: BucketTable) -> SchedulerConfig:
    """The limits that the scheduler keeps."""
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        token_buckets=buckets.token_buckets,
        row_buckets=buckets.row_buckets,
        max_steps_in_flight=setup.config.max_steps_in_flight,
        max_decode_row_tokens=buckets.num_scheduler_steps,
        max_multi_token_rows=buckets.most_multi_rows,
        long_prefill_token_threshold=setup.config.long_prefill_token_threshold,
        prefill_first=setup.prefill_first,
        max_queue_seconds=setup.config.max_queue_time,
        enable_prefix_caching=setup.config.enable_prefix_caching,
        num_host_pages=_count_host_pages(setup),
    )


def make_policy(config: EngineConfig) -> Policy:
    """The policy that the scheduler goes by, with the operator's goals."""
    given = {"ttft_goal_seconds": config.ttft_goal_ms, "tpot_goal_seconds": config.tpot_goal_ms}
    goals = {name: goal / 1e3 for name, goal in given.items() if goal is not None}
    return POLICIES[config.scheduling_policy](**goals)


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
        num_host_pages=_count_host_pages(setup),
        takes_copies=setup.config.enable_prefix_caching,
    )
    shapes = ProgramShapes(
        leaves=setup.layout.abstract(setup.sharder),
        cache=abstract_cache(setup.geometries, num_pages, setup.sharder),
        state=abstract_state(setup, limits),
        hidden_size=setup.model.hidden_size,
        hidden_dtype=setup.dtype,
    )
    few_draw_rows = FEW_DRAW_ROWS if setup.backend == "mosaic" else ()
    functions = StepFunctions(
        setup.layout, setup.sharder, choose_draw(setup.backend), few_draw_rows
    )
    if setup.config.batch_invariant:
        functions = dataclasses.replace(
            functions, logits=compute_invariant_logits, log_softmax=log_softmax.log_softmax
        )
    elif setup.sharder.mesh.size == 1:
        head = shapes.leaves[setup.layout.head_index]
        soft_cap = setup.layout.logit_soft_cap
        functions = dataclasses.replace(
            functions, greedy_head=choose_greedy_head(setup.backend, head, soft_cap=soft_cap)
        )
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


def _count_host_pages(setup: ModelSetup) -> int:
    return count_host_pages(setup.geometries, setup.config.kv_offloading_bytes)


def _make_pools(setup: ModelSetup, num_pages: tuple[int, ...]) -> tuple[PagePool, ...]:
    return tuple(
        PagePool(
            count,
            setup.config.block_size,
            sliding_window=geometry.sliding_window,
            num_host_pages=_count_host_pages(setup),
        )
        for count, geometry in zip(num_pages, setup.geometries, strict=True)
    )


def _open_plans(
    setup: ModelSetup,
    limits: Limits,
    buckets: BucketTable,
    demands: tuple[PageDemand, ...],
    cache_dir: Path,
) -> PlanMemory:
    """The plan of an earlier start like this one."""
    largest = buckets.all()[-1]  # whose step needs most
    moved_bytes, copied_bytes = _moved_bytes(setup, demands), _copied_bytes(setup, demands)
    key = (setup.model, limits, largest, setup.geometries, demands, setup.stack, moved_bytes)
    device = (jax.devices()[0].device_kind, setup.sharder.mesh.size)
    kernels = (setup.backend, setup.config.batch_invariant, FEW_DRAW_ROWS)
    return PlanMemory(cache_dir, *key, copied_bytes, setup.dtype, *kernels, device, jax.__version__)


def _count_pages(
    setup: ModelSetup,
    buckets: BucketTable,
    demands: tuple[PageDemand, ...],
    memory: DeviceMemory | None,
    kept: PlanMemory | None,
    found: RememberedPlan | None,
) -> tuple[RememberedPlan, bool]:
    """Page counts by what the config gives, or by what the devices have left; if by an estimate."""
    given = _given_pages(setup, demands, memory)
    if given is not None:
        return RememberedPlan(given, 0), False
    assert memory is not None
    if found is not None:
        temporary_bytes = _with_copies(setup, demands, found.temporary_bytes)
        known = RememberedPlan(found.num_pages, temporary_bytes)
    else:
        temporary_bytes = _with_copies(setup, demands, estimate_with_margin(setup, buckets))
        known = kept.read() if kept is not None else None
    is_known = known is not None and fits_memory(known, demands, memory.free_bytes)
    plan = known if is_known else fill_memory(demands, memory.free_bytes, temporary_bytes)
    assert plan is not None
    if found is not None and kept is not None:
        kept.write(plan)
    return plan, found is None and not is_known


def estimate_with_margin(setup: ModelSetup, buckets: BucketTable) -> int:
    """Bytes of the largest step, so that few starts find that they need more."""
    return int(ESTIMATE_MARGIN * estimate_temporaries(setup, buckets))


def _with_copies(setup: ModelSetup, demands: tuple[PageDemand, ...], step_bytes: int) -> int:
    """Temporaries of the largest program on one device, and pages on their way to the host."""
    return max(step_bytes, _copied_bytes(setup, demands)) + _moved_bytes(setup, demands)


def _moved_bytes(setup: ModelSetup, demands: tuple[PageDemand, ...]) -> int:
    """Bytes on one device of pages on their way to the host and back."""
    if not setup.config.kv_offloading_bytes:
        return 0
    return MAX_DEVICE_PAGES * max(demand.bytes_per_page for demand in demands)


def _copied_bytes(setup: ModelSetup, demands: tuple[PageDemand, ...]) -> int:
    """Bytes on one device of the program that copies pages; it runs between steps."""
    if not setup.config.enable_prefix_caching:
        return 0
    return NUM_PAGE_COPIES * sum(demand.bytes_per_page for demand in demands)


def _given_pages(
    setup: ModelSetup, demands: tuple[PageDemand, ...], memory: DeviceMemory | None
) -> tuple[int, ...] | None:
    """Page counts by override, or by bytes a device; None where the memory decides."""
    config = setup.config
    if config.num_gpu_blocks_override is not None:
        return (config.num_gpu_blocks_override + 1,) * len(setup.geometries)
    if config.kv_cache_memory_bytes is not None:
        return pages_that_fit(config.kv_cache_memory_bytes, demands)
    if memory is None:
        return pages_that_fit(DEFAULT_CPU_CACHE_BYTES // setup.sharder.mesh.size, demands)
    return None


def _fit_max_model_len(
    setup: ModelSetup, limits: Limits, pools: tuple[PagePool, ...], max_row_tokens: int
) -> Limits:
    """A sequence that runs alone must find pages to its end."""
    wanted, asked = limits.max_model_len, setup.config.max_model_len
    longest = max_sequence_tokens(pools, max_model_len=wanted, max_row_tokens=max_row_tokens)
    if longest == wanted:
        return limits
    if setup.config.fixed_model_len is not None:
        raise EngineConfigError(
            f"max_model_len must fit the pages' {longest} tokens; got {asked}; lower it or set "
            f"it to auto, or give the pages more memory"
        )
    level = logging.WARNING if asked is None else logging.INFO
    logger.log(level, "max_model_len is lowered to %d, the tokens that the pages hold", longest)
    return dataclasses.replace(limits, max_model_len=longest)


def _make_bill(
    setup: ModelSetup,
    demands: tuple[PageDemand, ...],
    plan: RememberedPlan,
    memory: DeviceMemory | None,
) -> MemoryBill:
    windows = tuple(geometry.sliding_window for geometry in setup.geometries)
    page_bytes = count_page_bytes(demands, plan.num_pages)
    is_given = _given_pages(setup, demands, memory) is not None
    reserved_bytes = 0 if is_given else RESERVED_BYTES
    used = page_bytes + plan.temporary_bytes + reserved_bytes
    num_host_pages = _count_host_pages(setup)
    bytes_per_host_page = sum(geometry.bytes_per_page for geometry in setup.geometries)
    return MemoryBill(
        device_bytes=memory.limit_bytes if memory else 0,
        weight_bytes=count_weight_bytes(setup),
        page_bytes=page_bytes,
        temporary_bytes=plan.temporary_bytes,
        reserved_bytes=reserved_bytes,
        left_bytes=memory.free_bytes - used if memory else None,
        num_pages=plan.num_pages,
        windows=windows,
        num_tokens=count_tokens(plan.num_pages, windows, setup.config.block_size),
        host_page_bytes=num_host_pages * bytes_per_host_page,
        num_host_pages=num_host_pages,
    )


def count_weight_bytes(setup: ModelSetup) -> int:
    """Bytes of the weights on one device."""
    return sum(map(device_bytes, setup.layout.abstract(setup.sharder)))
