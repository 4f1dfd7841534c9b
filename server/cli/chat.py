"""`jaxserve chat`: talk to a model in this process, or to a server."""

import argparse
import sys
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    option,
)
from server.cli.talking import RemoteOptions, answer_all, open_model
from server.cli.text_models import AnswerClock, TextModel
from server.cli.unsupported import add_unsupported_flags

USAGE = "[OPTION ...]"
COMMON = (
    "quick",
    "system_prompt",
    "stats",
    "url",
    "model_name",
    "api_key",
    "model",
    "max_tokens",
    "temperature",
)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Flags of this command; messages come from the terminal or a pipe, one a line."""

    quick: str | None = option(
        None, "answer one message and leave", "chat", short="-q", metavar="MESSAGE"
    )
    system_prompt: str | None = option(None, "first message of the conversation", "chat")
    stats: bool = option(False, "tell the speed of each answer on stderr", "chat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config_arguments(parser, ChatOptions)
    add_config_arguments(parser, RemoteOptions)
    add_sampling_arguments(parser)
    add_engine_arguments(parser, without={"skip_tokenizer_init"})
    add_unsupported_flags(parser, of_server=False)


def run(arguments: argparse.Namespace) -> int:
    """Read messages until the end of input; print answers as they come."""

    def check_template(llm: LLM) -> None:
        if arguments.chat_template is None and llm.get_tokenizer().chat_template is None:
            rule = "must be given; the model has no chat template"
            raise InvalidRequestError(f"--chat-template {rule}")

    model = open_model(arguments, check_template, is_chat=True)
    conversation = Conversation(model, arguments.system_prompt, has_stats=arguments.stats)
    if arguments.quick is not None:
        conversation.answer(arguments.quick)
        return 0
    return answer_all(conversation.answer, is_terminal=sys.stdin.isatty())


class Conversation:
    """The messages so far; one that was not answered to the end is taken back."""

    def __init__(
        self, model: TextModel, system_prompt: str | None = None, *, has_stats: bool = False
    ):
        self._model, self._has_stats = model, has_stats
        self.messages: list[dict[str, str]] = []
        if system_prompt:
            self.messages.append({"role": "system", "content": system_prompt})

    def answer(self, message: str) -> None:
        """Print the answer as it comes.

        Raises:
          InvalidRequestError: the conversation has become too long, or the template refuses it.
          CommandError: the server refuses it, or is gone.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        clock = AnswerClock()
        answer = clock.print(self._model.chat(messages))
        if self._has_stats:
            print(clock, file=sys.stderr)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
