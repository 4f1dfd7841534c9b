"""LLM.get_metrics on a tiny model: vLLM's names and kinds, and numbers that follow the work."""

from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.v1.metrics.reader import Counter, Gauge, Histogram, read_metrics
from tests.tiny_llm import MODEL, SETTINGS

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    settings = SETTINGS | {"skip_tokenizer_init": True, "served_model_name": "tiny"}
    return LLM(MODEL, disable_log_stats=False, **settings)


def find(llm: LLM, name: str, **labels: str) -> Any:
    (metric,) = [
        metric
        for metric in llm.get_metrics()
        if metric.name == name and labels.items() <= metric.labels.items()
    ]
    return metric


def test_metrics_follow_the_work_under_vllms_names_and_kinds(llm):
    before = find(llm, "vllm:generation_tokens").value
    llm.generate([[5, 6, 7], [8, 9]], PARAMS, use_tqdm=False)
    tokens = find(llm, "vllm:generation_tokens")
    assert isinstance(tokens, Counter) and tokens.value - before == 12
    assert tokens.labels == {"model_name": "tiny", "engine": "0"}
    running = find(llm, "vllm:num_requests_running")
    assert isinstance(running, Gauge) and running.value == 0
    assert find(llm, "vllm:cache_config_info").labels["num_gpu_blocks"] == "25"
    lengths = find(llm, "vllm:request_prompt_tokens")
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (2, 5)
    assert (lengths.buckets["2.0"], lengths.buckets["5.0"], lengths.buckets["+Inf"]) == (1, 2, 2)
    assert all(m.name.startswith("vllm:") for m in llm.get_metrics())


def test_a_stream_that_is_left_counts_as_aborted_and_a_whole_one_by_its_reason(llm):
    def ended(reason: str) -> int:
        return find(llm, "vllm:request_success", finished_reason=reason).value

    before = {reason: ended(reason) for reason in ("abort", "length")}
    stream = llm.stream([5, 6, 7], PARAMS)
    next(stream)
    assert find(llm, "vllm:num_requests_running").value == 1
    stream.close()
    assert find(llm, "vllm:num_requests_running").value == 0
    num_outputs = sum(1 for _ in llm.stream([5, 6, 7], PARAMS))
    assert num_outputs > 1
    assert {reason: ended(reason) - count for reason, count in before.items()} == {
        "abort": 1,
        "length": 1,
    }


def test_without_counting_there_is_nothing_to_read():
    llm = LLM.from_config(EngineConfig(model=MODEL, skip_tokenizer_init=True, **SETTINGS))
    with pytest.raises(EngineConfigError, match="^disable_log_stats must be False for get_metrics"):
        llm.get_metrics()


def test_the_switch_is_true_or_false():
    with pytest.raises(EngineConfigError, match="^disable_log_stats must be True or False; got 1"):
        LLM(MODEL, disable_log_stats=1, **SETTINGS)  # pyright: ignore[reportArgumentType]


def test_names_of_other_makers_are_left_out():
    families = [GaugeMetricFamily(name, "", value=3) for name in ("vllm:a", "process_a", "vllm_a")]
    assert read_metrics(families) == [Gauge("vllm:a", {}, 3.0)]
