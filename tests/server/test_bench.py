"""Tests of server/cli/bench.py, server/bench/measure.py and benchmarks/compare.py."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import print_table
from jaxserve.llm import LLM
from server.bench import measure as measure_module
from server.bench.measure import find_commit, measure
from server.bench.workloads import Workload
from server.cli import bench
from server.cli.main import main
from tests.tiny_llm import MODEL, SETTINGS, to_text, write_tokenizer

PROMPTS = ((5, 6, 7), (8, 9), tuple(range(10, 40)))
LENS = (4, 9, 2)
KEYS = {
    "test", "text", "runs", "architecture", "layers", "hidden_size", "device", "version", "commit",
    "kv_cache_tokens", "start_seconds", "requests", "input_tokens", "output_tokens",
    "output_tokens_per_second", "total_tokens_per_second", "seconds", "num_steps",
    "padded_per_real_token", "host_ms_schedule", "host_ms_build", "host_ms_dispatch",
    "host_ms_collect", "host_ms_commit", "host_ms_output", "uploaded_bytes_per_step",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("words"))
    return LLM(MODEL, tokenizer=tokenizer, **SETTINGS)


def make_workload(kind: Any = "throughput", prompts=PROMPTS) -> Workload:
    return Workload("tiny", kind, prompts, LENS, num_warm_up=2)


def test_a_line_holds_device_commit_totals_padding_and_host_times(llm: LLM):
    line = measure(llm, make_workload(), num_runs=2, with_text=False)
    assert set(line) == KEYS
    assert (line["requests"], line["input_tokens"], line["output_tokens"]) == (3, 35, 15)
    assert (line["runs"], len(line["seconds"]), line["device"]) == (2, 2, "cpu")
    assert line["commit"] == find_commit()
    assert line["padded_per_real_token"] >= 1
    assert line["num_steps"] >= 2 * (1 + max(LENS) - 1)
    assert all(line[key] > 0 for key in KEYS if key.startswith("host_ms_"))
    seconds = sorted(line["seconds"])
    median = sum(seconds) / 2
    assert line["output_tokens_per_second"] == pytest.approx(15 / median, rel=0.05)
    assert json.loads(json.dumps(line)) == line


def test_latency_splits_first_and_later_tokens(llm: LLM):
    line = measure(llm, make_workload("latency"), num_runs=1, with_text=False)
    assert set(line) == KEYS | {"ttft_ms", "ms_per_step"}
    total = line["ttft_ms"] + line["ms_per_step"] * (max(LENS) - 1)
    assert total == pytest.approx(line["seconds"][0] * 1e3, rel=0.05)


def test_with_text_the_tokens_of_the_texts_are_counted(llm: LLM, monkeypatch):
    seen: list[list[str]] = []
    generate = llm.generate

    def watched(prompts, params, *, use_tqdm):
        seen.append(prompts)
        outputs = generate(prompts, params, use_tqdm=use_tqdm)
        assert all(output.outputs[0].text for output in outputs)
        return outputs

    monkeypatch.setattr(llm, "generate", watched)
    prompts = (*PROMPTS[:2], (300, *PROMPTS[2]))  # no word for 300: the text lacks it
    line = measure(llm, make_workload(prompts=prompts), num_runs=1, with_text=True)
    assert (line["text"], line["input_tokens"]) == (True, 35)
    assert seen[-1] == [to_text(prompt) for prompt in PROMPTS]


def test_a_commit_is_none_outside_a_repository(monkeypatch, tmp_path: Path):
    assert re.fullmatch("[0-9a-f]{7,}", find_commit() or "0000000")
    monkeypatch.setattr(measure_module, "__file__", str(tmp_path / "measure.py"))
    assert find_commit() is None


def test_the_command_prints_a_line_a_test_and_appends_it_to_the_file(
    llm: LLM, monkeypatch, capsys, tmp_path: Path
):
    configs = []
    monkeypatch.setattr(bench.LLM, "from_config", lambda config: configs.append(config) or llm)
    for name in ("single", "decode64"):
        monkeypatch.setitem(bench.WORKLOADS, name, lambda vocab_size: make_workload("latency"))
    path = tmp_path / "lines.jsonl"
    path.write_text("{}\n")
    words = ["--runs", "1", "--buckets", "2,4/32,64", "--output-json", str(path)]
    assert main(["bench", "latency", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert path.read_text().splitlines() == ["{}", *lines]
    assert [json.loads(line)["test"] for line in lines] == ["tiny", "tiny"]
    (config,) = configs
    assert (config.row_buckets, config.token_buckets) == ((2, 4), (32, 64))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (4, 64)
    assert not config.enable_prefix_caching


@pytest.mark.parametrize("words", [["--enable-prefix-caching"], ["--config", "FILE"]])
def test_prompts_are_computed_again_unless_the_cache_is_asked_for(
    words: list[str], llm: LLM, monkeypatch, capsys, tmp_path: Path
):
    path = tmp_path / "bench.yaml"
    path.write_text("enable-prefix-caching: true\n")
    configs = []
    monkeypatch.setattr(bench.LLM, "from_config", lambda config: configs.append(config) or llm)
    monkeypatch.setitem(bench.WORKLOADS, "single", lambda vocab_size: make_workload("latency"))
    words = [str(path) if word == "FILE" else word for word in words]
    assert main(["bench", "latency", "--tests", "single", "--runs", "1", *words]) == 0
    assert [config.enable_prefix_caching for config in configs] == [True]
    with pytest.raises(SystemExit):
        main(["bench", "--help=enable-prefix-caching"])
    assert "(default: True)" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--runs", "0"], "runs must be at least 1; got 0"),
        (["latency", "--tests", "x"], "tests must be among single, decode64; got 'x'"),
        (["latency", "--tests", "batch256"], "tests must be among single, decode64"),
        (["all", "--text", "--skip-tokenizer-init"], "--text must have a tokenizer"),
        (["all", "--output-json", "/no/such/file"], "--output-json must be a file that can be"),
    ],
)
def test_mistakes_are_told_before_an_engine_starts(words, message, capsys, monkeypatch):
    monkeypatch.setattr(bench.LLM, "from_config", None)
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxserve: {message}")


@pytest.mark.parametrize("text", ["8", "a/b", "8/", "/8", "1/2/3", "0/8", ""])
def test_buckets_that_cannot_be_read_are_refused_with_an_example(text: str, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "latency", "--buckets", text])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "--buckets: must be sizes of rows, a slash, and sizes of tokens, as 8,64/128" in shown
    assert f"; got {text!r}; see" in shown


def test_the_table_sets_our_figures_beside_the_peers(capsys):
    single = {"shape": "qwen3-0.6b", "test": "single", "ttft_ms": 6.2, "ms_per_step": 1.01}
    batch = {"shape": "llama-3-8b", "test": "batch256", "output_tokens_per_second": 13784.0}
    print_table(
        [single, batch, {"shape": "qwen3-0.6b", "test": "unknown", "ttft_ms": 1.0}], num_gpus=1
    )
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["test", "figure", "jaxserve", "vLLM", "limit", "speed"]
    assert rows == [
        ["qwen3-0.6b", "single", "ttft_ms", "6.2", "12.4", "2.00x"],
        ["qwen3-0.6b", "single", "ms_per_step", "1.01", "2.02", "0.28", "2.00x"],
        ["llama-3-8b", "batch256", "output_tokens_per_second", "13784.0", "6892", "9270", "2.00x"],
    ]
