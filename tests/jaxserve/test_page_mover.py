"""PageMover: bytes, order, waiting, and the programs that it calls."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.execution.page_mover import MAX_PENDING_PAGES, PageSeconds
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
    small_run.mover.waited_seconds = 0.0
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
    np.testing.assert_array_equal(bits(run.host_pages.v_pages[0])[7], before)
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
        (1, [8]),
        (8, [8]),
        (9, [8, 8]),
        (32, [8] * 4),
        (33, [64]),
        (64, [64]),
        (65, [64, 8]),
        (100, [64, 64]),
        (130, [64, 64, 8]),
    ],
)
def test_moves_are_cut_into_chunks_that_are_at_least_half_full_or_small(
    run: MoverRun, monkeypatch: pytest.MonkeyPatch, count: int, sizes: list[int]
) -> None:
    found: dict[str, list[int]] = {"read_pages": [], "write_pages": []}
    for name, taken in found.items():
        program_of = getattr(run.programs, name)

        def note(chunk, program_of=program_of, taken=taken):
            taken.append(chunk.num_pages)
            return program_of(chunk)

        monkeypatch.setattr(run.programs, name, note)
    moves = moves_of(0, range(1, count + 1), range(count))
    run.apply(moves)
    run.apply((), moves)
    assert found == {"read_pages": sizes, "write_pages": sizes}
    run.check()


@pytest.fixture
def gate(run: MoverRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Pages land only once it is set."""
    opened, write = threading.Event(), run.host_pages.write

    def write_late(*arguments) -> None:
        assert opened.wait(20)
        write(*arguments)

    monkeypatch.setattr(run.host_pages, "write", write_late)
    yield opened
    opened.set()
    run.mover.land_all()


def test_the_loop_goes_on_while_pages_are_on_their_way(run: MoverRun, monkeypatch, gate) -> None:
    run.apply(moves_of(0, range(1, MAX_PENDING_PAGES + 1), range(MAX_PENDING_PAGES)))
    run.step(3)
    run.apply((), moves_of(0, [9], [NUM_SLOTS - 1]))  # a slot that nothing is on its way to
    assert run.mover.waited_seconds == 0
    gate.set()
    run.check()
    assert run.mover.waited_seconds > 0


def test_too_many_pages_on_their_way_wait_for_the_oldest(run: MoverRun, gate) -> None:
    run.apply(moves_of(0, range(1, MAX_PENDING_PAGES + 1), range(MAX_PENDING_PAGES)))
    threading.Timer(0.2, gate.set).start()
    start = time.perf_counter()
    run.apply(moves_of(0, [200], [200]))
    assert gate.is_set() and 0 < run.mover.waited_seconds <= time.perf_counter() - start
    run.check()


def test_a_fetch_waits_for_its_slot_only(run: MoverRun, gate) -> None:
    run.apply(moves_of(0, [1], [1]))
    run.apply((), moves_of(0, [50], [2]))
    assert run.mover.waited_seconds == 0 and not gate.is_set()
    threading.Timer(0.2, gate.set).start()
    run.apply((), moves_of(0, [51], [1]))
    assert gate.is_set() and run.mover.waited_seconds > 0
    run.check()


def test_a_page_that_could_not_be_kept_fails_every_later_step(monkeypatch) -> None:
    run = MoverRun(ONE_GROUP, (9,), 4)

    def fail(*arguments) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(run.host_pages, "write", fail)
    cache = run.mover.apply(moves_of(0, [1], [1]), (), run.cache)
    for fetches in ((), moves_of(0, [3], [1]), ()):
        with pytest.raises(MemoryError, match="no room"):
            while True:
                cache = run.mover.apply((), fetches, cache)
    assert not cache.groups[0].k_pages.is_deleted(), "a step that fails here leaves the cache whole"
    assert run.mover.drop_pending() and not run.mover.drop_pending()
    run.mover.apply((), moves_of(0, [3], [1]), cache)


def test_both_directions_are_timed_and_no_page_changes(caplog) -> None:
    caplog.set_level("INFO", logger="jaxserve.execution.page_mover")
    run = MoverRun(TWO_GROUPS, (20, 30), 70)
    start = time.perf_counter()
    run.cache = run.mover.measure(run.cache)
    passed = time.perf_counter() - start
    seconds = run.mover.seconds_per_page
    assert isinstance(seconds, PageSeconds) and min(seconds.offload, seconds.fetch) > 0
    assert 64 * (seconds.offload + seconds.fetch) < passed
    assert run.mover.waited_seconds == 0
    assert run.mover.num_offloaded_bytes == run.mover.num_fetched_bytes == 0
    for slots, pages in zip(run.slots, run.expected, strict=True):
        slots[:, :64] = pages[:, None, :, 0]
    run.check()
    (message,) = caplog.messages
    assert message.startswith("pages of 5.0 KiB go to the host at ")
