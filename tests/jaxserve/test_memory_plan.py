"""The memory plan: what is free, what a restart remembers, and the bill."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import EngineConfigError
from jaxserve.execution import memory_plan
from jaxserve.execution.memory_plan import (
    DeviceMemory,
    MemoryBill,
    PlanMemory,
    RememberedPlan,
    count_tokens,
    free_device_bytes,
)
from jaxserve.execution.page_plan import PAGE_COUNT_STEP
from tests.jaxserve.simulated_gpu import SimulatedGPU

PLAN = RememberedPlan((2048, 77), 12345)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger=memory_plan.__name__)
    return caplog


def test_a_plan_is_remembered_for_the_same_key_only(tmp_path: Path, warnings) -> None:
    memory = PlanMemory(tmp_path, "model", 8)
    assert memory.read() is None
    memory.write(PLAN)
    assert PlanMemory(tmp_path, "model", 8).read() == PLAN
    assert PlanMemory(tmp_path, "model", 9).read() is None
    memory.write(RememberedPlan((1024,), 1))
    assert memory.read() == RememberedPlan((1024,), 1)
    assert [path.suffix for path in (tmp_path / "memory_plans").iterdir()] == [".json"]
    assert warnings.messages == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\0",
        '{"num_pages": [5]}',
        '{"num_pages": null, "temporary_bytes": 1}',
        '{"num_pages": 2048, "temporary_bytes": 1}',
        '{"num_pages": "2048", "temporary_bytes": 1}',
        '{"num_pages": [null], "temporary_bytes": 1}',
    ],
)
def test_a_damaged_file_costs_a_warning_and_is_overwritten(
    tmp_path: Path, warnings, text: str
) -> None:
    memory = PlanMemory(tmp_path, "key")
    memory.write(PLAN)
    (path,) = (tmp_path / "memory_plans").iterdir()
    path.write_text(text)
    assert memory.read() is None
    (message,) = warnings.messages
    assert message.startswith(f"the memory plan {path} cannot be read: ")
    memory.write(PLAN)
    assert memory.read() == PLAN


def test_bytes_that_are_no_text_count_as_damage(tmp_path: Path, warnings) -> None:
    memory = PlanMemory(tmp_path, "key")
    memory.write(PLAN)
    (path,) = (tmp_path / "memory_plans").iterdir()
    path.write_bytes(b"\xff\xfe{")
    assert memory.read() is None
    assert len(warnings.messages) == 1


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, warnings) -> None:
    # A file where the folder should be: permissions do not stop root.
    (tmp_path / "memory_plans").write_text("")
    memory = PlanMemory(tmp_path, "key")
    memory.write(PLAN)
    (message,) = warnings.messages
    assert "cannot be written" in message
    assert memory.read() is None


class Device:
    def __init__(self, stats: dict | None):
        self._stats = stats

    def memory_stats(self) -> dict | None:
        return self._stats


def test_a_device_tells_what_is_free_or_nothing() -> None:
    assert free_device_bytes(Device({"bytes_limit": 100, "bytes_in_use": 30})) == (70, 100)
    assert free_device_bytes(Device(None)) is None
    assert free_device_bytes(Device({"bytes_in_use": 30})) is None


def test_of_several_devices_the_one_with_the_least_counts() -> None:
    fuller = Device({"bytes_limit": 100, "bytes_in_use": 60})
    smaller = Device({"bytes_limit": 90, "bytes_in_use": 30})
    memory = DeviceMemory.of_devices([fuller, smaller])
    assert memory == DeviceMemory(limit_bytes=90, free_bytes=40)
    assert memory is not None and memory.less(50) == DeviceMemory(limit_bytes=90, free_bytes=-10)
    assert DeviceMemory.of_devices([fuller, Device(None)]) is None
    assert DeviceMemory.of_devices([]) is None


def test_tokens_that_fit_are_those_of_full_groups_if_there_are_any() -> None:
    assert count_tokens((11,), (None,), 16) == 160
    assert count_tokens((11, 5), (None, 64), 16) == 160
    assert count_tokens((11, 5), (32, 64), 16) == 64


def test_the_bill_names_every_part() -> None:
    bill = MemoryBill(
        device_bytes=8 << 30,
        weight_bytes=3 << 30,
        page_bytes=2 << 30,
        temporary_bytes=1 << 29,
        reserved_bytes=1 << 29,
        left_bytes=2 << 30,
        num_pages=(1024,),
        windows=(None,),
        num_tokens=16368,
        host_page_bytes=0,
        num_host_pages=0,
    )
    assert str(bill) == (
        "memory of 8.00 GiB: weights 3.00 GiB, pages 2.00 GiB (1024 pages, 16368 tokens), "
        "temporaries 0.50 GiB"
    )
    assert str(replace(bill, device_bytes=0)).startswith("memory on this host: ")
    tier = replace(bill, host_page_bytes=5 << 30, num_host_pages=2560)
    assert str(tier) == f"{bill}; host tier 5.00 GiB (2560 pages)"
    groups = replace(bill, num_pages=(1024, 512), windows=(None, 4096))
    assert "(1024 pages + 512 pages of window 4096, 16368 tokens)" in str(groups)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGPU:
    return SimulatedGPU(tmp_path, monkeypatch)


def test_a_first_start_estimates_and_a_restart_remembers(gpu: SimulatedGPU) -> None:
    first = gpu.start(2.9 * PAGE_COUNT_STEP)
    assert first.bill.num_pages == (2 * PAGE_COUNT_STEP,)
    assert first.bill.temporary_bytes == gpu.temporary_bytes
    pools = first.engine.scheduler._roster.page_pools
    assert [pool.num_pages for pool in pools] == [2 * PAGE_COUNT_STEP]
    # A little less or more memory is left, and another estimate: the programs stay.
    gpu.estimated_bytes += 2 * PAGE_COUNT_STEP * gpu.page_bytes
    for room in (2.0, 3.5):
        again = gpu.start(room * PAGE_COUNT_STEP)
        assert again.bill.num_pages == (2 * PAGE_COUNT_STEP,)
        assert again.bill.temporary_bytes == gpu.temporary_bytes
    assert gpu.num_compilations == 3


def test_a_step_that_needs_more_than_was_estimated_leaves_fewer_pages(gpu: SimulatedGPU) -> None:
    gpu.temporary_bytes = 4 * PAGE_COUNT_STEP * gpu.page_bytes
    gpu.estimated_bytes = gpu.temporary_bytes // 2
    first = gpu.start(1.5 * PAGE_COUNT_STEP)
    assert first.bill.num_pages == (PAGE_COUNT_STEP,)
    assert first.bill.temporary_bytes == gpu.temporary_bytes and first.bill.left_bytes is not None
    assert first.bill.left_bytes >= 0
    assert gpu.num_compilations == 2
    assert gpu.start(1.5 * PAGE_COUNT_STEP).bill == first.bill
    assert gpu.num_compilations == 3


def test_a_step_that_needs_less_keeps_the_pages_that_were_compiled_for(gpu: SimulatedGPU) -> None:
    gpu.estimated_bytes = gpu.temporary_bytes + PAGE_COUNT_STEP * gpu.page_bytes
    first = gpu.start(2.5 * PAGE_COUNT_STEP)
    assert first.bill.num_pages == (PAGE_COUNT_STEP,)
    assert first.bill.temporary_bytes == gpu.temporary_bytes
    assert gpu.start(2.5 * PAGE_COUNT_STEP).bill == first.bill
    assert gpu.num_compilations == 2


def test_a_remembered_plan_that_no_longer_fits_is_made_anew(gpu: SimulatedGPU) -> None:
    gpu.start(2.5 * PAGE_COUNT_STEP)
    smaller = gpu.start(1.9 * PAGE_COUNT_STEP)
    assert smaller.bill.num_pages == (PAGE_COUNT_STEP,)
    gpu.estimated_bytes *= 100
    assert gpu.start(1.9 * PAGE_COUNT_STEP).bill.num_pages == (PAGE_COUNT_STEP,)


@pytest.mark.parametrize(
    ("settings", "is_remembered"),
    [
        ({"max_num_seqs": 4}, False),
        ({"block_size": 32}, False),
        ({"row_buckets": (4,)}, True),
        ({"num_scheduler_steps": 4}, True),
    ],
)
def test_only_what_changes_the_largest_step_has_a_plan_of_its_own(
    gpu: SimulatedGPU, settings: dict[str, Any], is_remembered: bool
) -> None:
    gpu.start(1.5 * PAGE_COUNT_STEP)
    report = gpu.report(1.5 * PAGE_COUNT_STEP, 10**9, **settings)
    assert report.plan.is_estimated is not is_remembered


def test_page_counts_that_are_given_are_taken_without_measuring(gpu: SimulatedGPU) -> None:
    by_count = gpu.start(9 * PAGE_COUNT_STEP, num_gpu_blocks_override=77)
    assert by_count.bill.num_pages == (78,)
    by_bytes = gpu.start(9 * PAGE_COUNT_STEP, kv_cache_memory_bytes=99 * gpu.page_bytes)
    assert by_bytes.bill.num_pages == (99,)
    assert gpu.num_compilations == 2


def test_memory_that_holds_no_pages_is_refused(gpu: SimulatedGPU) -> None:
    with pytest.raises(EngineConfigError, match="must hold at least 2 pages"):
        gpu.start(1.5)
