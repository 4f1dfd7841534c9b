"""What `sleep` and `wake_up` may be asked for; no JAX."""

from collections.abc import Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import check_int

SLEEP_LEVELS = (1, 2)
"""1 keeps the weights in the host's memory, 2 drops them. vLLM's 0, a pause, is not built."""
SLEEP_MODES = ("abort", "wait", "keep")
"""Unfinished requests end at once, end by themselves, or are frozen until the wake-up."""
WEIGHTS, KV_CACHE = "weights", "kv_cache"
WAKE_TAGS = (WEIGHTS, KV_CACHE)
"""What comes back to the device."""


def check_sleep(level: Any, mode: Any) -> None:
    """Refuse what no engine of ours does.

    Raises:
      InvalidRequestError: the level or the mode is none of ours.
    """
    if check_int("level", level) not in SLEEP_LEVELS:
        raise InvalidRequestError.for_field("level", "must be 1 or 2 in this release", level)
    if not isinstance(mode, str) or mode not in SLEEP_MODES:
        rule = f"must be one of {', '.join(SLEEP_MODES)}"
        raise InvalidRequestError.for_field("mode", rule, mode)


def check_wake_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """The tags of a wake-up; None is all of them.

    Raises:
      InvalidRequestError: it is no list, an empty one, or holds what is no tag.
    """
    if tags is None:
        return WAKE_TAGS
    if not isinstance(tags, list | tuple) or not tags or any(t not in WAKE_TAGS for t in tags):
        rule = f"must be a list of {' and '.join(WAKE_TAGS)}"
        raise InvalidRequestError.for_field("tags", rule, tags)
    return tuple(tags)
