"""Tests of jaxserve/config.py."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import SCHEDULING_POLICIES, EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.scheduling.policies import POLICIES


def test_the_defaults_are_valid_and_frozen():
    config = EngineConfig()
    assert (config.model, config.gpu_memory_utilization, config.block_size) == (None, 0.92, 16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_sizes_are_sorted_and_kept_once():
    config = EngineConfig(row_buckets=[8, 1, 8], token_buckets=(64,))  # pyright: ignore[reportArgumentType]
    assert (config.row_buckets, config.token_buckets) == ((1, 8), (64,))


def test_quantities_may_be_texts_and_are_kept_as_numbers():
    config = EngineConfig.from_keywords(
        max_model_len="16k", kv_cache_memory_bytes="20GiB", max_num_batched_tokens="8K"
    )
    assert (config.max_model_len, config.fixed_model_len) == (16_000, 16_000)
    assert (config.kv_cache_memory_bytes, config.max_num_batched_tokens) == (20 << 30, 8192)


@pytest.mark.parametrize("value", ["auto", "-1", -1])
def test_a_length_can_be_left_to_model_and_memory(value: Any):
    config = EngineConfig(max_model_len=value)
    assert (config.max_model_len, config.fixed_model_len) == ("auto", None)
    assert EngineConfig(**dataclasses.asdict(config)) == config != EngineConfig()


BAD: list[tuple[str, Any, str]] = [
    ("model", 3, "must be text"),
    ("tokenizer", object(), "must be text .*not supported in this release"),
    ("revision", 1, "must be text"),
    ("tokenizer_revision", 1, "must be text"),
    ("download_dir", 1, "must be text"),
    ("hf_token", True, "must be text .*; got a bool$"),
    ("use_modelscope", "true", "must be True or False"),
    ("trust_remote_code", 1, "must be True or False"),
    ("served_model_name", "", "must be a name or a list of names"),
    ("served_model_name", [], "must be a name or a list of names"),
    ("served_model_name", ["a", 1], "must be a name or a list of names"),
    ("override_generation_config", [1], "must be a dict"),
    ("skip_tokenizer_init", 1, "must be True or False; got 1"),
    ("load_format", "pt", "must be one of auto, gguf"),
    ("dtype", "int8", "must be one of auto, float32"),
    ("dtype", None, "must be text"),
    ("hf_overrides", len, "must be a dict .*functions are not supported"),
    ("hf_overrides", {"rope_scaling": {"factors": {1, 2}}}, "must hold only what JSON can; got {"),
    ("override_generation_config", {"temperature": Path("x")}, "must hold only what JSON can"),
    ("generation_config", 3, "must be text"),
    ("seed", 2**63, "must be at most"),
    ("seed", 1.5, "must be an integer"),
    ("max_model_len", 0, "must be at least 1; got 0"),
    ("max_model_len", True, "must be an integer; got True"),
    ("max_model_len", -2, "must be at least 1; got -2"),
    ("max_model_len", "8q", r"must be an integer, or one like 8k \(8000\), .*, or auto; got '8q'"),
    ("max_model_len", "Auto", "must be an integer, or one like 8k"),
    ("max_model_len", "0", "must be at least 1; got 0"),
    ("max_model_len", -1.0, "must be an integer"),
    ("gpu_memory_utilization", 0, r"must be in \(0, 1\]"),
    ("gpu_memory_utilization", 1.1, r"must be in \(0, 1\]"),
    ("gpu_memory_utilization", float("nan"), r"must be in \(0, 1\]"),
    ("gpu_memory_utilization", "0.9", "must be a number; got '0.9'"),
    ("gpu_memory_utilization", True, "must be a number; got True"),
    ("kv_cache_memory_bytes", -1, "must be at least 1"),
    ("kv_cache_memory_bytes", "auto", "must be an integer, or one like 8k"),
    ("kv_cache_memory_bytes", "20GB", r"must be an integer, or one like 8k .* \(8192\); got"),
    ("num_gpu_blocks_override", 0, "must be at least 1"),
    ("block_size", 17, "must be 16, 32, 64 or 128; got 17"),
    ("block_size", 256, "must be 16, 32, 64 or 128"),
    ("stored_head_dim", 80, "must be 64, 128 or 256"),
    ("kv_offloading_size", -0.5, "must be at least 0; got -0.5"),
    ("kv_offloading_size", float("nan"), "must be at least 0"),
    ("kv_offloading_size", 20 << 30, "must be at most 1048576"),
    ("kv_offloading_size", "4", "must be a number; got '4'"),
    ("max_num_seqs", 0, "must be at least 1"),
    ("max_num_batched_tokens", -5, "must be at least 1"),
    ("max_num_batched_tokens", "-1", "must be at least 1; got -1"),
    ("long_prefill_token_threshold", -1, "must be at least 0"),
    ("max_steps_in_flight", 0, "must be at least 1"),
    ("num_scheduler_steps", 0, "must be at least 1"),
    ("num_scheduler_steps", 17, "must be at most 16"),
    ("preemption_mode", "never", "must be one of swap, recompute, auto; got 'never'"),
    ("scheduling_policy", "lifo", "must be one of fcfs, priority, shortest-first, slo; got 'lifo'"),
    ("scheduling_policy", None, "must be text"),
    ("prefill_first", 1, "must be True or False; got 1"),
    ("ttft_goal_ms", 250, "must be given only with scheduling_policy='slo'; got 250"),
    ("ttft_goal_ms", 0, "must be at least 0.001; got 0"),
    ("tpot_goal_ms", 0.5, "must be given only with scheduling_policy='slo'; got 0.5"),
    ("tpot_goal_ms", float("inf"), "must be finite"),
    ("max_queue_time", 0, "must be at least 0.001; got 0"),
    ("max_queue_time", "5", "must be a number"),
    ("row_buckets", 5, "must be a list of positive integers; got 5"),
    ("row_buckets", (), "must be a list of positive integers"),
    ("row_buckets", (0,), "must be a list of positive integers"),
    ("token_buckets", [True], "must be a list of positive integers"),
    ("token_buckets", "64", "must be a list of positive integers"),
    ("attention_backend", "flash", "must be one of mosaic, triton, xla"),
    ("stacked_weights", "some", "must be one of none, vectors, all"),
    ("tensor_parallel_size", 0, "must be at least 1"),
    ("enable_prefix_caching", 1, "must be True or False; got 1"),
    ("step_timeout", -1, "must be at least 0; got -1"),
    ("step_timeout", float("inf"), "must be finite"),
    ("debug_poison_pages", 1, "must be True or False; got 1"),
    ("batch_invariant", 1, "must be True or False; got 1"),
    ("max_logprobs", 21, r"must be in \[0, 20\]"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD)
def test_a_bad_value_is_refused_with_name_rule_and_value(name: str, value: Any, rule: str):
    with pytest.raises(EngineConfigError, match=f"^{name} {rule}"):
        EngineConfig(**{name: value})


def test_prompts_first_breaks_the_goals_of_slo():
    rule = "^prefill_first must not be given with slo, whose goals it breaks; got True"
    with pytest.raises(EngineConfigError, match=rule):
        EngineConfig(prefill_first=True, scheduling_policy="slo")
    assert EngineConfig(prefill_first=False, scheduling_policy="slo").prefill_first is False


@pytest.mark.parametrize(
    ("setting", "value"),
    [("tensor_parallel_size", 2), ("attention_backend", "xla"), ("attention_backend", "triton")],
)
def test_batch_invariance_is_refused_where_its_kernels_do_not_run(setting: str, value: Any):
    assert EngineConfig(batch_invariant=True, attention_backend="mosaic").batch_invariant
    with pytest.raises(EngineConfigError, match=f"^batch_invariant must be off with {setting} "):
        EngineConfig(batch_invariant=True, **{setting: value})


def test_each_field_that_has_a_rule_is_among_the_bad_ones():
    free = {"chat_template", "compilation_cache_dir"}
    assert {field.name for field in dataclasses.fields(EngineConfig)} - free == {b[0] for b in BAD}


def test_the_policies_that_can_be_chosen_are_those_that_there_are():
    assert SCHEDULING_POLICIES == tuple(POLICIES)


@pytest.mark.parametrize(
    ("gibibytes", "num_bytes"), [(None, 0), (0, 0), (1, 2**30), (0.5, 2**29), (1e-12, 1)]
)
def test_the_hosts_part_of_the_cache_is_given_in_gibibytes(gibibytes, num_bytes):
    config = EngineConfig.from_keywords(kv_offloading_size=gibibytes)
    assert config.kv_offloading_bytes == num_bytes


def test_names_in_the_api_are_kept_in_order_and_once():
    assert EngineConfig(served_model_name="a").served_model_name == ("a",)  # pyright: ignore[reportArgumentType]
    several = EngineConfig(served_model_name=["b", "a", "b"])  # pyright: ignore[reportArgumentType]
    assert several.served_model_name == ("b", "a")


def test_a_token_is_never_shown():
    config = EngineConfig(hf_token="hf_secret")
    assert config.hf_token == "hf_secret" and "hf_secret" not in f"{config} {config!r}"
    with pytest.raises(EngineConfigError) as caught:
        EngineConfig(hf_token=b"hf_secret")  # pyright: ignore[reportArgumentType]
    assert "hf_secret" not in str(caught.value)


def test_paths_are_taken_for_texts():
    config = EngineConfig.from_keywords(model=Path("m"), download_dir=Path("/d"))
    assert (config.model, config.download_dir) == ("m", "/d")


def test_arguments_of_later_releases_are_taken_only_where_they_ask_nothing():
    neutral = {"quantization": None, "enable_lora": False, "cpu_offload_gb": 0.0}
    neutral |= {"kv_offloading_backend": "native"}
    assert EngineConfig.from_keywords(seed=1, **neutral) == EngineConfig(seed=1)
    refused = {"quantization": "awq", "enable_lora": True, "pooler_config": [1]}
    for name, value in (refused | {"kv_offloading_backend": "lmcache"}).items():
        with pytest.raises(EngineConfigError, match=f"^{name} is not supported in this release"):
            EngineConfig.from_keywords(**{name: value})


def test_an_unknown_argument_is_named_with_the_one_that_was_meant():
    with pytest.raises(EngineConfigError, match=r"got max_seqs; did you mean max_num_seqs\?"):
        EngineConfig.from_keywords(max_seqs=3)
    with pytest.raises(EngineConfigError, match="keywords must be engine arguments; got zzz$"):
        EngineConfig.from_keywords(zzz=3)
