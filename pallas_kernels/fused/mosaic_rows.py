"""What Mosaic GPU kernels share that keep rows in registers, read from and written to memory.

Each thread loads vectors of up to 16 bytes, works in registers and stores; shared memory is only
where threads meet, if they do. A layout says which thread holds what.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.cacheable_kernels import make_kernels_cacheable

make_kernels_cacheable()

WARPS = 4  # of a warpgroup
WARP_LANES = 32
MAX_VECTOR = 8  # elements: 16 bytes of the model dtype, two loads of 16 bytes of float32

# No barriers around loads and stores: where threads read what others wrote, in shared memory or
# through counters in global memory, the kernel has barriers of its own.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)


def check_model_dtype(name: str, dtype: DTypeLike) -> None:
    """Refuse what the fused kernels do not compute in.

    Raises:
      ValueError: neither bfloat16 nor float16.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name} must be bfloat16 or float16; got {jnp.dtype(dtype).name}")


def power_of_two_below(number: int) -> int:
    """The greatest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def divide(number: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of non-negative int32 numbers."""
    return lax.div(number, jnp.int32(divisor)), lax.rem(number, jnp.int32(divisor))


def vector_length(elements: int) -> int:
    """Elements of one load, where a thread holds `elements` of a row."""
    return next(size for size in (MAX_VECTOR, 4, 2, 1) if elements % size == 0)


def rows_layout(rows: int, columns: int, lanes: int) -> Any:
    """Layout of [rows, columns]: `lanes` neighbouring threads share a row.

    Rows go to the warps first, then to the lanes of a warp. Where there are fewer rows than places,
    several threads hold the same elements, and store the same values.

    Args:
      rows: a power of two.
      columns: a multiple of `lanes`.
      lanes: a power of two, at most 32.
    """
    places = WARPS * WARP_LANES // lanes
    warps = min(WARPS, rows)
    rows_a_warp = min(rows, places) // warps
    vector = vector_length(columns // lanes)
    repeated_warps = WARPS // warps
    repeated_lanes = WARP_LANES // (lanes * rows_a_warp)
    layout = mosaic.TiledLayout(
        plgpu.Tiling(
            ((warps * rows_a_warp, lanes * vector), (rows_a_warp, lanes * vector), (vector,))
        ),
        warp_dims=(-5, *_replicated(repeated_warps)),
        lane_dims=(-3, *_replicated(repeated_lanes), -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _replicated(times: int) -> tuple[plgpu.Replicated, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()


def load(ref: Any, layout: Any) -> jax.Array:
    """Read global or shared memory into registers, as float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def load_sum(ref: Any, index: tuple[Any, ...], layout: Any, dtype: DTypeLike) -> jax.Array:
    """Read a product's result, whole or in parts, and round it to the model dtype.

    Args:
      ref: the whole result, or float32 with the parts along one more leading axis.
      index: of the wanted rows and columns in the whole result.
      layout: of what is read.
      dtype: of the model.

    Returns:
      float32, rounded to `dtype`.
    """
    if ref.ndim == len(index):
        return load(ref.at[index], layout)
    total = load(ref.at[(0, *index)], layout)
    for part in range(1, ref.shape[0]):
        total += load(ref.at[(part, *index)], layout)
    return round_to(total, dtype)


def layer_index(layer_ref: Any, stacked_ref: Any) -> jax.Array:
    """Which layer of [L, ...] to read; where there is only one, nothing is loaded to know it."""
    return jnp.int32(0) if stacked_ref.shape[0] == 1 else layer_ref[0]


def round_to(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round float32 to the model dtype, and stay float32."""
    return value.astype(dtype).astype(jnp.float32)


def over_rows(columns: jax.Array, rows: int, layout: Any) -> jax.Array:
    """[columns] -> [rows, columns]."""
    shape = (rows, columns.shape[0])
    return plgpu.layout_cast(lax.broadcast_in_dim(columns, shape, (1,)), layout)


def over_columns(rows: jax.Array, columns: int, layout: Any) -> jax.Array:
    """[rows] -> [rows, columns]."""
    shape = (rows.shape[0], columns)
    return plgpu.layout_cast(lax.broadcast_in_dim(rows, shape, (0,)), layout)


def interpret_option(interpret: Any) -> dict[str, Any]:
    """The argument of `plgpu.kernel`, which takes no None."""
    return {} if interpret is None else {"interpret": interpret}
