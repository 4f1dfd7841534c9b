"""What the one-row kernel says in Mosaic GPU itself: reads, barriers, remote stores, its end.

Interpret mode cannot run such code; there a block runs alone, and its steps one after the other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector


def read_now(ref: Any, *, interpreted: bool) -> jax.Array:
    """Read an int32 scalar of global memory here and not later.

    The compiler would move the load to its first use, and so let that wait for its latency.
    """
    if interpreted:
        return ref[...]
    out = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def read(_, ref):
        value = mosaic.utils.inline_ptx(
            "ld.global.b32 $0, [$1];",
            mosaic.utils.memref_ptr(ref),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mosaic.FragmentedArray.splat(value, (), is_signed=True)

    return read(ref)  # pyright: ignore[reportCallIssue]


def only_if(condition: jax.Array, work: Callable[[], None], *, interpreted: bool) -> None:
    """Do the work, the block's last; where the condition does not hold, the block ends here.

    As a branch around the work, the compiler would move into it what the work reads, and so let
    that wait for the condition.
    """
    if interpreted:
        pl.when(condition)(work)
        return

    @pl.when(~condition)
    def _end():
        @plgpu.inline_mgpu()
        def end(_):
            mosaic.utils.inline_ptx("exit;", has_side_effects=True)

        end()  # pyright: ignore[reportCallIssue]

    work()


def widen(x: jax.Array, layout: Any, *, interpreted: bool) -> jax.Array:
    """To float32, in one instruction a number: bfloat16 is its upper half."""
    if interpreted or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def widen_all(_, x):
        registers = np.empty_like(x.registers)
        for place, register in np.ndenumerate(x.registers):
            registers[place] = _widen_register(register)
        return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widen_all(x)  # pyright: ignore[reportCallIssue]


def _widen_register(register: ir.Value) -> ir.Value:
    """A vector of an even number of bfloat16 to float32."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    length = ir.VectorType(register.type).shape[0]
    words = vector.bitcast(ir.VectorType.get([length // 2], i32), register)
    sixteen, upper = (mosaic.utils.c(number, i32) for number in (16, -(1 << 16)))
    floats = []
    for pair in range(length // 2):
        word = vector.extract(words, [], [pair])
        halves = arith.shli(word, sixteen), arith.andi(word, upper)
        floats += [mosaic.utils.bitcast(half, f32) for half in halves]
    return vector.from_elements(ir.VectorType.get([length], f32), floats)


def synchronize(*, interpreted: bool) -> None:
    """Wait until all threads of the block have come here, and see what they stored."""
    if interpreted:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        mosaic.utils.warpgroup_barrier()

    wait()  # pyright: ignore[reportCallIssue]


def synchronize_cluster() -> None:
    """Wait until all blocks of the cluster have come here, and see what they stored."""

    @plgpu.inline_mgpu()
    def wait(_):
        for step in ("arrive.release", "wait.acquire"):
            ptx = f"barrier.cluster.{step}.aligned;"
            mosaic.utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    wait()  # pyright: ignore[reportCallIssue]


def store_to_leader(x: jax.Array, ref: Any, layout: Any) -> None:
    """Store `x` into `ref` in the shared memory of the cluster's first block.

    Args:
      x: in `layout`.
      ref: of x's shape, in shared memory; it lies at the same place in every block.
      layout: of registers.
    """

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_, x, ref):
        utils = mosaic.utils
        leader = utils.c(0, ir.IndexType.get())
        axis = utils.gpu.Dimension.x  # pyright: ignore[reportPrivateImportUsage]
        remote = utils.get_cluster_ref(ref, axis, leader)
        x.store_untiled(remote, optimized=False)

    store(x, ref)  # pyright: ignore[reportCallIssue]
