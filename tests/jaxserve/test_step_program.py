"""A step lowered elsewhere and carried over: same bits, same trees, same places."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Compiled

from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.program_store import ProgramStore
from jaxserve.execution.programs import ProgramKey
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.step_program import StepProgram
from tests.jaxserve.test_programs import SmallTable

BUCKETS = BucketTable((2,), (16,), num_scheduler_steps=2, multi_step_rows=2)
DECODE, SEVERAL, MIXED = BUCKETS.all()
KEYS: tuple[ProgramKey, ...] = (
    ("decode", SEVERAL, SampleMode.GREEDY),
    ("forward", MIXED, None),
    ("sample", 2, SampleMode.SAMPLED),
)


@pytest.fixture(scope="module")
def small() -> SmallTable:
    return SmallTable(64, BUCKETS)


def arguments(program: StepProgram) -> tuple[Any, ...]:
    """New arrays each time, since some are donated; integers are small enough for any index."""
    numbers = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(numbers.integers(0, 2, leaf.shape), leaf.dtype)
        return jnp.asarray(numbers.normal(0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree.map(draw, program.arguments)


def run(compiled: Compiled, program: StepProgram) -> list[np.ndarray]:
    """The results of `arguments`, in place of those that are donated."""
    given = arguments(program)
    donated = jax.tree.leaves([given[index] for index in program.donated])
    places = [leaf.unsafe_buffer_pointer() for leaf in donated]
    results = jax.block_until_ready(jax.tree.leaves(compiled(*given)))
    assert all(leaf.is_deleted() for leaf in donated)
    assert [leaf.unsafe_buffer_pointer() for leaf in results[-len(donated) :]] == places
    return [np.asarray(leaf) for leaf in results]


@pytest.fixture(scope="module", params=KEYS, ids=lambda key: key[0])
def programs(
    request: pytest.FixtureRequest, small: SmallTable
) -> Iterator[tuple[StepProgram, Compiled, Compiled]]:
    """One step, compiled as it is, and as it comes back from elsewhere."""
    program = small.table.step_program(request.param)
    direct = program.trace().lower()
    carried = program.trace_exported(program.export("cpu")).lower()
    names = [re.findall(r"module @(\w+)", lowered.as_text()) for lowered in (direct, carried)]
    assert names[0] == names[1] == [f"jit_{program.name}"]
    yield program, direct.compile(), carried.compile()


def test_bits_trees_and_places_are_the_same(
    programs: tuple[StepProgram, Compiled, Compiled],
) -> None:
    program, direct, carried = programs
    assert carried.in_tree == direct.in_tree and carried.out_tree == direct.out_tree
    memory = [compiled.memory_analysis() for compiled in (direct, carried)]
    assert memory[0] is not None and memory[1] is not None
    assert memory[1].alias_size_in_bytes == memory[0].alias_size_in_bytes > 0
    assert memory[1].temp_size_in_bytes == memory[0].temp_size_in_bytes
    expected, got = run(direct, program), run(carried, program)
    assert any(array.any() for array in expected[: len(program.new_shardings)])
    for left, right in zip(expected, got, strict=True):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes()


def test_a_carried_program_is_kept_for_the_next_start(small: SmallTable, tmp_path: Path) -> None:
    program = small.table.step_program(("sample", 2, SampleMode.SAMPLED))
    store = ProgramStore(tmp_path, jax.devices()[:1])
    assert store.is_empty
    with store.without_xla_cache():
        carried = program.trace_exported(program.export("cpu")).lower().compile()
    store.write("step", carried)
    kept = store.read("step")
    assert kept is not None and not store.is_empty
    for left, right in zip(run(carried, program), run(kept, program), strict=True):
        assert left.tobytes() == right.tobytes()


def test_another_program_is_refused(small: SmallTable) -> None:
    program = small.table.step_program(("decode", DECODE, SampleMode.GREEDY)).export("cpu")
    with pytest.raises(ValueError, match="must have the arrays"):
        small.table.step_program(("forward", MIXED, None)).trace_exported(program)


def test_a_table_takes_what_is_lowered_elsewhere_and_lowers_the_rest(
    small: SmallTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample = [("sample", 2, mode) for mode in reversed(SampleMode)]
    monkeypatch.setattr(small.table, "keys", lambda: (*sample, ("admit", None, None)))
    carried = (small.table.step_program(sample[0]).export("cpu"), None, b"no program")
    asked = []

    def lower_elsewhere(keys):
        asked.extend(keys)
        return iter(zip(keys, carried, strict=True))

    with caplog.at_level("DEBUG", logger="jaxserve"):
        small.table.compile_all(num_threads=1, lower_elsewhere=lower_elsewhere)
    assert asked == sample
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "lowered in vain" in warnings[0].getMessage()
    assert "2 of 4 programs" in caplog.text
    for _, num_rows, mode in sample:
        assert small.table.sample(num_rows, mode) is not None
