"""LLM.get_metrics on a tiny model: vLLM's names and kinds, and numbers that follow the work."""

from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.llm import LLM
from jaxserve.metrics.totals import STAGES
from jaxserve.sampling_params import SamplingParams
from jaxserve.v1.metrics.reader import (
    BucketBound,
    Counter,
    Gauge,
    Histogram,
    Metric,
    PositionValues,
    Vector,
    read_metrics,
)
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
    assert all(m.name.startswith(("vllm:", "jaxserve:")) for m in llm.get_metrics())
    assert not any(m.name.endswith("_total") for m in llm.get_metrics() if isinstance(m, Counter))


def test_what_the_engine_counts_of_its_steps_is_told_in_process_too(llm):
    llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    num_tokens, num_padded = (
        find(llm, f"jaxserve:{name}").value for name in ("step_tokens", "step_padded_tokens")
    )
    assert 0 < num_tokens <= num_padded
    assert find(llm, "jaxserve:compilations").value == 0
    seconds = [find(llm, "jaxserve:host_seconds", stage=stage).value for stage in STAGES]
    assert all(seconds) and isinstance(seconds[0], float)


SEARCHED = {
    "cache_usage": Gauge,
    "num_requests_running": Gauge,
    "num_requests_waiting": Gauge,
    "gpu_prefix_cache_queries": Counter,
    "request_success": Counter,
    "prompt_tokens": Counter,
    "generation_tokens": Counter,
    "latency": Histogram,
    "time": Histogram,
    "tokens": Histogram,
}
"""What the reference documents search for in the names, and the kind that they print."""


def report(metrics: list[Metric]) -> list[str]:
    """Print metrics with the calls of the reference documents' script."""
    lines = []
    for metric in metrics:
        if not any(text in metric.name for text in SEARCHED):
            continue
        if isinstance(metric, Vector):
            lines += [f"{metric.name} {key} {metric.values[key]}" for key in metric.values.keys()]
        elif isinstance(metric, Histogram):
            mean = metric.sum / metric.count if metric.count else 0
            lines.append(f"{metric.name} {metric.count} {mean:.3f}")
            for bound, count in metric.buckets.items():
                shown = "all" if bound == float("inf") else f"<= {bound}"
                lines.append(f"{metric.name} {shown} {count}")
        elif isinstance(metric, Counter | Gauge):
            lines.append(f"{metric.name} {metric.value}")
    return lines


@pytest.mark.parametrize(("text", "kind"), SEARCHED.items())
def test_each_name_that_the_reference_documents_search_for_is_there(llm, text, kind):
    assert any(text in m.name and isinstance(m, kind) for m in llm.get_metrics())


def test_the_script_of_the_reference_documents_runs_and_says_what_happened(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    before = find(llm, "vllm:request_max_num_generation_tokens").buckets["5.0"]
    llm.generate([[5, 6], [7]], params, use_tqdm=False)
    vector = Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, PositionValues([4, 1]))
    lines = report([*llm.get_metrics(), vector])
    assert "vllm:num_requests_running 0.0" in lines
    assert f"vllm:request_max_num_generation_tokens <= 5.0 {before + 2}" in lines
    latency = find(llm, "vllm:e2e_request_latency_seconds")
    assert f"{latency.name} all {latency.count}" in lines
    assert f"{vector.name} 0 4" in lines and f"{vector.name} 1 1" in lines


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


def test_counters_by_position_become_one_vector():
    family = CounterMetricFamily("vllm:per_pos", "", labels=("engine", "position"))
    for position, count in ((2, 1), (0, 5)):
        family.add_metric(("0", str(position)), count)
    (vector,) = read_metrics([family])
    assert vector == Vector("vllm:per_pos", {"engine": "0"}, PositionValues([5, 0, 1]))
    assert isinstance(vector, Vector) and vector.values == [5, 0, 1]
    assert [vector.values[key] for key in vector.values.keys()] == [5, 0, 1]


def test_a_bound_is_its_text_and_equals_its_number():
    buckets: dict[str, int] = {BucketBound("0.5"): 1, BucketBound("+Inf"): 2}
    assert (buckets["0.5"], buckets["+Inf"]) == (1, 2)
    assert list(buckets) == ["0.5", "+Inf"] == list(map(str, buckets))
    assert [bound == float("inf") for bound in buckets] == [False, True]
    assert [bound != 0.5 for bound in buckets] == [False, True]
    assert "0.5" == BucketBound("0.5") != "0.50" and BucketBound("0.5") != None  # noqa: E711


def test_names_of_other_makers_are_left_out():
    names = ("vllm:a", "process_a", "vllm_a", "jaxserve:a")
    families = [GaugeMetricFamily(name, "", value=3) for name in names]
    assert read_metrics(families) == [Gauge("vllm:a", {}, 3.0), Gauge("jaxserve:a", {}, 3.0)]
