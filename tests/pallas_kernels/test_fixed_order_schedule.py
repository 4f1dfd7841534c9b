"""Sizes of the fixed-order product: chunks follow from the weight alone, tiles cover everything."""

import pytest

from pallas_kernels.products.fixed_order_schedule import (
    MAX_CHUNKS,
    ROW_TILE,
    STAGED_BYTES,
    count_chunks,
    make_fixed_order_schedule,
)

# K, N of Llama-3-8B and Qwen3-0.6B, then odd ones
WEIGHTS = [
    (4096, 6144),
    (4096, 4096),
    (4096, 28672),
    (14336, 4096),
    (4096, 128256),
    (1024, 4096),
    (2048, 1024),
    (3072, 1024),
    (1024, 151936),
    (64, 64),
    (576, 192),
    (5120, 320),
]
ROWS = [8, 16, 64, 128, 136, 256, 512, 1000, 1024, 2048, 8192, 16384]


@pytest.mark.parametrize(("depth", "columns"), WEIGHTS)
def test_chunks_do_not_depend_on_the_rows(depth, columns):
    chunks, chunk_steps = count_chunks(depth, columns)
    assert 1 <= chunks <= MAX_CHUNKS
    assert (chunks - 1) * chunk_steps < depth // 64 <= chunks * chunk_steps
    for rows in ROWS:
        schedule = make_fixed_order_schedule(rows, depth, columns)
        assert (schedule.chunks, schedule.chunk_steps) == (chunks, chunk_steps)


@pytest.mark.parametrize(("depth", "columns"), WEIGHTS)
@pytest.mark.parametrize("rows", ROWS)
def test_tiles_cover_the_result_and_fit_the_processor(rows, depth, columns):
    schedule = make_fixed_order_schedule(rows, depth, columns)
    assert (schedule.row_tiles - 1) * ROW_TILE < rows <= schedule.row_tiles * ROW_TILE
    assert schedule.tile_columns <= columns <= schedule.column_tiles * schedule.tile_columns
    assert (schedule.column_tiles - 1) * schedule.tile_columns < columns
    ring = schedule.stages * (schedule.tile_columns + ROW_TILE) * 64 * 2
    assert schedule.stages >= 4
    assert ring + schedule.warpgroups * STAGED_BYTES < 227 * 1024
    accumulators = schedule.group_columns // 64 * (1 if schedule.chunks == 1 else 2)
    assert schedule.splits_chunks or accumulators <= 2  # of 64 registers each
    assert not schedule.splits_chunks or (schedule.chunks > 1 and rows <= 1024)


@pytest.mark.parametrize(("depth", "columns"), WEIGHTS[:9])
def test_few_rows_fill_the_processors_and_many_take_wide_tiles(depth, columns):
    few = make_fixed_order_schedule(8, depth, columns)
    assert few.programs >= 96
    many = make_fixed_order_schedule(8192, depth, columns)
    assert many.tile_columns >= 128 and not many.splits_chunks
