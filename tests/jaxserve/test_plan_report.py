"""What a plan tells is what a start decides, and no tensor is read for it."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineConfigError
from jaxserve.execution.memory_plan import RESERVED_BYTES
from jaxserve.execution.page_mover import MAX_DEVICE_PAGES
from jaxserve.execution.page_plan import PAGE_COUNT_STEP
from jaxserve.plan_report import PlanReport, RequestFit, report_plan
from models.errors import ModelLoadError
from models.loading import hub
from tests.engine_runs import shared_engine
from tests.goldens_loader import GOLDENS_FOLDER
from tests.jaxserve.simulated_gpu import SimulatedGPU

LLAMA = GOLDENS_FOLDER / "llama_gqa"
MIB = 2**20


def plan_of(model: str = "llama_gqa", device_memory: int | None = 2**30, **settings: Any):
    config = EngineConfig(model=str(GOLDENS_FOLDER / model), **settings)
    return report_plan(config, device_memory=device_memory)


def fits(report: PlanReport) -> list[tuple[int, int, int]]:
    return [dataclasses.astuple(fit) for fit in report.requests]


def test_on_this_machine_the_plan_is_what_the_start_decides() -> None:
    built = shared_engine()
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    settings |= {"row_buckets": (8,), "token_buckets": (64,), "max_model_len": 256}
    report = plan_of(device_memory=None, dtype="float32", **settings)
    assert (report.plan.bill, report.plan.limits) == (built.bill, built.limits)
    assert (report.device_kind, report.temporaries) == (built.device_kind, "not counted")
    assert report.setup.model == built.model_config
    # 256 pages of 16 tokens: 16 pages for a request of 256 tokens.
    assert fits(report) == [(256, 16, 8)]
    assert report.longest == 512


def test_batch_invariance_is_refused_on_another_device_and_for_sizes_it_has_no_kernels_for() -> (
    None
):
    rule = "^batch_invariant must run on a Hopper GPU by the mosaic kernels; got the xla backend on"
    with pytest.raises(EngineConfigError, match=rule):
        plan_of(device_memory=None, dtype="bfloat16", batch_invariant=True)
    with pytest.raises(EngineConfigError, match="with batch_invariant must have a 16-bit dtype"):
        plan_of(dtype="float32", batch_invariant=True)
    with pytest.raises(EngineConfigError, match="with batch_invariant must have products of"):
        plan_of(dtype="bfloat16", batch_invariant=True)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 640}
    report = plan_of(dtype="bfloat16", batch_invariant=True, hf_overrides=sizes)
    assert report.setup.config.batch_invariant and report.plan.bill.num_tokens > 0


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGPU:
    return SimulatedGPU(tmp_path, monkeypatch)


def test_weights_that_are_not_there_are_counted_and_a_start_decides_the_same(gpu) -> None:
    weight_bytes = plan_of(dtype="float32").plan.bill.weight_bytes
    assert weight_bytes > 100_000
    report = gpu.report(2.9 * PAGE_COUNT_STEP, weight_bytes)
    assert (report.temporaries, gpu.num_compilations) == ("estimated", 0)
    built = gpu.start(2.9 * PAGE_COUNT_STEP)
    assert report.plan.bill == built.bill and report.plan.limits == built.limits
    assert report.plan.bill.num_pages == (2 * PAGE_COUNT_STEP,)
    room_bytes = int(2.9 * PAGE_COUNT_STEP * gpu.page_bytes)
    assert report.plan.bill.left_bytes == room_bytes - report.plan.bill.page_bytes
    assert gpu.report(2.9 * PAGE_COUNT_STEP, weight_bytes).temporaries == "compiled"
    assert gpu.num_compilations == 1


def test_a_start_takes_the_length_that_the_pages_hold(gpu) -> None:
    built = gpu.start(20.5, max_model_len="auto")
    assert (built.bill.num_pages, built.limits.max_model_len) == ((20,), 19 * 16)


def test_weights_larger_than_the_memory_are_refused(gpu) -> None:
    with pytest.raises(EngineConfigError, match=r"must hold at least 2 pages .*; got -\d+ bytes"):
        gpu.report(1, -(1 << 30))
    with pytest.raises(EngineConfigError, match=r"must hold at least 2 pages .*; got -\d+ bytes"):
        plan_of(device_memory=64 * MIB)


def test_pages_on_their_way_to_the_host_count_among_the_temporaries(gpu) -> None:
    weight_bytes = plan_of(dtype="float32").plan.bill.weight_bytes
    room, moved_bytes = 2.9 * PAGE_COUNT_STEP + MAX_DEVICE_PAGES, MAX_DEVICE_PAGES * gpu.page_bytes
    bill = gpu.report(room, weight_bytes, kv_offloading_size=0.25).plan.bill
    assert bill.num_pages == (2 * PAGE_COUNT_STEP,)
    assert bill.temporary_bytes == gpu.temporary_bytes + moved_bytes
    assert (bill.num_host_pages, bill.host_page_bytes) == (2**28 // gpu.page_bytes, 2**28)
    assert gpu.report(room, weight_bytes).plan.bill.temporary_bytes == gpu.temporary_bytes
    with_tier, without = (
        plan_of(dtype="float32", kv_offloading_size=size).plan.bill for size in (0.25, None)
    )
    assert with_tier.temporary_bytes - without.temporary_bytes == moved_bytes


def test_a_gpu_that_is_not_there_gets_a_gpus_sizes_and_the_whole_bill_adds_up() -> None:
    report = plan_of(device_memory=2 << 30, gpu_memory_utilization=0.5)
    bill, limits = report.plan.bill, report.plan.limits
    assert (report.device_kind, report.temporaries) == (None, "estimated")
    assert (report.setup.dtype, limits.max_num_seqs) == ("bfloat16", 256)
    assert bill.device_bytes == 2**30 and bill.reserved_bytes == RESERVED_BYTES
    assert bill.temporary_bytes > 0 and bill.left_bytes is not None
    parts = (bill.weight_bytes, bill.page_bytes, bill.temporary_bytes, bill.reserved_bytes)
    assert sum(parts) + bill.left_bytes == bill.device_bytes
    # Less than a step of pages is left.
    assert 0 <= bill.left_bytes < PAGE_COUNT_STEP * bill.page_bytes // bill.num_pages[0]
    half = plan_of(device_memory=2 << 30, gpu_memory_utilization=0.5, tensor_parallel_size=2)
    assert half.plan.bill.num_pages[0] >= 2 * bill.num_pages[0]
    assert half.plan.bill.weight_bytes < bill.weight_bytes


def test_pages_asked_for_beyond_the_memory_show_as_less_than_nothing_left() -> None:
    left = plan_of(device_memory=64 * MIB, kv_cache_memory_bytes="128MiB").plan.bill.left_bytes
    assert left is not None and -80 * MIB < left < -60 * MIB


@pytest.mark.parametrize("asked", [None, "auto", -1])
def test_a_length_that_is_left_open_is_lowered_to_what_the_pages_hold(asked, caplog) -> None:
    report = plan_of(num_gpu_blocks_override=10, max_model_len=asked)
    assert report.plan.limits.max_model_len == report.longest == 160
    # Only who did not ask for it needs a warning.
    assert [r.levelname for r in caplog.records] == (["WARNING"] if asked is None else [])
    assert fits(report) == [(160, 1, 1)]


def test_the_longest_is_what_auto_would_choose_whatever_was_asked_for() -> None:
    for model in ("llama_gqa", "mistral_window", "gemma2"):
        for pages in ({"num_gpu_blocks_override": 9}, {"kv_cache_memory_bytes": "200k"}):
            settings: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 1, **pages}
            auto = plan_of(model, max_model_len="auto", **settings)
            short = plan_of(model, max_model_len=33, **settings)
            assert short.longest == auto.longest == auto.plan.limits.max_model_len
            assert short.plan.limits.max_model_len == 33


def test_a_fixed_length_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(EngineConfigError, match="must fit the pages' 160 tokens; got 161; lower"):
        plan_of(num_gpu_blocks_override=10, max_model_len=161)
    assert plan_of(num_gpu_blocks_override=10, max_model_len=160).longest == 160


def test_requests_behind_a_window_hold_its_pages_only() -> None:
    # A window of 16 tokens in pages of 16: 2 pages while decoding, 4 for a row of 32 tokens.
    config = EngineConfig(
        model=str(GOLDENS_FOLDER / "mistral_window"),
        num_gpu_blocks_override=11,
        max_num_batched_tokens=32,
        max_num_seqs=3,
    )
    windows = report_plan(config).plan.bill.windows
    assert windows == (16,)
    report = report_plan(config, request_tokens=[500, 16])
    assert report.requests == (
        RequestFit(num_tokens=500, num_in_pages=4, num_running=3),
        RequestFit(num_tokens=16, num_in_pages=11, num_running=3),
    )


@pytest.mark.parametrize("length", [0, -3, 161])
def test_lengths_that_no_request_can_have_are_refused(length: int) -> None:
    config = EngineConfig(model=str(LLAMA), num_gpu_blocks_override=10, max_model_len=160)
    with pytest.raises(EngineConfigError, match=rf"^request_tokens must be in .*; got {length}$"):
        report_plan(config, request_tokens=[8, length])


@pytest.mark.parametrize("num_bytes", [0, -1, 2**41, 10**24])
def test_a_device_memory_that_no_gpu_has_is_refused(num_bytes: int) -> None:
    with pytest.raises(EngineConfigError, match=r"^device_memory must be in \[1, "):
        plan_of(device_memory=num_bytes)


def test_of_a_repository_no_weights_are_fetched(monkeypatch, tmp_path: Path) -> None:
    shutil.copy(LLAMA / "config.json", tmp_path)
    asked: list[str] = []

    def fetch(repository: str, files: tuple[str, ...], access: hub.HubAccess) -> Path:
        asked.extend(files)
        return tmp_path

    monkeypatch.setattr("models.loading.source.fetch_folder", fetch)
    report = report_plan(EngineConfig(model="owner/name"), device_memory=2**30)
    assert report.path == tmp_path and "config.json" in asked
    assert not any("safetensors" in file for file in asked)


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    values = json.loads((LLAMA / "config.json").read_text()) | {"architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="architectures must name one of"):
        report_plan(EngineConfig(model=str(tmp_path), load_format="dummy"))
