"""What chat and complete share: their flags, the model they open, and the loop over messages."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.environment import environment_settings
from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.llm import LLM
from server.cli.arguments import (
    given_sampling,
    interactive_engine_config,
    option,
    refuse_given,
    sampling_params,
)
from server.cli.failures import CommandError, tell
from server.cli.text_models import LocalModel, RemoteModel, TextModel
from server.protocol.sampling import chat_limit


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Flags that name a server."""

    url: str | None = option(
        None,
        "of a server's API, as http://localhost:8000/v1; without it the model runs in this process",
        "server",
    )
    model_name: str | None = option(
        None, "the server's name of the model; its first one if not given", "server"
    )
    api_key: str | None = option(
        None, "of the server; also JAXSERVE_API_KEY or VLLM_API_KEY", "server"
    )


def open_model(
    arguments: argparse.Namespace, check_model: Callable[[LLM], None], *, is_chat: bool = False
) -> TextModel:
    """The model that the flags name; a flag that it would not read is refused.

    Args:
      arguments: with RemoteOptions, EngineConfig and sampling parameters.
      check_model: raises when a model in this process will not do.
      is_chat: answers that nobody limits may use the rest of the model's length, as on a server.

    Raises:
      EngineConfigError: flags contradict each other.
      InvalidRequestError: a sampling parameter breaks its rule.
      CommandError: the server cannot be reached.
    """
    sampling_params(arguments)
    if arguments.url is not None:
        rule = "is of a model in this process; --url must come without it"
        refuse_given(arguments, EngineConfig, rule, without=environment_settings())
        return RemoteModel(
            arguments.url,
            api_key=arguments.api_key,
            name=arguments.model_name,
            sampling=given_sampling(arguments),
        )
    if arguments.model_name is not None:
        raise EngineConfigError("--model-name must come with --url; a model here is --model")
    if arguments.api_key not in (None, arguments.environment_api_key):
        raise EngineConfigError("--api-key must come with --url")
    llm = LLM.from_config(interactive_engine_config(arguments))
    check_model(llm)
    defaults = llm.get_default_sampling_params()
    if is_chat:
        defaults.max_tokens = chat_limit(defaults)
    return LocalModel(llm, sampling_params(arguments, defaults))


def answer_all(answer: Callable[[str], None], *, is_terminal: bool) -> int:
    """Answer a message a line until the end of input.

    A message that is refused ends nothing; in a pipe it shows in the status.
    """
    if is_terminal:
        print("Type a message; Ctrl-C ends an answer, Ctrl-D leaves.", file=sys.stderr)
    status = 0
    while (message := read_message("> " if is_terminal else "")) is not None:
        try:
            if message.strip():
                answer(message)
        except (InvalidRequestError, CommandError) as error:
            status = max(status, error.status if isinstance(error, CommandError) else 2)
            tell(str(error))
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print()
    return 0 if is_terminal else status


def read_message(prompt: str) -> str | None:
    """The next line of stdin, None at its end."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"messages must be UTF-8; got {error.object[:40]!r}") from error
