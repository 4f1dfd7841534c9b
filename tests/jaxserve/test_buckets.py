"""Buckets: what is compiled, and which of it a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.execution.buckets import Bucket, BucketTable, make_bucket_table

SIZES = st.one_of(st.none(), st.lists(st.integers(1, 600), min_size=1, max_size=5))


@st.composite
def tables(draw) -> BucketTable:
    max_num_seqs = draw(st.integers(1, 300))
    return make_bucket_table(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 500)),
        small_row_buckets=draw(st.sampled_from([(1,), (8,), (1, 8)])),
        small_sampler_rows=draw(st.sampled_from([16, 128])),
        row_buckets=draw(SIZES),
        token_buckets=draw(SIZES),
    )


@given(table=tables(), data=st.data())
def test_a_step_takes_the_smallest_bucket_that_holds_it(table: BucketTable, data) -> None:
    num_tokens = data.draw(st.integers(1, table.token_buckets[-1]))
    num_rows = data.draw(st.integers(1, min(num_tokens, table.max_num_rows)))
    fitting = [
        bucket
        for bucket in table.all()
        if not bucket.is_decode_only
        and bucket.num_tokens >= num_tokens
        and bucket.num_rows >= num_rows
    ]
    assert table.select(num_tokens, num_rows, is_decode_only=False) == min(fitting)


@given(table=tables(), data=st.data())
def test_a_decode_step_takes_the_smallest_row_bucket_that_holds_it(table, data) -> None:
    num_rows = data.draw(st.integers(1, table.row_buckets[-1]))
    bucket = table.select(num_rows, num_rows, is_decode_only=True)
    S = min(size for size in table.row_buckets if size >= num_rows)
    assert bucket == Bucket(S, S, True)
    assert bucket in table.all()


@given(table=tables(), data=st.data())
def test_each_step_finds_a_sampler_for_its_rows(table: BucketTable, data) -> None:
    num_rows = data.draw(st.integers(1, table.max_num_rows))
    bucket = table.select(num_rows, num_rows, is_decode_only=True)
    assert table.fuses_sampler(num_rows) == bucket.fuses_sampler == (bucket.num_rows <= 64)
    for is_greedy in (True, False):
        R = table.select_sampler(num_rows, is_greedy=is_greedy)
        assert R in table.sampler_sizes(is_greedy=is_greedy)
        assert num_rows <= R <= table.max_num_rows
    if not bucket.fuses_sampler:
        smallest = min(table.small_sampler_rows, table.max_num_rows)
        R = table.select_sampler(num_rows, is_greedy=True)
        assert R in (smallest, bucket.num_rows) and R <= max(smallest, bucket.num_rows)


@given(table=tables())
def test_all_buckets_are_distinct_and_end_with_the_largest(table: BucketTable) -> None:
    buckets = table.all()
    assert len(set(buckets)) == len(buckets)
    assert buckets[-1].num_tokens == max(bucket.num_tokens for bucket in buckets)
    assert buckets[-1].num_rows == max(bucket.num_rows for bucket in buckets)
    assert all(bucket.num_rows <= bucket.num_tokens for bucket in buckets)


def test_sizes_are_sorted_and_closed_by_the_limits() -> None:
    table = make_bucket_table(
        max_num_seqs=100,
        max_num_batched_tokens=500,
        small_row_buckets=(8,),
        small_sampler_rows=128,
        row_buckets=(64, 8, 8, 256, 100),
        token_buckets=(512, 128, 4096),
    )
    assert table.row_buckets == (8, 64, 100)
    assert table.token_buckets == (128, 500)
    assert [bucket.num_rows for bucket in table.all()] == [8, 64, 100, 100, 100]
    assert table.sampler_sizes(is_greedy=True) == (100,)


def test_the_default_table_is_short_where_weights_bound_a_step_and_dense_above() -> None:
    table = make_bucket_table(
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        small_row_buckets=(1, 8),
        small_sampler_rows=128,
    )
    by_64, by_128 = (64, 128, 192, 256, 320, 384, 448, 512), (640, 768, 896, 1024)
    assert table.row_buckets == (1, 8, 32, *by_64, *by_128)
    assert table.token_buckets == (128, 256, 512, 1024, 2048, 4096, 8192)
    assert table.sampler_sizes(is_greedy=True) == (128, *by_64[2:], *by_128)
    assert table.sampler_sizes(is_greedy=False) == (128, 256, 384, 640, 1024)
    assert len(table.all()) == 22


@pytest.mark.parametrize(
    ("row_buckets", "max_num_seqs", "greedy", "others"),
    [
        ((8, 32, 64), 1024, (128, 1024), (128, 1024)),
        ((8,), 180, (128, 180), (128, 180)),
        ((256, 512), 1024, (128, 256, 512, 1024), (128, 256, 512, 1024)),
        ((8, 100, 200), 300, (128, 200, 300), (128, 200, 300)),
        ((1,), 8, (8,), (8,)),
    ],
)
def test_few_rows_of_large_tables_have_a_small_sampler(row_buckets, max_num_seqs, greedy, others):
    table = make_bucket_table(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        small_row_buckets=(8,),
        small_sampler_rows=128,
        row_buckets=row_buckets,
    )
    assert table.sampler_sizes(is_greedy=True) == greedy
    assert table.sampler_sizes(is_greedy=False) == others


def test_a_step_that_no_bucket_holds_is_an_error_with_its_sizes() -> None:
    table = BucketTable((2, 8), (16, 64))
    with pytest.raises(ValueError, match="no bucket holds 65 tokens of 3 rows"):
        table.select(65, 3, is_decode_only=False)
    with pytest.raises(ValueError, match="no bucket holds 20 tokens of 9 rows"):
        table.select(20, 9, is_decode_only=False)
    with pytest.raises(ValueError, match="no bucket holds 9"):
        table.select(9, 9, is_decode_only=True)


def test_many_rows_of_few_tokens_move_up_to_a_bucket_with_enough_rows() -> None:
    table = BucketTable((8,), (4, 64))
    assert table.select(4, 4, is_decode_only=False) == Bucket(4, 4, False)
    assert table.select(5, 5, is_decode_only=False) == Bucket(64, 8, False)
    assert str(Bucket(64, 8, False)) == "mixed[T=64,S=8]"
    assert str(Bucket(8, 8, True)) == "decode[T=8,S=8]"


def test_a_budget_below_the_smallest_row_bucket_still_ends_with_the_largest_bucket() -> None:
    table = make_bucket_table(
        max_num_seqs=1, max_num_batched_tokens=1, small_row_buckets=(8,), small_sampler_rows=128
    )
    assert table.all() == (Bucket(8, 8, True), Bucket(8, 8, False))
