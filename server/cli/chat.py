"""`jaxserve chat`: talk to a model in this process."""

import argparse
import sys

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from server.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_params,
)

HELP = "talk to a model in this process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer one message and leave")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")
    add_sampling_arguments(parser, max_tokens=512)
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read messages until the end of input; print answers as they come."""
    params = sampling_params(arguments)
    llm = LLM.from_config(engine_config(arguments))
    messages: list[dict[str, str]] = []
    if arguments.system_prompt:
        messages.append({"role": "system", "content": arguments.system_prompt})
    if arguments.quick is not None:
        _answer(llm, messages, arguments.quick, params)
        return 0
    print("Type a message; Ctrl-D leaves.", file=sys.stderr)
    while (message := _read_message()) is not None:
        if message.strip():
            _answer(llm, messages, message, params)
    return 0


def _read_message() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _answer(llm: LLM, messages: list[dict[str, str]], message: str, params) -> None:
    """Stream one answer; the conversation keeps it. A message that does not fit is taken back."""
    messages.append({"role": "user", "content": message})
    answer = ""
    try:
        for output in llm.stream_chat(messages, params):
            answer += output.outputs[0].text
            print(output.outputs[0].text, end="", flush=True)
    except InvalidRequestError as error:
        messages.pop()
        print(f"jaxserve: {error}", file=sys.stderr)
        return
    print()
    messages.append({"role": "assistant", "content": answer})
