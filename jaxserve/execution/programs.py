"""ProgramTable: every step program, compiled ahead of time; nothing compiles while serving."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import jax
from jax.stages import Compiled

from jaxserve.execution.batch_builder import BatchBuilder
from jaxserve.execution.buckets import Bucket, BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.step_functions import StepFunctions
from models.kv_cache import KVCache
from models.sharding import Sharder

logger = logging.getLogger(__name__)

COMPILE_STACK_BYTES = 64 << 20
"""XLA's lowering recurses deeper than a thread's default stack."""

Options = dict[str, str | bool | int]

COMPILER_OPTIONS: Options = {"xla_disable_hlo_passes": "rematerialization"}
"""The pass counts the donated cache twice, finds it too large, and tries in vain to shrink it."""
LIBRARY_PRODUCTS: Options = {"xla_gpu_enable_triton_gemm": False}
"""cuBLAS for all products: nothing to gain from generated ones, and far less to autotune."""
NO_AUTOTUNING: Options = {"xla_gpu_autotune_level": 0}
MAX_ROWS_OF_GENERATED_PRODUCTS = 64
"""Below it XLA's own products beat cuBLAS (docs/performance.md)."""

ProgramKey = tuple[str, Bucket | int | None, SampleMode | None]


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
        self._functions, self._shapes, self._sharder = functions, shapes, sharder
        self._builder, self._buckets = builder, buckets
        self._programs: dict[ProgramKey, Compiled] = {}

    def forward(self, bucket: Bucket) -> Compiled:
        """(leaves, cache, state, packed) -> (hidden, slot_ids, cache, state)."""
        return self._programs["forward", bucket, None]

    def decode(self, bucket: Bucket, mode: SampleMode) -> Compiled:
        """(leaves, cache, state, packed) -> (result, cache, state)."""
        return self._programs["decode", bucket, mode]

    def sample(self, num_rows: int, mode: SampleMode) -> Compiled:
        """(head, hidden, slot_ids, state) -> (result, state)."""
        return self._programs["sample", num_rows, mode]

    def admit(self) -> Compiled:
        """(state, packed) -> state."""
        return self._programs["admit", None, None]

    def keys(self) -> tuple[ProgramKey, ...]:
        """All programs that serving can need."""
        buckets = self._buckets.all()
        forwards: list[ProgramKey] = [("forward", bucket, None) for bucket in buckets]
        decodes: list[ProgramKey] = [
            ("decode", bucket, mode)
            for bucket in buckets
            for mode in SampleMode
            if bucket.is_decode_only and mode.is_fused
        ]
        samples: list[ProgramKey] = [
            ("sample", num_rows, mode)
            for num_rows in sorted({bucket.num_rows for bucket in buckets})
            for mode in SampleMode
        ]
        return (("admit", None, None), *decodes, *forwards, *samples)

    def compile_all(
        self, *, num_threads: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile what is missing, in parallel.

        Args:
          num_threads: compilations at a time; lowering is done one at a time, under the GIL.
          progress: called with (done, total).
        """
        start, counter = time.monotonic(), CompilationCounter()
        keys = [key for key in self.keys() if key not in self._programs]
        # The forward passes go first: later programs find their products autotuned.
        forwards = [key for key in keys if key[0] == "forward"]
        others = [key for key in keys if key[0] != "forward"]
        previous = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
                for wave in (forwards, others):
                    # Lowering in threads is slower: it holds the GIL.
                    running = [pool.submit(_compile, key, self._lower(key)) for key in wave]
                    for future in as_completed(running):
                        key, compiled = future.result()
                        self._programs[key] = compiled
                        if progress is not None:
                            progress(len(self._programs), len(keys))
        finally:
            threading.stack_size(previous)
        logger.info(
            "%d programs ready in %.1f s, %d of them found in the compilation cache",
            len(keys),
            time.monotonic() - start,
            counter.num_cache_hits,
        )

    def measure_temporaries(self) -> int:
        """Bytes that the largest step needs beside its arguments; compiles it."""
        largest = self._buckets.all()[-1]
        keys: list[ProgramKey] = [
            ("forward", largest, None),
            ("sample", largest.num_rows, SampleMode.FULL),
        ]
        compiled = [_compile(key, self._lower(key), NO_AUTOTUNING)[1] for key in keys]
        return max(map(_temporary_bytes, compiled))

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        kind, shape, mode = key
        if isinstance(shape, Bucket):
            return self._lower_forward(shape, mode)
        if shape is not None and mode is not None:
            return self._lower_sample(shape, mode)
        assert kind == "admit", key
        return self._lower_admit()

    def _lower_forward(self, bucket: Bucket, mode: SampleMode | None) -> jax.stages.Lowered:
        """The forward pass, or with a mode its fusion with the sampler."""
        layout, shapes = self._builder.layout(bucket), self._shapes
        carried = (self._shardings(shapes.cache), self._shardings(shapes.state))
        if mode is None:
            function = functools.partial(self._functions.forward, layout)
            out_shardings = (self._whole(2), self._whole(1), *carried)
        else:
            function = functools.partial(self._functions.decode, layout, mode)
            out_shardings = (self._whole(2), *carried)
        jitted = jax.jit(function, donate_argnums=(1, 2), out_shardings=out_shardings)
        packed = self._sharder.replicated((layout.size,), "int32")
        return jitted.lower(shapes.leaves, shapes.cache, shapes.state, packed)

    def _lower_sample(self, num_rows: int, mode: SampleMode) -> jax.stages.Lowered:
        shapes, sharder = self._shapes, self._sharder
        function = functools.partial(self._functions.sample, mode)
        shardings = (self._whole(2), self._shardings(shapes.state))
        jitted = jax.jit(function, donate_argnums=(3,), out_shardings=shardings)
        head = shapes.leaves[self._functions.weights.head_index]
        hidden = sharder.replicated((num_rows, shapes.hidden_size), shapes.hidden_dtype)
        slot_ids = sharder.replicated((num_rows,), "int32")
        return jitted.lower(head, hidden, slot_ids, shapes.state)

    def _lower_admit(self) -> jax.stages.Lowered:
        layout = self._builder.admission_layout
        function = functools.partial(self._functions.admit, layout)
        state = self._shapes.state
        jitted = jax.jit(function, donate_argnums=(0,), out_shardings=self._shardings(state))
        return jitted.lower(state, self._sharder.replicated((layout.size,), "int32"))

    def _whole(self, num_axes: int) -> jax.sharding.Sharding:
        """Every device holds the array: one copy is read, and the next program expects it."""
        return self._sharder.sharding((1,) * num_axes, (None,) * num_axes)

    @staticmethod
    def _shardings(tree):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _compile(
    key: ProgramKey, lowered: jax.stages.Lowered, options: Options | None = None
) -> tuple[ProgramKey, Compiled]:
    start = time.monotonic()
    compiled = lowered.compile(compiler_options=_compiler_options(key[1]) | (options or {}))
    logger.debug("%s %s %s compiled in %.1f s", *key, time.monotonic() - start)
    return key, compiled


def _compiler_options(shape: Bucket | int | None) -> Options:
    if jax.default_backend() != "gpu":
        return dict(COMPILER_OPTIONS)
    if isinstance(shape, Bucket) and shape.is_decode_only:
        if shape.num_rows <= MAX_ROWS_OF_GENERATED_PRODUCTS:
            return dict(COMPILER_OPTIONS)
    return COMPILER_OPTIONS | LIBRARY_PRODUCTS


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
