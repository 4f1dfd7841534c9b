"""The whole engine against transformers' float32 answers on tiny random checkpoints."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine_builder import BuiltEngine
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kernels import model_kernels
from models.kv_cache import allocate_cache, cache_geometries
from models.loading.checkpoint import CheckpointLoader
from models.loading.safetensors import SafetensorsFolder
from models.registry import model_class
from models.sharding import Sharder, make_mesh
from models.weight_layout import Stack, WeightLayout, WeightStore
from tests.engine_runs import generate, greedy, make_engine, with_scheduler
from tests.goldens_loader import GOLDEN_NAMES, load_golden
from tests.models.tiny_models import logits_of_each

PAGE_SIZE, NUM_PAGES = 16, 8


def load_model(folder: Path, stack: Stack):
    source = SafetensorsFolder(folder)
    config = ModelConfig.from_dict(source.config_dict())
    sharder = Sharder(make_mesh())
    layout = WeightLayout.of_model(
        model_class(config.architecture),
        config,
        stack=stack,
        dtype="float32",
        kernels=model_kernels("xla", "cpu"),
    )
    store = WeightStore(layout, sharder)
    CheckpointLoader(config, store).load(source.tensors())
    geometries = cache_geometries(config, page_size=PAGE_SIZE, dtype="float32")
    num_pages = (NUM_PAGES,) * len(geometries)
    return layout, store.leaves(), allocate_cache(geometries, num_pages, sharder)


def prompt_batch(prompt: tuple[int, ...], num_groups: int, num_padded: int = 0) -> ForwardBatch:
    """One prompt, padded to so many tokens of the null page; then prompts share a program."""
    positions = np.arange(max(num_padded, len(prompt)), dtype=np.int32)
    is_prompt = positions < len(prompt)
    token_ids = np.zeros_like(positions)
    token_ids[is_prompt] = prompt
    table = np.arange(1, NUM_PAGES, dtype=np.int32)[None]
    return ForwardBatch(
        token_ids=jnp.asarray(token_ids),
        positions=jnp.asarray(np.where(is_prompt, positions, 0)[None]),
        slot_mapping=(jnp.asarray(np.where(is_prompt, PAGE_SIZE + positions, 0)),) * num_groups,
        page_tables=(jnp.asarray(table),) * num_groups,
        seq_lens=jnp.array([len(prompt)], jnp.int32),
        query_start_loc=jnp.array([0, len(prompt)], jnp.int32),
        num_decode_rows=jnp.array([0], jnp.int32),
        logits_indices=jnp.asarray(positions),
    )


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_logits_of_all_positions_equal_those_of_transformers(name: str) -> None:
    golden = load_golden(name)
    layout, leaves, cache = load_model(
        golden.folder, "all" if name.startswith("llama") else "vectors"
    )
    num_padded = max(len(case.prompt) for case in golden.logits)
    batches = [prompt_batch(c.prompt, len(cache.groups), num_padded) for c in golden.logits]
    found = logits_of_each(layout, leaves, batches, cache)
    for case, logits in zip(golden.logits, found, strict=True):
        worst = np.abs(logits[: len(case.prompt)] - case.logits).max()
        assert worst <= 1e-4 * np.abs(case.logits).max()


@functools.cache
def built_engine(name: str) -> BuiltEngine:
    return make_engine(load_golden(name).folder)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_greedy_tokens_equal_those_of_transformers_alone_and_together(name: str) -> None:
    golden, engine = load_golden(name), built_engine(name).engine
    assert generate(engine, [golden.alone.prompt], greedy()) == [golden.alone.tokens]
    together = generate(engine, [case.prompt for case in golden.mixed], greedy())
    assert together == [case.tokens for case in golden.mixed]


VARIANTS = {
    "chunks of one token": ("llama_gqa", {"long_prefill_token_threshold": 1}),
    "chunks of seven tokens": ("qwen3_tied", {"long_prefill_token_threshold": 7}),
    "pages of 32 tokens": ("llama_gqa", {"block_size": 32}),
    "a larger stored head dim": ("qwen3_sharded", {"stored_head_dim": 128}),
    "one step in flight": ("llama_linear_rope", {"max_steps_in_flight": 1}),
    "three steps in flight": ("llama_gqa", {"max_steps_in_flight": 3}),
    "four decode steps in one": ("llama_gqa", {"num_scheduler_steps": 4}),
    "eight decode steps in one with windows": ("gemma2", {"num_scheduler_steps": 8}),
    "stacked weights": ("qwen3_tied", {"stacked_weights": "all"}),
    "stacked vectors": ("llama_mha_head_dim_80", {"stacked_weights": "vectors"}),
    "chunks of one token with windows": ("gemma2", {"long_prefill_token_threshold": 1}),
    "chunks of seven tokens with windows": ("gemma2", {"long_prefill_token_threshold": 7}),
    "pages of 32 tokens with windows": ("mistral_window", {"block_size": 32}),
    "stacked weights with windows": ("gemma2", {"stacked_weights": "all"}),
    "more buckets": ("llama_gqa", {"row_buckets": (1, 4, 8), "token_buckets": (16, 32, 64)}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_do_not_depend_on(variant: str) -> None:
    name, settings = VARIANTS[variant]
    golden = load_golden(name)
    engine = make_engine(golden.folder, **settings).engine
    together = generate(engine, [case.prompt for case in golden.mixed], greedy())
    assert together == [case.tokens for case in golden.mixed]


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_tied", "qwen2_windows"])
def test_greedy_tokens_survive_preemption(name: str) -> None:
    golden = load_golden(name)
    engine = with_scheduler(built_engine(name), num_pages=25)
    together = generate(engine, [case.prompt for case in golden.mixed], greedy())
    assert together == [case.tokens for case in golden.mixed]
    assert engine.scheduler.num_preemptions > 0
