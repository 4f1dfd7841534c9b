"""ModelRunner: uploads, donation, and what steps leave alone in a real model's cache."""

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.execution import limits
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.model_runner import StepHandle
from jaxserve.execution.page_functions import HOST_MEMORY, PAGE_CHUNK_SIZES, PageChunk
from jaxserve.execution.programs import CompilationCounter, ProgramTable
from jaxserve.execution.sample_mode import SampleMode
from tests.engine_runs import (
    add_request,
    drain,
    greedy,
    make_engine,
    shared_engine,
    with_empty_cache,
    with_scheduler,
)
from tests.goldens_loader import GOLDENS_FOLDER, load_golden
from tests.jaxserve.page_moves import moves_of

GOLDEN = load_golden("llama_gqa")
NUM_ROWS = 256
NUM_SLOTS, PAGE_BYTES = 6, 2 * 2 * 16 * 2 * 64 * 4


@pytest.fixture
def engine() -> Engine:
    return with_empty_cache(with_scheduler(shared_engine(), max_steps_in_flight=1))


def cached(engine: Engine) -> np.ndarray:
    """[2, L, P, B, K, H]: all keys and values."""
    group = engine.runner._cache.groups[0]
    return np.stack([group.k_pages, group.v_pages])


def fill_slot(engine: Engine, slot: int, value: float) -> None:
    """Put a page of one value on the host."""
    shape, mover = cached(engine)[:, :, 0].shape, engine.runner.page_mover
    assert mover is not None
    page = jax.device_put(np.full(shape, value, np.float32), device=jax.devices()[0])
    host = page.sharding.with_memory_kind(HOST_MEMORY)
    mover._host_pages.put(0, [slot], [jax.device_put(page, host)])


def test_a_step_changes_only_the_slots_of_its_tokens_and_the_null_page(engine: Engine) -> None:
    for index, case in enumerate(GOLDEN.mixed[3:11]):
        add_request(engine, str(index), case.prompt, greedy(6 + index))
    kinds = set()
    while (output := engine.scheduler.schedule()) is not None:
        before = cached(engine)
        batch = engine._builder.build(output)
        result = engine.runner.collect(engine.runner.dispatch(batch))
        after = cached(engine)
        changed = (before != after).any((0, 1, 4, 5))
        scheduled = np.zeros_like(changed)
        for row in output.rows:
            positions = np.arange(row.start, row.start + row.num_scheduled_tokens)
            pages = np.array(row.sequence.page_tables[0])[positions // 16]
            scheduled[pages, positions % 16] = True
        np.testing.assert_array_equal(changed[1:], scheduled[1:])
        kinds.add((batch.bucket, batch.num_rows < batch.bucket.num_rows))
        engine.scheduler.commit(output, result)
    assert not engine.scheduler.has_unfinished
    assert len({bucket for bucket, _ in kinds}) == 2 and {True} <= {padded for _, padded in kinds}


def test_a_step_deletes_the_cache_and_the_state_that_it_was_given(engine: Engine) -> None:
    runner = engine.runner
    add_request(engine, "r", GOLDEN.alone.prompt, greedy(3))
    while engine.has_unfinished:
        before = jax.tree.leaves((runner._cache, runner._state))
        if not engine.step():
            continue
        assert all(leaf.is_deleted() for leaf in before)
        assert not any(leaf.is_deleted() for leaf in runner._leaves)


def test_a_step_that_samples_nothing_reads_nothing(engine: Engine) -> None:
    add_request(engine, "long", GOLDEN.mixed[16].prompt, greedy(1))
    output = engine.scheduler.schedule()
    assert output is not None and not output.rows[0].can_sample
    handle = engine.runner.dispatch(engine._builder.build(output))
    assert handle.result is None
    result = engine.runner.collect(handle)
    assert (result.tokens.tolist(), result.num_new.tolist()) == ([[0]], [0])
    assert result.is_finite.tolist() == [True] and result.logprobs is None
    assert engine.scheduler.commit(output, result) == []
    drain(engine)


def test_every_buffer_that_a_step_sends_is_counted(engine: Engine) -> None:
    runner = engine.runner
    add_request(engine, "r", GOLDEN.alone.prompt, greedy(3))
    sizes = []
    while (output := engine.scheduler.schedule()) is not None:
        before, batch = runner.num_uploaded_bytes, engine._builder.build(output)
        result = runner.collect(runner.dispatch(batch))
        sizes.append(runner.num_uploaded_bytes - before)
        assert sizes[-1] == batch.packed.nbytes
        engine.scheduler.commit(output, result)
    assert len(sizes) == 3 and sizes[0] > sizes[1] == sizes[2]


@pytest.fixture
def wide_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """256 rows in one bucket."""
    table = BucketTable((NUM_ROWS,), (NUM_ROWS,))
    monkeypatch.setattr(limits, "make_bucket_table", lambda **_: table)
    built = make_engine(
        GOLDENS_FOLDER / "llama_gqa",
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=NUM_ROWS,
        num_gpu_blocks_override=3 * NUM_ROWS,
        max_model_len=48,
    )
    return built.engine


def test_a_steady_decode_step_of_256_rows_uploads_at_most_16_kib(wide_engine: Engine) -> None:
    case = GOLDEN.mixed[0]
    assert len(case.prompt) == 1, "all prompts fit one step, and all rows reach a page together"
    for index in range(NUM_ROWS):
        add_request(wide_engine, str(index), case.prompt, greedy(40))
    steady, updates = [], {}
    while wide_engine.has_unfinished:
        running = wide_engine.scheduler.num_running
        steps, before = wide_engine.times.num_steps, wide_engine.runner.num_uploaded_bytes
        for update in wide_engine.step():
            updates.setdefault(update.request_id, []).extend(update.new_token_ids)
        num_steps = wide_engine.times.num_steps - steps
        handles = [handle for _, handle in wide_engine._in_flight]
        batches = [handle.batch for handle in handles if isinstance(handle, StepHandle)]
        assert len(batches) == len(handles)
        is_steady = all(b.bucket.is_decode_only and b.num_rows == NUM_ROWS for b in batches)
        if num_steps == 1 and running == NUM_ROWS and batches and is_steady:
            steady.append(wide_engine.runner.num_uploaded_bytes - before)
    assert len(steady) > 20
    assert 0 < max(steady) <= 16 << 10
    assert len(updates) == NUM_ROWS
    assert all(tokens == list(case.tokens[:40]) for tokens in updates.values())


@pytest.fixture(scope="module")
def tiered_engine() -> Engine:
    """One row, six host slots, and the programs that a greedy request needs."""
    table = BucketTable((1,), (64,))
    decode, mixed = table.all()
    chunk = PageChunk(0, PAGE_CHUNK_SIZES[0])
    keys = (
        ("forward", mixed, None),
        ("decode", decode, SampleMode.GREEDY),
        ("sample", 1, SampleMode.GREEDY),
        ("copy_pages", None, None),
        ("offload", chunk, None),
        ("fetch", chunk, None),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(limits, "make_bucket_table", lambda **_: table)
        monkeypatch.setattr(ProgramTable, "keys", lambda _: keys)
        built = make_engine(
            GOLDENS_FOLDER / "llama_gqa",
            compile_all=True,
            max_num_seqs=1,
            max_steps_in_flight=1,
            kv_offloading_size=NUM_SLOTS * PAGE_BYTES / 2**30,
            preemption_mode="swap",
        )
    mover = built.engine.runner.page_mover
    assert mover is not None and mover.seconds_per_page is not None
    assert built.engine.scheduler._config.num_host_pages == NUM_SLOTS
    assert (built.bill.num_host_pages, built.bill.page_bytes) == (NUM_SLOTS, 257 * PAGE_BYTES)
    assert built.bill.host_page_bytes == NUM_SLOTS * PAGE_BYTES
    assert mover._host_pages.num_slots == NUM_SLOTS
    return built.engine


def test_pages_that_went_to_the_host_and_came_back_give_the_same_tokens(tiered_engine) -> None:
    engine, case, tokens = tiered_engine, GOLDEN.alone, []
    runner, mover = engine.runner, engine.runner.page_mover
    zeros = NUM_SLOTS - 1
    fill_slot(engine, zeros, 0)
    add_request(engine, "r", case.prompt, greedy(40))
    num_moved, counter = 0, CompilationCounter()
    while (output := engine.scheduler.schedule()) is not None:
        row = output.rows[0]
        held = row.sequence.page_tables[0][: -(-row.start // 16)]
        moves = tuple(moves_of(0, held, [3, 0, 2, 1, 4][: len(held)]))
        # Before each step the pages go to the host, and zeros take their place.
        runner._cache = mover.apply(moves, moves_of(0, held, [zeros] * len(held)), runner._cache)
        assert not cached(engine)[:, :, held].any()
        step = msgspec.structs.replace(output, fetches=moves)
        result = runner.collect(runner.dispatch(engine._builder.build(step)))
        for update in engine.scheduler.commit(output, result):
            tokens += update.new_token_ids
        num_moved += len(held)
    assert tuple(tokens) == case.tokens[:40]
    assert mover.num_offloaded_bytes == num_moved * PAGE_BYTES
    assert mover.num_fetched_bytes == 2 * num_moved * PAGE_BYTES > 0
    assert counter.count == 0


def test_a_step_offloads_what_its_pages_held_before_it(tiered_engine) -> None:
    engine = with_empty_cache(tiered_engine)
    runner, mover = engine.runner, engine.runner.page_mover
    assert mover is not None
    fill_slot(engine, 3, 7)
    add_request(engine, "r", GOLDEN.alone.prompt, greedy(1))
    output = engine.scheduler.schedule()
    assert output is not None
    row = output.rows[0]
    page = row.sequence.page_tables[0][row.start // 16]
    step = msgspec.structs.replace(output, offloads=tuple(moves_of(0, [page], [3])))
    result = runner.collect(runner.dispatch(engine._builder.build(step)))
    mover.land_all()
    assert cached(engine)[0, :, page].any()
    assert not np.asarray(mover._host_pages.get(0, [3])[0]).any()
    engine.scheduler.commit(output, result)
