"""ProgramTable: every step program, compiled ahead of time; nothing compiles while serving."""

import contextlib
import enum
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import jax
from jax.stages import Compiled

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import Bucket, BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.page_functions import (
    PAGE_CHUNK_SIZES,
    PageChunk,
    lower_copy,
    lower_fetch,
    lower_offload,
)
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.step_functions import StepFunctions
from jaxserve.execution.step_program import StepProgram
from models.kv_cache import KVCache
from models.sharding import Sharder
from pallas_kernels.platform import default_backend

logger = logging.getLogger(__name__)

COMPILE_STACK_BYTES = 64 << 20
"""XLA's lowering recurses deeper than a thread's default stack."""

Options = dict[str, str | bool | int]

_ALWAYS: Options = {"xla_disable_hlo_passes": "rematerialization"}
"""The pass counts the donated cache twice, finds it too large, and tries in vain to shrink it."""
_LIBRARY_PRODUCTS: Options = _ALWAYS | {"xla_gpu_enable_triton_gemm": False}
"""cuBLAS for all products: nothing to gain from generated ones, and far less to autotune."""
MAX_FEW_ROWS = 64
"""Decode rows up to which XLA's generated products beat cuBLAS (docs/performance.md)."""


class ProgramClass(enum.Enum):
    """What the compiler's options depend on."""

    ON_CPU = enum.auto()
    FEW_ROWS = enum.auto()
    """Decode on a GPU, of at most `MAX_FEW_ROWS` rows."""
    MANY_ROWS = enum.auto()
    """All else on a GPU."""


COMPILER_OPTIONS: dict[ProgramClass, Options] = {
    ProgramClass.ON_CPU: _ALWAYS,
    ProgramClass.FEW_ROWS: _ALWAYS,
    ProgramClass.MANY_ROWS: _LIBRARY_PRODUCTS,
}

_STEP_KINDS = ("forward", "sample", "decode")
ProgramKey = tuple[str, Bucket | PageChunk | int | None, SampleMode | None]
LowerElsewhere = Callable[[Sequence[ProgramKey]], Iterator[tuple[ProgramKey, bytes | None]]]
"""Begins to lower step programs in other processes; None = one is left (`LoweringPool.lower`)."""


@dataclass(frozen=True, kw_only=True)
class ProgramShapes:
    """The abstract arguments that programs are lowered with."""

    leaves: list[jax.ShapeDtypeStruct]
    cache: KVCache
    state: DeviceState
    hidden_size: int
    hidden_dtype: str


class ProgramTable:
    """Key -> compiled program. An unplanned key is an error, never a silent compile."""

    def __init__(
        self,
        functions: StepFunctions,
        shapes: ProgramShapes,
        sharder: Sharder,
        builder: BatchBuilder,
        buckets: BucketTable,
    ):
        """Compile nothing yet; a builder that takes moves or copies of pages asks for theirs."""
        self._functions, self._shapes, self._sharder = functions, shapes, sharder
        self._builder, self._buckets = builder, buckets
        self._programs: dict[ProgramKey, Compiled] = {}

    def forward(self, bucket: Bucket) -> Compiled:
        """(leaves, cache, state, packed) -> (hidden, slot_ids, cache, state).

        Of buckets that fuse no sampler.
        """
        return self._programs["forward", bucket, None]

    def decode(self, bucket: Bucket, mode: SampleMode) -> Compiled:
        """(leaves, cache, state, packed) -> (result, cache, state); of buckets that fuse it."""
        return self._programs["decode", bucket, mode]

    def sample(self, num_rows: int, mode: SampleMode) -> Compiled:
        """(head, hidden, slot_ids, state) -> (result, state), of the first rows of any forward."""
        return self._programs["sample", num_rows, mode]

    def admit(self) -> Compiled:
        """(state, packed) -> state."""
        return self._programs["admit", None, None]

    def offload(self, chunk: PageChunk) -> Compiled:
        """(k_pages, v_pages, page_ids) -> an array in the host's memory for each page."""
        return self._programs["offload", chunk, None]

    def fetch(self, chunk: PageChunk) -> Compiled:
        """(k_pages, v_pages, page_ids, and such an array for each page) -> (k_pages, v_pages)."""
        return self._programs["fetch", chunk, None]

    def copy_pages(self) -> Compiled:
        """(cache, pairs) -> cache."""
        return self._programs["copy_pages", None, None]

    def keys(self) -> tuple[ProgramKey, ...]:
        """All programs that serving can need; the first ones are compiled first.

        Decode programs of few rows take longest. Those of one bucket stand apart, so that the later
        one finds its products tuned. A decode step whose sampler is not fused, though its bucket
        fuses one, runs in a mixed bucket (`BatchBuilder.build`).
        """
        buckets = self._buckets.all()
        decode = [bucket for bucket in buckets if bucket.fuses_sampler]
        forward = [bucket for bucket in buckets if not bucket.fuses_sampler]
        first, *others = (mode for mode in SampleMode if mode.is_fused)
        groups = range(len(self._shapes.cache.groups) if self._builder.num_host_pages else 0)
        chunks = [PageChunk(group, size) for group in groups for size in PAGE_CHUNK_SIZES]
        return (
            *(("decode", bucket, first) for bucket in decode),
            *(("forward", bucket, None) for bucket in forward),
            *(("decode", bucket, mode) for mode in others for bucket in decode),
            *(
                ("sample", R, mode)
                for mode in SampleMode
                for R in self._buckets.sampler_sizes(is_greedy=mode == SampleMode.GREEDY)
            ),
            ("admit", None, None),
            *((("copy_pages", None, None),) if self._builder.takes_copies else ()),
            *((kind, chunk, None) for chunk in chunks for kind in ("offload", "fetch")),
        )

    def compile_all(
        self,
        *,
        num_threads: int,
        progress: Callable[[int, int], None] | None = None,
        store: ProgramStore | None = None,
        lower_elsewhere: LowerElsewhere | None = None,
    ) -> None:
        """Load or compile what is missing, in parallel.

        Args:
          num_threads: programs compiled at a time.
          progress: called with (done, total).
          store: keeps programs for later starts; None = each is lowered and compiled.
          lower_elsewhere: lowers in other processes; None = here, one at a time, under the GIL.
        """
        start, counter = time.monotonic(), CompilationCounter()
        keys = [key for key in self.keys() if key not in self._programs]
        previous = threading.stack_size(COMPILE_STACK_BYTES)

        def take(jobs: Iterable[Future[tuple[ProgramKey, Compiled | None]]]) -> None:
            for job in as_completed(jobs):
                key, program = job.result()
                if program is not None:
                    self._programs[key] = program
                    if progress is not None:
                        progress(len(self._programs), len(keys))

        try:
            only_store = contextlib.nullcontext() if store is None else store.without_xla_cache()
            threads = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
            with only_store, _no_collections(), threads as pool:
                if store is not None:
                    take([pool.submit(self._load, key, store) for key in keys])
                missing = [key for key in keys if key not in self._programs]
                # Lowering in threads is slower: it holds the GIL. Compilation goes on meanwhile.
                lowered = self._lower_all(missing, lower_elsewhere)
                take([pool.submit(self._compile, *program, store) for program in lowered])
        finally:
            threading.stack_size(previous)
        logger.info(
            "%d programs ready in %.1f s: %d were kept whole, %d found in XLA's cache",
            len(keys),
            time.monotonic() - start,
            len(keys) - len(missing),
            counter.num_cache_hits,
        )

    def temporary_bytes(self) -> int:
        """Bytes on one device that the largest compiled step needs beside its arguments.

        0 where the programs do not tell.
        """
        of_steps = (p for key, p in self._programs.items() if key[0] in _STEP_KINDS)
        return max(map(_temporary_bytes, of_steps), default=0)

    def _load(self, key: ProgramKey, store: ProgramStore) -> tuple[ProgramKey, Compiled | None]:
        return key, store.read(self._describe(key))

    def _compile(
        self, key: ProgramKey, lowered: jax.stages.Lowered, store: ProgramStore | None
    ) -> tuple[ProgramKey, Compiled]:
        start = time.monotonic()
        compiled = lowered.compile(COMPILER_OPTIONS[_class_of(key[1])])
        logger.debug("%s %s %s compiled in %.1f s", *key, time.monotonic() - start)
        if store is not None:
            store.write(self._describe(key), compiled)
        return key, compiled

    def _describe(self, key: ProgramKey) -> str:
        """Name a program by all that the table knows of it."""
        shape, builder = key[1], self._builder
        layout = builder.layout(shape) if isinstance(shape, Bucket) else builder.admission_layout
        rows, options = self._buckets.max_num_rows, COMPILER_OPTIONS[_class_of(shape)]
        return f"{key} {layout} {rows} {options} {self._shapes_text}"

    @functools.cached_property
    def _shapes_text(self) -> str:
        return repr(self._shapes)

    def _lower_all(
        self, keys: Sequence[ProgramKey], lower_elsewhere: LowerElsewhere | None
    ) -> Iterator[tuple[ProgramKey, jax.stages.Lowered]]:
        """Each program as soon as it is lowered."""
        if lower_elsewhere is None:
            yield from ((key, self._lower(key)) for key in keys)
            return
        steps = [key for key in keys if key[0] in _STEP_KINDS]
        carried, num_carried = lower_elsewhere(steps), 0
        yield from ((key, self._lower(key)) for key in keys if key[0] not in _STEP_KINDS)
        for key, program in carried:
            num_carried += program is not None
            yield key, self._lower(key) if program is None else self._take(key, program)
        logger.debug("%d of %d programs were lowered elsewhere", num_carried, len(keys))

    def _take(self, key: ProgramKey, program: bytes) -> jax.stages.Lowered:
        """What another process has lowered, unless it does not fit."""
        try:
            return self.step_program(key).trace_exported(program).lower()
        except Exception as error:  # of reading it: anything
            logger.warning("%s %s %s was lowered in vain elsewhere: %s", *key, error)
            return self._lower(key)

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        kind, shape, _ = key
        if kind in _STEP_KINDS:
            return self.step_program(key).trace().lower()
        if isinstance(shape, PageChunk):
            lower = lower_offload if kind == "offload" else lower_fetch
            group = self._shapes.cache.groups[shape.group]
            return lower(group, shape.num_pages, self._sharder)
        if kind == "copy_pages":
            return lower_copy(self._shapes.cache, self._sharder)
        assert kind == "admit", key
        return self._lower_admit()

    def step_program(self, key: ProgramKey) -> StepProgram:
        """What a program of "forward", "sample" or "decode" is lowered from."""
        _, shape, mode = key
        if isinstance(shape, Bucket):
            return self._forward_program(shape, mode)
        assert isinstance(shape, int) and mode is not None, key
        return self._sample_program(shape, mode)

    def _forward_program(self, bucket: Bucket, mode: SampleMode | None) -> StepProgram:
        """The forward pass, or with a mode its fusion with the sampler."""
        layout, shapes = self._builder.layout(bucket), self._shapes
        if mode is None:
            num_outputs = self._buckets.max_num_rows
            function = functools.partial(self._functions.forward, layout, num_outputs)
            new_shardings = (self._whole(2), self._whole(1))
        else:
            function = functools.partial(self._functions.decode, layout, mode)
            new_shardings = (self._whole(2),)
        packed = self._sharder.replicated((layout.size,), "int32")
        return StepProgram(
            name="forward" if mode is None else "decode",
            function=function,
            arguments=(shapes.leaves, shapes.cache, shapes.state, packed),
            donated=(1, 2),
            new_shardings=new_shardings,
        )

    def _sample_program(self, num_rows: int, mode: SampleMode) -> StepProgram:
        shapes, sharder = self._shapes, self._sharder
        head = shapes.leaves[self._functions.weights.head_index]
        num_outputs = self._buckets.max_num_rows
        hidden = sharder.replicated((num_outputs, shapes.hidden_size), shapes.hidden_dtype)
        slot_ids = sharder.replicated((num_outputs,), "int32")
        return StepProgram(
            name="sample",
            function=functools.partial(self._functions.sample, mode, num_rows),
            arguments=(head, hidden, slot_ids, shapes.state),
            donated=(3,),
            new_shardings=(self._whole(2),),
        )

    def _lower_admit(self) -> jax.stages.Lowered:
        layout = self._builder.admission_layout
        function = functools.partial(self._functions.admit, layout)
        state = self._shapes.state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        jitted = jax.jit(function, donate_argnums=(0,), out_shardings=shardings)
        return jitted.lower(state, self._sharder.replicated((layout.size,), "int32"))

    def _whole(self, num_axes: int) -> jax.sharding.Sharding:
        """Every device holds the array: one copy is read, and the next program expects it."""
        return self._sharder.sharding((1,) * num_axes, (None,) * num_axes)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without the collector of cycles, which walks in vain over all that lowering keeps: 5 %."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _class_of(shape: Bucket | PageChunk | int | None) -> ProgramClass:
    if default_backend() != "gpu":
        return ProgramClass.ON_CPU
    if isinstance(shape, Bucket) and shape.is_decode_only and shape.num_rows <= MAX_FEW_ROWS:
        return ProgramClass.FEW_ROWS
    return ProgramClass.MANY_ROWS


def _temporary_bytes(compiled: Compiled) -> int:
    """Bytes that a call needs beside its arguments; 0 where the backend does not tell."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + new_outputs


class CompilationCounter:
    """Counts XLA compilations of this process since it was made; serving must add none."""

    _num_compilations = 0
    _num_cache_hits = 0
    _is_listening = False

    def __init__(self):
        cls = type(self)
        if not cls._is_listening:
            jax.monitoring.register_event_duration_secs_listener(cls._on_duration)
            jax.monitoring.register_event_listener(cls._on_event)
            cls._is_listening = True
        self._compilations_before = cls._num_compilations
        self._hits_before = cls._num_cache_hits

    @property
    def count(self) -> int:
        """Programs that were compiled, or found in the persistent cache."""
        return type(self)._num_compilations - self._compilations_before

    @property
    def num_cache_hits(self) -> int:
        """Programs that were found in the persistent cache."""
        return type(self)._num_cache_hits - self._hits_before

    @classmethod
    def _on_duration(cls, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            cls._num_compilations += 1

    @classmethod
    def _on_event(cls, event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            cls._num_cache_hits += 1
