"""Tests of server/cli/arguments.py."""

import argparse
import dataclasses
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from server.cli.arguments import (
    add_config_arguments,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    option,
    read_config,
    refuse_given,
    sampling_params,
)
from server.cli.parser import Parser
from server.cli.shown_settings import shown_settings
from server.cli.unsupported import add_unsupported_flags
from server.cli.values import read_integer, read_json, read_sizes, read_words
from server.config import ServerConfig


def parse(*words: str) -> argparse.Namespace:
    parser = Parser(prog="jaxserve")
    parser.add_argument("prompts", nargs="*")
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=64, temperature=0.0)
    add_unsupported_flags(parser, of_server=False)
    return parser.parse_args(words)


def test_without_flags_the_config_is_the_default_one():
    assert engine_config(parse()) == EngineConfig()


def test_every_field_has_a_flag_of_its_name():
    values: dict[type, Any] = {
        tuple: ("8,4", (4, 8)),
        dict: ('{"a": 1}', {"a": 1}),
        bool: (None, True),
        int: ("32", 32),
        float: ("0.5", 0.5),
        str: ("m", "m"),
    }
    special = {"load_format": "dummy", "dtype": "float16", "generation_config": "vllm"}
    special |= {"attention_backend": "xla", "stacked_weights": "all", "scheduling_policy": "slo"}
    special |= {"preemption_mode": "recompute"}
    needed = {"ttft_goal_ms": "slo", "tpot_goal_ms": "slo"}
    several: dict[str, Any] = {"served_model_name": ("m", ("m",)), "num_scheduler_steps": ("8", 8)}
    for field in dataclasses.fields(EngineConfig):
        kind = next(k for k in values if k.__name__ in str(field.type))
        word, expected = several.get(field.name, values[kind])
        if field.name in special:
            word = expected = special[field.name]
        if field.name == "stored_head_dim":
            word, expected = "64", 64
        if field.name == "max_logprobs":
            word, expected = "7", 7
        flag = f"--{field.name.replace('_', '-')}"
        words = [flag] if word is None else [flag, word]
        if field.name in needed:
            words += ["--scheduling-policy", needed[field.name]]
        config = engine_config(parse(*words))
        assert getattr(config, field.name) == expected, field.name


def test_underscores_in_flags_are_dashes_but_not_in_values_or_behind_two_dashes():
    arguments = parse("--max_model_len=32", "--chat_template=a_b", "--", "--a_b")
    assert (arguments.max_model_len, arguments.chat_template) == (32, "a_b")
    assert arguments.prompts == ["--a_b"]


def test_booleans_have_a_no():
    assert parse("--no-skip-tokenizer-init").skip_tokenizer_init is False


def test_a_field_can_be_left_out():
    parser = Parser()
    add_engine_arguments(parser, without={"seed"})
    assert not hasattr(parser.parse_args([]), "seed")
    assert engine_config(parser.parse_args([])) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", 12), ("-1", -1), ("8k", 8000), ("8K", 8192), ("20GiB", 20 << 30)],
)
def test_integers_have_short_forms(text: str, expected: int):
    assert read_integer(text) == expected


def test_what_is_no_integer_is_refused_with_the_text():
    with pytest.raises(argparse.ArgumentTypeError, match="must be an integer, .*; got '8q'$"):
        read_integer("8q")


def test_a_length_may_be_a_number_or_auto(capsys):
    assert engine_config(parse("--max-model-len", "16K")).max_model_len == 16384
    for words in (["auto"], ["-1"]):
        assert engine_config(parse("--max-model-len", *words)).max_model_len == "auto"
    with pytest.raises(SystemExit):
        parse("--max-model-len", "most")
    refusal = capsys.readouterr().err
    assert "argument --max-model-len: must be an integer" in refusal
    assert "8192), or auto; got 'most'" in refusal


def test_sizes_have_short_forms():
    assert read_sizes("8, 1k,4K") == (8, 1000, 4096)


@pytest.mark.parametrize("text", ["", "8,", "a", "0", "8,-1", "8;9"])
def test_what_are_no_sizes_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="must be positive integers with commas"):
        read_sizes(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row-buckets", "a"], "argument --row-buckets: must be positive integers"),
        (["--hf-overrides", "{a"], "argument --hf-overrides: must be JSON"),
        (["--seed", "x"], "argument --seed: must be an integer"),
        (["--quantization", "awq"], "--quantization is not supported in this release"),
        (
            ["--max-modle-len=3"],
            "--max-modle-len is not a flag of this command; did you mean --max",
        ),
        (["--served-model-name", "[1"], "argument --served-model-name: must be JSON"),
    ],
)
def test_a_flag_that_cannot_be_read_gives_one_line_and_status_2(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxserve: {message}") and line.endswith("see jaxserve --help")


def test_a_value_that_breaks_its_rule_is_the_configs_to_refuse():
    with pytest.raises(EngineConfigError, match="hf_overrides must be a dict"):
        engine_config(parse("--hf-overrides", "[1]"))


def test_flags_go_over_the_callers_defaults_and_these_over_the_models():
    of_model = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=5)
    params = sampling_params(parse("--top-k", "4", "--stop", "a", "--stop", "b"), of_model)
    expected = SamplingParams(temperature=0, max_tokens=64, top_k=4, stop=["a", "b"])
    assert params == expected
    warm = sampling_params(parse("--temperature", "0.7"), of_model)
    assert (warm.temperature, warm.top_p, warm.max_tokens) == (0.7, 0.9, 64)
    assert of_model.max_tokens == 5


@pytest.mark.parametrize(
    ("flag", "value"), [("max-tokens", "0"), ("temperature", "3"), ("top-p", "0"), ("min-p", "2")]
)
def test_sampling_values_that_break_a_rule_are_refused_without_a_model(flag: str, value: str):
    with pytest.raises(InvalidRequestError, match=flag.replace("-", "_")):
        sampling_params(parse(f"--{flag}", value))


def test_a_list_takes_words_or_json_and_grows_when_the_flag_comes_again():
    parser = Parser()
    add_config_arguments(parser, ServerConfig)
    config = read_config(parser.parse_args(["--api-key", "a", "b", "--api-key", "c"]), ServerConfig)
    assert config.api_key == ("a", "b", "c")
    config = read_config(parser.parse_args(["--allowed-origins", '["x", "y"]']), ServerConfig)
    assert config.allowed_origins == ("x", "y") and config.allowed_methods == ("*",)
    with pytest.raises(argparse.ArgumentTypeError, match="must be a list of texts"):
        read_words(["[1]"])


def test_dots_set_a_part_of_a_json_value():
    words = ["--hf-overrides", '{"a": {"x": 1}, "b_c": 2}', "--hf_overrides.a.y_z", "3"]
    overrides = engine_config(parse(*words, "--hf-overrides.d=text")).hf_overrides
    assert overrides == {"a": {"x": 1, "y_z": 3}, "b_c": 2, "d": "text"}
    assert engine_config(parse("--hf-overrides.a", "[1]")).hf_overrides == {"a": [1]}


def test_vllms_short_names_are_known(capsys):
    assert engine_config(parse("-tp", "2")).tensor_parallel_size == 2
    assert engine_config(parse("-pp", "1", "-dp=1", "-cc", "null")) == EngineConfig()
    for words in (["-pp", "2"], ["-dp", "4"], ["-q", "fp8"], ["-O", "3"], ["-cc", "3"]):
        with pytest.raises(SystemExit):
            parse(*words)
        assert f"{words[0]} is not supported in this release" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-lora"],
        ["--no-enable-chunked-prefill"],
        ["--speculative-config", '{"method": "ngram"}'],
        ["--compilation-config.level", "3"],
        ["--kv-cache-dtype", "fp8"],
        ["--enforce-eager"],
    ],
)
def test_vllms_flags_that_nothing_acts_on_are_refused_by_name(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    flag = words[0].partition("=")[0].partition(".")[0].replace("_", "-")
    assert line.startswith(f"jaxserve: {flag} is not supported in this release")


def test_their_neutral_values_are_taken():
    words = ["--no-enable-lora", "--enable-prefix-caching", "--enable-chunked-prefill"]
    words += ["--kv-cache-dtype", "auto", "--cpu-offload-gb", "0", "--quantization", "none"]
    words += ["--max_num_queued_reqs", "None", "--watermark", "0.0", "--no-enforce-eager"]
    assert engine_config(parse(*words)) == EngineConfig()


def test_flags_of_another_kind_of_model_can_be_refused():
    arguments = parse("--dtype", "float16")
    with pytest.raises(EngineConfigError, match="^--dtype must not be$"):
        refuse_given(arguments, EngineConfig, "must not be")
    refuse_given(arguments, EngineConfig, "must not be", without={"dtype"})
    refuse_given(parse(), EngineConfig, "must not be")


def test_settings_are_shown_without_secrets_and_without_defaults():
    engine = EngineConfig(model="m", hf_token="hf_secret", seed=3)
    shown = shown_settings(engine, ServerConfig(api_key=("secret",), port=9))
    expected = ["model='m'", "hf_token=***", "seed=3", "port=9", "api_key=***"]
    assert shown.split(", ") == expected
    assert shown_settings(EngineConfig(), ServerConfig()) == "all defaults"


def test_a_commands_own_fields_have_short_names_and_shown_defaults():
    @dataclasses.dataclass(frozen=True)
    class Options:
        size: int = option(3, "how large", "things", short="-s", metavar="SIZE")

    parser = Parser()
    add_config_arguments(parser, Options)
    assert read_config(parser.parse_args(["-s", "2k"]), Options) == Options(2000)
    assert parser.show_help("size") == "  -s SIZE, --size SIZE  how large (default: 3)\n"


def test_json_that_cannot_be_read_is_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="must be JSON"):
        read_json("[" * 100_000)
