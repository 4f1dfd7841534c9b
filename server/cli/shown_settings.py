"""The settings that a start log shows: those that differ from the defaults, without secrets."""

import dataclasses
from typing import Any

SECRETS = ("api_key", "hf_token")


def shown_settings(*configs: Any) -> str:
    """The fields of dataclasses that are not at their defaults, as `name=value, ...`."""
    shown: list[str] = []
    for config in configs:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if value == field.default:
                continue
            is_secret = not field.repr or field.name in SECRETS
            shown.append(f"{field.name}={'***' if is_secret else repr(value)}")
    return ", ".join(shown) or "all defaults"
