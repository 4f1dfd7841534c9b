"""ServerConfig: how the HTTP server listens, whom it lets in and what it answers; no JAX."""

from dataclasses import dataclass, fields
from typing import Any, Self

from jaxserve.config_fields import (
    check_choice,
    check_range,
    check_types,
    field_error,
    flag,
)
from jaxserve.errors import EngineConfigError, describe_value

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server; never changed after it was made. Names are vLLM's.

    Raises:
      EngineConfigError: a value breaks its rule.
    """

    host: str | None = flag(None, "address to listen at; all of them if not given", "listening")
    port: int = flag(8000, "port to listen at", "listening")
    uds: str | None = flag(None, "Unix socket to listen at, instead of a port", "listening")
    root_path: str = flag("", "path of the application behind a proxy", "listening")
    shutdown_timeout: int = flag(
        30, "seconds that running requests get to finish after SIGTERM", "listening"
    )
    watchdog_seconds: float = flag(
        30.0, "seconds of silence of an engine with work after which /health is bad", "health"
    )
    uvicorn_log_level: str = flag("info", f"one of {', '.join(LOG_LEVELS)}", "logs")
    disable_uvicorn_access_log: bool = flag(False, "log no line for each request", "logs")
    enable_log_requests: bool = flag(
        False, "log each request's prompt and parameters (prompts may be private)", "logs"
    )
    max_log_len: int = flag(256, "characters of a prompt that are logged", "logs")
    api_key: tuple[str, ...] = flag(
        (), "keys of which a client must send one; none lets everybody in", "access", is_secret=True
    )
    allow_metrics_without_api_key: bool = flag(
        False, "let /metrics be read without a key", "access"
    )
    enable_dev_routes: bool = flag(
        False, "add /reset_prefix_cache, /sleep and others for those who develop", "access"
    )
    allowed_origins: tuple[str, ...] = flag((), "web origins that browsers may use", "access")
    allowed_methods: tuple[str, ...] = flag(("*",), "methods for those origins", "access")
    allowed_headers: tuple[str, ...] = flag(("*",), "headers for those origins", "access")
    allow_credentials: bool = flag(False, "let those origins send cookies", "access")
    max_num_queued_reqs: int | None = flag(
        None, "sequences that may wait; 4 times max_num_seqs, at least 256, if not given", "limits"
    )
    max_num_queued_tokens: int | None = flag(
        None, "prompt tokens that may wait; 8 times the KV cache's if not given", "limits"
    )
    default_request_timeout: float | None = flag(
        None, "seconds until a request ends that gives no timeout of its own", "limits"
    )
    max_body_bytes: int = flag(8 << 20, "bytes of a request's body", "limits")
    max_header_bytes: int = flag(16 << 10, "bytes of a request's headers", "limits")
    max_json_depth: int = flag(64, "nesting of a request's JSON", "limits")
    strict: bool = flag(False, "refuse requests with unknown fields", "limits")
    response_role: str = flag("assistant", "role of the answers", "chat")
    trust_request_chat_template: bool = flag(
        False, "let clients send chat templates, which are programs", "chat"
    )
    default_chat_template_kwargs: dict[str, Any] | None = flag(
        None, "variables of the chat template, unless a request gives them", "chat"
    )
    parse_special_tokens_in_content: bool = flag(
        False, "let control tokens typed into messages be control tokens", "chat"
    )
    return_tokens_as_token_ids: bool = flag(
        False, "show tokens of log-probabilities as token_id:N", "answers"
    )
    enable_request_id_headers: bool = flag(False, "send X-Request-Id with answers", "answers")
    enable_force_include_usage: bool = flag(False, "end every stream with its usage", "answers")
    enable_prompt_tokens_details: bool = flag(
        False, "tell cached tokens in prompt_tokens_details", "answers"
    )
    sse_keep_alive_interval: float = flag(
        0.0, "seconds of silence after which a stream gets a comment line; 0 = never", "answers"
    )

    def __post_init__(self) -> None:
        """Check the values; lists become tuples."""
        for item in fields(self):
            if isinstance(getattr(self, item.name), list):
                object.__setattr__(self, item.name, tuple(getattr(self, item.name)))
        check_types(self)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, tuple) and not all(isinstance(part, str) for part in value):
                raise field_error(self, item.name, "must be a list of texts")
        check_range(self, "port", 0, 65535)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_json_depth"):
            check_range(self, name, 1)
        for name in ("max_body_bytes", "max_header_bytes"):
            check_range(self, name, 1024)
        check_range(self, "watchdog_seconds", 1)
        check_range(self, "default_request_timeout", 0.001)
        for name in ("shutdown_timeout", "max_log_len", "sse_keep_alive_interval"):
            check_range(self, name, 0)
        check_range(self, "max_json_depth", 1, 512)
        check_choice(self, "uvicorn_log_level", LOG_LEVELS)
        for key in self.api_key:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise EngineConfigError("api_key must be printable ASCII without spaces")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise field_error(self, "root_path", "must begin with / and not end with one")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise field_error(
                self, "allowed_origins", "must name origins when allow_credentials is set"
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Make a config of vLLM's frontend arguments.

        Raises:
          EngineConfigError: one is not supported, or not known.
        """
        known = {item.name for item in fields(cls)}
        for name, value in keywords.items():
            if name not in known:
                refuse_unsupported_flag(name, value)
        return cls(**{name: value for name, value in keywords.items() if name in known})


NOT_YET: dict[str, tuple[Any, ...]] = {
    "reasoning_parser": (None, ""),
    "enable_auto_tool_choice": (False,),
    "tool_call_parser": (None,),
    "tool_parser_plugin": (None, ""),
    "tool_strict_level": (None,),
    "exclude_tools_when_tool_choice_none": (False,),
    "reasoning_effort_map": (None,),
    "chat_template_content_format": ("auto", "string"),
    "enable_tokenizer_info_endpoint": (False,),
    "enable_per_request_metrics": (False,),
    "enable_log_outputs": (False,),
    "middleware": (None, (), []),
    "lora_modules": (None, (), []),
    "ssl_keyfile": (None,),
    "ssl_certfile": (None,),
    "ssl_ca_certs": (None,),
    "api_server_count": (None, 1),
    "headless": (False,),
}
"""vLLM's flags that this release does not act on, with the values that ask nothing of it."""


def refuse_unsupported_flag(name: str, value: Any) -> None:
    """Refuse a flag that is not a field of ServerConfig, unless it asks for nothing.

    Raises:
      EngineConfigError: it asks for something, or is not known.
    """
    if name not in NOT_YET:
        raise EngineConfigError(f"keywords must be server arguments; got {name}")
    if value not in NOT_YET[name]:
        raise EngineConfigError(
            f"{name} is not supported in this release; got {describe_value(value)}"
        )
