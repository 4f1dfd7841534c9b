"""PackedLayout: sections that do not touch, and room for whatever the scheduler decides."""

import itertools
from collections import deque

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.execution.buckets import Bucket, make_bucket_table
from jaxserve.execution.packed_layout import PackedLayout, admission_layout, step_layout
from jaxserve.execution.slot_record import RECORD_SIZE
from jaxserve.step import StepResult
from tests.jaxserve.scheduler_builders import make_scheduler, make_sequence
from tests.jaxserve.toy_steps import make_builder

LAYOUTS = [
    PackedLayout(num_rows=3, num_tokens=0, num_groups=1, num_page_updates=3, num_admissions=0),
    PackedLayout(num_rows=4, num_tokens=7, num_groups=2, num_page_updates=5, num_admissions=2),
    admission_layout(max_num_seqs=5, num_groups=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sections_cover_the_buffer_and_do_not_overlap(layout: PackedLayout) -> None:
    packed = np.arange(layout.size, dtype=np.int32)
    views = layout.split(packed)
    assert {name: view.shape for name, view in views.items()} == layout.sections
    joined = np.concatenate([view.ravel() for view in views.values()])
    assert sorted(joined.tolist()) == packed.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_into_a_view_is_read_by_a_traced_program(layout: PackedLayout) -> None:
    packed = layout.empty(unused_slot=9)
    written = {}
    for index, (name, view) in enumerate(layout.split(packed).items()):
        view[...] = 1000 * index + np.arange(view.size).reshape(view.shape)
        written[name] = view.copy()
    read = jax.jit(layout.split)(packed)
    assert read.keys() == written.keys()
    for name, values in written.items():
        np.testing.assert_array_equal(read[name], values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_entries_of_an_empty_buffer_point_at_no_slot(layout: PackedLayout) -> None:
    views = layout.split(layout.empty(unused_slot=9))
    for slots in (views["slot_ids"], views["admitted_slots"], views["page_updates"][..., 0]):
        assert (slots == 9).all()
    for name in ("counts", "num_scheduled", "token_ids", "admitted_records"):
        assert not views[name].any()
    assert not views["page_updates"][..., 1:].any()


def test_the_admission_layout_holds_all_slots_at_once() -> None:
    layout = admission_layout(max_num_seqs=5000, num_groups=1)
    assert layout.sections["admitted_records"] == (5000, RECORD_SIZE)
    assert layout.num_page_updates >= 5000


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_no_split_of_a_step_into_rows_needs_more_pages_than_fit(page_size: int) -> None:
    T, S = 8, 3
    capacity = step_layout(Bucket(T, S, False), num_groups=1, page_size=page_size).num_page_updates
    most = 0
    for lengths in itertools.product(range(T + 1), repeat=S):
        if sum(lengths) <= T:
            # The worst start of a row is a page border.
            most = max(most, sum(-(-length // page_size) for length in lengths))
    assert most <= capacity


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=45),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(2, 80),
    max_num_seqs=st.integers(1, 40),
    num_spare_tokens=st.integers(0, 30),
    threshold=st.sampled_from([0, 1, 3]),
    max_steps_in_flight=st.integers(1, 3),
)
def test_every_step_of_the_scheduler_fits_its_buffer(
    requests,
    page_size,
    num_pages,
    max_num_seqs,
    num_spare_tokens,
    threshold,
    max_steps_in_flight,
) -> None:
    budget = max_num_seqs + num_spare_tokens
    buckets = make_bucket_table(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        small_row_buckets=(1,),
        small_sampler_rows=16,
        token_buckets=(4, 16, budget),
    )
    num_pages = max(num_pages, 1 + -(-42 // page_size))
    scheduler = make_scheduler(
        num_pages,
        page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=64,
        token_buckets=buckets.token_buckets,
        row_buckets=buckets.row_buckets,
        long_prefill_token_threshold=threshold,
        max_steps_in_flight=max_steps_in_flight,
    )
    builder = make_builder(
        buckets,
        max_num_seqs=max_num_seqs,
        page_size=page_size,
        num_pages=(num_pages,),
        max_pages_per_seq=64 // page_size,
    )
    for seed, (num_prompt_tokens, max_tokens) in enumerate(requests):
        scheduler.add(make_sequence(str(seed), num_prompt_tokens, max_tokens, seed=seed))
    in_flight = deque()
    while scheduler.has_unfinished:
        while (output := scheduler.schedule()) is not None:
            in_flight.append(output)
            batch = builder.build(output)
            layout = builder.layout(batch.bucket)
            num_updates = sum(len(row.new_pages[0]) for row in output.rows)
            num_admissions = sum(row.is_admission for row in output.rows)
            assert num_updates <= layout.num_page_updates
            assert bool(batch.admissions) == (num_admissions > layout.num_admissions)
        output = in_flight.popleft()
        samples = np.array([row.can_sample for row in output.rows], np.int32)
        scheduler.commit(
            output,
            StepResult(
                tokens=np.full((len(samples), 1), 7, np.int32),
                num_new=samples,
                is_finite=np.ones(len(samples), bool),
            ),
        )
