"""Tests of `jaxserve serve` as processes: its start, its drain, and the deaths of its parts."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.tiny_llm import flags, write_tokenizer

START_SECONDS = 200.0
KEY = "sk-secret-of-this-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Served:
    """A `jaxserve serve` process of the tiny model."""

    def __init__(self, tokenizer: Path, *words: str, stderr: int | None = None):
        command = [sys.executable, "-m", "server.cli.main", "serve", *flags(tokenizer)]
        self.path = words[1] if words[0] == "--uds" else None
        environment = os.environ | {"VLLM_API_KEY": KEY}
        self.process = subprocess.Popen(
            [*command, "--log-level", "info", *words], stderr=stderr, env=environment
        )
        self._handle = psutil.Process(self.process.pid)

    def wait_until_ready(self, http: httpx.Client) -> None:
        end = time.monotonic() + START_SECONDS
        while self.path is not None and not os.path.exists(self.path):
            # httpcore leaks a socket for each path that is not there.
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.05)
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server has ended"
            with contextlib.suppress(httpx.TransportError):
                if http.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError("the server does not become ready")

    def engines(self) -> list[psutil.Process]:
        """The engine process, once it is there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._handle.children(recursive=True)
        return []

    def wait_for_engine(self) -> psutil.Process:
        end = time.monotonic() + START_SECONDS
        while not (engines := self.engines()):
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.02)
        return engines[0]

    def end(self) -> None:
        for process in (*self.engines(), self._handle):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextlib.contextmanager
def serving(tokenizer: Path, *words: str, stderr: int | None = None) -> Iterator[Served]:
    served = Served(tokenizer, *words, stderr=stderr)
    try:
        yield served
    finally:
        served.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_gone(process: psutil.Process, seconds: float) -> bool:
    with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
        process.wait(seconds)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def stream(http: httpx.AsyncClient, num_sequences: int) -> tuple[bytes, float]:
    """All events of one streamed completion, and when the last one came."""
    body = {"prompt": "w5", "max_tokens": 120, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body | {"n": num_sequences}) as response:
        assert response.status_code == 200
        events = await response.aread()
    return events, time.monotonic()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.mark.bugbank
def test_bugbank_R85_a_busy_port_ends_the_start_before_anything_is_loaded(tokenizer):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "server.cli.main", "serve", *flags(tokenizer)]
        done = subprocess.run(
            [*command, "--host", "127.0.0.1", "--port", port], capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1
    expected = f"jaxserve: cannot listen at 127.0.0.1:{port}: Address already in use (errno 98)\n"
    assert done.stderr == expected
    # The time of the processor: this machine may be busy with other tests.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_a_model_that_is_not_there_is_one_line_and_status_2(tokenizer, tmp_path):
    path = str(tmp_path / "s")
    command = [sys.executable, "-m", "server.cli.main", "serve", "/no/such", "--uds", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("jaxserve: model must be")
    assert "Traceback" not in done.stderr and not os.path.exists(path)


@pytest.mark.bugbank
@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_bugbank_R86_ctrl_c_at_the_start_leaves_no_process_and_no_socket(
    tokenizer, tmp_path, seconds
):
    path = str(tmp_path / "s")
    with serving(tokenizer, "--uds", path) as served:
        engine = served.wait_for_engine()
        time.sleep(seconds)
        os.kill(served.process.pid, signal.SIGINT)
        assert served.process.wait(10) == 130
        assert is_gone(engine, 10)
    assert not os.path.exists(path)


def test_a_server_with_a_full_stderr_serves_and_drains_its_streams_at_sigterm(tokenizer):
    """F12 and F10: nobody reads the pipe of the log, which fills up long before the signal."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("--host", "127.0.0.1", "--port", str(port))

    async def drain(served: Served) -> tuple[list[bytes], int, httpx.Response]:
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as http:
            streams = [asyncio.create_task(stream(http, 12)) for _ in range(8)]
            await asyncio.sleep(1)
            assert not all(task.done() for task in streams)
            os.kill(served.process.pid, signal.SIGTERM)
            while (health := (await http.get("/health")).status_code) == 200:
                await asyncio.sleep(0.01)
            late = await http.post("/v1/completions", json={"prompt": "w5"})
            return [events for events, _ in await asyncio.gather(*streams)], health, late

    with serving(tokenizer, *words, stderr=subprocess.PIPE) as served:
        with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as http:
            served.wait_until_ready(http)
            path = "/v1/models?" + "x" * 200
            assert all(http.get(path).status_code == 200 for _ in range(1200))
            assert http.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401
            assert http.get("/v1/models", headers={"x": "y" * 20_000}).status_code == 431
        engine = served.wait_for_engine()
        events, health, late = asyncio.run(drain(served))
        assert health == 503
        assert late.status_code == 503 and late.headers["connection"] == "close"
        assert all(e.endswith(b"data: [DONE]\n\n") and b'"error"' not in e for e in events)
        assert all(e.count(b'"finish_reason":"length"') == 12 for e in events)
        assert served.process.wait(20) == 0 and is_gone(engine, 10)
        assert served.process.stderr is not None
        log = served.process.stderr.read()
    assert b"api_key=***" in log and KEY.encode() not in log and b"xxx" not in log
    assert b"Traceback" not in log


def test_a_killed_engine_is_told_to_every_client_and_ends_the_server(tokenizer, tmp_path):
    """F02."""
    path = str(tmp_path / "s")

    async def watch(served: Served) -> tuple[list[bytes], float]:
        transport = httpx.AsyncHTTPTransport(uds=path)
        limits = {"base_url": "http://x", "headers": HEADERS, "timeout": 60}
        async with httpx.AsyncClient(transport=transport, **limits) as http:
            streams = [asyncio.create_task(stream(http, 100)) for _ in range(16)]
            await asyncio.sleep(1)
            assert not any(task.done() for task in streams)
            killed = time.monotonic()
            served.wait_for_engine().kill()
            ended = await asyncio.gather(*streams)
        return [events for events, _ in ended], max(when for _, when in ended) - killed

    log = tmp_path / "log"
    words = ("--uds", path, "--max-num-queued-reqs", "4k", "--max-num-queued-tokens", "100k")
    with log.open("wb") as file, serving(tokenizer, *words, stderr=file.fileno()) as served:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=path), base_url="http://x", headers=HEADERS
        ) as http:
            served.wait_until_ready(http)
        events, seconds = asyncio.run(watch(served))
        for told in events:
            assert told.endswith(b"data: [DONE]\n\n")
            assert told.count(b'"error"') == 1 and b'"code":503' in told
        assert seconds < 5
        assert served.process.wait(10) == 1
        assert not served.engines()
    assert not os.path.exists(path)
    assert b"the engine process has ended by signal 9" in log.read_bytes()


@pytest.mark.bugbank
def test_bugbank_R80_a_killed_server_takes_its_engine_with_it(tokenizer):
    """F03."""
    port = free_port()
    words = ("--host", "127.0.0.1", "--port", str(port))
    with serving(tokenizer, *words) as served:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS) as http:
            served.wait_until_ready(http)
            engine = served.wait_for_engine()
            served.process.kill()
            served.process.wait()
        assert is_gone(engine, 10)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
