"""`jaxserve generate`: continue prompts in this process and print the text as it comes."""

import argparse
import sys
import time
from dataclasses import dataclass

from jaxserve.llm import LLM
from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    interactive_engine_config,
    option,
    sampling_params,
)
from server.cli.unsupported import add_unsupported_flags

USAGE = "[OPTION ...] PROMPT [PROMPT ...]"
COMMON = ("prompts", "model", "max_tokens", "temperature", "top_p", "stop", "quiet", "dtype")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Flags of this command."""

    quiet: bool = option(False, "print the texts only, not the speed", "generate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="texts to continue")
    add_config_arguments(parser, GenerateOptions)
    add_sampling_arguments(parser, max_tokens=64, temperature=0.0)
    add_engine_arguments(parser, without={"skip_tokenizer_init", "chat_template"})
    add_unsupported_flags(parser, of_server=False)


def run(arguments: argparse.Namespace) -> int:
    """Generate and print."""
    sampling_params(arguments)
    start = time.perf_counter()
    llm = LLM.from_config(interactive_engine_config(arguments))
    params = sampling_params(arguments, llm.get_default_sampling_params())
    ready = time.perf_counter()
    first_text: float | None = None
    num_tokens = 0
    outputs_of = [(prompt, llm.stream(prompt, params)) for prompt in arguments.prompts]
    for prompt, outputs in outputs_of:
        print(prompt, end="", flush=True)
        for output in outputs:
            completion = output.outputs[0]
            first_text = first_text or time.perf_counter()
            num_tokens += len(completion.token_ids)
            print(completion.text, end="", flush=True)
        print()
    if not arguments.quiet:
        seconds = time.perf_counter() - ready
        print(
            f"\n{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s) on "
            f"{llm.device_name}; ready after {ready - start:.1f} s, first token "
            f"{(first_text or ready) - start:.1f} s after the start",
            file=sys.stderr,
        )
    return 0
