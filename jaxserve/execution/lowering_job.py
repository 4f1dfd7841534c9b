"""The two ends of a LoweringJob: made from an engine's plan, and made into a table elsewhere."""

import dataclasses
import re

import jax

from jaxserve.config import EngineConfig
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.engine_plan import make_programs
from jaxserve.execution.limits import Limits
from jaxserve.execution.lowering_messages import LoweringJob
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.programs import ProgramTable
from models.registry import model_class
from pallas_kernels.platform import AssumedGpu, assume_gpu, gpu_capability, gpu_kind

_OF_THE_PROCESS = re.compile(
    r"platform|device|cache|cluster|distributed|profile|log_|logging|_port|plugin"
)
"""Settings of JAX that say where a process runs, and not what it computes."""


def make_job(
    setup: ModelSetup, limits: Limits, buckets: BucketTable, num_pages: tuple[int, ...]
) -> LoweringJob:
    """Describe the programs of `make_programs` with the same arguments, on this process's device.

    Raises:
      ValueError: it is a GPU, but not NVIDIA's.
    """
    kind, capability = gpu_kind(), gpu_capability()
    if kind is not None and capability is None:
        raise ValueError(f"programs are lowered elsewhere for NVIDIA GPUs only; got {kind}")
    gpu = None if kind is None or capability is None else AssumedGpu(kind, capability)
    return LoweringJob(
        config=dataclasses.asdict(setup.config) | {"hf_token": None},  # nothing is fetched
        model=setup.model,
        is_offline=setup.is_offline,
        gpu=gpu,
        jax_settings=_jax_settings(),
        limits=limits,
        buckets=buckets,
        num_pages=num_pages,
        setup=describe_setup(setup),
    )


def make_table(job: LoweringJob) -> ProgramTable:
    """The table that a job describes, in a process that lacks the GPU, and from then on assumes it.

    Raises:
      ValueError: what the engine has chosen is not what this process would choose.
    """
    for name, value in job.jax_settings.items():
        if getattr(jax.config, name, jax.config.values[name]) != value:
            jax.config.update(name, value)
    # The engine that reads the programs has the same libraries as this process.
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    assume_gpu(job.gpu)
    config = EngineConfig(**job.config)
    setup = ModelSetup.choose(config, job.model, is_offline=job.is_offline)
    chosen = describe_setup(setup)
    if chosen != job.setup:
        raise ValueError(f"the engine's setup must be that of this process, {chosen}: {job.setup}")
    return make_programs(setup, job.limits, job.buckets, job.num_pages)[1]


def describe_setup(setup: ModelSetup) -> str:
    """Name what is chosen by the model, the device and what is registered in a process."""
    family = model_class(setup.model.architecture)
    name = f"{family.__module__}.{family.__qualname__}"
    chosen = (setup.backend, setup.dtype, setup.stack, setup.fuses_few_rows, setup.is_gpu)
    return repr((name, setup.shared_model, setup.geometries, *chosen))


def _jax_settings() -> dict[str, bool | int | float | str | None]:
    """As they are in this thread."""
    values = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str | None) and not _OF_THE_PROCESS.search(name)
    }
