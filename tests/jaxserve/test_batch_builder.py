"""BatchBuilder: steps as packed buffers, and the guards in front of the device."""

import msgspec
import numpy as np
import pytest

from jaxserve.execution import packed_layout
from jaxserve.execution.batch_builder import BatchBuilder, PackedBatch
from jaxserve.execution.buckets import Bucket, BucketTable
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.slot_record import RECORD_SIZE, SlotField
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import PageCopy, PageMove, ScheduledRow, SchedulerOutput
from tests.jaxserve.scheduler_builders import VOCABULARY, commit, make_scheduler, make_sequence
from tests.jaxserve.toy_steps import admit, make_builder, make_state

TABLE = BucketTable((2, 6), (8, 16))


def make_row(slot: int | None = 0, length: int = 4, *, start: int = 0, **fields) -> ScheduledRow:
    """A row of prompt tokens, or with `is_decode` of one sampled token."""
    is_decode = fields.get("is_decode", False)
    sequence = make_sequence(f"of slot {slot}", start + length, **fields.pop("params", {}))
    sequence.state_slot = slot
    defaults = {
        "num_scheduled_tokens": length,
        "is_decode": False,
        "is_admission": not is_decode,
        "can_sample": True,
        "new_pages": ((),),
    }
    return ScheduledRow(sequence=sequence, start=start, **(defaults | fields))


def make_output(*rows: ScheduledRow) -> SchedulerOutput:
    return SchedulerOutput(
        rows=rows,
        num_decode_rows=sum(row.is_decode for row in rows),
        num_tokens=sum(row.num_scheduled_tokens for row in rows),
    )


def split(builder: BatchBuilder, batch: PackedBatch) -> dict[str, np.ndarray]:
    return builder.layout(batch.bucket).split(batch.packed)


def test_a_mixed_step_is_packed_decode_rows_first() -> None:
    builder = make_builder(TABLE)
    decode = make_row(4, 1, start=9, is_decode=True, new_pages=(((2, 17),),))
    chunk = make_row(1, 5, start=3, is_admission=False, new_pages=(((1, 8), (2, 9)),))
    admission = make_row(0, 2, params={"min_tokens": 3, "temperature": 0.5})
    batch = builder.build(make_output(decode, chunk, admission))
    assert (batch.bucket, batch.num_rows, batch.num_tokens) == (Bucket(8, 6, False), 3, 8)
    assert batch.admissions == ()
    views = split(builder, batch)
    assert views["counts"].tolist() == [3, 1]
    assert views["slot_ids"].tolist() == [4, 1, 0, 6, 6, 6]
    assert views["num_scheduled"].tolist() == [1, 5, 2, 0, 0, 0]
    assert views["page_updates"][0, :4].tolist() == [[4, 2, 17], [1, 1, 8], [1, 2, 9], [6, 0, 0]]
    prompt = chunk.sequence.token_ids[3:8] + admission.sequence.token_ids
    assert views["token_ids"].tolist() == [0, *prompt]
    assert views["admitted_slots"].tolist() == [0, 6, 6, 6, 6, 6]
    assert views["admitted_records"][0, SlotField.MIN_TOKENS] == 3
    assert not views["admitted_records"][1:].any()


def test_a_decode_step_sends_no_token() -> None:
    builder = make_builder(TABLE)
    rows = [make_row(slot, 1, start=slot + 3, is_decode=True) for slot in (5, 2, 3)]
    batch = builder.build(make_output(*rows))
    assert batch.bucket == Bucket(6, 6, True)
    assert split(builder, batch)["token_ids"].size == 0
    assert split(builder, batch)["slot_ids"].tolist() == [5, 2, 3, 6, 6, 6]


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({"temperature": 0}, SampleMode.GREEDY),
        ({"temperature": 1.0}, SampleMode.SAMPLED),
        ({"temperature": 1.0, "top_k": 3}, SampleMode.SAMPLED),
        ({"temperature": 1.0, "top_p": 0.5}, SampleMode.SAMPLED),
        ({"temperature": 1.0, "min_p": 0.5}, SampleMode.SAMPLED),
        ({"temperature": 0, "logprobs": 0}, SampleMode.FULL),
        ({"temperature": 0, "min_tokens": 1}, SampleMode.FULL),
    ],
)
def test_the_mode_is_the_largest_that_a_sampling_row_needs(params: dict, mode: SampleMode) -> None:
    builder = make_builder(TABLE)
    plain = make_row(1, 2, params={"temperature": 0})
    silent = make_row(2, 2, params={"logprobs": 5, "temperature": 1.0}, can_sample=False)
    batch = builder.build(make_output(plain, make_row(0, 2, params=params), silent))
    assert batch.mode == mode
    is_full = mode is SampleMode.FULL
    assert batch.num_logprobs == ((None, params.get("logprobs"), None) if is_full else ())


def test_a_step_that_samples_nothing_has_no_mode() -> None:
    batch = make_builder(TABLE).build(make_output(make_row(can_sample=False)))
    assert batch.mode is None


def test_decode_rows_that_no_decode_program_samples_take_a_mixed_bucket() -> None:
    builder = make_builder(TABLE)
    fields: dict = {"start": 3, "is_decode": True, "new_pages": (((0, 9),),)}
    rows = [make_row(slot, 1, params={"logprobs": 1}, **fields) for slot in (2, 4)]
    batch = builder.build(make_output(*rows))
    assert (batch.bucket, batch.mode) == (Bucket(8, 6, False), SampleMode.FULL)
    views = split(builder, batch)
    assert views["counts"].tolist() == [2, 2]
    assert views["slot_ids"].tolist() == [2, 4, 6, 6, 6, 6]
    assert views["num_scheduled"].tolist() == [1, 1, 0, 0, 0, 0]
    assert not views["token_ids"].any()
    assert views["page_updates"][0, :3].tolist() == [[2, 0, 9], [4, 0, 9], [6, 0, 0]]


def test_the_mode_follows_a_sequence_that_leaves_its_min_tokens_behind() -> None:
    builder = make_builder(TABLE)
    row = make_row(1, 2, params={"temperature": 0, "min_tokens": 2})
    prompt = row.sequence.num_prompt_tokens
    modes = []
    for num_output in range(3):
        decode = {"start": prompt + num_output - 1, "num_scheduled_tokens": 1, "is_decode": True}
        step = msgspec.structs.replace(row, is_admission=False, **decode)
        modes.append(builder.build(make_output(step)).mode)
    assert modes == [SampleMode.FULL, SampleMode.FULL, SampleMode.GREEDY]


def test_the_mode_of_a_slot_changes_with_its_sequence() -> None:
    builder = make_builder(TABLE)
    rows = [make_row(1, 2, params=params) for params in ({"temperature": 0}, {"temperature": 1})]
    modes = [builder.build(make_output(row)).mode for row in (*rows, *rows)]
    assert modes == [SampleMode.GREEDY, SampleMode.SAMPLED] * 2


def with_token(token: int) -> ScheduledRow:
    row = make_row(0, 4)
    row.sequence.token_ids[2] = token
    return row


BAD_STEPS = {
    "a slot past the last": ([make_row(6)], r"state slots must be in \[0, 6\); got \[6\]"),
    "a negative slot": ([make_row(-1)], r"state slots must be in \[0, 6\); got \[-1\]"),
    "equal slots": ([make_row(3), make_row(3)], r"state slots must differ; got \[3 3\]"),
    "the null page": (
        [make_row(new_pages=(((0, 0),),))],
        r"page ids must be in \[1, 40\); got \[0\]",
    ),
    "a page past the last": (
        [make_row(new_pages=(((0, 39), (1, 40)),))],
        r"page ids must be in \[1, 40\); got \[39 40\]",
    ),
    "an index past the page table": (
        [make_row(new_pages=(((16, 3),),))],
        r"page table indices must be in \[0, 16\); got \[16\]",
    ),
    "a negative index": (
        [make_row(new_pages=(((-1, 3),),))],
        r"page table indices must be in \[0, 16\); got \[-1\]",
    ),
    "a token past the vocabulary": (
        [with_token(VOCABULARY)],
        rf"token ids must be in \[0, {VOCABULARY}\); got {VOCABULARY}",
    ),
    "a negative token": (
        [with_token(-2)],
        rf"token ids must be in \[0, {VOCABULARY}\); got -2",
    ),
    "more rows than any bucket has": (
        [make_row(slot, 1) for slot in range(7)],
        "no bucket holds 7 tokens of 7 rows",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_an_index_that_the_device_would_clamp_or_drop_is_refused(name: str) -> None:
    rows, message = BAD_STEPS[name]
    with pytest.raises(ValueError, match=message):
        make_builder(TABLE).build(make_output(*rows))


def test_a_decode_row_without_a_valid_slot_is_refused_too() -> None:
    row = make_row(6, 1, start=4, is_decode=True)
    with pytest.raises(ValueError, match="state slots must be in"):
        make_builder(TABLE).build(make_output(row))


def test_bad_pages_are_refused_in_admission_buffers_too(monkeypatch) -> None:
    monkeypatch.setattr(packed_layout, "MAX_IN_STEP_ADMISSIONS", 0)
    with pytest.raises(ValueError, match="page ids must be in"):
        make_builder(TABLE).build(make_output(make_row(new_pages=(((0, 40),),))))


def state_after(builder: BatchBuilder, batch: PackedBatch, state: DeviceState) -> DeviceState:
    """The state once the admissions and the changes of the step itself are applied."""
    for buffer in batch.admissions:
        state = admit(builder.admission_layout, state, buffer)
    return admit(builder.layout(batch.bucket), state, batch.packed)


def assert_equal_states(got: DeviceState, expected: DeviceState) -> None:
    np.testing.assert_array_equal(got.slots, expected.slots)
    np.testing.assert_array_equal(got.page_tables[0], expected.page_tables[0])


def test_admissions_that_do_not_fit_the_step_go_ahead_of_it_and_change_the_state_alike(
    monkeypatch,
) -> None:
    pages = iter(range(1, 40))
    rows = [
        make_row(slot, 2, params={"seed": slot + 1, "temperature": 0.5}, new_pages=(((0, page),),))
        for slot, page in zip((3, 0, 5, 1), pages, strict=False)
    ]
    running = make_row(2, 3, start=5, is_admission=False, new_pages=(((1, 30), (2, 31)),))
    output = make_output(*rows, running)
    inside = make_builder(TABLE)
    expected_batch = inside.build(output)
    assert expected_batch.admissions == ()
    expected = state_after(inside, expected_batch, make_state())

    monkeypatch.setattr(packed_layout, "MAX_IN_STEP_ADMISSIONS", 3)
    ahead = make_builder(TABLE)
    batch = ahead.build(output)
    assert len(batch.admissions) == 1
    views = split(ahead, batch)
    assert (views["admitted_slots"] == 6).all() and (views["page_updates"][..., 0] == 6).all()
    assert views["slot_ids"].tolist() == split(inside, expected_batch)["slot_ids"].tolist()
    assert_equal_states(state_after(ahead, batch, make_state()), expected)
    assert np.asarray(expected.slots)[[3, 0, 5, 1], SlotField.NUM_TOKENS].tolist() == [2] * 4
    assert np.asarray(expected.page_tables[0])[2, :3].tolist() == [0, 30, 31]


def test_more_pages_than_one_admission_buffer_holds_take_several() -> None:
    num_pages, num_rows = 5000, 40
    table = BucketTable((num_rows,), (6000,))
    builder = make_builder(
        table,
        max_num_seqs=num_rows,
        page_size=1,
        num_pages=(num_pages + 1,),
        max_pages_per_seq=num_pages,
    )
    shares = np.array_split(np.arange(1, num_pages + 1), num_rows)
    rows = [
        make_row(slot, len(share), new_pages=(tuple(enumerate(share.tolist())),))
        for slot, share in enumerate(shares)
    ]
    batch = builder.build(make_output(*rows))
    assert len(batch.admissions) == 2
    state = make_state(num_rows, num_pages)
    for buffer in batch.admissions:
        state = admit(builder.admission_layout, state, buffer)
    tables = np.asarray(state.page_tables[0])
    for slot, share in enumerate(shares):
        assert tables[slot, : len(share)].tolist() == share.tolist()
    assert np.asarray(state.slots)[:, SlotField.NUM_TOKENS].tolist() == [len(s) for s in shares]


def test_a_steady_decode_step_of_256_rows_uploads_at_most_16_kib() -> None:
    scheduler = make_scheduler(
        3000,
        16,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        row_buckets=(256,),
        token_buckets=(4096,),
        max_steps_in_flight=1,
    )
    table = BucketTable((256,), (4096,))
    builder = make_builder(
        table, max_num_seqs=256, page_size=16, num_pages=(3000,), max_pages_per_seq=16
    )
    for seed in range(256):
        # All reach a page border in the same step: the most page updates that can be.
        scheduler.add(make_sequence(str(seed), 14, 40, seed=seed))
    batches = [run_step(scheduler, builder) for _ in range(20)]
    decodes = [batch for batch in batches if batch.bucket.is_decode_only]
    assert len(decodes) > 16 and all(batch.num_rows == 256 for batch in decodes)
    assert all(batch.admissions == () for batch in decodes)
    uploads = [(split(builder, b)["page_updates"][0, :, 0] < 256).sum() for b in decodes]
    assert 256 in uploads
    assert {batch.packed.nbytes for batch in decodes} == {4 * (2 + 256 + 256 + 3 * 256)}
    assert decodes[0].packed.nbytes <= 16 << 10


def run_step(scheduler: Scheduler, builder: BatchBuilder) -> PackedBatch:
    output = scheduler.schedule()
    assert output is not None
    batch = builder.build(output)
    commit(scheduler, output, *([7] if row.can_sample else [] for row in output.rows))
    return batch


def test_a_row_costs_as_much_upload_as_its_record_only_when_it_is_admitted() -> None:
    builder = make_builder(TABLE)
    sizes = {bucket: builder.layout(bucket).size for bucket in TABLE.all()}
    assert sizes[Bucket(6, 6, True)] == 2 + 6 + 6 + 6 * 3
    assert sizes[Bucket(16, 6, False)] == 2 + 6 + 6 + (6 + 4) * 3 + 16 + 6 * (1 + RECORD_SIZE)


@pytest.mark.parametrize("field", ["offloads", "fetches"])
@pytest.mark.parametrize(
    ("group", "page", "slot", "message"),
    [
        (1, 1, 0, r"groups must be in \[0, 1\)"),
        (-1, 1, 0, r"groups must be in \[0, 1\)"),
        (0, 0, 0, r"page ids must be in \[1, 40\)"),
        (0, 40, 0, r"page ids must be in \[1, 40\)"),
        (0, 1, -1, r"host slots must be in \[0, 3\)"),
        (0, 1, 3, r"host slots must be in \[0, 3\)"),
    ],
)
def test_moves_of_pages_that_are_not_there_are_refused(field, group, page, slot, message) -> None:
    builder = make_builder(TABLE, num_host_pages=3)
    moves = (
        PageMove(group=0, page=39, host_slot=2),
        PageMove(group=group, page=page, host_slot=slot),
    )
    with pytest.raises(ValueError, match=message):
        builder.build(msgspec.structs.replace(make_output(make_row()), **{field: moves}))


def test_moves_go_with_the_batch() -> None:
    out = (PageMove(group=0, page=39, host_slot=2), PageMove(group=0, page=1, host_slot=0))
    back = (PageMove(group=0, page=2, host_slot=0),)
    output = msgspec.structs.replace(make_output(make_row()), offloads=out, fetches=back)
    batch = make_builder(TABLE, num_host_pages=3).build(output)
    assert (batch.offloads, batch.fetches) == (out, back)
    with pytest.raises(ValueError, match=r"host slots must be in \[0, 0\)"):
        make_builder(TABLE).build(output)


def test_page_updates_name_slot_index_and_page_row_by_row() -> None:
    rows = (
        make_row(4, new_pages=(((0, 7), (1, 9)), ((2, 5),))),
        make_row(1, new_pages=((), ())),
        make_row(2, new_pages=(((3, 8),), ())),
        make_row(0, new_pages=(((1, 6), (5, 3)), ())),
    )
    first, second = (BatchBuilder._page_updates(rows, group) for group in range(2))
    assert first.dtype == second.dtype == np.int32
    assert first.tolist() == [[4, 0, 7], [4, 1, 9], [2, 3, 8], [0, 1, 6], [0, 5, 3]]
    assert second.tolist() == [[4, 2, 5]]
    assert BatchBuilder._page_updates(rows[1:3], 1).shape == (0, 3)
    assert BatchBuilder._page_updates((), 0).shape == (0, 3)


def copies_of(*pairs: tuple[int, int]) -> tuple[PageCopy, ...]:
    return tuple(PageCopy(group=0, source=source, page=page) for source, page in pairs)


def test_copies_are_padded_by_the_null_page_in_buffers_of_one_size() -> None:
    builder = make_builder(TABLE, takes_copies=True)
    assert builder.build(make_output(make_row())).copies == ()
    pairs = [(1, 2 + index) for index in range(20)]
    output = msgspec.structs.replace(make_output(make_row()), copies=copies_of(*pairs))
    first, second = builder.build(output).copies
    assert first.shape == second.shape == (2, 1, packed_layout.NUM_PAGE_COPIES)
    found = np.concatenate([first, second], -1)[:, 0].T.tolist()
    assert found == [*map(list, pairs), *[[0, 0]] * 12]


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (40, 1), (1, 40), (-1, 1)])
def test_copies_of_pages_that_are_not_there_are_refused(pair: tuple[int, int]) -> None:
    output = msgspec.structs.replace(make_output(make_row()), copies=copies_of((1, 2), pair))
    with pytest.raises(ValueError, match=r"page ids must be in \[1, 40\)"):
        make_builder(TABLE, takes_copies=True).build(output)


@pytest.mark.parametrize("group", [-1, 1])
def test_copies_in_a_group_that_is_not_there_are_refused(group: int) -> None:
    copies = (PageCopy(group=group, source=1, page=2),)
    output = msgspec.structs.replace(make_output(make_row()), copies=copies)
    with pytest.raises(ValueError, match=r"groups must be in \[0, 1\)"):
        make_builder(TABLE, takes_copies=True).build(output)


def test_copies_are_refused_where_no_program_makes_them() -> None:
    output = msgspec.structs.replace(make_output(make_row()), copies=copies_of((1, 2)))
    with pytest.raises(ValueError, match="copies of pages have no program here; got 1"):
        make_builder(TABLE).build(output)
