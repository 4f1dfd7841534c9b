"""ModelRunner: uploads, donation, and what steps leave alone in a real model's cache."""

import jax
import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.execution import limits
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.programs import ProgramTable
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

GOLDEN = load_golden("llama_gqa")
NUM_ROWS = 256


@pytest.fixture
def engine() -> Engine:
    return with_empty_cache(with_scheduler(shared_engine(), max_steps_in_flight=1))


def cached(engine: Engine) -> np.ndarray:
    """[2, L, P, B, K, H]: all keys and values."""
    group = engine.runner._cache.groups[0]
    return np.stack([group.k_pages, group.v_pages])


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
    """256 rows, and the three programs that greedy requests need."""
    table = BucketTable((NUM_ROWS,), (NUM_ROWS,), (NUM_ROWS,))
    decode, mixed = table.all()
    greedy_keys = (
        ("forward", mixed, None),
        ("decode", decode, SampleMode.GREEDY),
        ("sample", NUM_ROWS, SampleMode.GREEDY),
        ("admit", None, None),
    )
    monkeypatch.setattr(limits, "make_bucket_table", lambda **_: table)
    monkeypatch.setattr(ProgramTable, "keys", lambda _: greedy_keys)
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
        handles = [handle.batch for _, handle in wide_engine._in_flight]
        is_steady = all(b.bucket.is_decode_only and b.num_rows == NUM_ROWS for b in handles)
        if num_steps == 1 and running == NUM_ROWS and handles and is_steady:
            steady.append(wide_engine.runner.num_uploaded_bytes - before)
    assert len(steady) > 20
    assert 0 < max(steady) <= 16 << 10
    assert len(updates) == NUM_ROWS
    assert all(tokens == list(case.tokens[:40]) for tokens in updates.values())
