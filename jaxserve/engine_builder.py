"""build_engine: from an EngineConfig to an engine that is compiled and ready."""

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.device_setup import (
    check_memory_pool,
    check_pinned_memory,
    configure_jax,
)
from jaxserve.execution.engine_plan import (
    EnginePlan,
    abstract_state,
    make_policy,
    make_programs,
    plan_engine,
    scheduler_config,
)
from jaxserve.execution.host_pages import HostPages, check_host_memory
from jaxserve.execution.limits import Limits
from jaxserve.execution.lowering_job import make_job
from jaxserve.execution.lowering_pool import LoweringPool, open_lowering_pool
from jaxserve.execution.memory_plan import DeviceMemory, MemoryBill, RememberedPlan
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.poison import PagePoisoner
from jaxserve.execution.program_store import (
    LateProgramStore,
    ProgramStore,
    open_program_store,
    write_all,
)
from jaxserve.execution.programs import ProgramTable
from jaxserve.execution.swap_cost import PageCosts, seconds_to_compute
from jaxserve.execution.warm_up import warm_up
from jaxserve.processing.model_files import open_configured_model
from jaxserve.scheduling.scheduler import Scheduler
from models.config import ModelConfig
from models.kv_cache import abstract_cache
from models.loading.checkpoint import CheckpointLoader
from models.loading.source import ModelSource, OpenedModel, open_source
from models.sharding import compile_zeros
from models.weight_layout import WeightStore, make_dummy_leaves

logger = logging.getLogger(__name__)

MAX_COMPILE_THREADS = 8
GPU_STEP_SECONDS = 300.0
"""Far more than the largest step takes; a CPU may take any time."""

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) while an engine starts."""


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine and what its users must know of it.

    Attributes:
      engine: ready to step.
      model_config: the model's numbers.
      path: where the model came from.
      cache_dir: folder of what is kept between starts, such as compiled programs.
      limits: the sizes chosen.
      bill: the memory's use.
      device_kind: of the device that runs the model, such as "NVIDIA H200" or "cpu".
      seconds: start-up time by stage.
      step_timeout: seconds after which a step counts as hung; None = never.
      batch_invariant: whether a token's keys and values have the same bits in any batch.
    """

    engine: Engine
    model_config: ModelConfig
    path: Path
    cache_dir: Path
    limits: Limits
    bill: MemoryBill
    device_kind: str
    seconds: dict[str, float]
    step_timeout: float | None
    batch_invariant: bool


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    opened: OpenedModel | None = None,
    is_offline: bool = False,
) -> BuiltEngine:
    """Load, plan and compile.

    Args:
      config: the settings.
      progress: hears of each stage.
      opened: the config's model, if the caller has opened it already.
      is_offline: no request comes while others run; a step may then take longer.

    Raises:
      ModelLoadError: the model's files are missing or refused; before any allocation.
      EngineConfigError: the settings do not fit the model or the device.
    """
    builder = _EngineBuilder(config, progress or (lambda stage, done, total: None))
    return builder.build(opened or open_configured_model(config), is_offline=is_offline)


def set_up(
    config: EngineConfig, opened: OpenedModel, *, is_offline: bool = False
) -> tuple[ModelSetup, Path]:
    """Take the devices: the model's setup on them, and the folder of the caches.

    The devices' memory is reserved; nothing but a few bytes lies in it.

    Raises:
      ModelLoadError: the model's config is refused.
      EngineConfigError: the settings do not fit the model, the devices or the host.
    """
    check_host_memory(config.kv_offloading_bytes)
    model = model_for(config, opened)
    cache_dir = configure_jax(
        gpu_memory_utilization=config.gpu_memory_utilization,
        pinned_bytes=_count_pinned_bytes(config, opened),
        compilation_cache_dir=config.compilation_cache_dir,
    )
    setup = ModelSetup.choose(config, model, is_offline=is_offline)
    if setup.is_gpu:
        check_pinned_memory(config.kv_offloading_bytes // config.tensor_parallel_size)
    jax.block_until_ready(setup.sharder.put(np.zeros(1, np.int32)))  # reserves the memory
    check_memory_pool(setup.sharder.mesh.local_devices)
    return setup, cache_dir


def _count_pinned_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes that the host may hold for one device: its host tier, and its weights during sleep."""
    num_weights = sum(math.prod(tensor.shape) for _, tensor in opened.source.tensors())
    weight_bytes = num_weights * (4 if config.dtype in ("float", "float32") else 2)
    return (config.kv_offloading_bytes + weight_bytes) // config.tensor_parallel_size


def model_for(config: EngineConfig, opened: OpenedModel) -> ModelConfig:
    """The model's numbers under the settings; raises as `OpenedModel.model_config`."""
    model = opened.model_config(config.hf_overrides)
    return model.for_length(config.fixed_model_len or model.max_position_embeddings)


class _EngineBuilder:
    """Runs the stages of a start in order, and tells of each."""

    def __init__(self, config: EngineConfig, progress: Progress):
        self.config, self.progress = config, progress
        self.seconds: dict[str, float] = {}

    def build(self, opened: OpenedModel, *, is_offline: bool) -> BuiltEngine:
        path, source = opened.path, opened.source
        setup, cache_dir = set_up(self.config, opened, is_offline=is_offline)
        store = open_program_store(setup, cache_dir)
        with open_lowering_pool(setup, store) as pool:
            leaves = self._timed("load", lambda: _load(setup, source, path, self.progress))
            memory = DeviceMemory.of_devices(setup.sharder.mesh.local_devices)
            plan = self._timed("plan", lambda: plan_engine(setup, memory, cache_dir))

            def compile_and_assemble() -> tuple[EnginePlan, Engine]:
                settled, made = self._compile(setup, plan, memory, cache_dir, store, pool)
                return settled, self._assemble(setup, settled, *made, leaves, path)

            try:
                settled, engine = self._timed("compile", compile_and_assemble)
            except Exception:
                write_all()  # no engine will be idle
                raise
        if store is not None:
            store.write_while_idle(engine)
        logger.info("%s", settled.bill)
        return BuiltEngine(
            engine=engine,
            model_config=setup.model,
            path=path,
            cache_dir=cache_dir,
            limits=settled.limits,
            bill=settled.bill,
            device_kind=jax.devices()[0].device_kind,
            seconds=self.seconds,
            step_timeout=_step_timeout(self.config, is_gpu=setup.is_gpu),
            batch_invariant=self.config.batch_invariant,
        )

    def _timed[T](self, stage: str, run: Callable[[], T]) -> T:
        self.progress(stage, 0, 1)
        start = time.monotonic()
        result = run()
        self.seconds[stage] = time.monotonic() - start
        return result

    def _compile(
        self,
        setup: ModelSetup,
        plan: EnginePlan,
        memory: DeviceMemory | None,
        cache_dir: Path,
        store: LateProgramStore | None,
        pool: LoweringPool | None,
    ) -> tuple[EnginePlan, tuple[BatchBuilder, ProgramTable]]:
        """Compile for a plan; and again for fewer pages, where its estimate was too low."""
        made = self._compile_once(setup, plan, store, pool)
        step_bytes = made[1].temporary_bytes()
        if not plan.is_estimated or not step_bytes:  # or the programs do not tell
            return plan, made
        found = RememberedPlan(plan.num_pages, step_bytes)
        settled = plan_engine(setup, memory, cache_dir, found=found)
        if settled.num_pages != plan.num_pages:
            logger.warning(
                "a step needs %.2f GiB, more than was estimated: compiling again for fewer pages",
                step_bytes / 2**30,
            )
            if store is not None:
                store.forget()  # no start comes back to these page counts
            made = self._compile_once(setup, settled, store, pool)
        return settled, made

    def _compile_once(
        self,
        setup: ModelSetup,
        plan: EnginePlan,
        store: ProgramStore | None,
        pool: LoweringPool | None,
    ) -> tuple[BatchBuilder, ProgramTable]:
        what = (setup, plan.limits, plan.buckets, plan.num_pages)
        batch_builder, programs = make_programs(*what)
        lower_elsewhere = None
        if pool is not None:
            lower_elsewhere = functools.partial(pool.lower, make_job(*what))
        programs.compile_all(
            num_threads=min(MAX_COMPILE_THREADS, os.cpu_count() or 1),
            progress=lambda done, total: self.progress("compile", done, total),
            store=store,
            lower_elsewhere=lower_elsewhere,
        )
        return batch_builder, programs

    def _assemble(
        self,
        setup: ModelSetup,
        plan: EnginePlan,
        batch_builder: BatchBuilder,
        programs: ProgramTable,
        leaves: list[jax.Array],
        path: Path,
    ) -> Engine:
        """Allocate, and put the engine together; on a GPU each program runs once."""
        abstract = abstract_cache(setup.geometries, plan.num_pages, setup.sharder)
        allocate = compile_zeros((abstract, abstract_state(setup, plan.limits)))
        cache, state = allocate()
        page_mover = None
        if plan.bill.num_host_pages:
            host_pages = HostPages(setup.geometries, plan.bill.num_host_pages)
            page_mover = PageMover(programs, host_pages)
            cache = page_mover.measure(cache)
            is_used = self._choose_swap(page_mover, plan, leaves, setup.model.vocab_size)
            if is_used and setup.is_gpu:
                page_mover.take_memory(cache)
        runner = ModelRunner(
            leaves,
            cache,
            state,
            programs,
            head_index=setup.layout.head_index,
            page_mover=page_mover,
            allocate=allocate,
            load_weights=functools.partial(_load_again, setup, path),
        )
        if setup.is_gpu:
            warm_up(runner, batch_builder, plan.buckets)
        return Engine(
            Scheduler(
                scheduler_config(setup, plan.limits, plan.buckets),
                plan.pools,
                policy=make_policy(self.config),
            ),
            batch_builder,
            runner,
            max_steps_in_flight=self.config.max_steps_in_flight,
            seed=self.config.seed,
            poisoner=self._make_poisoner(setup, plan),
        )

    def _choose_swap(
        self, mover: PageMover, plan: EnginePlan, leaves: list[jax.Array], vocab_size: int
    ) -> bool:
        """Whether the host tier is used; it stays empty where computing again costs less."""
        assert mover.seconds_per_page is not None
        compute = seconds_to_compute(self.config.block_size, leaves, vocab_size)
        costs = PageCosts(mover.seconds_per_page.fetch, compute)
        is_used = costs.pays(self.config.preemption_mode)  # pyright: ignore[reportArgumentType]
        costs.log(is_used=is_used)
        if not is_used:
            for pool in plan.pools:
                pool.give_up_host()
        return is_used

    def _make_poisoner(self, setup: ModelSetup, plan: EnginePlan) -> PagePoisoner | None:
        if not self.config.debug_poison_pages:
            return None
        cache = abstract_cache(setup.geometries, plan.num_pages, setup.sharder)
        return PagePoisoner(plan.pools, cache, setup.sharder)


def _load(
    setup: ModelSetup, source: ModelSource, path: Path, progress: Progress
) -> list[jax.Array]:
    """The weights on their devices."""
    if setup.config.load_format == "dummy":
        leaves = make_dummy_leaves(setup.layout, setup.sharder, setup.config.seed)
    else:
        store = WeightStore(setup.layout, setup.sharder)
        CheckpointLoader(setup.shared_model, store, str(path)).load(
            source.tensors(), lambda done: progress("load", done, source.num_tensors)
        )
        leaves = store.leaves()
    return jax.block_until_ready(leaves)


def _load_again(setup: ModelSetup, path: Path) -> list[jax.Array]:
    """The weights as the files have them now: who trains may have written them anew."""
    source = open_source(path, setup.config.load_format)
    return _load(setup, source, path, lambda stage, done, total: None)


def _step_timeout(config: EngineConfig, *, is_gpu: bool) -> float | None:
    """The watchdog's limit; the programs are compiled by then, so it is the device's time alone."""
    if config.step_timeout is None:
        return GPU_STEP_SECONDS if is_gpu else None
    return config.step_timeout or None
