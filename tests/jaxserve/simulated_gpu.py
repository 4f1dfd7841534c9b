"""SimulatedGPU: starts and plans on a device that tells its free bytes, without one."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve import engine_builder
from jaxserve.config import EngineConfig
from jaxserve.engine_builder import BuiltEngine, build_engine
from jaxserve.execution import engine_plan, memory_plan
from jaxserve.execution.memory_plan import RESERVED_BYTES
from jaxserve.execution.programs import ProgramTable
from jaxserve.plan_report import PlanReport, report_plan
from tests.goldens_loader import GOLDENS_FOLDER


class SimulatedGPU:
    """A device that tells its free bytes, and starts that compile nothing.

    Attributes:
      free_bytes: what the device tells.
      num_compilations: how often all programs were compiled.
      temporary_bytes: what the largest program is found to need.
      estimated_bytes: what is expected of it.
    """

    temporary_bytes = estimated_bytes = 3_000_000
    page_bytes = 16 * 2 * 2 * 2 * 64 * 4  # of llama_gqa in float32

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.free_bytes, self.num_compilations = 0, 0
        limit = 1 << 40
        tell = lambda _: (self.free_bytes, limit)  # noqa: E731
        monkeypatch.setattr(memory_plan, "free_device_bytes", tell)
        monkeypatch.setattr(engine_builder, "configure_jax", lambda **_: folder)
        monkeypatch.setattr(ProgramTable, "compile_all", self._compile)
        monkeypatch.setattr(ProgramTable, "temporary_bytes", lambda _: self.temporary_bytes)
        monkeypatch.setattr(engine_plan, "estimate_with_margin", lambda *_: self.estimated_bytes)

    def _compile(self, *_: object, **__: object) -> None:
        self.num_compilations += 1

    def start(self, room_in_pages: float, **settings: Any) -> BuiltEngine:
        """Start with room for so many pages beside weights, temporaries and reserve."""
        self._make_room(room_in_pages)
        return build_engine(self._config(settings))

    def report(self, room_in_pages: float, weight_bytes: int, **settings: Any) -> PlanReport:
        """Plan with the same room, which the weights do not fill yet."""
        self._make_room(room_in_pages)
        self.free_bytes += weight_bytes
        return report_plan(self._config(settings))

    def _make_room(self, room_in_pages: float) -> None:
        room_bytes = int(room_in_pages * self.page_bytes)
        self.free_bytes = RESERVED_BYTES + self.temporary_bytes + room_bytes

    @staticmethod
    def _config(settings: dict[str, Any]) -> EngineConfig:
        defaults = {"max_num_seqs": 8, "row_buckets": (8,), "token_buckets": (64,)}
        model = str(GOLDENS_FOLDER / "llama_gqa")
        return EngineConfig(**{"model": model, **defaults, **settings})
