"""Make Mosaic kernels depend on their code alone, so that the compilation cache finds them again.

JAX strips locations from a program before it is hashed into the persistent cache's key, but not
from the Mosaic GPU kernels inside: these keep the paths and lines of their source, and each
carries a running number for dumps. So the key changed with the order of lowering, and no program
with a kernel was ever found again (measured on an H200: 17 of 17 missed on a second start, all
25 others hit).
"""

import functools

from jax.experimental.mosaic.gpu import core
from jax.extend.mlir import ir, passmanager

_DUMP_NAME = "mosaic_gpu.dump_basename"


def make_kernels_cacheable() -> None:
    """Wrap the pass that serialises each kernel; a second call changes nothing."""
    serialise = core._run_serde_pass  # no public hook; jax is pinned below 0.12
    if getattr(serialise, "is_cacheable", False):
        return

    @functools.wraps(serialise)
    def strip_and_serialise(module: ir.Module, **options) -> ir.Module:
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)", module.context)
        strip.run(module.operation)
        if _DUMP_NAME in module.operation.attributes:
            name = ir.StringAttr.get("kernel", module.context)
            module.operation.attributes[_DUMP_NAME] = name
        return serialise(module, **options)

    strip_and_serialise.is_cacheable = True  # pyright: ignore[reportAttributeAccessIssue]
    core._run_serde_pass = strip_and_serialise
