"""Failed steps on a real tiny model: who ends, who runs again, and what the next request gets."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxserve.engine import Engine
from jaxserve.errors import EngineDeadError
from jaxserve.execution.device_fault import FaultKind, fault_kind
from jaxserve.request import FinishReason
from jaxserve.step import SchedulerOutput
from tests.engine_runs import (
    add_request,
    assert_idle_and_sane,
    drain,
    final_of,
    generate,
    greedy,
    make_engine,
    sampled,
    shared_engine,
    tokens_of,
    with_empty_cache,
    with_scheduler,
)
from tests.goldens_loader import load_golden
from tests.jaxserve.faulty_runner import (
    INTERNAL,
    OUT_OF_MEMORY,
    FaultyRunner,
    loses_arrays,
    raises,
    runs_out_of_memory,
)

GOLDEN = load_golden("llama_gqa")
CASES = GOLDEN.mixed[:7]


def new_engine(**limits: Any) -> Engine:
    """The shared programs with a cache and a state of its own, which a fault may take."""
    return with_empty_cache(with_scheduler(shared_engine(), **limits))


def add_cases(engine: Engine, **fields: Any) -> None:
    for index, case in enumerate(CASES):
        add_request(engine, str(index), case.prompt, greedy(), **fields)


def assert_all_golden(updates: dict) -> None:
    """Every request got its tokens, none twice and none lost, and ended once by its length."""
    for index, case in enumerate(CASES):
        assert tokens_of(updates[str(index), 0]) == case.tokens
        assert final_of(updates[str(index), 0]).finish_reason is FinishReason.LENGTH


def assert_serves(engine: Engine) -> None:
    """The engine, behind whatever failed, is idle, sane and gives golden tokens."""
    faulty = engine.runner
    assert isinstance(faulty, FaultyRunner)
    faulty.faults.clear()
    assert_idle_and_sane(engine)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (OUT_OF_MEMORY, FaultKind.OUT_OF_MEMORY),
        ("INTERNAL: Error dispatching computation: Out of memory", FaultKind.OUT_OF_MEMORY),
        (INTERNAL, FaultKind.DEVICE),
        ("INTERNAL: RESOURCE_EXHAUSTED in a collective", FaultKind.DEVICE),
    ],
)
def test_xla_tells_by_its_code_what_failed(message: str, kind: FaultKind) -> None:
    assert fault_kind(jax.errors.JaxRuntimeError(message)) is kind
    assert fault_kind(RuntimeError(message)) is FaultKind.HOST


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("number", [0, 9])
@pytest.mark.parametrize(
    ("method", "fault", "num_resets"),
    [
        ("dispatch", raises(OUT_OF_MEMORY), 0),
        ("collect", raises(OUT_OF_MEMORY), 0),
        ("dispatch", loses_arrays(OUT_OF_MEMORY), 1),
        ("dispatch", runs_out_of_memory, 1),
        ("collect", runs_out_of_memory, 1),
    ],
)
def test_one_step_without_memory_costs_no_request_a_token(
    method: str,
    number: int,
    fault: Callable,
    num_resets: int,
    enable_prefix_caching: bool,
) -> None:
    engine = new_engine(enable_prefix_caching=enable_prefix_caching)
    faulty = FaultyRunner.of(engine, method, [number], fault)
    add_cases(engine)
    assert_all_golden(drain(engine))
    assert (faulty.num_faults, faulty.num_resets) == (1, num_resets)
    assert engine.scheduler.num_preemptions > 0 and not engine.is_dead
    assert_serves(engine)


def test_sampled_tokens_and_their_logprobs_do_not_depend_on_a_step_without_memory() -> None:
    quiet, loud = new_engine(), new_engine()
    faulty = FaultyRunner.of(loud, "dispatch", [7, 19], runs_out_of_memory)
    outputs = []
    for engine in (quiet, loud):
        for index, case in enumerate(CASES):
            add_request(engine, str(index), case.prompt, sampled(index, logprobs=2))
        outputs.append(drain(engine))
    assert faulty.num_faults == 2
    for key, updates in outputs[0].items():
        assert tokens_of(outputs[1][key]) == tokens_of(updates)
        ids = [[e.top_ids for u in side[key] for e in u.logprobs or ()] for side in outputs]
        assert ids[0] == ids[1] and len(ids[0]) == 24


def test_steps_shrink_after_one_without_memory_and_grow_again() -> None:
    engine = new_engine(enable_prefix_caching=False)
    faulty = FaultyRunner.of(engine, "dispatch", [0], raises(OUT_OF_MEMORY))
    for index in range(4):
        add_request(engine, str(index), GOLDEN.mixed[16].prompt, greedy(60))
    updates = drain(engine)
    first, *later = faulty.token_counts
    assert first == 64 and max(later[:16]) == 32
    assert {tokens_of(u) for u in updates.values()} == {GOLDEN.mixed[16].tokens[:60]}
    faulty.token_counts.clear()
    generate(engine, [GOLDEN.mixed[16].prompt] * 2, greedy(2))
    assert max(faulty.token_counts) == 64


def test_a_step_that_finds_no_memory_however_small_ends_its_requests_alone() -> None:
    engine = new_engine(max_num_seqs=4)  # the others wait
    numbers = list(range(5, 10))
    faulty = FaultyRunner.of(engine, "dispatch", numbers, raises(OUT_OF_MEMORY))
    add_cases(engine)
    updates = drain(engine)
    finals = [final_of(updates[str(i), 0]) for i in range(7)]
    reasons = [final.finish_reason for final in finals]
    assert set(reasons) == {FinishReason.ERROR, FinishReason.LENGTH}
    assert {final.error for final in finals} == {None, "the step failed: JaxRuntimeError"}
    for index, case in enumerate(CASES):
        tokens = tokens_of(updates[str(index), 0])
        assert tokens == case.tokens[: len(tokens)]
    assert faulty.num_faults == len(numbers)
    assert_serves(engine)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("dispatch", raises(INTERNAL)),
        ("collect", raises(INTERNAL)),
        ("dispatch", loses_arrays(INTERNAL)),
    ],
)
def test_a_failing_device_ends_all_requests_within_a_step_and_serves_the_next(
    method: str, fault: Callable
) -> None:
    engine = new_engine(max_num_seqs=4, enable_prefix_caching=True)
    faulty = FaultyRunner.of(engine, method, [6], fault)
    add_cases(engine)
    updates: list = []
    while not faulty.num_faults:
        updates = engine.step()
    if method == "dispatch":  # the step before it is told of first
        updates += engine.step()
    finals = [update for update in updates if update.finish_reason]
    assert sorted(u.request_id for u in finals) == [str(i) for i in range(7)]
    assert all(u.finish_reason is FinishReason.ERROR for u in finals)
    assert not engine.has_unfinished and not engine.is_dead
    assert faulty.num_resets == 1
    assert_serves(engine)
    assert faulty.num_resets == 1


def test_a_device_that_fails_again_at_once_is_given_up() -> None:
    engine = new_engine()
    faulty = FaultyRunner.of(engine, "dispatch", [3, 4], raises(INTERNAL))
    add_cases(engine)
    drain(engine)
    assert faulty.num_faults == 1 and not engine.is_dead
    add_request(engine, "next", CASES[0].prompt, greedy())
    (final,) = drain(engine)["next", 0]
    assert final.finish_reason is FinishReason.ERROR and faulty.num_faults == 2
    assert engine.is_dead and faulty.num_resets == 1
    assert engine.death_reason is not None and "twice in a row" in engine.death_reason
    with pytest.raises(EngineDeadError, match="twice in a row"):
        add_request(engine, "refused", CASES[0].prompt, greedy())
    with pytest.raises(EngineDeadError, match="twice in a row"):
        engine.step()


def test_a_device_that_fails_now_and_then_is_not_given_up() -> None:
    engine = new_engine()
    faulty = FaultyRunner.of(engine, "dispatch", [3, 9, 15], raises(INTERNAL))
    for _ in range(3):
        add_cases(engine)
        drain(engine)
    assert faulty.num_faults == faulty.num_resets == 3 and not engine.is_dead
    assert_serves(engine)


@pytest.mark.parametrize("fault", [raises(INTERNAL), runs_out_of_memory])
def test_a_device_that_does_not_answer_is_given_up_and_all_requests_end(fault: Callable) -> None:
    engine = new_engine()
    faulty = FaultyRunner.of(engine, "dispatch", [5], fault)
    faulty.reset_error = jax.errors.JaxRuntimeError(INTERNAL)
    add_cases(engine)
    updates = drain(engine)
    assert len(updates) == 7 and faulty.num_faults == 1
    assert all(final_of(u).finish_reason is FinishReason.ERROR for u in updates.values())
    assert engine.death_reason == "the device does not answer: JaxRuntimeError"


def test_a_row_that_cannot_be_built_ends_its_request_and_no_other() -> None:
    engine = new_engine()
    add_cases(engine)
    add_request(engine, "bad", [5, 999_999, 7], greedy())
    updates = drain(engine)
    final = final_of(updates.pop(("bad", 0)))
    assert (final.finish_reason, final.error) == (
        FinishReason.ERROR,
        "the step failed: ValueError",
    )
    assert_all_golden(updates)
    assert_idle_and_sane(engine)


def test_two_rows_that_cannot_be_built_end_alone() -> None:
    engine = new_engine()
    add_request(engine, "low", [-1], greedy())
    add_cases(engine)
    add_request(engine, "high", [2**40], greedy())
    updates = drain(engine)
    for name in ("low", "high"):
        assert final_of(updates.pop((name, 0))).finish_reason is FinishReason.ERROR
    assert_all_golden(updates)
    assert_idle_and_sane(engine)


def test_a_step_that_cannot_be_built_by_no_rows_fault_ends_all_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine(max_num_seqs=4)
    build, num_faults = engine._builder.build, 0

    def build_with_one_slot(output: SchedulerOutput) -> Any:
        nonlocal num_faults
        if len(output.rows) > 1 and num_faults == 0:
            num_faults += 1
            first, second = (row.sequence for row in output.rows[:2])
            slot, second.state_slot = second.state_slot, first.state_slot
            try:
                return build(output)  # two rows with one slot: neither is wrong alone
            finally:
                second.state_slot = slot
        return build(output)

    monkeypatch.setattr(engine._builder, "build", build_with_one_slot)
    add_cases(engine)
    updates = drain(engine)
    ends = [final_of(updates[str(i), 0]).finish_reason for i in range(7)]
    assert num_faults == 1 and 2 <= ends.count(FinishReason.ERROR) <= 4
    for index, case in enumerate(CASES):
        if ends[index] is not FinishReason.ERROR:
            assert tokens_of(updates[str(index), 0]) == case.tokens
    monkeypatch.undo()
    assert_idle_and_sane(engine)


def test_an_abort_of_a_request_whose_step_failed_ends_it_once() -> None:
    engine = new_engine()
    faulty = FaultyRunner.of(engine, "dispatch", [5], raises(OUT_OF_MEMORY))
    add_cases(engine)
    while not faulty.num_faults:
        engine.step()
    engine.abort("3")
    updates = drain(engine)
    (final,) = updates.pop(("3", 0))
    assert final.finish_reason is FinishReason.ABORT
    assert {u[-1].finish_reason for u in updates.values()} == {FinishReason.LENGTH}
    assert_serves(engine)


def test_pages_on_the_host_survive_neither_a_lost_cache_nor_a_copy_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(
        GOLDEN.folder,
        num_gpu_blocks_override=24,
        kv_offloading_size=2**-8,
        preemption_mode="swap",
        debug_poison_pages=True,
    ).engine
    faulty = FaultyRunner.of(engine, "dispatch", [30, 90], runs_out_of_memory)
    mover = faulty.runner.page_mover
    assert mover is not None
    put, num_failed = mover._host_pages.put, 0

    class FailedPage:
        """What a page is whose copy failed on the device."""

        def is_ready(self) -> bool:
            return True

        def block_until_ready(self) -> None:
            raise MemoryError

    def put_with_one_fault(*arguments: Any) -> None:
        nonlocal num_failed
        put(*arguments)
        if mover.num_offloaded_bytes and num_failed == 0:
            num_failed += 1
            mover._pending.append(FailedPage())  # pyright: ignore[reportArgumentType]

    prompts = [case.prompt for case in GOLDEN.mixed]
    expected = [case.tokens[:64] for case in GOLDEN.mixed]
    assert generate(engine, prompts, greedy()) == expected
    assert faulty.num_faults == 2 and mover.num_offloaded_bytes > 0
    monkeypatch.setattr(mover._host_pages, "put", put_with_one_fault)
    for index, prompt in enumerate(prompts):
        add_request(engine, str(index), prompt, greedy())
    updates = drain(engine)
    ends = [final_of(updates[str(i), 0]).finish_reason for i in range(len(prompts))]
    assert num_failed == 1 and 1 <= ends.count(FinishReason.ERROR) <= 8
    for index, end in enumerate(ends):
        if end is FinishReason.LENGTH:
            assert tokens_of(updates[str(index), 0]) == expected[index]
    assert generate(engine, prompts, greedy()) == expected
    assert mover.num_fetched_bytes > 0


def test_reset_arrays_have_the_shapes_and_places_of_the_old_ones() -> None:
    runner = new_engine().runner
    before = [
        (a.shape, a.dtype, a.sharding) for a in jax.tree.leaves((runner._cache, runner._state))
    ]
    for leaf in jax.tree.leaves(runner._state):
        leaf.delete()
    assert not runner.is_intact()
    runner.reset()
    after = jax.tree.leaves((runner._cache, runner._state))
    assert [(a.shape, a.dtype, a.sharding) for a in after] == before
    assert runner.is_intact() and not any(a.any() for a in after)
    assert dataclasses.is_dataclass(runner._cache)
