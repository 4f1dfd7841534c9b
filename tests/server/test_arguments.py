"""Tests of server/cli/arguments.py."""

import argparse
import dataclasses

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from server.cli.arguments import (
    Parser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    read_integer,
    read_sizes,
    sampling_params,
)


def parse(*words: str) -> argparse.Namespace:
    parser = Parser(prog="jaxserve")
    parser.add_argument("prompts", nargs="*")
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=64, temperature=0.0)
    return parser.parse_args(words)


def test_without_flags_the_config_is_the_default_one():
    assert engine_config(parse()) == EngineConfig()


def test_every_field_has_a_flag_of_its_name():
    values = {
        tuple: ("8,4", (4, 8)),
        dict: ('{"a": 1}', {"a": 1}),
        bool: (None, True),
        int: ("32", 32),
        float: ("0.5", 0.5),
        str: ("m", "m"),
    }
    special = {"load_format": "dummy", "dtype": "float16", "generation_config": "vllm"}
    special |= {"attention_backend": "xla", "stacked_weights": "all"}
    for field in dataclasses.fields(EngineConfig):
        kind = next(k for k in values if k.__name__ in str(field.type))
        word, expected = values[kind]
        if field.name in special:
            word = expected = special[field.name]
        if field.name == "stored_head_dim":
            word, expected = "64", 64
        if field.name == "max_logprobs":
            word, expected = "7", 7
        flag = f"--{field.name.replace('_', '-')}"
        config = engine_config(parse(flag) if word is None else parse(flag, word))
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
    [("12", 12), ("-1", -1), ("8k", 8000), ("8K", 8192), ("1.5M", 3 * 2**19), ("2g", 2 * 10**9)],
)
def test_integers_have_short_forms(text: str, expected: int):
    assert read_integer(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1.5", "k", "1kk", "1e3"])
def test_what_is_no_integer_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="must be an integer"):
        read_integer(text)


@pytest.mark.parametrize("text", ["", "8,", "a", "0", "-1", "8;9"])
def test_what_are_no_sizes_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="must be positive integers with commas"):
        read_sizes(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row-buckets", "a"], "argument --row-buckets: must be positive integers"),
        (["--hf-overrides", "{a"], "argument --hf-overrides: must be JSON"),
        (["--seed", "x"], "argument --seed: must be an integer"),
        (["--quantization", "awq"], "unrecognized arguments: --quantization"),
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
