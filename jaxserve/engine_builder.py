"""build_engine: from an EngineConfig to an engine that is compiled and ready."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import EngineConfigError
from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.device_setup import configure_jax
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.limits import Limits, choose_buckets, choose_limits
from jaxserve.execution.memory_plan import (
    DEFAULT_CPU_CACHE_BYTES,
    PAGE_COUNT_STEP,
    RESERVED_BYTES,
    MemoryBill,
    PlanMemory,
    RememberedPlan,
    free_device_bytes,
    pages_that_fit,
)
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.programs import ProgramShapes, ProgramTable
from jaxserve.execution.step_functions import StepFunctions
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from models.attention import attention_kernels
from models.config import ModelConfig
from models.kv_cache import abstract_cache, allocate_cache, cache_geometries
from models.loading.checkpoint import CheckpointLoader
from models.loading.source import ModelSource, OpenedModel, open_model
from models.registry import model_class
from models.sharding import Sharder, make_mesh
from models.weight_layout import Stack, WeightLayout, WeightStore, make_dummy_leaves
from pallas_kernels.platform import AttentionBackend, choose_attention_backend

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
    opened = opened or open_model(config.model, config.load_format)
    return _EngineBuilder(config, progress or (lambda stage, done, total: None)).build(opened)


class _EngineBuilder:
    """The stages of a start, in order; each stage keeps what later ones need."""

    def __init__(self, config: EngineConfig, progress: Progress):
        self.config, self.progress = config, progress
        self.seconds: dict[str, float] = {}

    def build(self, opened: OpenedModel) -> BuiltEngine:
        path, source = opened.path, opened.source
        raw = source.config_dict() | (self.config.hf_overrides or {})
        config_path = path / "config.json" if path.is_dir() else path
        self.model = ModelConfig.from_dict(raw, str(config_path))
        self.cache_dir = configure_jax(
            gpu_memory_utilization=self.config.gpu_memory_utilization,
            compilation_cache_dir=self.config.compilation_cache_dir,
        )
        self._choose_device()
        self._lay_out_model()
        self._timed("load", lambda: self._load(source))
        self._timed("plan", self._plan)
        self._timed("compile", self._compile)
        engine = self._assemble()
        logger.info("%s", self.bill)
        return BuiltEngine(
            engine=engine,
            model_config=self.model,
            path=path,
            limits=self.limits,
            bill=self.bill,
            device_kind=jax.devices()[0].device_kind,
            seconds=self.seconds,
        )

    def _timed(self, stage: str, run: Callable[[], None]) -> None:
        self.progress(stage, 0, 1)
        start = time.monotonic()
        run()
        self.seconds[stage] = time.monotonic() - start

    def _choose_device(self) -> None:
        try:
            self.sharder = Sharder(make_mesh(self.config.tensor_parallel_size))
            self.backend: AttentionBackend = choose_attention_backend(self.config.attention_backend)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error
        self.is_gpu = jax.default_backend() == "gpu"
        if self.is_gpu and self.config.tensor_parallel_size > 1:
            raise EngineConfigError(
                f"tensor_parallel_size is not supported on GPUs in this release; "
                f"got {self.config.tensor_parallel_size}"
            )
        self.dtype = _choose_dtype(self.config.dtype, self.model.dtype, self.is_gpu)
        if self.backend == "mosaic" and self.dtype == "float32":
            if self.config.attention_backend == "mosaic":
                raise EngineConfigError(
                    "attention_backend mosaic must have a 16-bit dtype; got float32; use xla"
                )
            self.backend = choose_attention_backend("xla")
        default = "vectors" if self.is_gpu else "none"
        self.stack: Stack = cast(Stack, self.config.stacked_weights or default)
        device = jax.devices()[0]
        logger.info("device %s, %s, attention by %s", device.device_kind, self.dtype, self.backend)

    def _lay_out_model(self) -> None:
        self.layout = WeightLayout.of_model(
            model_class(self.model.architecture),
            self.model,
            stack=self.stack,
            dtype=self.dtype,
            kernels=attention_kernels(self.backend, jax.default_backend()),
        )
        self.geometries = cache_geometries(
            self.model,
            page_size=self.config.block_size,
            dtype=self.dtype,
            stored_head_dim=self.config.stored_head_dim,
        )
        try:
            self.layout.abstract(self.sharder)
            abstract_cache(self.geometries, (2,) * len(self.geometries), self.sharder)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error

    def _load(self, source: ModelSource) -> None:
        if self.config.load_format == "dummy":
            self.leaves = make_dummy_leaves(self.layout, self.sharder, self.config.seed)
        else:
            store = WeightStore(self.layout, self.sharder)
            CheckpointLoader(self.model, store).load(source.tensors())
            self.leaves = store.leaves()
        jax.block_until_ready(self.leaves)

    def _plan(self) -> None:
        """Settle page count, lengths and buckets; then allocate the cache."""
        self.limits = choose_limits(self.config, self.model, is_gpu=self.is_gpu)
        self.buckets = choose_buckets(self.config, self.limits, is_gpu=self.is_gpu)
        remembered = self._count_pages()
        self.num_pages = remembered.num_pages
        tokens = (self.num_pages - 1) * self.config.block_size
        wanted = self.config.max_model_len
        if wanted is not None and wanted > tokens:
            raise EngineConfigError(
                f"max_model_len must fit the pages' {tokens} tokens; got {wanted}; lower it, or "
                f"give the pages more memory"
            )
        longest = min(self.limits.max_model_len, tokens)
        if longest < self.limits.max_model_len:
            logger.warning(
                "max_model_len is lowered to %d, the tokens that the pages hold", longest
            )
        self.limits = dataclasses.replace(self.limits, max_model_len=longest)
        self.bill = self._make_bill(remembered.temporary_bytes)

    def _count_pages(self) -> RememberedPlan:
        """Page count by override, by bytes, or by what the device has left."""
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return RememberedPlan(config.num_gpu_blocks_override + 1, 0)
        if config.kv_cache_memory_bytes is not None:
            return RememberedPlan(pages_that_fit(config.kv_cache_memory_bytes, self.geometries), 0)
        free = free_device_bytes(jax.devices()[0])
        if free is None:
            return RememberedPlan(pages_that_fit(DEFAULT_CPU_CACHE_BYTES, self.geometries), 0)
        return self._count_pages_on_gpu(free[0])

    def _count_pages_on_gpu(self, free_bytes: int) -> RememberedPlan:
        key = (self.model, self.limits, self.buckets, self.geometries, self.stack)
        device = jax.devices()[0].device_kind
        memory = PlanMemory(self.cache_dir, *key, self.dtype, self.backend, device, jax.__version__)
        bytes_per_page = sum(geometry.bytes_per_page for geometry in self.geometries)
        plan = memory.read()
        if plan is not None:
            needed = plan.num_pages * bytes_per_page + plan.temporary_bytes + RESERVED_BYTES
            if needed <= free_bytes:
                return plan
        temporary_bytes = self._make_programs(PAGE_COUNT_STEP).measure_temporaries()
        available = free_bytes - temporary_bytes - RESERVED_BYTES
        plan = RememberedPlan(pages_that_fit(available, self.geometries), temporary_bytes)
        memory.write(plan)
        return plan

    def _make_bill(self, temporary_bytes: int) -> MemoryBill:
        free = free_device_bytes(jax.devices()[0])
        return MemoryBill(
            device_bytes=free[1] if free else 0,
            weight_bytes=self.layout.num_bytes // self.sharder.mesh.size,
            page_bytes=self.num_pages * sum(g.bytes_per_page for g in self.geometries),
            temporary_bytes=temporary_bytes,
            num_pages=self.num_pages,
            num_tokens=(self.num_pages - 1) * self.config.block_size,
        )

    def _make_programs(self, num_pages: int) -> ProgramTable:
        """The table for a page count; nothing is compiled yet."""
        pages = (num_pages,) * len(self.geometries)
        limits = self.limits
        max_pages = -(-limits.max_model_len // self.config.block_size)
        self.builder = BatchBuilder(
            self.buckets,
            max_num_seqs=limits.max_num_seqs,
            page_size=self.config.block_size,
            num_pages=pages,
            max_pages_per_seq=max_pages,
            vocab_size=self.model.vocab_size,
        )
        self.abstract_state = DeviceState.abstract(
            self.sharder,
            max_num_seqs=limits.max_num_seqs,
            max_pages=max_pages,
            num_groups=len(self.geometries),
        )
        shapes = ProgramShapes(
            leaves=self.layout.abstract(self.sharder),
            cache=abstract_cache(self.geometries, pages, self.sharder),
            state=self.abstract_state,
            hidden_size=self.model.hidden_size,
            hidden_dtype=self.dtype,
        )
        functions = StepFunctions(self.layout)
        return ProgramTable(functions, shapes, self.sharder, self.builder, self.buckets)

    def _compile(self) -> None:
        self.programs = self._make_programs(self.num_pages)
        self.programs.compile_all(
            num_threads=min(MAX_COMPILE_THREADS, os.cpu_count() or 1),
            progress=lambda done, total: self.progress("compile", done, total),
        )

    def _assemble(self) -> Engine:
        config, limits = self.config, self.limits
        pages = (self.num_pages,) * len(self.geometries)
        runner = ModelRunner(
            self.leaves,
            allocate_cache(self.geometries, pages, self.sharder),
            self.sharder.zeros(self.abstract_state),
            self.programs,
            head_index=self.layout.head_index,
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            token_buckets=self.buckets.token_buckets,
            row_buckets=self.buckets.row_buckets,
            max_steps_in_flight=config.max_steps_in_flight,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        pools = tuple(PagePool(count, config.block_size) for count in pages)
        return Engine(
            Scheduler(scheduler_config, pools),
            self.builder,
            runner,
            max_steps_in_flight=config.max_steps_in_flight,
            seed=config.seed,
        )


def _choose_dtype(asked: str, of_model: str, is_gpu: bool) -> str:
    """CPUs compute in float32 unless told otherwise; GPUs in 16 bits."""
    names = {"half": "float16", "float": "float32"}
    if asked != "auto":
        return names.get(asked, asked)
    if not is_gpu:
        return "float32"
    return "float16" if of_model == "float16" else "bfloat16"
