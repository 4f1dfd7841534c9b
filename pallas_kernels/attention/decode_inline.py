"""What decode kernels and products say in Mosaic GPU itself, since Pallas has no word for it.

Interpret mode cannot run such code, so each function also has its plain meaning.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
SWIZZLE_ROWS, SWIZZLE_COLUMNS, CHUNK = 8, 64, 8  # of 128-byte swizzled tiles of 16-bit numbers


def column_reduce(op: str, x: jax.Array, scratch: Any, *, interpreted: bool) -> jax.Array:
    """Reduce [M, N] over its rows, which lie in all four warps.

    Args:
      op: "max" or "add".
      x: [M, N] float32 in the WGMMA layout.
      scratch: float32 in shared memory of this warpgroup alone, `scratch_size(N)` long.
      interpreted: say it in plain jnp.
    """
    if interpreted:
        return x.max(0) if op == "max" else x.sum(0)
    out = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=BY_COLUMN)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=out)
    def reduce(_, x, scratch):
        return x.reduce(op, 0, scratch)

    return reduce(x, scratch)  # pyright: ignore[reportCallIssue]


def scratch_size(columns: int) -> int:
    """Numbers of scratch for `column_reduce`: up to 16 columns at a time."""
    return 4 * 32 * min(columns // 4, 4)


def store_weights(x: jax.Array, ref: Any, transforms: Any, *, interpreted: bool) -> None:
    """Store `x` [M, N], 16 bits a number, as [N, M] into 128-byte swizzled shared memory."""
    if interpreted:
        ref[...] = x.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)))
    def store(_, x, ref):
        def store_one(value, index):
            row, column = index[1], index[0]
            row_tile, row = _divide(row, SWIZZLE_ROWS)
            column_tile, column = _divide(column, SWIZZLE_COLUMNS)
            chunk, column = _divide(column, CHUNK)
            chunk = arith.muli(arith.xori(chunk, row), _index(CHUNK))
            memref.store(value, ref, [row_tile, column_tile, row, arith.addi(chunk, column)])

        x.foreach(store_one)

    store(x, ref)  # pyright: ignore[reportCallIssue]


def store_columns(x: jax.Array, ref: Any, *, interpreted: bool) -> None:
    """Store the first G columns of `x` [M, N] as the rows of `ref` [G, M] in global memory."""
    group = ref.shape[0]
    if interpreted:
        ref[...] = x.T[:group]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_, x, ref):
        def store_one(value, index):
            if group == x.shape[1]:
                memref.store(value, ref, [index[1], index[0]])
                return
            is_stored = arith.cmpi(arith.CmpIPredicate.ult, index[1], _index(group))
            with mosaic.utils.when(is_stored):
                memref.store(value, ref, [index[1], index[0]])

        x.foreach(store_one)

    store(x, ref)  # pyright: ignore[reportCallIssue]


def arrive(counter: Any, pieces: jax.Array, arrived: Any, *, interpreted: bool) -> None:
    """Publish what this warpgroup stored, and count it in; the last one resets the counter.

    Args:
      counter: int32 scalar in global memory, how many pieces have arrived; then 0 again.
      pieces: int32 scalar, how many there are.
      arrived: [1] int32 in shared memory, set to how many arrived before. If these are all the
        others, then this warpgroup sees what they stored.
      interpreted: say it in plain jnp; thread blocks then run one by one.
    """
    if interpreted:
        before = counter[...]
        arrived[0] = before
        counter[...] = jnp.where(before + 1 == pieces, 0, before + 1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.RefType()))
    def count(_, counter, pieces, arrived):
        i32 = ir.IntegerType.get_signless(32)
        utils = mosaic.utils
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            last = arith.subi(pieces.registers.item(), utils.c(1, i32))
            before = utils.inline_ptx(
                "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;",
                utils.memref_ptr(counter),
                last,
                result_types=i32,
                has_side_effects=True,
            )
            memref.store(before, arrived, [_index(0)])
        utils.warpgroup_barrier()
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)

    count(counter, pieces, arrived)  # pyright: ignore[reportCallIssue]


def _index(number: int) -> ir.Value:
    return mosaic.utils.c(number, ir.IndexType.get())


def _divide(number: ir.Value, by: int) -> tuple[ir.Value, ir.Value]:
    """Quotient and rest."""
    return arith.divui(number, _index(by)), arith.remui(number, _index(by))
