import asyncio
import dataclasses
import re
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.async_llm_engine import AsyncLLMEngine, EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import EngineStats
from jaxserve.metrics.engine_metrics import REJECTION_REASONS, EngineMetrics
from jaxserve.metrics.histograms import HISTOGRAMS, Histogram
from jaxserve.metrics.totals import STAGES
from jaxserve.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.scheduling.scheduler import NOT_FINITE
from jaxserve.v1.metrics.reader import read_metrics
from tests.engine_infos import make_info
from tests.tiny_llm import MODEL, SETTINGS

NAMES = ("tiny", "other")
INFO = make_info(device_kind="cpu")


def fake_engine(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "config": EngineConfig(served_model_name=NAMES),
        "state": EngineState.READY,
        "info": INFO,
        "stats": EngineStats(),
        "seconds_since_news": 0.0,
    }
    return types.SimpleNamespace(**(facts | changes))


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": "0", **labels}
    return metrics.registry.get_sample_value(name, labels)


def make_request(request_id: str = "r", num_prompt: int = 3, **params: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling_params=SamplingParams(max_tokens=8, **params),
    )


def make_output(
    stats: RequestStateStats,
    *,
    reason: str | None = None,
    request_id: str = "r",
    num: int = 1,
    num_cached: int | None = None,
) -> RequestOutput:
    outputs = [CompletionOutput(i, "", [0], finish_reason=reason) for i in range(num)]
    return RequestOutput(
        request_id,
        None,
        [0],
        outputs=outputs,
        finished=reason is not None,
        metrics=stats,
        num_cached_tokens=num_cached,
    )


def times(num_tokens: int, last: float | None, **others: Any) -> RequestStateStats:
    first = None if last is None else 12.0
    known = {"arrival_time": 10.0, "queued_ts": 10.5, "first_token_ts": first}
    latency = None if last is None else 2.0
    return RequestStateStats(
        num_generation_tokens=num_tokens,
        last_token_ts=last,
        first_token_latency=latency,
        **(known | others),
    )


def run_one_stream(metrics: EngineMetrics, **others: Any) -> None:
    """Three tokens at 12.0, 12.02 and 12.05 seconds."""
    request = make_request()
    metrics.added(request)
    metrics.gave(request, make_output(times(1, 12.0, **others)))
    metrics.gave(request, make_output(times(2, 12.02, **others)))
    metrics.gave(request, make_output(times(3, 12.05, **others), reason="stop"))


def test_a_stream_is_counted_by_tokens_times_and_reason():
    metrics = EngineMetrics(fake_engine(), clock=lambda: 13.0)
    run_one_stream(metrics)
    assert value(metrics, "vllm:prompt_tokens_total") == 3
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.05)
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.025") == 1
    per_token = value(metrics, "vllm:request_time_per_output_token_seconds_sum")
    assert per_token == pytest.approx(0.025)
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 3.0
    assert value(metrics, "vllm:request_decode_time_seconds_sum") == pytest.approx(0.05)
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 3
    assert value(metrics, "vllm:request_generation_tokens_sum") == 3
    assert value(metrics, "vllm:request_params_n_sum") == 1
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 8
    assert metrics.num_errors == 0


def test_queue_and_prefill_times_are_observed_only_where_the_engine_tells_them():
    names = ("queue", "inference", "prefill")
    metrics = EngineMetrics(fake_engine())
    run_one_stream(metrics)
    assert all(value(metrics, f"vllm:request_{name}_time_seconds_count") == 0 for name in names)
    run_one_stream(metrics, scheduled_ts=11.0)
    sums = [value(metrics, f"vllm:request_{name}_time_seconds_sum") for name in names]
    assert sums == pytest.approx([0.5, 1.05, 1.0])


def test_a_request_with_one_final_output_has_no_token_gaps():
    metrics = EngineMetrics(fake_engine())
    metrics.gave(make_request(), make_output(times(5, 12.4), reason="length"))
    assert value(metrics, "vllm:request_generation_tokens_sum") == 5
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 0
    per_token = value(metrics, "vllm:request_time_per_output_token_seconds_sum")
    assert per_token == pytest.approx(0.1)


def test_tokens_that_come_together_share_the_time_since_the_last_output():
    metrics, request = EngineMetrics(fake_engine()), make_request()
    metrics.gave(request, make_output(times(1, 12.0)))
    metrics.gave(request, make_output(times(5, 12.4)))
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.4)


def test_sequences_that_run_side_by_side_do_not_shorten_the_time_between_tokens():
    metrics, request = EngineMetrics(fake_engine()), make_request(n=4, temperature=1.0)
    metrics.gave(request, make_output(times(4, 12.0), num=4))
    metrics.gave(request, make_output(times(8, 12.1), num=4, reason="length"))
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    per_token = value(metrics, "vllm:request_time_per_output_token_seconds_sum")
    assert per_token == pytest.approx(0.1)


def ended(metrics: EngineMetrics) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    name = "vllm:request_success_total"
    counts = {reason: value(metrics, name, finished_reason=reason) or 0 for reason in reasons}
    return {reason: count for reason, count in counts.items() if count}


def output_of(reasons: Mapping[int, str | None], *, finished: bool) -> RequestOutput:
    outputs = [CompletionOutput(i, "", [0], finish_reason=r) for i, r in reasons.items()]
    return RequestOutput("r", None, [0], outputs=outputs, finished=finished, metrics=times(1, 12.0))


def test_each_sequence_counts_once_under_its_own_reason_in_deltas_and_in_cumulative_outputs():
    request = make_request(n=3, temperature=1.0)
    for is_delta in (True, False):
        metrics = EngineMetrics(fake_engine())
        shown = {} if is_delta else {0: "stop"}
        metrics.gave(request, output_of({0: "stop", 1: None, 2: None}, finished=False))
        metrics.gave(request, output_of(shown | {1: "length", 2: None}, finished=False))
        shown = {} if is_delta else {0: "stop", 1: "length"}
        metrics.gave(request, output_of(shown | {2: "stop"}, finished=True))
        assert ended(metrics) == {"stop": 2, "length": 1}
        assert value(metrics, "vllm_requests_total") == 1 and metrics._requests._seen == {}


def test_of_a_client_that_left_only_the_sequences_that_had_not_ended_are_aborted():
    metrics, request = EngineMetrics(fake_engine()), make_request(n=3, temperature=1.0)
    metrics.gave(request, output_of({0: "stop", 1: None, 2: None}, finished=False))
    metrics.aborted(request)
    metrics.aborted(make_request("never seen", n=2, temperature=1.0))
    assert ended(metrics) == {"stop": 1, "abort": 4}
    assert value(metrics, "vllm_requests_total") == 2


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_longest_sequence_of_a_request_is_observed_in_every_form_of_output(kind):
    metrics = EngineMetrics(fake_engine())
    request = make_request(n=2, temperature=1.0, output_kind=kind)

    def give(tokens: dict[int, int], *, finished: bool) -> None:
        outputs = [CompletionOutput(i, "", [0] * n) for i, n in tokens.items()]
        stats = times(7, 12.0)
        metrics.gave(request, RequestOutput("r", None, [0], None, outputs, finished, stats))

    if kind is RequestOutputKind.DELTA:
        give({0: 1, 1: 1}, finished=False)
        give({1: 3}, finished=False)
        give({0: 1, 1: 1}, finished=True)
    else:
        if kind is RequestOutputKind.CUMULATIVE:
            give({0: 1, 1: 4}, finished=False)
        give({0: 2, 1: 5}, finished=True)
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 5
    assert value(metrics, "vllm:request_generation_tokens_sum") == 7


def test_the_length_of_the_one_sequence_is_the_longest():
    metrics = EngineMetrics(fake_engine())
    run_one_stream(metrics)
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 3


def test_prompt_tokens_are_told_apart_by_where_their_keys_came_from():
    metrics, request = EngineMetrics(fake_engine()), make_request(num_prompt=40)
    metrics.gave(request, make_output(times(1, 12.0), num_cached=32))
    metrics.gave(request, make_output(times(2, 12.1), num_cached=32, reason="stop"))
    metrics.gave(make_request(num_prompt=5), make_output(times(1, 12.0), reason="stop"))
    assert value(metrics, "vllm:prompt_tokens_total") == 45
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 32
    by_source = "vllm:prompt_tokens_by_source_total"
    assert value(metrics, by_source, source="local_compute") == 13
    assert value(metrics, by_source, source="local_cache_hit") == 32
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 13
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_count") == 2


def test_a_prompt_that_was_never_computed_is_not_observed_as_such():
    metrics = EngineMetrics(fake_engine())
    metrics.gave(make_request(), make_output(times(0, None), reason="error"))
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_count") == 0


def test_only_what_was_not_finite_counts_as_corrupted():
    metrics = EngineMetrics(fake_engine())
    for number, error in enumerate((NOT_FINITE, "the step failed: RuntimeError")):
        request_id = str(number)
        output = make_output(times(1, 12.0), reason="error", request_id=request_id)
        output.outputs[0].error = error
        metrics.gave(make_request(request_id), output)
    assert value(metrics, "vllm:corrupted_requests_total") == 1
    assert ended(metrics) == {"error": 2}


def test_the_engines_own_totals_are_shown_under_their_names():
    metrics = EngineMetrics(fake_engine())
    metrics.stepped(
        EngineStats(
            num_steps=1,
            num_tokens=60,
            num_padded_tokens=64,
            num_compilations=2,
            num_prefix_queries=50,
            num_prefix_hits=32,
            num_copied_pages=3,
            schedule_seconds=0.5,
            collect_seconds=0.25,
        )
    )
    assert value(metrics, "jaxserve:step_tokens_total") == 60
    assert value(metrics, "jaxserve:step_padded_tokens_total") == 64
    assert value(metrics, "jaxserve:compilations_total") == 2
    assert value(metrics, "jaxserve:copied_pages_total") == 3
    for prefix in ("vllm:prefix_cache", "vllm:gpu_prefix_cache"):
        assert value(metrics, f"{prefix}_queries_total") == 50
        assert value(metrics, f"{prefix}_hits_total") == 32
    stages = ("schedule", "build", "dispatch", "collect", "commit")
    seconds = [value(metrics, "jaxserve:host_seconds_total", stage=stage) for stage in stages]
    assert seconds == [0.5, 0, 0, 0.25, 0]


def test_refused_requests_are_counted_by_the_setting_that_refused_them(caplog):
    metrics, name = EngineMetrics(fake_engine()), "vllm:admission_rejections_total"
    assert [value(metrics, name, reason=reason) for reason in REJECTION_REASONS] == [0, 0]
    metrics.rejected("max_num_queued_reqs")
    metrics.rejected("something else")
    assert [value(metrics, name, reason=reason) for reason in REJECTION_REASONS] == [1, 0]
    assert metrics.num_errors == 1


def test_output_tokens_are_counted_as_steps_give_them_out():
    metrics, counts = EngineMetrics(fake_engine()), []
    for total in (3, 7, 7):
        metrics.stepped(EngineStats(num_generation_tokens=total))
        counts.append(value(metrics, "vllm:generation_tokens_total"))
    run_one_stream(metrics)
    assert counts == [3, 7, 7]
    assert value(metrics, "vllm:generation_tokens_total") == 7


def test_a_request_that_ends_before_its_first_token_counts_no_prompt():
    metrics = EngineMetrics(fake_engine(), clock=lambda: 11.0)
    metrics.gave(make_request(), make_output(times(0, None), reason="error"))
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:prompt_tokens_total") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 1.0


def test_nothing_is_remembered_of_requests_that_have_left():
    metrics = EngineMetrics(fake_engine())
    run_one_stream(metrics)
    request = make_request("gone")
    metrics.gave(request, make_output(times(1, 12.0), request_id="gone"))
    metrics.aborted(request)
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert metrics._requests._seen == {}


def test_steps_are_observed_with_their_tokens():
    metrics = EngineMetrics(fake_engine())
    metrics.stepped(EngineStats(num_steps=1, num_tokens=100))
    metrics.stepped(EngineStats(num_steps=1, num_tokens=100))
    metrics.stepped(EngineStats(num_steps=3, num_tokens=104))
    assert value(metrics, "vllm:iteration_tokens_total_count") == 3
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 104
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="8.0") == 2


def test_gauges_are_those_of_the_engine_at_this_moment():
    engine = fake_engine()
    metrics = EngineMetrics(engine)
    engine.stats = EngineStats(num_running=3, num_waiting=2, kv_cache_usage=0.25)
    engine.seconds_since_news = 7.0
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [value(metrics, f"vllm:{name}") for name in gauges] == [3, 2, 0.25]
    by_reason = "vllm:num_requests_waiting_by_reason"
    reasons = [value(metrics, by_reason, reason=reason) for reason in ("capacity", "deferred")]
    assert reasons == [2, 0]
    assert value(metrics, "jaxserve:seconds_since_engine_news") == 7
    facts = {"block_size": "16", "num_gpu_blocks": "9", "gpu_memory_utilization": "0.92"}
    assert value(metrics, "vllm:cache_config_info", **facts) == 1
    assert value(metrics, "jaxserve:engine_state", state="ready") == 1
    assert value(metrics, "jaxserve:engine_state", state="dead") == 0


def test_the_sleep_state_is_one_of_vllms_and_none_before_the_engine_is_ready():
    engine = fake_engine(state=EngineState.STARTING)
    metrics, states = EngineMetrics(engine), ("awake", "weights_offloaded", "discard_all")
    seen = []
    for level in (None, 0, 1, 2):
        if level is not None:
            engine.state, engine.stats = EngineState.READY, EngineStats(sleep_level=level)
        name = "vllm:engine_sleep_state"
        seen.append([value(metrics, name, sleep_state=state) for state in states])
    assert seen == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_an_engine_that_is_still_starting_can_be_scraped():
    metrics = EngineMetrics(fake_engine(state=EngineState.STARTING, info=None))
    text = generate_latest(metrics.registry).decode()
    assert "cache_config_info" not in text
    assert value(metrics, "jaxserve:engine_state", state="starting") == 1


@pytest.mark.bugbank
def test_bugbank_R82_gauges_are_zero_when_the_engine_has_died():
    engine = fake_engine(stats=EngineStats(num_running=106, num_waiting=7, kv_cache_usage=0.9))
    metrics = EngineMetrics(engine)
    assert value(metrics, "vllm:num_requests_running") == 106
    engine.state = EngineState.DEAD
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [value(metrics, f"vllm:{name}") for name in gauges] == [0, 0, 0]


@pytest.mark.bugbank
def test_bugbank_R82_gauges_are_zero_within_a_second_after_all_streams_are_cancelled():
    async def run() -> None:
        settings = SETTINGS | {"served_model_name": NAMES, "skip_tokenizer_init": True}
        engine = AsyncLLMEngine(EngineConfig(model=MODEL, **settings))
        metrics = EngineMetrics(engine)
        engine.observers.append(metrics)
        await engine.start()
        try:
            await engine.wait_until_ready()
            await check(engine, metrics)
        finally:
            await engine.close()

    async def check(engine: AsyncLLMEngine, metrics: EngineMetrics) -> None:
        params = SamplingParams(max_tokens=120, ignore_eos=True, detokenize=False)
        started = asyncio.Event()

        async def read_all(index: int) -> None:
            async for _ in engine.generate([index + 5], params):
                started.set()

        streams = [asyncio.create_task(read_all(index)) for index in range(50)]
        await started.wait()
        busy = [value(metrics, f"vllm:num_requests_{name}") for name in ("running", "waiting")]
        assert sum(filter(None, busy)) > 0
        for stream in streams:
            stream.cancel()
        cancelled = time.monotonic()
        await asyncio.gather(*streams, return_exceptions=True)
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(value(metrics, f"vllm:{name}") for name in gauges):
            assert time.monotonic() - cancelled < 1
            await asyncio.sleep(0.01)
        assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 50
        assert value(metrics, "vllm:generation_tokens_total") == engine.stats.num_generation_tokens
        assert engine.stats.num_generation_tokens > 0
        num_tokens = value(metrics, "jaxserve:step_tokens_total")
        num_padded = value(metrics, "jaxserve:step_padded_tokens_total")
        assert num_tokens and num_padded and num_padded >= num_tokens
        assert value(metrics, "jaxserve:compilations_total") == 0
        assert all(value(metrics, "jaxserve:host_seconds_total", stage=stage) for stage in STAGES)
        assert metrics._requests._seen == {} and metrics.num_errors == 0

    asyncio.run(run())


@pytest.mark.bugbank
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.integers(-5, 5)] * 5), max_size=8))
def test_bugbank_R83_counters_never_fall_whatever_the_engine_reports(totals):
    metrics, last = EngineMetrics(fake_engine()), {}
    for preemptions, frames, steps, tokens, outputs in totals:
        metrics.stepped(
            EngineStats(
                num_preemptions=preemptions,
                num_bad_frames=frames,
                num_steps=steps,
                num_tokens=tokens,
                num_generation_tokens=outputs,
            )
        )
        now = {key: count for key, count in counters(metrics)}
        assert all(now[key] >= count for key, count in last.items())
        last = now


@pytest.mark.bugbank
def test_bugbank_R83_a_total_that_falls_is_counted_and_clamped():
    metrics = EngineMetrics(fake_engine())
    metrics.stepped(EngineStats(num_preemptions=5))
    metrics.stepped(EngineStats(num_preemptions=2))
    metrics.stepped(EngineStats(num_preemptions=3))
    assert value(metrics, "vllm:num_preemptions_total") == 6
    assert value(metrics, "jaxserve:metric_errors_total") == 1


@pytest.mark.bugbank
def test_bugbank_R83_a_time_that_runs_backwards_is_counted_and_clamped():
    metrics = EngineMetrics(fake_engine(), clock=lambda: 13.0)
    run_one_stream(metrics, scheduled_ts=10.0)
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 0
    assert value(metrics, "jaxserve:metric_errors_total") == 1


@pytest.mark.bugbank
def test_bugbank_R83_what_fails_inside_the_metrics_is_counted_and_goes_no_further(caplog):
    metrics: Any = EngineMetrics(fake_engine())
    broken = dataclasses.replace(make_output(times(1, 12.0)), metrics=object())
    metrics.gave(make_request(), broken)
    metrics.gave(make_request(), broken)
    metrics.stepped(None)
    metrics.aborted(None)
    assert value(metrics, "jaxserve:metric_errors_total") == 4
    assert len(caplog.records) == 1


def test_a_failure_of_the_metrics_leaves_other_counts_usable():
    metrics: Any = EngineMetrics(fake_engine())
    metrics.stepped(None)
    run_one_stream(metrics)
    assert value(metrics, "vllm:request_generation_tokens_sum") == 3


def test_only_a_configured_name_is_a_label():
    metrics = EngineMetrics(fake_engine())
    run_one_stream(metrics)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {"tiny"}


@pytest.mark.parametrize(
    ("config", "label"),
    [(EngineConfig(model="some/folder"), "some/folder"), (EngineConfig(), "SmolLM2-135M-Instruct")],
)
def test_without_a_served_name_the_model_is_the_label(config, label):
    metrics = EngineMetrics(fake_engine(config=config))
    labels = {"model_name": label, "engine": "0"}
    assert metrics.registry.get_sample_value("vllm:num_requests_running", labels) == 0


def test_help_lines_start_with_vllm_and_have_every_histogram():
    text = generate_latest(EngineMetrics(fake_engine()).registry).decode()
    shown = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP vllm")}
    assert set(HISTOGRAMS) <= shown
    assert {"vllm:num_requests_running", "vllm:request_success_total"} <= shown
    assert {"vllm_requests_total", "vllm_ttft_seconds"} <= shown


def test_the_documents_name_every_metric_of_the_engine_and_no_other():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    tables = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`((?:vllm|jaxserve):\w+)`", tables))
    assert named == {metric.name for metric in read_metrics(EngineMetrics(fake_engine()).collect())}


def test_the_openmetrics_form_has_all_metrics_too():
    text = generate_openmetrics(EngineMetrics(fake_engine()).registry).decode()
    assert "vllm:num_requests_running" in text
    assert text.endswith("# EOF\n")


def test_engines_share_nothing():
    first, second = EngineMetrics(fake_engine()), EngineMetrics(fake_engine())
    run_one_stream(first)
    assert value(first, "vllm:prompt_tokens_total") == 3
    assert value(second, "vllm:prompt_tokens_total") == 0


def test_a_histogram_puts_a_bound_into_its_own_bucket():
    metrics = EngineMetrics(fake_engine())
    histogram = metrics._histograms["vllm:request_params_n"]
    for number in (1, 2, 3, 21):
        histogram.observe(number)
    counts = [
        value(metrics, "vllm:request_params_n_bucket", le=le)
        for le in ("1.0", "2.0", "5.0", "+Inf")
    ]
    assert counts == [1, 2, 3, 4]
    assert histogram.count == 4 and histogram.sum == 27


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_ascend(name):
    bounds, text = HISTOGRAMS[name]
    assert list(bounds) == sorted(set(bounds))
    assert text.endswith(".")
    assert Histogram(bounds).count == 0


def test_times_between_tokens_are_told_apart_below_ten_milliseconds():
    bounds, _ = HISTOGRAMS["vllm:inter_token_latency_seconds"]
    assert sum(bound < 0.01 for bound in bounds) >= 6


def counters(metrics: EngineMetrics) -> Iterator[tuple[Any, float]]:
    for family in metrics.collect():
        for sample in family.samples:
            if family.type == "counter":
                yield (sample.name, *sorted(sample.labels.items())), sample.value
