"""LeavingRate: when there is room again, by what ended while others waited."""

import pytest

from server.access.leaving_rate import MAX_RETRY_SECONDS, WINDOW_SECONDS, LeavingRate


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rate(clock: Clock) -> LeavingRate:
    """A rate of a server in which something waits from now on."""
    made = LeavingRate(clock)
    made.watch(is_waiting=True)
    return made


def test_of_what_ended_the_scarcer_tells(rate: LeavingRate, clock: Clock):
    clock.now += 8
    for _ in range(4):
        rate.note_end(1, 100)  # 0.5 sequences and 50 tokens a second
    assert rate.retry_seconds(3, 0) == 6
    assert rate.retry_seconds(0, 450) == 9
    assert rate.retry_seconds(3, 450) == 9
    assert rate.retry_seconds(3, 201) == 6


def test_a_fast_server_is_asked_again_after_a_second_and_a_slow_one_after_a_minute(
    rate: LeavingRate, clock: Clock
):
    clock.now += 10
    rate.note_end(100, 5000)
    assert rate.retry_seconds(1, 1) == 1
    assert rate.retry_seconds(10**6, 0) == MAX_RETRY_SECONDS


def test_while_nothing_ends_the_answer_is_to_wait_as_long_again(rate: LeavingRate, clock: Clock):
    for seconds, expected in ((0, 1), (0.5, 1), (6.5, 7), (100, WINDOW_SECONDS)):
        clock.now = 1000.0 + seconds
        assert rate.retry_seconds(1, 1) == expected


def test_what_ended_long_ago_does_not_count(rate: LeavingRate, clock: Clock):
    for _ in range(60):  # two a second
        clock.now += 0.5
        rate.note_end(1, 10)
    assert rate.retry_seconds(20, 0) == 10
    for _ in range(60):  # one in 5 seconds
        clock.now += 5
        rate.note_end(1, 10)
    assert rate.retry_seconds(6, 0) == pytest.approx(6 * 5, abs=5)
    clock.now += WINDOW_SECONDS + 5
    assert rate.retry_seconds(6, 0) == WINDOW_SECONDS


def test_a_server_in_which_nothing_waits_is_not_measured(clock: Clock):
    rate = LeavingRate(clock)
    rate.note_end(1, 10)
    rate.watch(is_waiting=True)
    clock.now += 4
    rate.note_end(2, 20)
    rate.watch(is_waiting=True)
    assert rate.retry_seconds(3, 0) == 6
    rate.watch(is_waiting=False)
    assert rate.retry_seconds(3, 0) == 1
    clock.now += 100
    rate.watch(is_waiting=True)
    clock.now += 2
    rate.note_end(1, 10)
    assert rate.retry_seconds(3, 0) == 6
