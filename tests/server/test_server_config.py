"""ServerConfig: its rules, and the flags it refuses by name."""

from typing import Any

import pytest

from jaxserve.errors import EngineConfigError
from server.config import NOT_YET, ServerConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port", "80"),
        ("host", 3),
        ("uvicorn_log_level", "loud"),
        ("shutdown_timeout", -1),
        ("sse_keep_alive_interval", float("nan")),
        ("sse_keep_alive_interval", float("inf")),
        ("max_body_bytes", 10),
        ("max_json_depth", 0),
        ("max_json_depth", 100_000),
        ("max_num_queued_reqs", 0),
        ("root_path", "api"),
        ("root_path", "/api/"),
        ("allowed_origins", ("a", 3)),
        ("default_chat_template_kwargs", "x"),
        ("strict", 1),
        ("default_request_timeout", 0),
        ("default_request_timeout", float("inf")),
        ("default_request_timeout", "60"),
        ("enable_dev_routes", 1),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused_by_name(name, value):
    with pytest.raises(EngineConfigError, match=name):
        ServerConfig(**{name: value})


def test_lists_become_tuples_and_keys_are_never_shown():
    given: dict[str, Any] = {"api_key": ["secret-1"], "allowed_origins": ["http://a"]}
    config = ServerConfig(**given)
    assert config.api_key == ("secret-1",) and config.allowed_origins == ("http://a",)
    assert "secret" not in repr(config)
    for keys in (("secret 2",), ("",), ("é-secret",), (7,), "secret"):
        with pytest.raises(EngineConfigError) as caught:
            ServerConfig(api_key=keys)  # pyright: ignore[reportArgumentType]
        assert "secret" not in str(caught.value)


def test_credentials_must_not_go_to_any_origin():
    with pytest.raises(EngineConfigError, match="allowed_origins"):
        ServerConfig(allow_credentials=True, allowed_origins=("*",))


@pytest.mark.bugbank
def test_bugbank_R27_a_reasoning_parser_is_refused_by_name():
    with pytest.raises(EngineConfigError, match="reasoning_parser is not supported"):
        ServerConfig.from_keywords(reasoning_parser="deepseek_r1")
    assert ServerConfig.from_keywords(reasoning_parser="") == ServerConfig()


def test_flags_not_in_this_release_are_taken_with_their_neutral_values_only():
    for name, neutral_values in NOT_YET.items():
        for value in neutral_values:
            ServerConfig.from_keywords(**{name: value})
        with pytest.raises(EngineConfigError, match=name):
            ServerConfig.from_keywords(**{name: "something"})
    with pytest.raises(EngineConfigError, match="prot"):
        ServerConfig.from_keywords(prot=80)
