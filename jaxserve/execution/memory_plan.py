"""The memory plan: how many pages fit, the bill that is shown, and what a restart remembers."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import EngineConfigError
from models.kv_cache import CacheGeometry

logger = logging.getLogger(__name__)

PAGE_COUNT_STEP = 1024
"""Page counts are multiples of it: a small change of free memory keeps the compiled shapes."""
RESERVED_BYTES = 512 << 20
"""For what XLA allocates from the same pool and no analysis shows: cuBLAS workspaces, literals."""
DEFAULT_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBill:
    """Where the device's memory goes, in bytes.

    Attributes:
      device_bytes: that the process may use; 0 where the device does not tell (CPU).
      weight_bytes: of the model on one device.
      page_bytes: of keys and values.
      temporary_bytes: of the largest step.
      num_pages: in each cache group.
      num_tokens: that the pages hold.
    """

    device_bytes: int
    weight_bytes: int
    page_bytes: int
    temporary_bytes: int
    num_pages: int
    num_tokens: int

    def __str__(self) -> str:
        parts = [
            f"weights {_gib(self.weight_bytes)}",
            f"pages {_gib(self.page_bytes)} ({self.num_pages} pages, {self.num_tokens} tokens)",
            f"temporaries {_gib(self.temporary_bytes)}",
        ]
        total = f"of {_gib(self.device_bytes)}" if self.device_bytes else "on this host"
        return f"memory {total}: " + ", ".join(parts)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def free_device_bytes(device: Any) -> tuple[int, int] | None:
    """(free, limit) bytes of a device's memory pool; None where it does not tell."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]


def pages_that_fit(available_bytes: int, geometries: Sequence[CacheGeometry]) -> int:
    """Pages of each group that fit, rounded down to a multiple of `PAGE_COUNT_STEP`.

    Raises:
      EngineConfigError: not even two pages fit.
    """
    bytes_per_page = sum(geometry.bytes_per_page for geometry in geometries)
    count = max(available_bytes, 0) // bytes_per_page
    if count >= PAGE_COUNT_STEP:
        count -= count % PAGE_COUNT_STEP
    if count < 2:
        raise EngineConfigError(
            f"the memory left must hold at least 2 pages of {bytes_per_page} bytes; got "
            f"{available_bytes} bytes; raise gpu_memory_utilization or take a smaller model"
        )
    return count


@dataclass(frozen=True, slots=True)
class RememberedPlan:
    """What a start found out and the next one can use; it is in every program's shape."""

    num_pages: int
    temporary_bytes: int


class PlanMemory:
    """Plans kept beside the compilation cache, one file for each (model, config, device)."""

    def __init__(self, folder: Path, *key_parts: object):
        text = json.dumps([str(part) for part in key_parts])
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._path = folder / "memory_plans" / f"{name}.json"

    def read(self) -> RememberedPlan | None:
        """The remembered plan, or None; a damaged file counts as none."""
        try:
            values = json.loads(self._path.read_text())
            return RememberedPlan(int(values["num_pages"]), int(values["temporary_bytes"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the memory plan %s cannot be read: %s", self._path, error)
            return None

    def write(self, plan: RememberedPlan) -> None:
        """Keep a plan; a folder that cannot be written costs a warning only."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(dataclasses.asdict(plan)))
            temporary.replace(self._path)
        except OSError as error:
            logger.warning("the memory plan %s cannot be written: %s", self._path, error)
