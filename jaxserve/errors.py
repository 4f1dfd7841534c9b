"""Every error that jaxserve raises on purpose, in one tree.

    JaxServeError                 root (defined in models/errors.py, since loading needs it)
    ├── InvalidRequestError       the client asked for something that no engine of ours does
    │   └── RequestTooLongError   more tokens than the model or the page pool holds
    ├── RequestTooLargeError      more bytes than the server reads
    ├── AuthenticationError       no key, or a wrong one
    ├── ModelNotFoundError        no model or adapter of that name
    ├── QueueFullError            too many requests or tokens wait already
    ├── QueueTimeoutError         waited longer than allowed without being scheduled
    ├── RowError                  one sequence failed: NaN logits, or a raising processor
    ├── EngineConfigError         the settings contradict each other or the machine
    ├── ModelLoadError            the model's files (defined in models/errors.py)
    ├── EngineNotReadyError       the engine is still loading, asleep, or about to leave
    └── EngineDeadError           the engine has stopped and answers nothing any more

`server/errors.py` maps each to one HTTP status. A message is one sentence: name must rule; got
value[; do].
"""

import reprlib
from typing import Any, Self

from models.errors import JaxServeError, ModelLoadError

__all__ = [
    "AuthenticationError",
    "EngineConfigError",
    "EngineDeadError",
    "EngineNotReadyError",
    "InvalidRequestError",
    "JaxServeError",
    "ModelLoadError",
    "ModelNotFoundError",
    "QueueFullError",
    "QueueTimeoutError",
    "RequestTooLargeError",
    "RequestTooLongError",
    "RowError",
    "VLLMValidationError",
    "describe_value",
]

_LONGEST_VALUE = 200
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


def describe_value(value: object) -> str:
    """Show a client's value in at most 200 characters, whatever it is.

    Python refuses to print integers of more than 4 300 digits, so those are shown by their size.
    """
    try:
        text = _short.repr(value)
    except Exception as error:  # a client's own __repr__, or an integer too long to print
        if isinstance(value, int):
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


class InvalidRequestError(JaxServeError, ValueError):
    """What the client asked is wrong or not supported; asking again will not help.

    Attributes:
      parameter: name of the field at fault, None when there is no single one.
      value: what the field held.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None):
        """Take the message and the field at fault."""
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    @classmethod
    def for_field(cls, parameter: str, rule: str, value: Any, *, advice: str = "") -> Self:
        """Make the error "`parameter` `rule`; got `value`[; `advice`]".

        Args:
          parameter: name of the field.
          rule: what must hold, with its verb: "must be at least 1".
          value: what the field held.
          advice: what to do instead.
        """
        message = f"{parameter} {rule}; got {describe_value(value)}"
        return cls(f"{message}; {advice}" if advice else message, parameter=parameter, value=value)


VLLMValidationError = InvalidRequestError
"""The name under which a script written for vLLM catches it."""


class RequestTooLongError(InvalidRequestError):
    """The prompt, or the prompt and `max_tokens`, need more tokens than the model or pool holds."""


class RequestTooLargeError(JaxServeError):
    """The body, its nesting or its lists are over the server's limits."""


class AuthenticationError(JaxServeError):
    """The request carries no API key, or one that is not known."""


class ModelNotFoundError(JaxServeError):
    """No served model or adapter has the name asked for."""


class QueueFullError(JaxServeError):
    """As many requests or tokens wait as may wait.

    Attributes:
      retry_seconds: whole seconds until there is room again, by estimate.
    """

    def __init__(self, message: str, *, retry_seconds: int):
        """Take the message and when to ask again."""
        super().__init__(message)
        self.retry_seconds = retry_seconds


class QueueTimeoutError(JaxServeError):
    """The request waited longer than it may, without being scheduled.

    Attributes:
      retry_seconds: whole seconds after which to ask again; a server that knows better sets it.
    """

    retry_seconds: int = 1


class RowError(JaxServeError):
    """One sequence failed on the device: its logits held NaN, or its processor raised."""


class EngineConfigError(JaxServeError):
    """The engine's settings contradict each other, the model or the machine."""


class EngineNotReadyError(JaxServeError):
    """The engine is still loading, sleeps, or takes no new requests since it is about to leave."""


class EngineDeadError(JaxServeError):
    """The engine has stopped; every request in it has failed and no other is taken."""
