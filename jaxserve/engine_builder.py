"""build_engine: from an EngineConfig to an engine that is compiled and ready."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
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
    MemoryBill,
    PlanMemory,
    RememberedPlan,
    count_tokens,
    free_mesh_bytes,
)
from jaxserve.execution.model_runner import ModelRunner
from jaxserve.execution.page_plan import (
    PAGE_COUNT_STEP,
    count_page_bytes,
    make_demands,
    pages_that_fit,
    plan_pages,
)
from jaxserve.execution.programs import ProgramShapes, ProgramTable
from jaxserve.execution.step_functions import StepFunctions
from jaxserve.model_files import open_configured_model
from jaxserve.scheduling.admission import max_sequence_tokens
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from models.attention_kernels import attention_kernels
from models.config import ModelConfig
from models.kv_cache import abstract_cache, allocate_cache, cache_geometries
from models.loading.checkpoint import CheckpointLoader
from models.loading.source import ModelSource, NamedTensor, OpenedModel
from models.registry import model_class
from models.sharding import Sharder, device_bytes, make_mesh, share_kv_heads
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
    opened = opened or open_configured_model(config)
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
        model = ModelConfig.from_dict(raw, str(config_path))
        self.model = model.for_length(self.config.max_model_len or model.max_position_embeddings)
        self.cache_dir = configure_jax(
            gpu_memory_utilization=self.config.gpu_memory_utilization,
            compilation_cache_dir=self.config.compilation_cache_dir,
        )
        self._choose_device()
        self._lay_out_model()
        self._timed("load", lambda: self._load(source, str(path)))
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
            self.shared_model = share_kv_heads(self.model, self.config.tensor_parallel_size)
            self.backend: AttentionBackend = choose_attention_backend(self.config.attention_backend)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error
        self.is_gpu = jax.default_backend() == "gpu"
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
            self.shared_model,
            stack=self.stack,
            dtype=self.dtype,
            kernels=attention_kernels(self.backend, jax.default_backend(), self.sharder.mesh),
        )
        self.geometries = cache_geometries(
            self.shared_model,
            page_size=self.config.block_size,
            dtype=self.dtype,
            stored_head_dim=self.config.stored_head_dim,
        )
        try:
            self.layout.abstract(self.sharder)
            abstract_cache(self.geometries, (2,) * len(self.geometries), self.sharder)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error

    def _load(self, source: ModelSource, path: str) -> None:
        if self.config.load_format == "dummy":
            self.leaves = make_dummy_leaves(self.layout, self.sharder, self.config.seed)
        else:
            store = WeightStore(self.layout, self.sharder)
            tensors = self._reported(source.tensors(), source.num_tensors)
            CheckpointLoader(self.shared_model, store, path).load(tensors)
            self.leaves = store.leaves()
        jax.block_until_ready(self.leaves)

    def _reported(self, tensors: Iterator[NamedTensor], total: int) -> Iterator[NamedTensor]:
        """The same tensors; the progress hears of each one that was taken."""
        for number, tensor in enumerate(tensors, start=1):
            yield tensor
            self.progress("load", number, total)

    def _plan(self) -> None:
        """Settle page counts, lengths and buckets."""
        self.limits = choose_limits(self.config, self.model, is_gpu=self.is_gpu)
        self.buckets = choose_buckets(self.config, self.limits, is_gpu=self.is_gpu)
        max_row_tokens = self._scheduler_config().max_row_tokens
        self.demands = make_demands(self.geometries, self.sharder, self.limits, max_row_tokens)
        remembered = self._count_pages()
        self.num_pages = remembered.num_pages
        self.pools = tuple(
            PagePool(count, self.config.block_size, sliding_window=geometry.sliding_window)
            for count, geometry in zip(self.num_pages, self.geometries, strict=True)
        )
        self._fit_max_model_len(max_row_tokens)
        self.bill = self._make_bill(remembered.temporary_bytes)

    def _fit_max_model_len(self, max_row_tokens: int) -> None:
        """A sequence that runs alone must find pages to its end."""
        wanted, asked = self.limits.max_model_len, self.config.max_model_len
        longest = max_sequence_tokens(
            self.pools, max_model_len=wanted, max_row_tokens=max_row_tokens
        )
        if longest == wanted:
            return
        if asked is not None:
            raise EngineConfigError(
                f"max_model_len must fit the pages' {longest} tokens; got {asked}; lower it, or "
                f"give the pages more memory"
            )
        logger.warning("max_model_len is lowered to %d, the tokens that the pages hold", longest)
        self.limits = dataclasses.replace(self.limits, max_model_len=longest)

    def _count_pages(self) -> RememberedPlan:
        """Page counts by override, by bytes a device, or by what the devices have left."""
        config = self.config
        if config.num_gpu_blocks_override is not None:
            count = config.num_gpu_blocks_override + 1
            return RememberedPlan((count,) * len(self.geometries), 0)
        if config.kv_cache_memory_bytes is not None:
            return RememberedPlan(pages_that_fit(config.kv_cache_memory_bytes, self.demands), 0)
        free = self._free_bytes()
        if free is None:
            of_host = DEFAULT_CPU_CACHE_BYTES // self.sharder.mesh.size
            return RememberedPlan(pages_that_fit(of_host, self.demands), 0)
        key = (self.model, self.limits, self.buckets, self.geometries, self.demands, self.stack)
        device = (jax.devices()[0].device_kind, self.sharder.mesh.size)
        memory = PlanMemory(self.cache_dir, *key, self.dtype, self.backend, device, jax.__version__)
        small = (PAGE_COUNT_STEP,) * len(self.geometries)
        return plan_pages(
            memory,
            self.demands,
            free[0],
            lambda: self._make_programs(small).measure_temporaries(),
        )

    def _free_bytes(self) -> tuple[int, int] | None:
        return free_mesh_bytes(self.sharder.mesh.local_devices)

    def _make_bill(self, temporary_bytes: int) -> MemoryBill:
        free = self._free_bytes()
        windows = tuple(geometry.sliding_window for geometry in self.geometries)
        return MemoryBill(
            device_bytes=free[1] if free else 0,
            weight_bytes=sum(map(device_bytes, self.layout.abstract(self.sharder))),
            page_bytes=count_page_bytes(self.demands, self.num_pages),
            temporary_bytes=temporary_bytes,
            num_pages=self.num_pages,
            windows=windows,
            num_tokens=count_tokens(self.num_pages, windows, self.config.block_size),
        )

    def _make_programs(self, num_pages: tuple[int, ...]) -> ProgramTable:
        """The table for page counts; nothing is compiled yet."""
        limits = self.limits
        max_pages = -(-limits.max_model_len // self.config.block_size)
        self.builder = BatchBuilder(
            self.buckets,
            max_num_seqs=limits.max_num_seqs,
            page_size=self.config.block_size,
            num_pages=num_pages,
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
            cache=abstract_cache(self.geometries, num_pages, self.sharder),
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
        runner = ModelRunner(
            self.leaves,
            allocate_cache(self.geometries, self.num_pages, self.sharder),
            self.sharder.zeros(self.abstract_state),
            self.programs,
            head_index=self.layout.head_index,
        )
        return Engine(
            Scheduler(self._scheduler_config(), self.pools),
            self.builder,
            runner,
            max_steps_in_flight=self.config.max_steps_in_flight,
            seed=self.config.seed,
        )

    def _scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            token_buckets=self.buckets.token_buckets,
            row_buckets=self.buckets.row_buckets,
            max_steps_in_flight=self.config.max_steps_in_flight,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
        )


def _choose_dtype(asked: str, of_model: str, is_gpu: bool) -> str:
    """CPUs compute in float32 unless told otherwise; GPUs in 16 bits."""
    names = {"half": "float16", "float": "float32"}
    if asked != "auto":
        return names.get(asked, asked)
    if not is_gpu:
        return "float32"
    return "float16" if of_model == "float16" else "bfloat16"
