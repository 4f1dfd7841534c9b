"""How many pages each cache group gets of the memory that is left."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import EngineConfigError
from jaxserve.execution.limits import Limits
from jaxserve.execution.memory_plan import RESERVED_BYTES, RememberedPlan
from jaxserve.scheduling.windows import count_pages_of_window
from models.kv_cache import CacheGeometry, abstract_cache
from models.sharding import Sharder, device_bytes

PAGE_COUNT_STEP = 1024
"""Page counts are multiples of it: a small change of free memory keeps the compiled shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDemand:
    """What one cache group wants.

    Attributes:
      bytes_per_page: on one device, whatever part of a page it holds.
      weight: pages in proportion to those of the other groups.
      fewest: pages that one sequence needs, the null page included.
      most: pages beyond it would never be used; None = no limit.
    """

    bytes_per_page: int
    weight: float = 1.0
    fewest: int = 2
    most: int | None = None


def make_demands(
    geometries: tuple[CacheGeometry, ...], sharder: Sharder, limits: Limits, max_row_tokens: int
) -> tuple[PageDemand, ...]:
    """The demand of each group.

    A sequence of n tokens holds n tokens' pages in a full group and at most `window` tokens' in a
    window group (while it decodes). Equal page counts are best where no sequence outgrows the
    window, and counts of window : max_model_len where all become as long as they may; the weight
    is the geometric mean of both.

    Args:
      geometries: of the groups.
      sharder: tells which part of a page a device holds.
      limits: of the engine.
      max_row_tokens: see `SchedulerConfig.max_row_tokens`.
    """
    one_page = abstract_cache(geometries, (1,) * len(geometries), sharder)
    demands = []
    for geometry, group in zip(geometries, one_page.groups, strict=True):
        num_bytes = device_bytes(group.k_pages) + device_bytes(group.v_pages)  # pyright: ignore[reportArgumentType]
        window, page_size = geometry.sliding_window, geometry.page_size
        if window is None:
            demands.append(PageDemand(bytes_per_page=num_bytes))
            continue
        per_sequence = min(
            count_pages_of_window(max_row_tokens, window=window, page_size=page_size),
            -(-limits.max_model_len // page_size),
        )
        demand = PageDemand(
            bytes_per_page=num_bytes,
            weight=min(1.0, math.sqrt(window / limits.max_model_len)),
            fewest=per_sequence + 1,
            most=limits.max_num_seqs * per_sequence + 1,
        )
        demands.append(demand)
    return tuple(demands)


def pages_that_fit(available_bytes: int, demands: Sequence[PageDemand]) -> tuple[int, ...]:
    """Share the bytes of the smallest device out to the groups.

    Each group gets pages by its weight, but a window group at least what one sequence needs, if
    equal counts would allow it, and at most what can be used; the rest goes to the others.
    Counts that follow the free memory are rounded down to a multiple of `PAGE_COUNT_STEP`.

    Raises:
      EngineConfigError: not even two pages of each group fit.
    """
    bytes_per_page = sum(demand.bytes_per_page for demand in demands)
    equal = _round_down(max(available_bytes, 0) / bytes_per_page)
    if equal < 2:
        raise EngineConfigError(
            f"the memory left must hold at least 2 pages of {bytes_per_page} bytes; got "
            f"{available_bytes} bytes; raise gpu_memory_utilization or take a smaller model"
        )
    settled: dict[int, int] = {}
    while True:
        unsettled = [index for index in range(len(demands)) if index not in settled]
        left = available_bytes - sum(demands[i].bytes_per_page * n for i, n in settled.items())
        weights = sum(demands[i].weight * demands[i].bytes_per_page for i in unsettled)
        shares = {i: demands[i].weight * left / weights for i in unsettled}
        limited = {i: _limit(share, demands[i], equal) for i, share in shares.items()}
        raised = {i: count for i, count in limited.items() if count > shares[i]}
        lowered = {i: count for i, count in limited.items() if count < shares[i]}
        # What is raised takes from the others, whose shares must shrink before one is settled.
        beyond = raised or lowered
        if not beyond:
            counts = settled | {i: _round_down(share) for i, share in shares.items()}
            return tuple(counts[index] for index in range(len(demands)))
        settled |= {i: int(count) for i, count in beyond.items()}


def fits_memory(plan: RememberedPlan, demands: Sequence[PageDemand], free_bytes: int) -> bool:
    """Whether pages, temporaries and reserve fit the bytes of the device that has the least."""
    if len(plan.num_pages) != len(demands):
        return False
    page_bytes = count_page_bytes(demands, plan.num_pages)
    return page_bytes + plan.temporary_bytes + RESERVED_BYTES <= free_bytes


def fill_memory(
    demands: Sequence[PageDemand], free_bytes: int, temporary_bytes: int
) -> RememberedPlan:
    """Pages for what temporaries and reserve leave; raises as `pages_that_fit`."""
    available = free_bytes - temporary_bytes - RESERVED_BYTES
    return RememberedPlan(pages_that_fit(available, demands), temporary_bytes)


def count_page_bytes(demands: Sequence[PageDemand], num_pages: tuple[int, ...]) -> int:
    """Bytes of all groups' pages on one device."""
    counts = zip(demands, num_pages, strict=True)
    return sum(demand.bytes_per_page * count for demand, count in counts)


def _limit(share: float, demand: PageDemand, equal: int) -> float:
    lowest = min(demand.fewest, equal)
    return max(lowest, share if demand.most is None else min(share, demand.most))


def _round_down(count: float) -> int:
    whole = int(count)
    return whole - whole % PAGE_COUNT_STEP if whole >= PAGE_COUNT_STEP else whole
