"""What the error of a step says of the device."""

import enum

import jax

_MEMORY_CODE, _MEMORY_WORDS = "RESOURCE_EXHAUSTED", "out of memory"


class FaultKind(enum.Enum):
    """Where a step failed."""

    HOST = enum.auto()
    """In Python: the device did not see it."""
    OUT_OF_MEMORY = enum.auto()
    """The device had no memory for the step; it is well, but may have lost the donated arrays."""
    DEVICE = enum.auto()
    """In the device, its driver or its compiler."""


def fault_kind(error: Exception) -> FaultKind:
    """Tell where the error of a step comes from.

    XLA's begin with a status code. A program whose input is the result of one that failed fails in
    its turn, with the words of the first error but the code INTERNAL.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return FaultKind.HOST
    message = str(error)
    is_memory = message.startswith(_MEMORY_CODE) or _MEMORY_WORDS in message.lower()
    return FaultKind.OUT_OF_MEMORY if is_memory else FaultKind.DEVICE
