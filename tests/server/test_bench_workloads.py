"""Tests of server/bench/workloads.py: the workloads of the published figures."""

import pytest

from server.bench.workloads import LATENCY, THROUGHPUT, WORKLOADS

QWEN3_VOCAB = 151_936
TOTALS = {
    "single": (1, 128, 256),
    "decode64": (64, 64 * 128, 64 * 256),
    "batch256": (256, 256 * 512, 256 * 128),
    "batch256_sampled": (256, 256 * 512, 256 * 128),
    "mixed1000": (1000, 523_197, 262_193),
}
FIRST_IDS = {
    "single": (119588, 147740, 123067),
    "decode64": (29004, 139179, 65732),
    "batch256": (125405, 71515, 139708),
    "batch256_sampled": (125405, 71515, 139708),
    "mixed1000": (68897, 77220, 49686),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_and_lengths_are_the_published_ones(name: str):
    workload = WORKLOADS[name](QWEN3_VOCAB)
    num_in = sum(map(len, workload.prompts))
    assert (len(workload.prompts), num_in, sum(workload.output_lens)) == TOTALS[name]
    assert workload.prompts[0][:3] == FIRST_IDS[name]
    assert all(1000 <= i < QWEN3_VOCAB - 2000 for prompt in workload.prompts for i in prompt)
    assert workload.num_warm_up == min(len(workload.prompts), 300)


def test_mixed_lengths_lie_between_their_borders():
    workload = WORKLOADS["mixed1000"](QWEN3_VOCAB)
    in_lens = [len(prompt) for prompt in workload.prompts]
    assert 32 <= min(in_lens) < 40 and 1016 < max(in_lens) <= 1024
    assert 16 <= min(workload.output_lens) < 20 and 508 < max(workload.output_lens) <= 512


def test_only_one_workload_is_sampled_and_none_stops_early():
    for name, make in WORKLOADS.items():
        params = make(QWEN3_VOCAB).sampling_params(7, detokenize=False)
        expected = (0.8, 0.95) if name == "batch256_sampled" else (0.0, 1.0)
        assert (params.temperature, params.top_p) == expected
        assert (params.max_tokens, params.ignore_eos, params.seed) == (7, True, None)


def test_a_small_vocabulary_is_used_whole():
    (prompt,) = WORKLOADS["single"](256).prompts
    assert max(prompt) < 256 and min(prompt) < 20


def test_every_workload_is_of_one_kind():
    assert {*LATENCY, *THROUGHPUT} == set(WORKLOADS)
    assert all(WORKLOADS[name](256).kind == "latency" for name in LATENCY)
    assert all(WORKLOADS[name](256).kind == "throughput" for name in THROUGHPUT)
