"""Tests of `--config`: server/cli/config_file.py through the parser."""

import importlib
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from server.cli.arguments import engine_config, read_config
from server.cli.main import command_parser
from server.config import ServerConfig

FILE = """
model: folder
port: 8001
max-model-len: 8k
gpu_memory_utilization: 0.5
skip_tokenizer_init: true
hf_overrides:
  rope_scaling: {type: linear, factor: 2}
row_buckets: [8, 4]
token-buckets: "64,128"
served-model-name: [a, b]
api_key: from-file
allow-credentials: false
dtype: null
revision: 1234
enable_lora: false
quantization: null
"""


def parse(path: Path, text: str, *words: str, command: str = "serve"):
    path.write_text(text)
    module = importlib.import_module(f"server.cli.{command}")
    parser = command_parser(command, module, {"VLLM_API_KEY": "from-env"})
    return parser.parse_args(["--config", str(path), *words])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_the_files_values_are_the_flags(path):
    text = FILE.replace("skip_tokenizer_init: true\n", "")
    arguments = parse(path, text)
    server = read_config(arguments, ServerConfig)
    assert engine_config(arguments) == EngineConfig(
        model="folder",
        max_model_len=8000,
        gpu_memory_utilization=0.5,
        hf_overrides={"rope_scaling": {"type": "linear", "factor": 2}},
        row_buckets=(4, 8),
        token_buckets=(64, 128),
        served_model_name=("a", "b"),
        revision="1234",
    )
    assert server == ServerConfig(port=8001, api_key=("from-file",))


def test_the_command_line_goes_over_the_file_and_the_file_over_the_environment(path):
    text = "port: 1\napi_key: [a, b]\nserved_model_name: c\nhf_overrides: {x: {y: 1, z: 2}}\n"
    words = ["--port", "2", "--served-model-name", "d", "e", "--hf-overrides.x.y", "3"]
    for arguments in (parse(path, text, *words), parse(path, text, *words[::-1][::-1])):
        assert arguments.port == 2 and arguments.api_key == ("a", "b")
        assert arguments.served_model_name == ("d", "e")
        assert arguments.hf_overrides == {"x": {"y": 3, "z": 2}}
    assert parse(path, text, "--hf-overrides", '{"q": 1}').hf_overrides == {"q": 1}
    assert parse(path, "", "--port", "3").api_key == ("from-env",)


def test_a_boolean_of_the_file_can_be_taken_back(path):
    arguments = parse(path, "text: true\nruns: 5\n", "latency", "--no-text", command="bench")
    assert (arguments.text, arguments.runs) == (False, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot' is not a flag; did you mean port?"),
        ("1: 1", "1 is not a flag"),
        ("config: x", "'config' is not a flag"),
        ("help: all", "'help' is not a flag"),
        ("port: many", "port must be an integer, or one like 8k (8000), 8K or 8KiB (8192); got 'm"),
        ("port: [1]", "port must be one text or number; got [1]"),
        ("gpu_memory_utilization: x", "gpu_memory_utilization must be a number; got 'x'"),
        ("trust-remote-code: 1", "trust-remote-code must be true or false; got 1"),
        ("row_buckets: 0", "row_buckets must be positive integers with commas"),
        ("served_model_name: [[a]]", "served_model_name must be a list of texts or numbers"),
        ("hf_overrides: '{'", "hf_overrides must be JSON"),
        ("enable_lora: true", "enable_lora is not supported in this release"),
        ("speculative_config: {method: ngram}", "speculative_config is not supported in"),
        ("- a", "must hold flags and their values, as `port: 8001`"),
        ("a: [", "must be YAML; while parsing"),
        ("a: !!python/object:os.system x", "must be YAML; could not determine a constructor"),
        ("api_key: {k: sk-secret}", "api_key must be of another kind"),
    ],
)
def test_what_the_file_says_wrong_is_one_line_with_its_name(path, text, message):
    with pytest.raises(EngineConfigError) as caught:
        parse(path, text)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(str(path)) and message in line and "sk-secret" not in line


@pytest.mark.parametrize("content", [None, b"a: \xff"])
def test_a_file_that_cannot_be_read_is_one_line(path, content, tmp_path):
    if content is not None:
        path.write_bytes(content)
    module = importlib.import_module("server.cli.serve")
    parser = command_parser("serve", module, {})
    with pytest.raises(EngineConfigError, match="--config must be a YAML file that can be read"):
        parser.parse_args([f"--config={path}"])


def test_config_needs_a_word(capsys):
    parser = command_parser("serve", importlib.import_module("server.cli.serve"), {})
    with pytest.raises(SystemExit):
        parser.parse_args(["--config"])
    assert "expected one argument" in capsys.readouterr().err
