"""`jaxserve bench`: the workloads that peers are compared on, one JSON line a test."""

import argparse
import json

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from server.bench.measure import measure
from server.bench.workloads import LATENCY, THROUGHPUT, WORKLOADS
from server.cli.arguments import add_engine_arguments, engine_config

KINDS = {"latency": LATENCY, "throughput": THROUGHPUT, "all": LATENCY + THROUGHPUT}
HELP = "time fixed workloads in this process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("kind", choices=tuple(KINDS), help="which workloads")
    parser.add_argument("--tests", help="only these, separated by commas")
    parser.add_argument("--runs", type=int, default=3, help="timed calls of each (default: 3)")
    parser.add_argument("--text", action="store_true", help="text in and out, not token ids")
    parser.add_argument("--output-json", help="append the lines to this file, too")
    parser.add_argument(
        "--buckets",
        type=_read_buckets,
        metavar="ROWS/TOKENS",
        help="compile only these sizes, for example 8,64/128,8192",
    )
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Time the chosen tests and print a line for each."""
    names = _chosen_tests(arguments)
    if arguments.buckets is not None:
        arguments.row_buckets, arguments.token_buckets = arguments.buckets
        arguments.max_num_seqs = arguments.max_num_seqs or max(arguments.row_buckets)
        budget = arguments.max_num_batched_tokens or max(arguments.token_buckets)
        arguments.max_num_batched_tokens = budget
    llm = LLM.from_config(engine_config(arguments))
    for name in names:
        workload = WORKLOADS[name](llm.model_config.vocab_size)
        result = measure(llm, workload, num_runs=arguments.runs, with_text=arguments.text)
        line = json.dumps(result)
        print(line, flush=True)
        if arguments.output_json:
            with open(arguments.output_json, "a", encoding="utf-8") as file:
                file.write(line + "\n")
    return 0


def _read_buckets(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of decode steps, and tokens of steps with prompt tokens."""
    rows, tokens = text.split("/")
    return tuple(map(int, rows.split(","))), tuple(map(int, tokens.split(",")))


def _chosen_tests(arguments: argparse.Namespace) -> list[str]:
    of_kind = KINDS[arguments.kind]
    names: list[str] = arguments.tests.split(",") if arguments.tests else list(of_kind)
    for name in names:
        if name not in of_kind:
            rule = f"must be among {', '.join(of_kind)}"
            raise InvalidRequestError.for_field("tests", rule, name)
    return names
