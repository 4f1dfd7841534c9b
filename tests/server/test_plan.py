"""Tests of server/cli/plan.py, through the command line."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.cli.main import main
from tests.tiny_llm import MODEL, flags

NO_MODEL = "/no/such"
PLAN = ["plan", "--log-level", "warning"]


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets JAX's platform for its process, which here is that of all tests."""
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])


def kinds(value: Any) -> Any:
    """The types of a JSON value's parts."""
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    return [kinds(item) for item in value[:1]] if isinstance(value, list) else type(value)


def test_json_has_every_part_of_the_plan(capsys):
    assert main([*PLAN, *flags()[:4], "--device-memory", "1GiB", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert kinds(values) == {
        "model": str,
        "architecture": str,
        "device": {"kind": type(None), "is_present": bool, "count": int, "asked_bytes": int},
        "memory": {
            "device_bytes": int,
            "weight_bytes": int,
            "page_bytes": int,
            "temporary_bytes": int,
            "temporaries": str,
            "temporaries_are": str,
            "reserved_bytes": int,
            "left_bytes": int,
            "host_page_bytes": int,
        },
        "pages": {
            "block_size": int,
            "num_pages": [int],
            "windows": [type(None)],
            "num_tokens": int,
            "num_host_pages": int,
        },
        "largest_max_model_len": int,
        "requests": [{"num_tokens": int, "num_in_pages": int, "num_running": int}],
        "chosen": {
            "max_model_len": int,
            "max_num_seqs": int,
            "max_num_batched_tokens": int,
            "dtype": str,
            "attention_backend": type(None),
            "batch_invariant": bool,
            "row_buckets": [int],
            "token_buckets": [int],
            "sampler_rows": [int],
        },
    }
    assert values["memory"]["temporaries"] == "estimated"
    assert values["memory"]["device_bytes"] == int(2**30 * 0.92)


def test_people_see_the_bill_the_table_and_the_choice(capsys):
    words = [*flags(), "--max-model-len", "0.3k", "--request-tokens", "100,300"]
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"model   {MODEL} (Qwen3ForCausalLM)", "device  cpu"]
    assert "25 pages, 16 tokens each: 384 tokens" in lines
    assert "the largest max_model_len that fits: 384" in lines
    assert "             100             3       3" in lines
    assert "             300             1       1" in lines
    assert "  max_model_len           300" in lines


def test_pages_in_the_hosts_memory_are_shown_where_there_are_any(capsys):
    words = ["plan", *flags(), "--kv-offloading-size", "0.125"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    num_bytes, count = values["memory"]["host_page_bytes"], values["pages"]["num_host_pages"]
    per_page = values["memory"]["page_bytes"] // values["pages"]["num_pages"][0]
    assert count > 0 and num_bytes == count * per_page
    assert 2**27 - per_page < num_bytes <= 2**27
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{count:,} more pages in the host's memory, {num_bytes / 2**30:.2f} GiB" in lines
    assert main(["plan", *flags()]) == 0
    assert "host" not in capsys.readouterr().out


def test_an_estimate_is_named_as_one(capsys):
    assert main([*PLAN, MODEL, "--device-memory", "1.5GiB", "-tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "device  2 x GPU of 1.50 GiB, as asked for" in shown
    assert "memory of each device, GiB" in shown
    assert "(temporaries estimated: the larger of a layer's activations" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([NO_MODEL], "model must be a path that exists or a hub id"),
        ([MODEL, "--model", "other"], f"MODEL must be given once; got {MODEL!r} and --model 'o"),
        ([MODEL, "--device-memory", "0"], "device_memory must be in [1, "),
        ([MODEL, "--device-memory", "64MiB"], "the memory left must hold at least 2 pages of "),
        ([MODEL, "--max-model-len", "513"], "max_model_len must be at most the model's 512; got"),
        ([MODEL, "--request-tokens", "8,1k"], "request_tokens must be in [1, 512], the tokens"),
        (
            [MODEL, "--kv-offloading-size", "1000000"],
            "kv_offloading_size must be at most the host's memory, ",
        ),
        ([MODEL, "--block-size", "17"], "block_size must be 16, 32, 64 or 128; got 17"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words, message, capsys):
    assert main([*PLAN, *words]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"jaxserve: {message}") and shown.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory", "80GB"], "argument --device-memory: must be an integer, or one like"),
        (["--request-tokens", "1k,,"], "argument --request-tokens: must be positive integers"),
        (["--max-model-len", "most"], "argument --max-model-len: must be an integer, or one"),
    ],
)
def test_words_that_cannot_be_read_are_one_line_too(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*PLAN, MODEL, *words])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def write_model_of_zeros(folder: Path) -> int:
    """A model of one wide layer in a sparse file; returns the bytes of its tensors."""
    D, F, V = 8192, 65536, 128000
    numbers = {"hidden_size": D, "intermediate_size": F, "vocab_size": V, "num_hidden_layers": 1}
    numbers |= {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 9000,
    }
    config = {"architectures": ["LlamaForCausalLM"], **numbers, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    attention = {"q_proj": [D, D], "k_proj": [1024, D], "v_proj": [1024, D], "o_proj": [D, D]}
    mlp = {"gate_proj": [F, D], "up_proj": [F, D], "down_proj": [D, F]}
    norms = {"input_layernorm": [D], "post_attention_layernorm": [D]}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}": shape for name, shape in mlp.items()} | norms
    shapes = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens": [V, D], "lm_head": [V, D], "model.norm": [D]}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def test_the_console_script_reads_no_tensor(tmp_path: Path):
    num_bytes = write_model_of_zeros(tmp_path)
    assert num_bytes > 7 << 30
    script = Path(sys.executable).with_name("jaxserve")
    words = ["plan", str(tmp_path), "--device-memory", "24GiB", "--json"]
    # A process begins with the peak of the one it was forked from: a small one stands between.
    measure = (
        "import os, subprocess, sys\n"
        "process = subprocess.Popen(sys.argv[1:])\n"
        "_, status, usage = os.wait4(process.pid, 0)\n"
        "print(usage.ru_maxrss, file=sys.stderr)\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    command = [sys.executable, "-c", measure, script, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["memory"]["weight_bytes"] == num_bytes
    assert values["chosen"]["dtype"] == "bfloat16"
    assert [fit["num_tokens"] for fit in values["requests"]] == [1024, 4096, 9000]
    # Whoever reads the tensors has them in memory, a whole one at least.
    assert int(done.stderr.split()[-1]) * 1024 < 1 << 30
