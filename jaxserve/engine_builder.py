"""build_engine: from an EngineConfig to an engine that is compiled and ready."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.execution.device_setup import check_memory_pool, configure_jax
from jaxserve.execution.engine_plan import (
    EnginePlan,
    abstract_state,
    make_programs,
    plan_engine,
    scheduler_config,
)
from jaxserve.execution.limits import Limits
from jaxserve.execution.memory_plan import MemoryBill
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.program_store import ProgramStore, open_program_store
from jaxserve.processing.model_files import open_configured_model
from jaxserve.scheduling.scheduler import Scheduler
from models.config import ModelConfig
from models.kv_cache import allocate_cache
from models.loading.checkpoint import CheckpointLoader
from models.loading.source import ModelSource, OpenedModel
from models.weight_layout import WeightStore, make_dummy_leaves

logger = logging.getLogger(__name__)

MAX_COMPILE_THREADS = 8

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while an engine starts."""


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine and what its users must know of it.

    Attributes:
      engine: ready to step.
      model_config: the model's numbers.
      path: where the model came from.
      limits: the sizes chosen.
      bill: the memory's use.
      device_kind: of the device that runs the model, such as "NVIDIA H200" or "cpu".
      seconds: start-up time by stage.
    """

    engine: Engine
    model_config: ModelConfig
    path: Path
    limits: Limits
    bill: MemoryBill
    device_kind: str
    seconds: dict[str, float]


def build_engine(
    config: EngineConfig, progress: Progress | None = None, *, opened: OpenedModel | None = None
) -> BuiltEngine:
    """Load, plan and compile.

    Args:
      config: the settings.
      progress: hears of each stage.
      opened: the config's model, if the caller has opened it already.

    Raises:
      ModelLoadError: the model's files are missing or refused; before any allocation.
      EngineConfigError: the settings do not fit the model or the device.
    """
    builder = _EngineBuilder(config, progress or (lambda stage, done, total: None))
    return builder.build(opened or open_configured_model(config))


class _EngineBuilder:
    """Runs the stages of a start in order, and tells of each."""

    def __init__(self, config: EngineConfig, progress: Progress):
        self.config, self.progress = config, progress
        self.seconds: dict[str, float] = {}

    def build(self, opened: OpenedModel) -> BuiltEngine:
        path, source = opened.path, opened.source
        model = opened.model_config(self.config.hf_overrides)
        model = model.for_length(self.config.max_model_len or model.max_position_embeddings)
        cache_dir = configure_jax(
            gpu_memory_utilization=self.config.gpu_memory_utilization,
            compilation_cache_dir=self.config.compilation_cache_dir,
        )
        setup = ModelSetup.choose(self.config, model)
        jax.block_until_ready(setup.sharder.put(np.zeros(1, np.int32)))  # reserves the memory
        check_memory_pool(setup.sharder.mesh.local_devices)
        leaves = self._timed("load", lambda: self._load(setup, source, str(path)))
        plan = self._timed("plan", lambda: plan_engine(setup, cache_dir))
        store = open_program_store(setup, cache_dir)
        engine = self._timed("compile", lambda: self._compile(setup, plan, leaves, store))
        logger.info("%s", plan.bill)
        return BuiltEngine(
            engine=engine,
            model_config=model,
            path=path,
            limits=plan.limits,
            bill=plan.bill,
            device_kind=jax.devices()[0].device_kind,
            seconds=self.seconds,
        )

    def _timed[T](self, stage: str, run: Callable[[], T]) -> T:
        self.progress(stage, 0, 1)
        start = time.monotonic()
        result = run()
        self.seconds[stage] = time.monotonic() - start
        return result

    def _load(self, setup: ModelSetup, source: ModelSource, path: str) -> list[jax.Array]:
        if setup.config.load_format == "dummy":
            leaves = make_dummy_leaves(setup.layout, setup.sharder, setup.config.seed)
        else:
            store = WeightStore(setup.layout, setup.sharder)
            CheckpointLoader(setup.shared_model, store, path).load(
                source.tensors(), lambda done: self.progress("load", done, source.num_tensors)
            )
            leaves = store.leaves()
        return jax.block_until_ready(leaves)

    def _compile(
        self,
        setup: ModelSetup,
        plan: EnginePlan,
        leaves: list[jax.Array],
        store: ProgramStore | None,
    ) -> Engine:
        batch_builder, programs = make_programs(setup, plan.limits, plan.buckets, plan.num_pages)
        programs.compile_all(
            num_threads=min(MAX_COMPILE_THREADS, os.cpu_count() or 1),
            progress=lambda done, total: self.progress("compile", done, total),
            store=store,
        )
        runner = ModelRunner(
            leaves,
            allocate_cache(setup.geometries, plan.num_pages, setup.sharder),
            setup.sharder.zeros(abstract_state(setup, plan.limits)),
            programs,
            head_index=setup.layout.head_index,
        )
        return Engine(
            Scheduler(scheduler_config(setup, plan.limits, plan.buckets), plan.pools),
            batch_builder,
            runner,
            max_steps_in_flight=self.config.max_steps_in_flight,
            seed=self.config.seed,
        )
