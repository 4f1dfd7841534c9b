"""PageMover: bytes, order, failures, and the programs that it calls."""

import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxserve.execution.page_functions import HOST_MEMORY
from jaxserve.execution.page_mover import PageSeconds
from jaxserve.execution.programs import CompilationCounter
from tests.jaxserve.page_moves import ONE_GROUP, TWO_GROUPS, MoverRun, bits, moves_of
from tests.models.on_four_devices import findings_of

NUM_PAGES, NUM_SLOTS = 300, 260


@pytest.fixture(scope="module")
def small_run() -> MoverRun:
    return MoverRun(ONE_GROUP, (NUM_PAGES,), NUM_SLOTS)


@pytest.fixture
def run(small_run: MoverRun) -> Iterator[MoverRun]:
    """One group, float32; nothing is on its way before and after."""
    yield small_run
    small_run.mover.land_all()


@pytest.mark.parametrize("seed", range(3))
def test_random_moves_keep_every_byte_and_compile_nothing(seed: int) -> None:
    run = MoverRun(TWO_GROUPS, (150, 90), 75)
    counter = CompilationCounter()
    num_bytes = run.run_randomly(40, seed)
    assert counter.count == 0
    assert (run.mover.num_offloaded_bytes, run.mover.num_fetched_bytes) == num_bytes
    assert min(num_bytes) > 0


def test_two_devices_that_share_the_heads_keep_every_byte() -> None:
    found = findings_of("tests.jaxserve.page_moves_on_devices", timeout=120)
    assert found["shares"] == [0.5] * 4, "each device holds half of the heads"
    assert found["counted"] == found["expected"] and min(found["counted"]) > 0
    assert found["num_compilations"] == 0


def test_an_offload_keeps_what_the_page_held_before_the_step_overwrote_it(run: MoverRun) -> None:
    before = bits(run.cache.groups[0].v_pages)[:, 5].copy()
    run.apply(moves_of(0, [5], [7]))
    run.step(11)
    run.mover.land_all()
    np.testing.assert_array_equal(run.on_host(0, 7)[1], before)
    assert (bits(run.cache.groups[0].v_pages)[:, 5] != before).all()
    run.check()


def test_a_fetch_gets_what_an_offload_of_the_same_step_brought(run: MoverRun) -> None:
    run.apply(moves_of(0, [5, 6], [1, 2]), moves_of(0, [6, 5], [1, 2]))
    run.check()


def test_of_several_moves_to_one_place_the_last_counts(run: MoverRun) -> None:
    pages = list(range(1, 101))
    run.apply(moves_of(0, pages, [3] * 100))
    run.check()
    slots = [9, 8, 9, 8] * 25
    run.apply(moves_of(0, [1, 2], [8, 9]), moves_of(0, [40] * 100, slots))
    run.check()


def test_fetched_bytes_do_not_change_when_the_slot_is_filled_anew_at_once(run: MoverRun) -> None:
    run.apply(moves_of(0, range(1, 65), range(64)))
    run.mover.land_all()
    run.apply((), moves_of(0, range(101, 165), range(64)))
    run.apply(moves_of(0, range(201, 265), range(64)))
    run.check()


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (0, []),
        (1, [4]),
        (4, [4]),
        (5, [4, 4]),
        (16, [4] * 4),
        (17, [32]),
        (32, [32]),
        (33, [32, 4]),
        (50, [32, 32]),
        (66, [32, 32, 4]),
    ],
)
def test_moves_are_cut_into_chunks_that_are_at_least_half_full_or_small(
    run: MoverRun, monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    found: dict[str, list[int]] = {"offload": [], "fetch": []}
    for name, taken in found.items():
        program_of = getattr(run.programs, name)

        def note(chunk, program_of=program_of, taken=taken):
            taken.append(chunk.num_pages)
            return program_of(chunk)

        monkeypatch.setattr(run.programs, name, note)
    moves = moves_of(0, range(1, count + 1), range(count))
    run.apply(moves)
    run.apply((), moves)
    assert found == {"offload": sizes, "fetch": sizes}
    run.check()


def test_a_page_that_could_not_be_kept_fails_every_later_step(monkeypatch) -> None:
    run = MoverRun(ONE_GROUP, (9,), 4)

    def fail(_: jax.Array) -> None:
        raise MemoryError("no room")

    cache = run.mover.apply(moves_of(0, [1], [1]), (), run.cache)
    (page,) = run.host_pages.get(0, [1])
    with monkeypatch.context() as patch:
        patch.setattr(type(page), "block_until_ready", fail)
        for fetches in ((), moves_of(0, [3], [1]), ()):
            with pytest.raises(MemoryError, match="no room"):
                while True:
                    cache = run.mover.apply((), fetches, cache)
        assert not cache.groups[0].k_pages.is_deleted(), "such a step leaves the cache whole"
        assert run.mover.drop_pending() and not run.mover.drop_pending()
    run.mover.apply((), moves_of(0, [3], [1]), cache)


def test_an_empty_slot_cannot_be_fetched() -> None:
    run = MoverRun(ONE_GROUP, (9,), 4)
    run.apply(moves_of(0, [1], [1]))
    with pytest.raises(AssertionError, match="must have been filled"):
        run.mover.apply((), moves_of(0, [3, 4], [1, 2]), run.cache)
    run.mover.clear()
    with pytest.raises(AssertionError, match="must have been filled"):
        run.mover.apply((), moves_of(0, [3], [1]), run.cache)


def test_the_memory_of_a_page_is_free_once_its_slot_has_another_or_is_cleared() -> None:
    run = MoverRun(ONE_GROUP, (70,), 40)

    def host_bytes() -> int:
        kind = HOST_MEMORY
        return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == kind)

    before, size = host_bytes(), run.host_pages.bytes_per_page(0)
    for first in (1, 11, 21):
        run.apply(moves_of(0, range(first, first + 40), range(40)))
        run.mover.land_all()
        assert host_bytes() - before == 40 * size
    run.apply((), moves_of(0, range(1, 41), range(40)))
    run.check()
    run.mover.clear()
    assert host_bytes() == before


def test_memory_is_taken_for_all_slots_and_more_and_nothing_stays(monkeypatch) -> None:
    run, sizes = MoverRun(TWO_GROUPS, (9, 9), 70), []
    put = run.host_pages.put

    def note(group, slots, pages) -> None:
        put(group, slots, pages)
        sizes.append((group, len(slots)))

    monkeypatch.setattr(run.host_pages, "put", note)
    run.mover.take_memory(run.cache)
    counts = [sum(count for of, count in sizes if of == group) for group in range(2)]
    assert counts == [70 + 64] * 2
    with pytest.raises(AssertionError, match="must have been filled"):
        run.host_pages.get(0, [0])
    run.check()


def test_both_directions_are_timed_and_no_page_changes(caplog) -> None:
    caplog.set_level("INFO", logger="jaxserve.execution.page_mover")
    run = MoverRun(TWO_GROUPS, (20, 30), 70)
    start = time.perf_counter()
    run.cache = run.mover.measure(run.cache)
    passed = time.perf_counter() - start
    seconds = run.mover.seconds_per_page
    assert isinstance(seconds, PageSeconds) and min(seconds.offload, seconds.fetch) > 0
    assert 32 * (seconds.offload + seconds.fetch) < passed
    assert run.mover.num_offloaded_bytes == run.mover.num_fetched_bytes == 0
    run.check()
    (message,) = caplog.messages
    assert message.startswith("pages of 5.0 KiB go to the host at ")
