"""Forms of arrays in shared memory that WGMMA reads and leaves without bank conflicts."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_COLUMNS = 64  # 16-bit numbers in the 128 bytes that are swizzled

TILED: Any = (
    plgpu.TilingTransform((8, SWIZZLE_COLUMNS)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""Of 16-bit numbers."""
TILED_FLOAT32: Any = (
    plgpu.TilingTransform((8, SWIZZLE_COLUMNS // 2)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
