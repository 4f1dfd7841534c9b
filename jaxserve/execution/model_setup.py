"""ModelSetup: how a model lies on its devices; chosen before anything is loaded."""

import logging
from dataclasses import dataclass
from typing import Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from models import few_rows
from models.config import ModelConfig
from models.invariant_kernels import invariance_refusal, invariant_kernels
from models.kernels import ModelKernels, model_kernels
from models.kv_cache import CacheGeometry, abstract_cache, cache_geometries
from models.products import MAX_SKINNY_BYTES
from models.registry import model_class
from models.sharding import MESH_AXES, Sharder, device_bytes, make_mesh, share_kv_heads
from models.weight_layout import Stack, WeightLayout
from pallas_kernels.platform import (
    AttentionBackend,
    choose_attention_backend,
    default_backend,
)

logger = logging.getLogger(__name__)

MAX_CHOSEN_STEPS = 8
OFFLINE_MULTI_STEP_ROWS, SERVER_MULTI_STEP_ROWS = 64, 8
"""Rows up to which several steps are one dispatch: a small model waits for the host there."""
MAX_DISPATCH_SECONDS = 4e-3
"""What a new request may wait for a dispatch that has just begun, on a server with few tokens in
its cache; there may be another one behind it."""
GPU_BYTES_PER_SECOND, GPU_STEP_SECONDS = 4.3e12, 5e-4
"""An H200's memory, and what a step of one row takes beside reading the weights (2026-11-30)."""


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """A model and the devices that run it.

    Attributes:
      config: the settings.
      model: the model's numbers.
      shared_model: the same with KV heads copied where there are fewer than devices.
      sharder: places arrays on the devices.
      backend: which attention kernels run.
      dtype: of weights and computation.
      stack: which weights are one array for all layers.
      layout: of the weights.
      geometries: of the cache groups.
      is_gpu: whether the devices are GPUs.
      fuses_few_rows: whether one row has kernels of its own; see `ModelKernels`.
      is_offline: no request comes while others run, so none waits for a step to end.
    """

    config: EngineConfig
    model: ModelConfig
    shared_model: ModelConfig
    sharder: Sharder
    backend: AttentionBackend
    dtype: str
    stack: Stack
    layout: WeightLayout
    geometries: tuple[CacheGeometry, ...]
    is_gpu: bool
    fuses_few_rows: bool
    is_offline: bool

    @classmethod
    def choose(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        *,
        is_offline: bool = False,
        for_absent_gpu: bool = False,
    ) -> Self:
        """Choose devices, types and layouts; allocates nothing.

        Args:
          config: the settings.
          model: the model's numbers.
          is_offline: see above.
          for_absent_gpu: gives the sizes that GPUs would get which this machine lacks. Kernels
            change no size, but for a bucket of one row, so plain XLA stands for them.

        Raises:
          EngineConfigError: the settings do not fit the model or the devices.
        """
        is_gpu = for_absent_gpu or default_backend() == "gpu"
        dtype = _choose_dtype(config.dtype, model.dtype, is_gpu)
        try:
            sharder = Sharder(_make_mesh(config.tensor_parallel_size, for_absent_gpu))
            shared_model = share_kv_heads(model, config.tensor_parallel_size)
            asked = "xla" if for_absent_gpu else config.attention_backend
            backend = _choose_backend(asked, dtype)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error
        stack = _choose_stack(config, shared_model, backend, dtype)
        if not for_absent_gpu:
            kind = jax.devices()[0].device_kind
            logger.info("device %s, %s, attention by %s", kind, dtype, backend)
        kernels = _choose_kernels(config, backend, sharder, for_absent_gpu)
        layout = WeightLayout.of_model(
            model_class(model.architecture),
            shared_model,
            stack=stack,
            dtype=dtype,
            kernels=kernels,
        )
        geometries = cache_geometries(
            shared_model,
            page_size=config.block_size,
            dtype=dtype,
            stored_head_dim=config.stored_head_dim,
        )
        if config.batch_invariant:
            refusal = invariance_refusal(model, dtype, geometries[0].stored_head_dim)
            if refusal is not None:
                raise EngineConfigError(f"a model that runs with batch_invariant {refusal}")
        try:
            layout.abstract(sharder)
            abstract_cache(geometries, (2,) * len(geometries), sharder)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error
        return cls(
            config=config,
            model=model,
            shared_model=shared_model,
            sharder=sharder,
            backend=backend,
            dtype=dtype,
            stack=stack,
            layout=layout,
            geometries=geometries,
            is_gpu=is_gpu,
            fuses_few_rows=kernels.fuses_few_rows and dtype != "float32",
            is_offline=is_offline,
        )

    @property
    def fuses_attention(self) -> bool:
        """Whether one row's kernels include one for its attention, of short contexts."""
        model = self.shared_model
        heads = (model.num_query_heads_per_kv_head, model.head_dim, model.rotary_dim)
        return self.fuses_few_rows and few_rows.fits_heads(*heads, self.geometries[0])

    @property
    def num_scheduler_steps(self) -> int:
        """Decode steps in one dispatch: many where no request comes meanwhile, else for a moment.

        They save the host's time, which a GPU would otherwise wait for. A CPU waits for nobody.
        """
        if self.config.num_scheduler_steps is not None:
            return self.config.num_scheduler_steps
        if not self.is_gpu:
            return 1
        if self.is_offline:
            return MAX_CHOSEN_STEPS
        num_bytes = sum(map(device_bytes, self.layout.abstract(self.sharder)))
        step_seconds = num_bytes / GPU_BYTES_PER_SECOND + GPU_STEP_SECONDS
        return max(1, min(MAX_CHOSEN_STEPS, int(MAX_DISPATCH_SECONDS / step_seconds)))

    @property
    def prefill_first(self) -> bool:
        """Whether prompts that fill a step hold decoding back: where only the whole time counts."""
        if self.config.prefill_first is not None:
            return self.config.prefill_first
        return self.is_offline and self.config.scheduling_policy != "slo"

    @property
    def multi_step_rows(self) -> int:
        """Most rows of a dispatch of several steps."""
        return OFFLINE_MULTI_STEP_ROWS if self.is_offline else SERVER_MULTI_STEP_ROWS


def _make_mesh(num_devices: int, is_absent: bool) -> Mesh:
    """The mesh; of several absent devices only its shape, from which no array can be made."""
    if num_devices == 1 or not is_absent:
        return make_mesh(num_devices)
    return cast(Mesh, AbstractMesh((1, num_devices), MESH_AXES))


def _choose_kernels(
    config: EngineConfig, backend: AttentionBackend, sharder: Sharder, for_absent_gpu: bool
) -> ModelKernels:
    """The kernels of a backend, or those of the batch-invariant mode.

    Raises:
      EngineConfigError: the device cannot run these.
    """
    if config.batch_invariant and not for_absent_gpu:
        if backend != "mosaic":
            raise EngineConfigError(
                "batch_invariant must run on a Hopper GPU by the mosaic kernels; "
                f"got the {backend} backend on {jax.devices()[0].device_kind}"
            )
        return invariant_kernels()
    return model_kernels(backend, default_backend(), sharder.mesh)


def _choose_stack(
    config: EngineConfig, model: ModelConfig, backend: AttentionBackend, dtype: str
) -> Stack:
    """Which weights are one array for all layers, if that is not asked for.

    Fewer arrays make a step's call cheaper. A CPU copies each slice that it takes out of a stack.
    XLA tunes the product with each slice anew, which takes minutes; the skinny kernel needs none
    of that, so matrices are stacked where it has all products of few rows.
    """
    if config.stacked_weights is not None:
        return cast(Stack, config.stacked_weights)
    if default_backend() != "gpu":
        return "none"
    largest = max(2 * model.intermediate_size, model.qkv_size) * model.hidden_size
    is_small = largest * jnp.dtype(dtype).itemsize <= MAX_SKINNY_BYTES
    is_skinny = backend == "mosaic" and config.tensor_parallel_size == 1
    return "all" if is_small and is_skinny else "vectors"


def _choose_backend(asked: str | None, dtype: str) -> AttentionBackend:
    """The kernels asked for, else the best ones for the device and type.

    Raises:
      ValueError: there is none of that name here.
      EngineConfigError: they do not take the type.
    """
    backend: AttentionBackend = choose_attention_backend(asked)
    if backend == "xla" or dtype != "float32":
        return backend
    if asked is not None:
        raise EngineConfigError(
            f"attention_backend {asked} must have a 16-bit dtype; got float32; use xla"
        )
    return choose_attention_backend("xla")


def _choose_dtype(asked: str, of_model: str, is_gpu: bool) -> str:
    """CPUs compute in float32 unless told otherwise; GPUs in 16 bits."""
    names = {"half": "float16", "float": "float32"}
    if asked != "auto":
        return names.get(asked, asked)
    if not is_gpu:
        return "float32"
    return "float16" if of_model == "float16" else "bfloat16"
