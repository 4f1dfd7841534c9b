"""Every step of every tile belongs to one program, and every plane of a tile to one of them."""

import pytest

from pallas_kernels.products.product_schedule import make_schedule
from pallas_kernels.products.product_tuning import ProductTuningConfig, product_tuning
from tests.pallas_kernels.test_skinny_product import REAL

SMEM_BYTES = 232_448


def planes_of_tiles(schedule):
    """Tile -> the planes that its programs write, as the kernel numbers them."""
    planes = [[] for _ in range(schedule.tiles)]
    for program in range(schedule.programs):
        first = program * schedule.share
        end = min(first + schedule.share, schedule.tiles * schedule.steps)
        for tile in range(first // schedule.steps, (end - 1) // schedule.steps + 1):
            planes[tile].append(program - tile * schedule.steps // schedule.share)
    return planes


@pytest.mark.parametrize("rows", [8, 64, 128])
@pytest.mark.parametrize(("depth", "columns", "transposed"), REAL)
def test_schedules_of_real_shapes_are_whole(depth, columns, transposed, rows):
    tuning = product_tuning("NVIDIA H200", rows, depth, columns, transposed)
    schedule = make_schedule(rows, depth, columns, transposed, tuning)
    assert schedule.steps * schedule.block_k == depth
    assert schedule.tiles * schedule.block_n >= columns
    assert schedule.programs <= tuning.num_processors
    planes = planes_of_tiles(schedule)
    assert all(found == list(range(len(found))) for found in planes)
    assert max(map(len, planes)) == schedule.partials
    assert schedule.fills_all_planes == (min(map(len, planes)) == schedule.partials)
    assert schedule.partials == 1 or columns % schedule.block_n == 0
    ring = schedule.stages * (schedule.block_n + rows) * schedule.block_k * 2
    staged = schedule.warpgroups * rows * 64 * 4
    assert ring + staged < SMEM_BYTES


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize(("depth", "columns", "transposed"), REAL)
def test_shares_keep_enough_processors_busy(depth, columns, transposed, rows):
    tuning = product_tuning(None, rows, depth, columns, transposed)
    schedule = make_schedule(rows, depth, columns, transposed, tuning)
    assert schedule.programs >= tuning.enough_programs


def test_many_rows_are_summed_from_few_planes():
    for depth, columns in ((4096, 6144), (4096, 4096), (14336, 4096)):
        tuning = product_tuning(None, 64, depth, columns, False)
        schedule = make_schedule(64, depth, columns, False, tuning)
        assert (schedule.block_n, schedule.partials) == (64, 2)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_no_more_partials_than_allowed(limit):
    tuning = ProductTuningConfig(max_partials=limit)
    for depth, columns, transposed in REAL:
        assert make_schedule(8, depth, columns, transposed, tuning).partials <= limit


def test_the_output_head_has_one_plane():
    tuning = product_tuning(None, 8, 4096, 128256, True)
    assert make_schedule(8, 4096, 128256, True, tuning).partials == 1


@pytest.mark.parametrize(("depth", "columns", "transposed"), REAL)
def test_what_is_kept_of_x_fits_beside_the_ring(depth, columns, transposed):
    tuning = product_tuning(None, 8, depth, columns, transposed)
    for kept in ("share", "all"):
        if kept == "all" and depth > 8192:
            continue
        schedule = make_schedule(1, depth, columns, transposed, tuning, kept)
        assert schedule.kept_steps >= min(schedule.share, schedule.steps)
        assert kept == "share" or schedule.kept_steps == schedule.steps
        ring = schedule.stages * schedule.block_n * schedule.block_k * 2
        assert ring + schedule.kept_steps * 8 * schedule.block_k * 2 < SMEM_BYTES


def test_more_of_x_than_fits_is_refused():
    with pytest.raises(ValueError, match="must divide the columns and fit ring_kib"):
        make_schedule(8, 14336, 4096, False, ProductTuningConfig(), "all")


def test_a_step_is_halved_until_it_divides_the_depth():
    tuning = ProductTuningConfig(block_k=256)
    assert make_schedule(8, 896, 1024, False, tuning).block_k == 128


def test_few_programs_read_no_less_than_the_least_share():
    tuning = ProductTuningConfig(min_share_kib=64, block_n=64)
    schedule = make_schedule(8, 2048, 1024, False, tuning)
    assert schedule.share * 64 * schedule.block_k * 2 >= 64 * 1024


def test_a_tile_wider_than_the_weight_is_refused():
    with pytest.raises(ValueError, match="block_n must divide .* got 256 for 128 columns"):
        make_schedule(8, 256, 128, False, ProductTuningConfig(block_n=256))
