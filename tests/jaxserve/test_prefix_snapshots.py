"""Prefixes on disk: what a fresh engine takes of them, and what it refuses; real tiny models."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxserve.engine_builder import BuiltEngine
from jaxserve.errors import EngineConfigError, EngineNotReadyError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.prefix_snapshots import PrefixSnapshots
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.page_digests import root_digest
from jaxserve.scheduling.prefix_pages import PrefixPages
from jaxserve.snapshot_file import SnapshotFile, write_snapshot
from tests.engine_runs import (
    add_request,
    assert_idle_and_sane,
    drain,
    final_of,
    greedy,
    make_engine,
    tokens_of,
    with_empty_cache,
    with_scheduler,
)
from tests.goldens_loader import GOLDENS_FOLDER

LLAMA = GOLDENS_FOLDER / "llama_gqa"
PROMPT = tuple((7 * i) % 200 + 10 for i in range(75))  # four pages and 11 tokens
LONGER = (*PROMPT, 3, 4, 5)
# Those of make_engine, so that programs compile once.
LLM_SETTINGS: dict[str, Any] = {
    "model": str(LLAMA),
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "row_buckets": (8,),
    "token_buckets": (64,),
    "max_model_len": 256,
}


@functools.cache
def built_engine(model: str) -> BuiltEngine:
    return make_engine(GOLDENS_FOLDER / model)


def fresh(model: str = "llama_gqa") -> BuiltEngine:
    """An engine that has forgotten all and whose pages are zeros; compiled once a model."""
    built = built_engine(model)
    built.engine.scheduler.reset_prefix_cache()
    with_empty_cache(built.engine)
    return built


def run(built: BuiltEngine, prompt: Sequence[int], **fields: Any) -> tuple[int, tuple[int, ...]]:
    """Cached tokens and the output of one request."""
    add_request(built.engine, "r", prompt, greedy(12), **fields)
    updates = drain(built.engine)["r", 0]
    return final_of(updates).num_cached_tokens, tokens_of(updates)


def save(
    built: BuiltEngine, folder: Path, prompt: Sequence[int] = PROMPT, salt: str | None = None
) -> Path:
    request = Request(
        request_id="s",
        prompt_token_ids=tuple(prompt),
        sampling_params=greedy(1),
        cache_salt=salt,
    )

    def compute() -> None:
        built.engine.add(request)
        drain(built.engine)

    num_tokens = PrefixSnapshots(built, folder).save("p", request, compute)
    assert num_tokens == len(prompt) // 16 * 16
    return folder / "p.safetensors"


def load(built: BuiltEngine, folder: Path, salt: str | None = None) -> int:
    return PrefixSnapshots(built, folder).load("p", salt)


def refusal(built: BuiltEngine, folder: Path, salt: str | None = None) -> str:
    """Why a snapshot is refused; nothing of it is taken."""
    with pytest.raises(InvalidRequestError) as caught:
        load(built, folder, salt)
    assert run(built, LONGER, cache_salt=salt)[0] == 0
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(fresh(), tmp_path)


def test_a_new_llm_takes_what_another_saved(tmp_path: Path):
    prompt, longer = {"prompt_token_ids": list(PROMPT)}, {"prompt_token_ids": list(LONGER)}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = LLM(**LLM_SETTINGS)
    expected = first.generate(longer, params, use_tqdm=False)[0].outputs[0].token_ids
    assert first.save_prefix("system-1", prompt, folder=tmp_path) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["system-1.safetensors"]
    second = LLM(**LLM_SETTINGS)
    assert second.load_prefix("system-1", folder=tmp_path) == 64
    output = second.generate(longer, params, use_tqdm=False)[0]
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (64, expected)
    with pytest.raises(InvalidRequestError, match="prompt must be one"):
        second.save_prefix("two", [prompt, prompt], folder=tmp_path)  # pyright: ignore[reportArgumentType]


def test_a_batch_invariant_engine_takes_only_what_one_of_its_kind_saved(saved: Path):
    invariant = dataclasses.replace(fresh(), batch_invariant=True)
    assert "must have this engine's batch_invariant mode" in refusal(invariant, saved.parent)
    save(invariant, saved.parent)
    invariant.engine.scheduler.reset_prefix_cache()
    assert load(invariant, saved.parent) == load(fresh(), saved.parent) > 0


def test_the_folder_lies_beside_the_compilation_cache(tmp_path: Path):
    built = fresh()
    compiled = Path(jax.config.jax_compilation_cache_dir or "")
    assert built.cache_dir in (compiled, compiled.parent)
    request = Request(request_id="s", prompt_token_ids=PROMPT, sampling_params=greedy(1))
    run(built, PROMPT)
    elsewhere = dataclasses.replace(built, cache_dir=tmp_path / "new")
    PrefixSnapshots(elsewhere).save("p", request, lambda: pytest.fail("it is cached"))
    assert (tmp_path / "new" / "prefixes" / "p.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 75])
@pytest.mark.parametrize("model", ["llama_gqa", "gemma2", "mistral_window", "qwen2_windows"])
def test_pages_of_all_groups_come_back(model: str, length: int, tmp_path: Path):
    built = fresh(model)
    prompt = PROMPT[:length]
    longer = (*prompt, *range(20, 60))
    expected = run(built, longer)[1]
    built.engine.scheduler.reset_prefix_cache()
    save(built, tmp_path, prompt)
    assert load(fresh(model), tmp_path) == 64
    assert run(built, longer) == (64, expected)


def test_each_page_gets_its_own_bytes(tmp_path: Path):
    """Attention does not see the order of pages, so tokens would not tell."""
    prompt = tuple((5 * i) % 190 + 20 for i in range(176))  # 11 pages: two chunks of programs
    tensors = SnapshotFile(save(fresh(), tmp_path, prompt)).tensors
    assert len(np.unique(tensors["0.keys"], axis=0)) == 11
    built = fresh()
    load(built, tmp_path)
    pools = built.engine.scheduler.page_pools
    tables = PrefixPages(pools, prompt, root_digest(None)).find()
    assert tables is not None
    cache = built.engine.runner.cache.groups[0]
    for name, pages in (("0.keys", cache.k_pages), ("0.values", cache.v_pages)):
        got = np.asarray(pages)[:, tables[0]].swapaxes(0, 1)
        np.testing.assert_array_equal(got, tensors[name])


def test_pages_that_are_there_are_not_taken_twice(tmp_path: Path):
    built = fresh()
    save(built, tmp_path)
    pool = built.engine.scheduler.page_pools[0]
    num_cached = pool.num_cached
    load(built, tmp_path)
    assert pool.num_cached == num_cached
    assert_idle_and_sane(built.engine)


def test_a_salt_keeps_prefixes_apart(tmp_path: Path):
    built = fresh()
    path = save(built, tmp_path, salt="tenant-1")
    assert b"tenant-1" not in path.read_bytes()
    fresh()
    assert "this engine's cache_salt (its digest), '" in refusal(built, tmp_path)
    assert "cache_salt" in refusal(built, tmp_path, "tenant-2")
    built = fresh()
    load(built, tmp_path, "tenant-1")
    assert run(built, LONGER)[0] == 0
    assert run(built, LONGER, cache_salt="tenant-1")[0] == 64


def test_evicted_pages_go_to_the_host_first(saved: Path):
    built = make_engine(
        LLAMA, kv_offloading_size=1 / 64, num_gpu_blocks_override=18, preemption_mode="swap"
    )
    others = [tuple(range(start, start + 120)) for start in (30, 60)]
    outputs = [run(built, other)[1] for other in others]
    load(built, saved.parent)  # takes pages that hold the first of them
    hits = built.engine.scheduler.num_host_prefix_hits
    assert run(built, LONGER)[0] == 64
    assert run(built, others[0]) == (112, outputs[0])
    assert built.engine.scheduler.num_host_prefix_hits > hits


def test_another_model_is_refused(saved: Path):
    text = refusal(fresh("mistral_window"), saved.parent)
    assert "prefix 'p' must have this engine's model (the numbers of its config)" in text


def test_another_page_size_is_refused(saved: Path):
    built = make_engine(LLAMA, block_size=32)
    assert "page size, '32'; got '16'" in refusal(built, saved.parent)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("format", "jaxserve prefix 0", "format, 'jaxserve prefix 1'; got 'jaxserve prefix 0'"),
        ("dtype", "bfloat16", "dtype, 'float32'; got 'bfloat16'"),
        ("geometry", "[]", "cache geometry, '["),
        ("num_devices", "2", "number of devices, '1'; got '2'"),
    ],
)
def test_what_another_engine_saved_is_refused(key: str, value: str, sentence: str, saved: Path):
    file = SnapshotFile(saved)
    tensors = {name: np.array(tensor) for name, tensor in file.tensors.items()}
    write_snapshot(saved, file.metadata | {key: value}, tensors)
    assert f"prefix 'p' must have this engine's {sentence}" in refusal(fresh(), saved.parent)


def test_other_weights_of_the_same_shapes_are_refused(saved: Path):
    built = fresh()
    weights = list(built.engine.runner.weights)
    leaves = list(weights)
    leaves[3] = leaves[3] * 1.001
    with_empty_cache(built.engine, leaves)
    try:
        with pytest.raises(InvalidRequestError) as caught:
            load(built, saved.parent)
    finally:
        with_empty_cache(built.engine, weights)
    assert "this engine's weights" in str(caught.value)


@pytest.mark.parametrize("place", ["token", "first page", "last byte"])
def test_a_flipped_bit_is_found(place: str, saved: Path):
    data = bytearray(saved.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[{"token": begin, "first page": begin + 4 * 64, "last byte": -1}[place]] ^= 1
    saved.write_bytes(data)
    assert "checksum" in refusal(fresh(), saved.parent)


def test_changed_metadata_is_found(saved: Path):
    saved.write_bytes(saved.read_bytes().replace(b"jaxserve 0", b"jaxserve 9", 1))
    assert "checksum" in refusal(fresh(), saved.parent)


@pytest.mark.parametrize("num_bytes", [0, 5, 300, -1])
def test_a_cut_file_is_refused(num_bytes: int, saved: Path):
    saved.write_bytes(saved.read_bytes()[:num_bytes])
    assert "p.safetensors must" in refusal(fresh(), saved.parent)


def test_a_missing_file_is_refused(tmp_path: Path):
    assert "p.safetensors must be a file" in refusal(fresh(), tmp_path)


@pytest.mark.parametrize("fault", ["too few pages", "other shape", "no tokens"])
def test_arrays_that_are_not_the_cache_s_are_refused(fault: str, saved: Path):
    file = SnapshotFile(saved)
    tensors = {name: np.array(tensor) for name, tensor in file.tensors.items()}
    if fault == "too few pages":
        tensors |= {name: tensors[name][1:] for name in ("0.keys", "0.values")}
    elif fault == "other shape":
        tensors["0.values"] = np.ascontiguousarray(tensors["0.values"][..., :32])
    else:
        del tensors["token_ids"]
    write_snapshot(saved, file.metadata, tensors)
    assert "'p' must hold" in refusal(fresh(), saved.parent)


@pytest.mark.parametrize("name", ["", "a/b", "..", "../p", "a\\b", ".p", "/p", "p\0", "x" * 129, 3])
def test_names_with_path_separators_are_refused(name: Any, saved: Path):
    snapshots = PrefixSnapshots(fresh(), saved.parent)
    with pytest.raises(InvalidRequestError, match="name must be 1 to 128"):
        snapshots.load(name)


def test_too_small_a_cache_is_refused_and_stays_sound(saved: Path):
    old = fresh()
    small = with_scheduler(old, num_pages=4)
    built = dataclasses.replace(old, engine=small)
    with pytest.raises(InvalidRequestError, match="must have 4 free pages for the prefix; got 3"):
        load(built, saved.parent)
    small.scheduler.check_invariants()
    assert small.scheduler.page_pools[0].num_free == 3


def test_who_cannot_save_is_told_why(tmp_path: Path):
    built = fresh()
    with pytest.raises(InvalidRequestError, match="must fill a page of 16 tokens; got 15"):
        save(built, tmp_path, PROMPT[:15])
    request = Request(request_id="s", prompt_token_ids=PROMPT, sampling_params=greedy(1))
    snapshots = PrefixSnapshots(built, tmp_path)
    with pytest.raises(InvalidRequestError, match="must be computed"):
        snapshots.save("p", request, lambda: None)
    add_request(built.engine, "r", LONGER, greedy(4))
    with pytest.raises(InvalidRequestError, match="no request is unfinished; got 1"):
        snapshots.save("p", request, lambda: None)
    drain(built.engine)
    assert not list(tmp_path.iterdir())
    with pytest.raises(EngineConfigError, match="enable_prefix_caching must be True"):
        PrefixSnapshots(make_engine(LLAMA, enable_prefix_caching=False), tmp_path)


def test_a_sleeping_engine_refuses(saved: Path):
    built = make_engine(LLAMA)
    built.engine.sleep(1)
    with pytest.raises(EngineNotReadyError, match="must be awake"):
        load(built, saved.parent)
    built.engine.wake_up()
    built.engine.release_cache()
    load(built, saved.parent)
    assert run(built, LONGER)[0] == 64


def test_a_write_that_fails_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before = saved.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxserve.snapshot_file.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(fresh(), saved.parent)
    assert [path.name for path in saved.parent.iterdir()] == ["p.safetensors"]
    assert saved.read_bytes() == before


def test_safetensors_itself_reads_the_file(saved: Path):
    tensors = load_file(saved)
    assert tensors["token_ids"].tolist() == list(PROMPT[:64])
    assert tensors["0.keys"].shape[0] == tensors["0.values"].shape[0] == 4
    with safe_open(saved, "numpy") as file:
        metadata = file.metadata()
    assert metadata["page_size"] == "16" and metadata["dtype"] == "float32"
    assert json.loads(metadata["geometry"])[0]["page_size"] == 16
