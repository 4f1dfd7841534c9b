"""Tests of jaxserve/log_writer.py: a log line can never fail or hold up a request."""

import io
import logging
import os
import re
import time
from typing import Any

import pytest

from jaxserve import log_writer
from jaxserve.errors import describe_value
from jaxserve.log_writer import LogWriter, write_line


def record(message: str, *args: Any) -> logging.LogRecord:
    return logging.LogRecord("server", logging.INFO, "", 1, message, args, None)


def written(*records: logging.LogRecord) -> str:
    stream = io.StringIO()
    writer = LogWriter(stream)
    for item in records:
        writer.handle(item)
    writer.close()
    return stream.getvalue()


def test_lines_are_written_in_their_order():
    lines = [record("line %d", number) for number in range(100)]
    assert written(*lines) == "".join(f"line {number}\n" for number in range(100))


class Unshowable:
    def __str__(self) -> str:
        raise ValueError("no")


def test_what_cannot_be_shown_is_counted_and_fails_nobody():
    shown = written(record("%s", Unshowable()), record("%d", "x"), record("good"))
    told = map(int, re.findall(r"WARNING jaxserve: (\d) log lines were dropped\n", shown))
    assert "good\n" in shown and sum(told) == 2


def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(log_writer, "MAX_LINES", 100)
    monkeypatch.setattr(log_writer, "EXIT_SECONDS", 0.1)
    reading, writing = os.pipe()
    with open(writing, "w") as stream:
        writer = LogWriter(stream)
        start = time.monotonic()
        for _ in range(1000):
            writer.handle(record("x" * 1000))
        writer.close()
        assert time.monotonic() - start < 2
        assert writer.num_dropped > 700
        os.close(reading)
        writer._thread.join(10)
        assert not writer._thread.is_alive()


@pytest.mark.parametrize("path", ["/dev/full", "closed"])
def test_a_stream_that_takes_nothing_fails_nobody(path):
    stream = open("/dev/full" if path == "/dev/full" else os.devnull, "w")
    if path == "closed":
        stream.close()
    writer = LogWriter(stream)
    writer.handle(record("lost"))
    writer.close()
    assert writer.num_dropped == 1
    stream.close()


@pytest.mark.bugbank
@pytest.mark.parametrize("offset", range(990, 1011))
def test_bugbank_R32_a_cut_line_ends_between_characters(offset, tmp_path):
    prompt = "a" * offset + "日本語のテキスト" * 40 + "\ud83d"
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as stream:
        writer = LogWriter(stream)
        writer.handle(record("prompt %s", prompt[:1000]))
        writer.handle(record("prompt %s", prompt))
        writer.handle(record("got %s", describe_value(prompt)))
        writer.close()
        assert writer.num_dropped == 0
    cut, whole, described = path.read_text(encoding="utf-8").splitlines()
    assert cut == f"prompt {prompt[:1000]}" and whole.endswith("テキスト\\ud83d")
    assert len(described) < 220


def test_what_a_terminal_lacks_is_escaped(tmp_path):
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        write_line(stream, "日\n")
    assert (tmp_path / "log").read_text() == "\\u65e5\n"
