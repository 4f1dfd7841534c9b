"""`jaxserve complete`: continue texts, by a model in this process or by a server."""

import argparse
import sys
from dataclasses import dataclass

from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    option,
)
from server.cli.talking import RemoteOptions, answer_all, open_model
from server.cli.text_models import AnswerClock
from server.cli.unsupported import add_unsupported_flags

USAGE = "[OPTION ...]"
COMMON = ("quick", "stats", "url", "model_name", "api_key", "model", "max_tokens", "temperature")


@dataclass(frozen=True, kw_only=True)
class CompleteOptions:
    """Flags of this command; texts come from the terminal or a pipe, one a line."""

    quick: str | None = option(
        None, "continue one text and leave", "complete", short="-q", metavar="TEXT"
    )
    stats: bool = option(False, "tell the speed of each text on stderr", "complete")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser, CompleteOptions)
    add_config_arguments(parser, RemoteOptions)
    add_sampling_arguments(parser, max_tokens=64)
    add_engine_arguments(parser, without={"skip_tokenizer_init", "chat_template"})
    add_unsupported_flags(parser, of_server=False)


def run(arguments: argparse.Namespace) -> int:
    """Read texts until the end of input; print what follows each as it comes."""
    model = open_model(arguments, lambda llm: None)

    def answer(prompt: str) -> None:
        clock = AnswerClock()
        clock.print(model.complete(prompt))
        if arguments.stats:
            print(clock, file=sys.stderr)

    if arguments.quick is not None:
        answer(arguments.quick)
        return 0
    return answer_all(answer, is_terminal=sys.stdin.isatty())
