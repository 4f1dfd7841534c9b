"""Make Mosaic kernels depend on their code alone, and lower each of them once.

JAX strips locations from a program before it is hashed into the persistent cache's key, but not
from the Mosaic GPU kernels inside: these keep the paths and lines of their source, and each
carries a running number for dumps. So the key changed with the order of lowering, and no program
with a kernel was ever found again (measured on an H200: 17 of 17 missed on a second start, all
25 others hit).

Besides, each program that holds a kernel lowered it anew, in Python, under the GIL: more than half
of a decode program's lowering, and programs of one bucket hold the same kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import core
from jax.extend.mlir import ir, passmanager

_DUMP_NAME = "mosaic_gpu.dump_basename"


_NUM_REMEMBERED = 512


def make_kernels_cacheable() -> None:
    """Wrap the lowering of kernels, and the pass that serialises them; once is enough."""
    serialise = core._run_serde_pass  # no public hooks; jax is pinned below 0.12
    if getattr(serialise, "is_cacheable", False):
        return
    lowering.lower_unpipelined_jaxpr_to_module = _lower_once(
        lowering.lower_unpipelined_jaxpr_to_module
    )

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


def _lower_once(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering that remembers its results; serialising one works on a copy.

    A kernel's jaxpr is one object for as long as its public function's jit remembers the trace.
    """

    @functools.lru_cache(_NUM_REMEMBERED)
    def remember(*arguments: Any) -> Any:
        return lower(*arguments)

    @functools.wraps(lower)
    def lower_once(
        mesh: Any, jax_mesh: Any, jaxpr: Any, in_shapes: Any, out_shapes: Any, params: Any,
        **traceback: Any,
    ) -> Any:  # fmt: skip
        del traceback  # it names the caller, and locations are stripped anyway
        return remember(mesh, jax_mesh, jaxpr, tuple(in_shapes), tuple(out_shapes), params)

    return lower_once
