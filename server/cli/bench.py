"""`jaxserve bench`: the workloads that peers are compared on, one JSON line a test."""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass

from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.llm import LLM
from server.bench.measure import measure
from server.bench.workloads import LATENCY, THROUGHPUT, WORKLOADS
from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    engine_config,
    option,
)
from server.cli.unsupported import add_unsupported_flags
from server.cli.values import read_sizes

KINDS = {"latency": LATENCY, "throughput": THROUGHPUT, "all": LATENCY + THROUGHPUT}
NOT_YET = ("serve", "startup", "sweep", "mm-processor", "forward")
USAGE = "[OPTION ...] {" + ",".join(KINDS) + "}"
COMMON = ("kind", "model", "tests", "runs", "text", "output_json", "load_format", "max_model_len")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Flags of this command."""

    tests: str | None = option(
        None, f"only these of {', '.join(WORKLOADS)}", "bench", metavar="NAME,NAME,..."
    )
    runs: int = option(3, "timed calls of each test", "bench")
    text: bool = option(False, "text in and out, not token ids", "bench")
    output_json: str | None = option(
        None, "append the lines to this file, too", "bench", metavar="FILE"
    )
    enable_prefix_caching: bool = option(
        False, "take computed prefixes; all runs and the warm-up have the same prompts", "bench"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("kind", type=read_kind, metavar="KIND", help=f"one of {', '.join(KINDS)}")
    add_config_arguments(parser, BenchOptions)
    parser.add_argument(
        "--buckets",
        type=read_buckets,
        metavar="ROWS/TOKENS",
        help="compile only these sizes, for example 8,64/128,8192",
    )
    add_engine_arguments(parser, without={"enable_prefix_caching"})
    add_unsupported_flags(parser, of_server=False)


def run(arguments: argparse.Namespace) -> int:
    """Time the chosen tests and print a line for each."""
    names = _checked_tests(arguments)
    with contextlib.ExitStack() as stack:
        files = [sys.stdout]
        if arguments.output_json:
            files.append(stack.enter_context(_open_to_append(arguments.output_json)))
        _apply_buckets(arguments)
        llm = LLM.from_config(engine_config(arguments))
        for name in names:
            workload = WORKLOADS[name](llm.model_config.vocab_size)
            result = measure(llm, workload, num_runs=arguments.runs, with_text=arguments.text)
            for file in files:
                print(json.dumps(result), file=file, flush=True)
    return 0


def read_kind(text: str) -> str:
    """Which workloads; vLLM's further kinds are refused by name."""
    if text in NOT_YET:
        raise argparse.ArgumentTypeError(f"bench {text} is not supported in this release")
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(KINDS)}; got {text!r}")
    return text


def read_buckets(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of decode steps, and tokens of steps with prompt tokens."""
    try:
        rows, tokens = map(read_sizes, text.split("/"))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"must be sizes of rows, a slash, and sizes of tokens, as 8,64/128,8192; got {text!r}"
        ) from error
    return rows, tokens


def _apply_buckets(arguments: argparse.Namespace) -> None:
    """The largest sizes are the limits too, unless these are given."""
    if arguments.buckets is None:
        return
    arguments.row_buckets, arguments.token_buckets = arguments.buckets
    arguments.max_num_seqs = arguments.max_num_seqs or max(arguments.row_buckets)
    budget = arguments.max_num_batched_tokens or max(arguments.token_buckets)
    arguments.max_num_batched_tokens = budget


def _checked_tests(arguments: argparse.Namespace) -> list[str]:
    """The tests to run; what can be wrong is told before a model is loaded."""
    of_kind = KINDS[arguments.kind]
    names: list[str] = arguments.tests.split(",") if arguments.tests else list(of_kind)
    for name in names:
        if name not in of_kind:
            rule = f"must be among {', '.join(of_kind)}"
            raise InvalidRequestError.for_field("tests", rule, name)
    if arguments.runs < 1:
        raise InvalidRequestError.for_field("runs", "must be at least 1", arguments.runs)
    if arguments.text and arguments.skip_tokenizer_init:
        raise EngineConfigError("--text must have a tokenizer; got --skip-tokenizer-init too")
    return names


def _open_to_append(path: str):
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise EngineConfigError(
            f"--output-json must be a file that can be written; got {path!r}: {error.strerror}"
        ) from error
