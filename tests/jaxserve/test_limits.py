"""Limits: what the config leaves open, and what it may not ask for."""

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.execution.limits import Limits, choose_buckets, choose_limits
from models.config import ModelConfig
from models.few_rows import MAX_FUSED_CONTEXT
from models.loading.source import open_source
from tests.goldens_loader import GOLDENS_FOLDER

MODEL = ModelConfig.from_dict(open_source(GOLDENS_FOLDER / "llama_gqa", "auto").config_dict())
GIB = 2**30


def limits_of(gpu_bytes: int | None = None, **settings: Any) -> Limits:
    is_gpu = gpu_bytes is not None
    return choose_limits(EngineConfig(**settings), MODEL, is_gpu=is_gpu, device_bytes=gpu_bytes)


def sizes(chosen: Limits) -> tuple[int, int]:
    return chosen.max_num_seqs, chosen.max_num_batched_tokens


def test_defaults_follow_the_device() -> None:
    assert sizes(limits_of()) == (8, 256)
    assert sizes(limits_of(24 * GIB)) == (256, 2048)
    assert sizes(limits_of(141 * GIB)) == (1024, 8192)


def test_the_budget_grows_with_the_sequences_that_are_asked_for() -> None:
    assert sizes(limits_of(max_num_seqs=300)) == (300, 300)


def test_fewer_sequences_run_by_default_when_the_budget_is_smaller() -> None:
    assert sizes(limits_of(max_num_batched_tokens=5)) == (5, 5)


def test_a_budget_below_the_sequences_that_are_asked_for_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="at least max_num_seqs=6; got 5"):
        limits_of(max_num_seqs=6, max_num_batched_tokens=5)


def test_a_length_beyond_the_model_is_refused() -> None:
    longest = MODEL.max_position_embeddings
    for asked in (None, "auto", longest):
        assert limits_of(max_model_len=asked).max_model_len == longest
    with pytest.raises(EngineConfigError, match=f"{longest}; got {longest + 1}"):
        limits_of(max_model_len=longest + 1)


def test_a_cpu_compiles_few_buckets_and_all_end_with_the_limits() -> None:
    table = choose_buckets(EngineConfig(), limits_of(), is_gpu=False, fuses_few_rows=False)
    assert (table.row_buckets, table.token_buckets) == ((1, 8), (8, 64, 256))
    table = choose_buckets(EngineConfig(), limits_of(), is_gpu=True, fuses_few_rows=False)
    assert (table.row_buckets, table.token_buckets) == ((8,), (128, 256))
    table = choose_buckets(EngineConfig(), limits_of(), is_gpu=True, fuses_few_rows=True)
    assert (table.row_buckets, table.token_buckets) == ((1, 8), (128, 256))
    assert table.sampler_sizes(is_greedy=True) == (8,)
    for longest, is_short in ((MAX_FUSED_CONTEXT, False), (MAX_FUSED_CONTEXT + 1, True)):
        limits = replace(limits_of(), max_model_len=longest)
        options = {"is_gpu": True, "fuses_few_rows": True, "fuses_attention": True}
        table = choose_buckets(EngineConfig(), limits, **options)
        assert any(bucket.max_context for bucket in table.all()) is is_short
    config = EngineConfig(row_buckets=(4, 99), token_buckets=(32,))
    table = choose_buckets(config, limits_of(), is_gpu=False, fuses_few_rows=False)
    assert (table.row_buckets, table.token_buckets) == ((4, 8), (32, 256))
