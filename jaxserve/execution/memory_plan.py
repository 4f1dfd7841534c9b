"""The memory plan: what is free, the bill that is shown, and what a restart remembers."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)

RESERVED_BYTES = 512 << 20
"""For what XLA allocates from the same pool and no analysis shows: cuBLAS workspaces, literals."""
DEFAULT_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBill:
    """Where the memory of one device goes, in bytes; of the smallest if they differ.

    Attributes:
      device_bytes: that the process may use; 0 where the device does not tell (CPU).
      weight_bytes: of the model on one device.
      page_bytes: of keys and values on one device.
      temporary_bytes: of the largest step; 0 where the number of pages does not follow from it.
      reserved_bytes: for what nothing else names; 0 in the same case.
      left_bytes: that nobody uses, negative where the pages asked for are too many; None where
        the device does not tell.
      num_pages: of each cache group.
      windows: for each group the tokens that its layers see, or None for all.
      num_tokens: that the pages hold when no sequence gives any back: of the full groups, or of
        the window groups where there are no others.
      host_page_bytes: of the host's memory, which no device holds; 0 = there is no host tier.
      num_host_pages: of each cache group, in the host's memory.
    """

    device_bytes: int
    weight_bytes: int
    page_bytes: int
    temporary_bytes: int
    reserved_bytes: int
    left_bytes: int | None
    num_pages: tuple[int, ...]
    windows: tuple[int | None, ...]
    num_tokens: int
    host_page_bytes: int
    num_host_pages: int

    def __str__(self) -> str:
        parts = [
            f"weights {_gib(self.weight_bytes)}",
            f"pages {_gib(self.page_bytes)} ({self._list_pages()}, {self.num_tokens} tokens)",
            f"temporaries {_gib(self.temporary_bytes)}",
        ]
        total = f"of {_gib(self.device_bytes)}" if self.device_bytes else "on this host"
        text = f"memory {total}: " + ", ".join(parts)
        if not self.host_page_bytes:
            return text
        return f"{text}; host tier {_gib(self.host_page_bytes)} ({self.num_host_pages} pages)"

    def _list_pages(self) -> str:
        names = ["" if window is None else f" of window {window}" for window in self.windows]
        counts = zip(self.num_pages, names, strict=True)
        return " + ".join(f"{count} pages{name}" for count, name in counts)


def count_tokens(
    num_pages: tuple[int, ...], windows: tuple[int | None, ...], page_size: int
) -> int:
    """Tokens that the pages hold when no sequence gives any back; see `MemoryBill`."""
    groups = list(zip(num_pages, windows, strict=True))
    of_full = [count for count, window in groups if window is None]
    return (min(of_full or num_pages) - 1) * page_size


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of the device that has the least.

    Attributes:
      limit_bytes: that the process may use.
      free_bytes: what is left of it; negative where weights that are yet to come do not fit.
    """

    limit_bytes: int
    free_bytes: int

    @classmethod
    def of_devices(cls, devices: Iterable[Any]) -> Self | None:
        """What the devices tell now; None where one does not tell."""
        found = [free_device_bytes(device) for device in devices]
        known = [pair for pair in found if pair is not None]
        if not known or len(known) < len(found):
            return None
        return cls(
            limit_bytes=min(limit for _, limit in known), free_bytes=min(free for free, _ in known)
        )

    def less(self, num_bytes: int) -> "DeviceMemory":
        """The memory when so many more bytes are in use."""
        return dataclasses.replace(self, free_bytes=self.free_bytes - num_bytes)


def free_device_bytes(device: Any) -> tuple[int, int] | None:
    """(free, limit) bytes of a device's memory pool; None where it does not tell."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]


@dataclass(frozen=True, slots=True)
class RememberedPlan:
    """What a start found out and the next one can use; it is in every program's shape.

    Attributes:
      num_pages: of each cache group.
      temporary_bytes: of the largest step on one device.
    """

    num_pages: tuple[int, ...]
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
            if not isinstance(values["num_pages"], list):
                raise TypeError(f"num_pages must be a list; got {values['num_pages']!r}")
            num_pages = tuple(map(int, values["num_pages"]))
            return RememberedPlan(num_pages, int(values["temporary_bytes"]))
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
