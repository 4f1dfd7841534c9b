"""RequestOptions: what a request asks besides its prompt and how its tokens are chosen."""

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import check_int, check_number

OPTION_KEYS = ("cache_salt", "timeout", "ttft_goal_ms", "tpot_goal_ms")
"""The names under which prompts and HTTP bodies hold them."""
MAX_SALT_CHARS = 1024
MIN_GOAL_MS = 0.001
"""A microsecond; policies divide by goals."""

type Priority = int | Sequence[int] | None
"""One for all prompts, or one a prompt; lower runs earlier, None is 0."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Fields of a Request under the same names, see there; None means "not given"."""

    cache_salt: str | None = None
    timeout_seconds: float | None = None
    ttft_goal_seconds: float | None = None
    tpot_goal_seconds: float | None = None

    @classmethod
    def from_fields(
        cls,
        *,
        cache_salt: Any = None,
        timeout: Any = None,
        ttft_goal_ms: Any = None,
        tpot_goal_ms: Any = None,
    ) -> Self:
        """Check what a user gives.

        Args:
          cache_salt: text of 1 to 1024 characters.
          timeout: seconds from the request's arrival to its end.
          ttft_goal_ms: wanted milliseconds to the first token.
          tpot_goal_ms: wanted milliseconds of each further token.

        Raises:
          InvalidRequestError: a value breaks its rule.
        """
        return cls(
            cache_salt=None if cache_salt is None else _check_salt(cache_salt),
            timeout_seconds=(
                None if timeout is None else check_number("timeout", timeout, 0, is_low_open=True)
            ),
            ttft_goal_seconds=_goal_seconds("ttft_goal_ms", ttft_goal_ms),
            tpot_goal_seconds=_goal_seconds("tpot_goal_ms", tpot_goal_ms),
        )

    def over(self, below: "RequestOptions") -> "RequestOptions":
        """These options, and those of `below` where nothing is given here."""
        if self == NO_OPTIONS:
            return below
        return RequestOptions(
            cache_salt=_first(self.cache_salt, below.cache_salt),
            timeout_seconds=_first(self.timeout_seconds, below.timeout_seconds),
            ttft_goal_seconds=_first(self.ttft_goal_seconds, below.ttft_goal_seconds),
            tpot_goal_seconds=_first(self.tpot_goal_seconds, below.tpot_goal_seconds),
        )


NO_OPTIONS = RequestOptions()


def list_priorities(priority: Priority, num_prompts: int) -> list[int]:
    """The priority of each prompt.

    Raises:
      InvalidRequestError: it is neither an integer of 64 bits nor one for each prompt.
    """
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, list | tuple):
        return [check_int("priority", priority)] * num_prompts
    if len(priority) != num_prompts:
        rule = f"must be one integer, or one for each of {num_prompts} prompts"
        raise InvalidRequestError.for_field("priority", rule, len(priority))
    return [check_int("priority", item) for item in priority]


def check_policy_fields(options: RequestOptions, priority: int, policy: str) -> None:
    """Refuse what the scheduling policy would not go by.

    Args:
      options: of the request.
      priority: of the request; 0 asks for nothing.
      policy: the engine's `scheduling_policy`.

    Raises:
      InvalidRequestError: a priority or goal is given, and the policy is for the other or neither.
    """
    if priority and policy != "priority":
        raise _not_gone_by("priority", "must be 0", priority, policy, "priority")
    if policy == "slo":
        return
    goals = (options.ttft_goal_seconds, options.tpot_goal_seconds)
    for name, seconds in zip(("ttft_goal_ms", "tpot_goal_ms"), goals, strict=True):
        if seconds is not None:
            raise _not_gone_by(name, "must not be given", seconds * 1e3, policy, "slo")


def _not_gone_by(
    name: str, rule: str, value: float, policy: str, needed: str
) -> InvalidRequestError:
    return InvalidRequestError.for_field(
        name,
        f"{rule} under the scheduling policy {policy}",
        value,
        advice=f"it needs an engine with scheduling_policy='{needed}'",
    )


def _check_salt(cache_salt: Any) -> str:
    is_text = isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_SALT_CHARS
    # The prefix cache goes by the salt's bytes, which half a surrogate pair does not have.
    if not is_text or any("\ud800" <= character <= "\udfff" for character in cache_salt):
        rule = f"must be text of 1 to {MAX_SALT_CHARS} characters"
        raise InvalidRequestError.for_field("cache_salt", rule, cache_salt)
    return cache_salt


def _goal_seconds(name: str, milliseconds: Any) -> float | None:
    if milliseconds is None:
        return None
    return check_number(name, milliseconds, MIN_GOAL_MS) / 1e3


def _first[T](value: T | None, other: T | None) -> T | None:
    return other if value is None else value
