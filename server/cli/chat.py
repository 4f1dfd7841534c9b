"""`jaxserve chat`: talk to a model in this process."""

import argparse
import sys

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from server.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    interactive_engine_config,
    sampling_params,
)

HELP = "talk to a model in this process; messages come from the terminal or a pipe, one a line"
USAGE = "[OPTION ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer one message and leave")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")
    add_sampling_arguments(parser, max_tokens=512)
    add_engine_arguments(parser, without={"skip_tokenizer_init"})


def run(arguments: argparse.Namespace) -> int:
    """Read messages until the end of input; print answers as they come."""
    sampling_params(arguments)
    llm = LLM.from_config(interactive_engine_config(arguments))
    if arguments.chat_template is None and llm.get_tokenizer().chat_template is None:
        raise InvalidRequestError("--chat-template must be given; the model has no chat template")
    params = sampling_params(arguments, llm.get_default_sampling_params())
    conversation = Conversation(llm, params, arguments.system_prompt)
    if arguments.quick is not None:
        conversation.answer(arguments.quick)
        return 0
    return _answer_all(conversation, is_terminal=sys.stdin.isatty())


def _answer_all(conversation: "Conversation", *, is_terminal: bool) -> int:
    """A message that is refused ends nothing; in a pipe it shows in the status."""
    if is_terminal:
        print("Type a message; Ctrl-C ends an answer, Ctrl-D leaves.", file=sys.stderr)
    num_refused = 0
    while (message := _read_message("> " if is_terminal else "")) is not None:
        try:
            if message.strip():
                conversation.answer(message)
        except InvalidRequestError as error:
            num_refused += 1
            print(f"jaxserve: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
    return 2 if num_refused and not is_terminal else 0


def _read_message(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"messages must be UTF-8; got {error.object[:40]!r}") from error


class Conversation:
    """The messages so far; one that was not answered to the end is taken back."""

    def __init__(self, llm: LLM, params: SamplingParams, system_prompt: str | None = None):
        self._llm, self._params = llm, params
        self.messages: list[dict[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def answer(self, message: str) -> None:
        """Print the answer as it comes.

        Raises:
          InvalidRequestError: the conversation has become too long, or the template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        answer = ""
        for output in self._llm.stream_chat(messages, self._params):
            answer += output.outputs[0].text
            print(output.outputs[0].text, end="", flush=True)
        print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
