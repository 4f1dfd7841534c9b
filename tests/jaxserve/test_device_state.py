"""DeviceState: what the step computes from it, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.device_state import (
    advance_computed,
    can_sample,
    read_records,
    record_tokens,
    sampling_rows,
    write_records,
)
from jaxserve.execution.slot_record import MAX_STOP_IDS, RECORD_SIZE, SlotField, float_bits
from jaxserve.step import SchedulerOutput
from models.batch import ForwardBatch
from tests.jaxserve.toy_steps import (
    MAX_NUM_SEQS,
    MAX_PAGES,
    PAGE_SIZE,
    ToyRun,
    make_state,
    prompt_sequence,
    random_prompts,
)

UNUSED = MAX_NUM_SEQS


def expected_batch(output: SchedulerOutput, T: int, S: int) -> dict[str, np.ndarray]:
    """What the model must read, from the host's sequences alone."""
    token_ids, positions = np.zeros(T, int), np.zeros(T, int)
    slot_mapping = np.arange(T) % PAGE_SIZE
    seq_lens, query_start_loc = np.zeros(S, int), np.full(S + 1, output.num_tokens)
    page_tables = np.zeros((S, MAX_PAGES), int)
    token = 0
    for index, row in enumerate(output.rows):
        query_start_loc[index] = token
        end = row.start + row.num_scheduled_tokens
        seq_lens[index] = end
        pages = row.sequence.page_tables[0]
        page_tables[index, : len(pages)] = pages
        for position in range(row.start, end):
            token_ids[token] = row.sequence.token_ids[position]
            positions[token] = position
            page, offset = pages[position // PAGE_SIZE], position % PAGE_SIZE
            slot_mapping[token] = page * PAGE_SIZE + offset
            token += 1
    return {
        "token_ids": token_ids,
        "positions": positions[None],
        "slot_mapping": slot_mapping,
        "page_tables": page_tables,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
        "num_decode_rows": np.array([output.num_decode_rows]),
        "logits_indices": np.maximum(query_start_loc[1:] - 1, 0),
    }


def assert_equals(batch: ForwardBatch, expected: dict[str, np.ndarray], num_rows: int) -> None:
    for name, values in expected.items():
        got = getattr(batch, name)
        if name == "page_tables":
            # Entries past a sequence's pages may be those of the slot's last owner.
            held = values[:num_rows] > 0
            np.testing.assert_array_equal(
                np.asarray(got[0])[:num_rows][held], values[:num_rows][held]
            )
            continue
        got = got[0] if name == "slot_mapping" else got
        np.testing.assert_array_equal(got, values, err_msg=name)
        assert got.dtype == jnp.int32


@pytest.mark.parametrize("threshold", [0, 3])
@pytest.mark.parametrize("num_pages", [40, 12])
def test_the_model_reads_what_the_host_knows_of_every_step(threshold: int, num_pages: int) -> None:
    run = ToyRun.make(num_pages, long_prefill_token_threshold=threshold)
    for name, (prompt, max_tokens) in enumerate(random_prompts()):
        run.add(prompt_sequence(str(name), prompt, max_tokens))
    kinds = set()
    while run.scheduler.has_unfinished:
        output = run.schedule()
        bucket = run.buckets.select(
            output.num_tokens,
            len(output.rows),
            is_decode_only=output.num_decode_rows == len(output.rows),
        )
        expected = expected_batch(output, bucket.num_tokens, bucket.num_rows)
        num_rows = len(output.rows)
        result = run.run(output)
        assert run.last_batch.bucket == bucket
        assert_equals(run.forward_batch, expected, num_rows)
        assert run.forward_batch.is_decode_only == bucket.is_decode_only
        kinds.add((bucket, 0 < output.num_decode_rows < num_rows, num_rows < bucket.num_rows))
        run.scheduler.commit(output, result)
    assert {bucket for bucket, _, _ in kinds} == set(run.buckets.all())
    assert any(is_mixed for _, is_mixed, _ in kinds) and any(
        has_padding for *_, has_padding in kinds
    )
    assert (run.scheduler.num_preemptions > 0) == (num_pages == 12)


def record(**fields: float) -> np.ndarray:
    values = np.zeros(RECORD_SIZE, np.int32)
    values[SlotField.FIRST_STOP_ID :] = -1
    for name, value in fields.items():
        values[SlotField[name]] = value
    return values


def state_of(*records: np.ndarray):
    state = make_state()
    slots = np.zeros((MAX_NUM_SEQS, RECORD_SIZE), np.int32)
    slots[: len(records)] = records
    return type(state)(slots=jnp.asarray(slots), page_tables=state.page_tables)


def test_records_of_unused_slots_are_zeros() -> None:
    state = state_of(record(NUM_TOKENS=3), record(NUM_TOKENS=4))
    records = np.asarray(read_records(state, jnp.array([1, UNUSED])))
    assert records[0, SlotField.NUM_TOKENS] == 4
    assert not records[1].any()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"NUM_TOKENS": 5, "NUM_COMPUTED": 5}, True),
        ({"NUM_TOKENS": 5, "NUM_COMPUTED": 4}, False),
        ({"NUM_TOKENS": 5, "NUM_COMPUTED": 5, "IS_FROZEN": 1}, False),
        ({"NUM_TOKENS": 5, "NUM_COMPUTED": 6}, False),
        ({}, False),
    ],
)
def test_a_row_samples_when_all_its_tokens_are_computed_and_it_is_not_frozen(
    fields: dict[str, int], expected: bool
) -> None:
    assert can_sample(jnp.asarray(record(**fields))[None]).tolist() == [expected]


def test_only_scheduled_slots_advance() -> None:
    state = state_of(*(record(NUM_COMPUTED=10 + slot) for slot in range(MAX_NUM_SEQS)))
    slot_ids = jnp.array([4, 1, UNUSED])
    records = advance_computed(read_records(state, slot_ids), jnp.array([50, 60, 0]))
    after = write_records(state, slot_ids, records)
    computed = np.asarray(after.slots)[:, SlotField.NUM_COMPUTED]
    assert computed.tolist() == [10, 60, 12, 13, 50, 15]


def test_only_what_steps_change_is_written_back() -> None:
    state = state_of(*(record(TOP_K=slot) for slot in range(MAX_NUM_SEQS)))
    after = write_records(state, jnp.array([2, UNUSED]), jnp.full((2, RECORD_SIZE), 77))
    changed = np.argwhere(np.asarray(after.slots) != np.asarray(state.slots))
    written = {SlotField.NUM_TOKENS, SlotField.NUM_COMPUTED, SlotField.LAST_TOKEN}
    written.add(SlotField.IS_FROZEN)
    assert {tuple(place) for place in changed.tolist()} == {(2, field) for field in written}


def frozen_after(token: int, *, num_output: int, min_tokens: int, finite: bool = True) -> int:
    before = record(NUM_TOKENS=3 + num_output, NUM_PROMPT_TOKENS=3, MIN_TOKENS=min_tokens)
    before[SlotField.FIRST_STOP_ID : SlotField.FIRST_STOP_ID + 2] = [2, 9]
    records = jnp.asarray(before)[None]
    sampled = jnp.array([token]), jnp.array([1]), jnp.array([finite])
    row = np.asarray(record_tokens(records, *sampled))[0]
    assert row[SlotField.NUM_TOKENS] == 3 + num_output + 1
    assert row[SlotField.LAST_TOKEN] == token
    return int(row[SlotField.IS_FROZEN])


def test_an_end_token_freezes_a_row_from_min_tokens_on() -> None:
    for token in (2, 9):
        frozen = [frozen_after(token, num_output=n, min_tokens=3) for n in range(5)]
        assert frozen == [0, 0, 1, 1, 1]
    assert not any(frozen_after(5, num_output=n, min_tokens=0) for n in range(3))
    assert frozen_after(2, num_output=0, min_tokens=0) == 1


def test_a_row_that_is_not_finite_is_frozen_whatever_its_token_is() -> None:
    assert frozen_after(5, num_output=0, min_tokens=9, finite=False) == 1


def test_rows_that_sample_nothing_and_unused_slots_change_nothing() -> None:
    records = [record(NUM_TOKENS=3 + slot, LAST_TOKEN=slot) for slot in range(MAX_NUM_SEQS)]
    state = state_of(*records)
    slot_ids = jnp.array([3, UNUSED, 1])
    sampled = jnp.array([7, 7, 8]), jnp.array([0, 0, 1]), jnp.array([True, False, True])
    after = write_records(state, slot_ids, record_tokens(read_records(state, slot_ids), *sampled))
    changed = np.argwhere(np.asarray(after.slots) != np.asarray(state.slots)).tolist()
    assert changed == [[1, SlotField.NUM_TOKENS], [1, SlotField.LAST_TOKEN]]


def test_the_sampler_sees_the_parameters_of_the_record() -> None:
    first = record(
        NUM_TOKENS=8,
        NUM_PROMPT_TOKENS=5,
        MIN_TOKENS=4,
        SEED_HIGH=-1,
        SEED_LOW=7,
        TEMPERATURE=float_bits(0.7),
        TOP_K=3,
        TOP_P=float_bits(0.9),
        MIN_P=float_bits(0.1),
        FIRST_STOP_ID=2,
    )
    second = record(NUM_TOKENS=9, NUM_PROMPT_TOKENS=5, MIN_TOKENS=4)
    rows = sampling_rows(jnp.asarray(np.stack([first, second])))
    assert rows.seeds.tolist() == [[2**32 - 1, 7], [0, 0]]
    assert rows.positions.tolist() == [8, 9]
    assert rows.temperature.tolist() == [np.float32(0.7), 0]
    assert rows.top_k.tolist() == [3, 0]
    assert rows.top_p[0] == np.float32(0.9) and rows.min_p[0] == np.float32(0.1)
    assert rows.stop_ids.shape == (2, MAX_STOP_IDS) and rows.stop_ids[0, :2].tolist() == [2, -1]
    assert rows.forbids_stop.tolist() == [True, False]
