"""debug_poison_pages: wrong reads are found out with it, not without, and right ones are equal."""

from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.errors import EngineConfigError
from jaxserve.execution.batch_builder import PackedBatch
from jaxserve.execution.poison import PAGES_PER_CALL, PagePoisoner
from jaxserve.execution.programs import CompilationCounter
from jaxserve.request import FinishReason, Sequence
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.step import SchedulerOutput
from models.kv_cache import CacheGeometry, abstract_cache
from models.sharding import Sharder, make_mesh
from tests.engine_runs import (
    add_request,
    assert_idle_and_sane,
    drain,
    final_of,
    generate,
    greedy,
    make_engine,
    shared_engine,
    step_until,
    tokens_of,
    with_empty_cache,
    with_scheduler,
)
from tests.goldens_loader import GOLDENS_FOLDER, load_golden
from tests.jaxserve.faulty_runner import FaultyRunner, runs_out_of_memory

GOLDEN = load_golden("llama_gqa")


def make_poisoned(*, is_poisoning: bool = True, **limits: Any) -> Engine:
    """The shared programs with their own arrays, and with a poisoner or without one."""
    engine = with_empty_cache(with_scheduler(shared_engine(), **limits))
    if is_poisoning:
        pools, cache = engine.scheduler._roster.page_pools, engine.runner._cache
        engine._poisoner = PagePoisoner(pools, cache, Sharder(make_mesh()))
    return engine


def nan_pages(engine: Engine, group: int = 0) -> set[int]:
    """Pages whose keys and values are all NaN; no page holds NaN only in part of the layers."""
    pages = engine.runner._cache.groups[group]
    found = [np.isnan(np.asarray(a)).all(axis=(0, 2, 3, 4)) for a in (pages.k_pages, pages.v_pages)]
    assert (found[0] == found[1]).all()
    return set(np.flatnonzero(found[0]).tolist())


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("num_pages", [257, 20])
def test_the_tokens_are_equal_with_it(num_pages: int, enable_prefix_caching: bool) -> None:
    engine = make_poisoned(num_pages=num_pages, enable_prefix_caching=enable_prefix_caching)
    prompts = [case.prompt for case in GOLDEN.mixed]
    for _ in range(2):
        outputs = generate(engine, prompts, greedy())
        assert outputs == [case.tokens[:64] for case in GOLDEN.mixed]
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 20)
    assert (engine.scheduler.num_prefix_hits > 0) == (enable_prefix_caching and num_pages == 257)
    assert nan_pages(engine) or enable_prefix_caching  # every page may be cached


def test_the_tokens_of_windows_are_equal_with_it() -> None:
    golden = load_golden("qwen2_windows")
    engine = make_engine(
        GOLDENS_FOLDER / "qwen2_windows", compile_all=True, debug_poison_pages=True
    ).engine
    counter = CompilationCounter()
    outputs = generate(engine, [case.prompt for case in golden.mixed], greedy())
    assert outputs == [case.tokens[:64] for case in golden.mixed]
    assert engine.scheduler.num_window_pages_freed > 0 and counter.count == 0
    assert nan_pages(engine, 0) and nan_pages(engine, 1)


def test_all_blank_pages_hold_nan_and_no_cached_or_held_one_does() -> None:
    engine = make_poisoned(num_pages=40, enable_prefix_caching=True)
    (pool,) = engine.scheduler._roster.page_pools
    engine.step()
    assert nan_pages(engine) == set()  # an idle engine overwrites nothing
    for index, case in enumerate(GOLDEN.mixed[:7]):
        add_request(engine, str(index), case.prompt, greedy())
    engine.step()
    held = {page for page in range(1, 40) if pool.num_references(page)}
    assert held and nan_pages(engine) == set(range(1, 40)) - held
    drain(engine)
    cached = set(pool.cache.idle_pages)
    assert cached and not nan_pages(engine) & (cached | {0})
    engine.scheduler.reset_prefix_cache()
    add_request(engine, "next", [5], greedy(1))
    drain(engine)
    (own,) = set(range(1, 40)) - nan_pages(engine)
    assert own in pool.cache.idle_pages  # it is remembered by its first tokens
    assert_idle_and_sane_without_cache(engine)


def assert_idle_and_sane_without_cache(engine: Engine) -> None:
    engine.scheduler.reset_prefix_cache()
    assert_idle_and_sane(engine)


class WrongEntry:
    """A scheduler's bug: in one step a free page takes the place of a page that is read."""

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name, self.stale = engine, name, 0
        self._real_build = engine._builder.build

    def build(self, output: SchedulerOutput) -> PackedBatch:
        rows = list(output.rows) if not self.stale else []
        for i, row in enumerate(rows):
            if row.sequence.request.request_id == self._name and row.is_decode:
                (pool,) = self._engine.scheduler._roster.page_pools
                self.stale = pool.blank_pages[0]
                new_pages = ((*row.new_pages[0], (0, self.stale)),)
                rows[i] = msgspec.structs.replace(row, new_pages=new_pages)
        return self._real_build(msgspec.structs.replace(output, rows=tuple(rows) or output.rows))


@pytest.mark.parametrize("is_poisoning", [True, False])
def test_a_wrong_page_table_entry_is_found_out_with_it_alone(
    is_poisoning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_poisoned(is_poisoning=is_poisoning)
    bug = WrongEntry(engine, "victim")
    monkeypatch.setattr(engine._builder, "build", bug.build)
    mate, victim = GOLDEN.mixed[3], GOLDEN.mixed[16]
    add_request(engine, "mate", mate.prompt, greedy())
    add_request(engine, "victim", victim.prompt, greedy())
    updates = drain(engine)
    final = final_of(updates["victim", 0])
    assert bug.stale and tokens_of(updates["mate", 0]) == mate.tokens
    assert tokens_of(updates["victim", 0]) != victim.tokens
    if is_poisoning:
        assert final.finish_reason is FinishReason.ERROR
        assert final.error == (
            "logits must be finite; got NaN, or no finite value; its page tables hold page "
            f"{bug.stale} at 0 of group 0, which it does not own"
        )
    else:
        assert (final.finish_reason, final.error) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("is_poisoning", [True, False])
def test_a_page_that_is_freed_too_early_is_found_out_with_it_alone(is_poisoning: bool) -> None:
    engine = make_poisoned(is_poisoning=is_poisoning, enable_prefix_caching=False)
    case = GOLDEN.mixed[16]
    add_request(engine, "victim", case.prompt, greedy())
    (sequence,) = engine.scheduler._roster.find("victim", None)

    def is_decoding() -> bool:
        return sequence.num_output_tokens > 3

    updates = step_until(engine, is_decoding)
    first = sequence.page_tables[0][0]
    free_too_early(engine, sequence)
    while sequence.finish_reason is None:
        updates += engine.step()
    assert first in engine.scheduler._roster.page_pools[0].blank_pages
    if is_poisoning:
        assert updates[-1].finish_reason is FinishReason.ERROR
        assert f"page {first} at 0 of group 0" in str(updates[-1].error)
    else:
        assert tokens_of(updates) == case.tokens[:64]


def free_too_early(engine: Engine, sequence: Sequence) -> None:
    """The pool thinks that no one holds the sequence's first page; its end must not free it."""
    (pool,) = engine.scheduler._roster.page_pools
    table = sequence.page_tables[0]
    pool.free([table[0]])
    pool._free.insert(0, pool._free.pop())  # given out last
    real_free = pool.free
    pool.free = lambda pages: real_free(page for page in pages if page != table[0])  # pyright: ignore[reportAttributeAccessIssue]


def test_the_pages_of_a_step_that_ran_out_of_memory_are_overwritten_anew() -> None:
    engine = make_poisoned(num_pages=60)
    faulty = FaultyRunner.of(engine, "dispatch", [4, 30], runs_out_of_memory)
    outputs = generate(engine, [case.prompt for case in GOLDEN.mixed[:7]], greedy())
    assert outputs == [case.tokens for case in GOLDEN.mixed[:7]]
    assert faulty.num_faults == faulty.num_resets == 2
    assert len(nan_pages(engine)) >= 20


def test_more_pages_than_one_call_takes_are_all_overwritten() -> None:
    num_pages = 2 * PAGES_PER_CALL + 5
    geometry = CacheGeometry(
        num_layers=2, page_size=4, num_kv_heads=1, stored_head_dim=2, dtype="bfloat16"
    )
    sharder = Sharder(make_mesh())
    abstract = abstract_cache((geometry,), (num_pages,), sharder)
    changes: list[Any] = []

    class Runner:
        def change_cache_in_next_step(self, new: list[Any]) -> None:
            changes[:] = new

    poisoner = PagePoisoner((PagePool(num_pages, 4),), abstract, sharder)
    poisoner.poison_before(SchedulerOutput(rows=(), num_decode_rows=0, num_tokens=0), Runner())  # pyright: ignore[reportArgumentType]
    cache = sharder.zeros(abstract)
    for change in changes:
        cache = change(cache)
    assert len(changes) == 3
    pages = cache.groups[0].v_pages
    assert not jnp.isnan(pages[:, 0]).any() and jnp.isnan(pages[:, 1:]).all()


def test_a_cache_that_knows_no_nan_is_refused() -> None:
    geometry = CacheGeometry(
        num_layers=1, page_size=4, num_kv_heads=1, stored_head_dim=1, dtype="int8"
    )
    sharder = Sharder(make_mesh())
    abstract = abstract_cache((geometry,), (9,), sharder)
    with pytest.raises(EngineConfigError, match="needs floating-point pages; got int8"):
        PagePoisoner((PagePool(9, 4),), abstract, sharder)
