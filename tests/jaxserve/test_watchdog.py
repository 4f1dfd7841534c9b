"""Steps that hang: who sees it, when, and what the process then does."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxserve.engine_client import InProcessClient
from jaxserve.execution.model_runner import StepHandle
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import StepResult
from jaxserve.watchdog import Watchdog, format_stacks
from tests.tiny_llm import MODEL, SETTINGS

LIMIT = 0.4


class Seen:
    """Messages of a watchdog, and when they came."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.came = threading.Event()

    def __call__(self, message: str) -> None:
        self.messages.append(message)
        self.came.set()


@pytest.fixture
def watched():
    seen = Seen()
    watchdog = Watchdog(LIMIT, seen)
    yield watchdog, seen
    watchdog.stop()


def sleep_in_a_step(seen: Seen, seconds: float) -> None:
    seen.came.wait(seconds)


def test_a_step_that_hangs_is_seen_once_and_its_place_is_logged(
    watched, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog, seen = watched
    start = time.monotonic()
    with watchdog:
        sleep_in_a_step(seen, 20)
        assert LIMIT * 0.9 <= time.monotonic() - start < 10
        time.sleep(2 * LIMIT)
    assert seen.messages == ["a step has not come back for 0.4 s"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "thread MainThread" in record.message and "in sleep_in_a_step" in record.message


def test_each_step_has_its_own_time_and_pauses_between_them_do_not_count(watched) -> None:
    watchdog, seen = watched
    for _ in range(8):
        with watchdog:
            time.sleep(LIMIT / 4)
    time.sleep(2 * LIMIT)
    assert not seen.messages
    for _ in range(2):
        seen.came.clear()
        with watchdog:
            assert seen.came.wait(20)
    assert len(seen.messages) == 2


def test_a_step_that_raises_is_over(watched) -> None:
    watchdog, seen = watched
    with pytest.raises(KeyError), watchdog:
        raise KeyError
    time.sleep(2 * LIMIT)
    assert not seen.messages


def test_a_stopped_watchdog_sees_nothing(watched) -> None:
    watchdog, seen = watched
    watchdog.stop()
    with watchdog:
        time.sleep(2 * LIMIT)
    assert not seen.messages


SUSPENDED = f"""
import sys, time
from jaxserve.watchdog import Watchdog
with Watchdog({LIMIT * 2}, lambda message: print("hung", flush=True)):
    print("in a step", flush=True)
    time.sleep({LIMIT})
print("back", flush=True)
"""


def test_a_process_that_was_suspended_does_not_hang() -> None:
    process = subprocess.Popen([sys.executable, "-c", SUSPENDED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "in a step\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4 * LIMIT)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "back\n"


def test_stacks_name_threads_and_functions_but_not_the_callers() -> None:
    is_done = threading.Event()
    thread = threading.Thread(target=is_done.wait, name="a waiting one")
    thread.start()
    try:
        text = format_stacks()
    finally:
        is_done.set()
        thread.join()
    assert "a waiting one" in text and "in wait" in text
    assert "text = format_stacks()" not in text


class HangingEngine:
    """An engine whose only step takes its time."""

    has_unfinished = True

    def __init__(self, seen: Seen):
        self._seen = seen

    def add(self, request) -> None:
        raise NotImplementedError

    def abort(self, request_id, index=None, **fields) -> None:
        raise NotImplementedError

    def step(self) -> list:
        assert self._seen.came.wait(20)
        return []


def test_a_hanging_step_in_this_process_is_told_of_and_may_come_back(watched) -> None:
    watchdog, seen = watched
    client = InProcessClient(HangingEngine(seen), watchdog)
    assert client.updates() == [] and len(seen.messages) == 1


def test_a_hanging_step_of_an_llm_is_logged_with_advice_and_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(MODEL, skip_tokenizer_init=True, step_timeout=LIMIT, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    (quiet,) = llm.generate(prompt, params, use_tqdm=False)
    collect = llm.engine.runner.collect

    def collect_late(handle: StepHandle) -> StepResult:
        monkeypatch.undo()
        time.sleep(3 * LIMIT)
        return collect(handle)

    monkeypatch.setattr(llm.engine.runner, "collect", collect_late)
    (late,) = llm.generate(prompt, params, use_tqdm=False)
    assert late.outputs[0].token_ids == quiet.outputs[0].token_ids
    first, second = (r.message for r in caplog.records if r.name.startswith("jaxserve"))
    assert "in collect_late" in first
    assert second == (
        "a step has not come back for 0.4 s; if it never does, restart this process, or the "
        "notebook's kernel"
    )
    num_watchdogs = sum(thread.name == "watchdog" for thread in threading.enumerate())
    del llm
    gc.collect()
    for _ in range(100):
        if sum(thread.name == "watchdog" for thread in threading.enumerate()) < num_watchdogs:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the watchdog of an LLM that is gone must end")
