"""ProductTuningConfig of the skinny product and the table (GPU, shapes) -> config."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTuningConfig:
    """Sizes of the skinny product.

    Attributes:
      block_n: weight columns a tile, 64, 128 or 256; None = what costs least by the bytes moved.
      block_k: depth of a ring step, 64 or 128 or 256; halved until it divides K and four steps fit.
      ring_kib: shared memory for weights and activations in flight.
      max_partials: at most so many partial sums; None = as many as cost least.
      min_share_kib: no program reads less than this of the weights, unless the tile is smaller.
      num_processors: streaming multiprocessors; as many programs at most.
      enough_programs: so many programs, reading weights and activations, saturate the memory.
    """

    block_n: int | None = None
    block_k: int = 64
    ring_kib: int = 160
    max_partials: int | None = None
    min_share_kib: int = 32
    num_processors: int = 132
    enough_programs: int = 80


# The transposed weight is the output head, whose logits need one plane.
_STORED_K_N = ProductTuningConfig()
_STORED_N_K = ProductTuningConfig(block_k=128, max_partials=1)
# Of many rows the partial sums weigh more, and narrow tiles need the fewest of them.
_MANY_ROWS = 32
_STORED_K_N_MANY_ROWS = ProductTuningConfig(block_n=64)

# Measured choices: (device kind, padded rows, K, N, transposed) -> config.
_PRODUCTS: dict[tuple[str, int, int, int, bool], ProductTuningConfig] = {}


def product_tuning(
    gpu: str | None, rows: int, depth: int, columns: int, transposed: bool
) -> ProductTuningConfig:
    """Config of [rows, depth] @ [depth, columns]; one for its kind where none is measured."""
    of_kind = _STORED_N_K if transposed else _STORED_K_N
    if rows >= _MANY_ROWS and not transposed:
        of_kind = _STORED_K_N_MANY_ROWS
    return _PRODUCTS.get((gpu or "", rows, depth, columns, transposed), of_kind)
