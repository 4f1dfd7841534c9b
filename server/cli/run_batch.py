"""`jaxserve run-batch`: a file of OpenAI batch lines, answered in this process."""

import argparse
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.llm import LLM
from jaxserve.metrics.engine_metrics import model_name
from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    engine_config,
    option,
    read_config,
)
from server.cli.batch_lines import BatchLine, BatchReader, read_lines
from server.cli.failures import CommandError
from server.cli.unsupported import add_unsupported_flags

logger = logging.getLogger(__name__)

USAGE = "-i INPUT -o OUTPUT [OPTION ...]"
COMMON = (
    "input_file",
    "output_file",
    "model",
    "served_model_name",
    "max_model_len",
    "max_num_seqs",
    "chat_template",
    "quiet",
)
WINDOW = 16_384
"""Lines that are in memory, and in the engine, at the same time."""


@dataclass(frozen=True, kw_only=True)
class RunBatchOptions:
    """Flags of this command."""

    input_file: str | None = option(
        None,
        "lines of {custom_id, method, url, body} for /v1/chat/completions and /v1/completions; "
        "- is stdin",
        "batch",
        short="-i",
        metavar="FILE",
    )
    output_file: str | None = option(
        None,
        "gets a line of {id, custom_id, response, error} for each, in their order; it has this "
        "name only when it is complete; - is stdout",
        "batch",
        short="-o",
        metavar="FILE",
    )
    quiet: bool = option(False, "show no progress", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser, RunBatchOptions)
    add_engine_arguments(parser, without={"skip_tokenizer_init"})
    add_unsupported_flags(parser, of_server=False)


def run(arguments: argparse.Namespace) -> int:
    """Answer every line; one that is wrong gets its error, and ends nothing."""
    options, config = read_config(arguments, RunBatchOptions), engine_config(arguments)
    if options.input_file is None or options.output_file is None:
        raise EngineConfigError("-i and -o must be given")
    with (
        _open_input(options.input_file) as lines,
        _open_output(options.output_file) as output,
    ):
        llm = LLM.from_config(config)
        reader = BatchReader(llm, _model_names(config))
        start = time.perf_counter()
        num_lines = num_failed = 0
        for window in _windows(read_lines(lines)):
            answers = _answer_window(llm, reader, window, is_quiet=options.quiet)
            for is_good, answer in answers:
                output.write(answer)
                num_lines += 1
                num_failed += not is_good
    seconds = time.perf_counter() - start
    logger.info("%d lines in %.1f s, %d of them refused or failed", num_lines, seconds, num_failed)
    return 0


def _model_names(config: EngineConfig) -> tuple[str, ...]:
    return config.served_model_name or (model_name(config),)


def _windows(lines: Iterator[bytes]) -> Iterator[Iterable[bytes]]:
    while window := list(itertools.islice(lines, WINDOW)):
        yield window


def _answer_window(
    llm: LLM, reader: BatchReader, lines: Iterable[bytes], *, is_quiet: bool
) -> Iterator[tuple[bool, bytes]]:
    """Whether each line was answered, and its output line."""
    items = [reader.read(line) for line in lines]
    submissions = [s for item in items if isinstance(item, BatchLine) for s in item.submissions]
    outputs = iter(llm.run(submissions, use_tqdm=not is_quiet))
    for item in items:
        if isinstance(item, bytes):
            yield False, item
        else:
            of_line = list(itertools.islice(outputs, len(item.submissions)))
            yield True, reader.answer(item, of_line)


@contextlib.contextmanager
def _open_input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")
    except OSError as error:
        rule = "must be a file that can be read"
        raise EngineConfigError(f"-i {rule}; got {path!r}: {error.strerror}") from error
    with file:
        yield file


@contextlib.contextmanager
def _open_output(path: str) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends well; devices and pipes are written at once."""
    target = Path(path)
    is_device = path != "-" and target.exists() and not target.is_file()
    try:
        if path == "-":
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        elif is_device:
            with _open_to_write(target) as file:
                yield file
        else:
            with _partial(target) as file:
                yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(f"{path!r} cannot be written: {reason}") from error


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[BinaryIO]:
    """A file beside the target that becomes it, or goes when the block fails."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with _open_to_write(partial) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _open_to_write(path: Path) -> BinaryIO:
    try:
        return open(path, "wb")
    except OSError as error:
        rule = "must be a file that can be written"
        raise EngineConfigError(f"-o {rule}; got {str(path)!r}: {error.strerror}") from error
