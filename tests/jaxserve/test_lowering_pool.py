"""Processes that lower programs: what they give, and what is left when they fail."""

import dataclasses
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine_builder import model_for
from jaxserve.execution import lowering_pool
from jaxserve.execution.engine_plan import make_programs, plan_engine
from jaxserve.execution.lowering_job import make_job
from jaxserve.execution.lowering_messages import LoweringJob
from jaxserve.execution.lowering_pool import (
    LoweringPool,
    count_cpus,
    count_processes,
    open_lowering_pool,
)
from jaxserve.execution.model_setup import ModelSetup
from jaxserve.execution.programs import ProgramKey, ProgramTable
from jaxserve.processing.model_files import open_configured_model
from pallas_kernels import platform
from pallas_kernels.platform import AssumedGpu, assume_gpu
from tests.goldens_loader import GOLDENS_FOLDER, load_golden

HASHES = re.compile(r'kernel_hash = "([^"]+)"')


@dataclasses.dataclass
class Start:
    """As far as an engine on an H200 has come when it wants its programs."""

    setup: ModelSetup
    job: LoweringJob
    table: ProgramTable
    keys: list[ProgramKey]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    assume_gpu(AssumedGpu("NVIDIA H200", "9.0"))
    config = EngineConfig(
        model=str(GOLDENS_FOLDER / "qwen3_tied"),
        row_buckets=(8,),
        token_buckets=(64,),
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        num_scheduler_steps=1,
    )
    setup = ModelSetup.choose(config, model_for(config, open_configured_model(config)))
    plan = plan_engine(setup, None, None)
    what = (setup, plan.limits, plan.buckets, plan.num_pages)
    table = make_programs(*what)[1]
    keys = [key for key in table.keys() if key[0] in ("decode", "forward", "sample")]
    yield Start(setup, make_job(*what), table, keys)
    assume_gpu(None)


def drain(pool: LoweringPool, start: Start) -> dict[ProgramKey, bytes | None]:
    results = list(pool.lower(start.job, start.keys))
    assert {key for key, _ in results} == set(start.keys) and len(results) == len(start.keys)
    return dict(results)


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Let this stand for the process."""
    script = folder / "process"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_process_lowers_for_the_gpu_what_this_one_would(start: Start) -> None:
    key, pool = start.keys[0], LoweringPool(1)
    try:
        results = drain(pool, start)
        again = dict(pool.lower(start.job, [key]))  # for other page counts, say
    finally:
        pool.close()
    assert None not in results.values()
    step = start.table.step_program(key)
    own = step.trace().lower(lowering_platforms=("cuda",)).as_text()
    for program in (results[key], again[key]):
        assert program is not None
        text = step.trace_exported(program).lower(lowering_platforms=("cuda",)).as_text()
        assert sorted(HASHES.findall(text)) == sorted(HASHES.findall(own)) != []
        assert text.count("tf.aliasing_output") == own.count("tf.aliasing_output") > 0


def test_a_process_that_cannot_lower_says_why(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = dataclasses.replace(start, job=msgspec.structs.replace(start.job, setup="another"))
    pool = LoweringPool(1)
    try:
        results = drain(pool, wrong)
    finally:
        pool.close()
    assert set(results.values()) == {None}
    (warning,) = warnings_of(caplog)
    assert "the engine's setup must be that of this process" in warning


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("echo no module of that name >&2; exit 3", "status 3: no module of that name"),
        ("kill -9 $$", "status -9: it said nothing"),
        ("exec sleep 60", "no answer came within"),
    ],
)
def test_a_process_that_dies_or_hangs_leaves_its_program_to_the_engine(
    start: Start,
    line: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    command(tmp_path, monkeypatch, line)
    monkeypatch.setattr(lowering_pool, "ANSWER_SECONDS", 0.3)
    pool = LoweringPool(2)
    try:
        assert set(drain(pool, start).values()) == {None}
        assert all(worker._process.returncode is not None for worker in pool._workers)
    finally:
        pool.close()
    (warning,) = warnings_of(caplog)
    assert reason in warning


def test_settings_that_no_message_holds_and_no_process_cost_a_warning(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pool = LoweringPool(2)
    assert set(drain(pool, start).values()) == {None}
    (warning,) = warnings_of(caplog)
    assert "/nowhere/python" in warning
    caplog.clear()
    monkeypatch.undo()
    odd = dataclasses.replace(start, job=msgspec.structs.replace(start.job, config={"x": object()}))
    pool = LoweringPool(1)
    try:
        assert set(drain(pool, odd).values()) == {None}
    finally:
        pool.close()
    (warning,) = warnings_of(caplog)
    assert "object" in warning


def test_closing_ends_processes_that_work_and_says_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command(tmp_path, monkeypatch, "exec sleep 60")
    pool = LoweringPool(2)
    started = time.monotonic()
    pool.lower(start.job, start.keys)
    pool.close()
    assert all(worker._process.returncode == -9 for worker in pool._workers)
    assert time.monotonic() - started < 5 and not warnings_of(caplog)


def test_a_process_leaves_when_its_engine_is_gone(start: Start) -> None:
    worker = lowering_pool._Worker()
    worker.begin(start.job)
    worker.close()
    assert worker._process.wait(30) == 0


def test_processes_are_for_one_hopper_gpu_with_many_cpus(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_cpus, expected in ((7, 0), (8, 4), (16, 8), (64, 8)):
        monkeypatch.setattr(lowering_pool, "count_cpus", lambda count=num_cpus: count)
        assert count_processes(start.setup) == expected
    assert count_processes(dataclasses.replace(start.setup, backend="triton")) == 0
    assert count_processes(dataclasses.replace(start.setup, backend="xla")) == 0
    monkeypatch.setattr(lowering_pool, "MAX_PROCESSES", 0)
    with open_lowering_pool(start.setup, None) as pool:
        assert pool is None


@pytest.mark.parametrize(
    ("quota", "expected"), [("400000 100000", 4), ("max 100000", 16), (None, 16)]
)
def test_a_containers_quota_counts(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota + "\n")
    assert count_cpus(path) == expected


def test_a_pool_starts_at_once_only_if_nothing_is_kept(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(lowering_pool, "count_cpus", lambda: 8)
    with open_lowering_pool(start.setup, None) as pool:
        assert pool is not None and len(pool._workers) == 4
    assert all(worker._process.returncode == -9 for worker in pool._workers)

    class Full:
        is_empty = False

    with open_lowering_pool(start.setup, Full()) as pool:  # pyright: ignore[reportArgumentType]
        assert pool is not None and not pool._workers
        few = pool.lower(start.job, start.keys[: lowering_pool.MIN_PROGRAMS - 1])
        assert [program for _, program in few] == [None] * (lowering_pool.MIN_PROGRAMS - 1)
        assert not pool._workers


def test_an_engine_of_carried_programs_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "_assumed", None)
    monkeypatch.setattr(lowering_pool, "count_processes", lambda _: 1)
    golden = load_golden("llama_gqa")
    with caplog.at_level("DEBUG", logger="jaxserve"):
        llm = LLM(
            str(golden.folder),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            row_buckets=(2,),
            token_buckets=(16,),
            compilation_cache_dir=str(tmp_path),  # which is empty
        )
        prompt = {"prompt_token_ids": list(golden.alone.prompt)}
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
    assert tuple(output.outputs[0].token_ids) == golden.alone.tokens[:20]
    assert not warnings_of(caplog)
    found = re.search(r"(\d+) of \d+ programs were lowered elsewhere", caplog.text)
    assert found is not None and int(found[1]) == 6
