"""LoweringPool: processes that lower an engine's programs while it starts.

To trace and lower a program takes about a second of Python under the GIL, so that threads do not
help, and an engine has dozens of programs.
"""

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxserve.execution.buckets import Bucket
from jaxserve.execution.lowering_messages import (
    LoweringFailed,
    LoweringJob,
    LowerProgram,
    receive_answer,
    send,
)
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.programs import ProgramKey
from models.registry import model_class

logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
"""0 = programs are lowered in the engine's process alone."""
MIN_CPUS = 8
MIN_PROGRAMS = 5
"""Fewer are lowered before a process has imported JAX."""
ANSWER_SECONDS = 120.0
"""A process that gives no program within this time is given up."""
STATUS_SECONDS = 1.0
"""A process whose pipe has closed ends so soon, or its status is not told."""

_WORKER_MODULE = "jaxserve.execution.lowering_worker"
_NO_GPU = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of libraries that are not used
}


class LoweringPool:
    """Processes that lower programs; they start when that is asked for.

    Args:
      num_processes: how many.
    """

    def __init__(self, num_processes: int):
        self._num_processes = num_processes
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._is_quiet = False

    def start(self) -> None:
        """Start the processes, unless they have been started. A failure costs a warning only."""
        if self._workers:
            return
        try:
            for _ in range(self._num_processes):
                self._workers.append(_Worker())
        except Exception as error:  # whatever it is, the engine can lower by itself
            self._warn(error)

    def lower(
        self, job: LoweringJob, keys: Sequence[ProgramKey]
    ) -> Iterator[tuple[ProgramKey, bytes | None]]:
        """Begin to lower programs, the first ones first.

        Args:
          job: describes their table.
          keys: of steps.

        Returns:
          Each key once, as soon as it is done, with what `StepProgram.export` gives; or with None
          where that failed, or no process is there.
        """
        if len(keys) >= MIN_PROGRAMS:
            self.start()
        pending = deque(keys)
        results: _Results = queue.SimpleQueue()
        for worker in self._workers:
            arguments = (worker, job, pending, results)
            self._threads.append(threading.Thread(target=self._drive, args=arguments, daemon=True))
            self._threads[-1].start()
        return _collect(len(self._workers), pending, results)

    def close(self) -> None:
        """End the processes."""
        self._is_quiet = True
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def _drive(
        self, worker: "_Worker", job: LoweringJob, pending: deque[ProgramKey], results: "_Results"
    ) -> None:
        """Hand keys to a worker until none is left; one that fails gets no more."""
        key = None
        try:
            worker.begin(job)
            while (key := _pop(pending)) is not None:
                results.put((key, worker.lower(key)))
        except Exception as error:  # whatever it is, the engine can lower by itself
            worker.kill()
            self._warn(error)
            if key is not None:
                results.put((key, None))
        results.put(None)

    def _warn(self, error: Exception) -> None:
        """Tell of the first failure; others likely have the same cause."""
        level = logging.DEBUG if self._is_quiet else logging.WARNING
        self._is_quiet = True
        logger.log(level, "a start takes longer, since a process that lowers has failed: %s", error)


_Results = queue.SimpleQueue[tuple[ProgramKey, bytes | None] | None]
"""Keys with programs, or with None if they failed; and None for each worker that gets no more."""


def _collect(
    num_workers: int, pending: deque[ProgramKey], results: _Results
) -> Iterator[tuple[ProgramKey, bytes | None]]:
    """What `LoweringPool.lower` returns."""
    while num_workers:
        if (result := results.get()) is None:
            num_workers -= 1
        else:
            yield result
    yield from ((key, None) for key in pending)


def _pop(pending: deque[ProgramKey]) -> ProgramKey | None:
    """The next key; None where none is left."""
    try:
        return pending.popleft()
    except IndexError:
        return None


class _Worker:
    """One process and the pipe to it.

    Raises:
      Exception: there is no process to be had.
    """

    def __init__(self):
        self._errors = tempfile.TemporaryFile()
        self._connection, theirs = multiprocessing.Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER_MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_environment(),
            )
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def begin(self, job: LoweringJob) -> None:
        """Tell what the next programs belong to; raises as `send`."""
        with contextlib.suppress(BrokenPipeError):  # `lower` finds out why
            send(self._connection, job)

    def lower(self, key: ProgramKey) -> bytes:
        """What `StepProgram.export` gives for the program of a key of the job.

        Raises:
          RuntimeError: it could not be lowered, or the process has ended.
          TimeoutError: it takes too long.
        """
        kind, shape, mode = key
        assert isinstance(shape, Bucket | int), key
        try:
            with contextlib.suppress(BrokenPipeError):  # there may be an answer still
                send(self._connection, LowerProgram(kind, shape, mode))
            answer = receive_answer(self._connection, ANSWER_SECONDS)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(self._how_it_ended()) from error
        if isinstance(answer, LoweringFailed):
            raise RuntimeError(answer.reason)
        return answer.program

    def kill(self) -> None:
        """End the process, and take it off the process table."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipe, which no thread may use any more."""
        self._connection.close()
        self._errors.close()

    def _how_it_ended(self) -> str:
        """Its status and its last words; the pipe's end comes a moment before them."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STATUS_SECONDS)
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(words) if line.strip()), "it said nothing")
        return f"it has ended with status {self._process.returncode}: {last}"


def _environment() -> dict[str, str]:
    """This process's variables and module paths, but no GPU, nor flags that are for one."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = os.pathsep.join(path for path in sys.path if path)
    return inherited | _NO_GPU | {"PYTHONPATH": paths}


@contextlib.contextmanager
def open_lowering_pool(
    setup: ModelSetup, store: ProgramStore | None
) -> Iterator[LoweringPool | None]:
    """A pool for an engine's start; None where its programs are better lowered in its process.

    Args:
      setup: the model on its devices.
      store: of programs of earlier starts. If it is empty, the processes start at once; else they
        start when programs are found to be missing.
    """
    num_processes = count_processes(setup)
    if not num_processes:
        yield None
        return
    pool = LoweringPool(num_processes)
    try:
        if store is None or store.is_empty:
            pool.start()
        yield pool
    finally:
        pool.close()


def count_processes(setup: ModelSetup) -> int:
    """How many processes may lower an engine's programs; 0 = none can, or few CPUs are there.

    Without a GPU, JAX lowers Mosaic kernels for Hopper, and Triton's not at all.
    """
    is_known = model_class(setup.model.architecture).__module__.startswith("models.")
    can_carry = importlib.util.find_spec("flatbuffers") is not None  # of jax.export
    is_fit = setup.backend == "mosaic" and setup.sharder.mesh.size == 1 and is_known and can_carry
    num_cpus = count_cpus() if is_fit else 0
    return min(MAX_PROCESSES, num_cpus // 2) if num_cpus >= MIN_CPUS else 0


def count_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs that this process may use, by its affinity and by its container's quota, if any."""
    num_cpus = len(os.sched_getaffinity(0))
    try:
        microseconds, period = map(int, quota.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return num_cpus
    return min(num_cpus, microseconds // period)
