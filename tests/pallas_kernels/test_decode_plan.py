"""DecodePlan: every block of every row in exactly one segment, in even shares."""

import bisect
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.decode_plan import DecodePlan, plan_decode
from pallas_kernels.attention.tuning import DecodeTuningConfig

BLOCK = 64
TUNING = DecodeTuningConfig(
    block_tokens=BLOCK, num_stages=2, num_processors=13, min_split_tokens=128
)
RAGGED = (0, 2000, 64, 65, 0, 0, 700, 3000, 1, 0)


def make_plan(lens: tuple[int, ...], tuning=TUNING, num_kv_heads=1, **options) -> DecodePlan:
    return plan_decode(
        jnp.array(lens, jnp.int32),
        num_kv_heads=num_kv_heads,
        head_dim=64,
        dtype="bfloat16",
        max_tokens=40_000,
        tuning=tuning,
        **options,
    )


def shares_of(plan: DecodePlan) -> list[np.ndarray]:
    """Segments of each share: row, length, first block, blocks, piece, pieces, place."""
    segments, shares = np.asarray(plan.segments), np.asarray(plan.shares)
    assert shares[0, 0] == 0
    assert (shares[1:, 0] == shares[:-1, 1]).all()
    for first, end, *fields in shares:
        assert first == end or (segments[first] == fields).all()
    return [segments[first:end] for first, end, *_ in shares]


def blocks_of(shares: list[np.ndarray]) -> list[int]:
    return [int(share[:, 3].sum()) for share in shares]


@pytest.mark.parametrize(
    ("lens", "window", "split_tokens"),
    [
        (RAGGED, None, None),
        (RAGGED, 1500, None),
        (RAGGED, None, 64),
        (RAGGED, 1500, 256),
        ((0, 0, 0), None, None),
        ((40_000,), None, None),
        ((512,) * 40, 100, 64),
    ],
)
def test_the_segments_of_a_row_are_its_visible_blocks_in_order(lens, window, split_tokens):
    plan = make_plan(lens, sliding_window=window, split_tokens=split_tokens)
    segments = np.concatenate(shares_of(plan))
    places: list[int] = []
    for row, length in enumerate(lens):
        own = segments[segments[:, 0] == row]
        assert (own[:, 1] == length).all()
        assert own[:, 4].tolist() == list(range(len(own)))
        assert (own[:, 5] == len(own)).all()
        start = max(0, length - window) if window else 0
        covered = [block for _, _, first, steps, *_ in own for block in range(first, first + steps)]
        assert covered == list(range(start // BLOCK, -(-length // BLOCK)))
        if split_tokens:
            assert not (own[1:, 2] % (split_tokens // BLOCK)).any()
        if len(own) > 1:
            places += (own[:, 6] + own[:, 4]).tolist()
    assert len(set(places)) == len(places)
    assert max(places, default=0) < plan.max_pieces


@pytest.mark.parametrize("split_tokens", [None, 128])
@pytest.mark.parametrize("live", [(), (700,), (2000, 64, 65, 700, 3000, 1), (500,) * 40])
def test_rows_that_are_left_change_nothing_of_the_others(live, split_tokens):
    plan = make_plan(live + (0,) * 90, split_tokens=split_tokens, leaves_padding=True)
    segments = np.concatenate(shares_of(plan))
    assert (segments[:, 1] > 0).all()
    if live:
        alone = make_plan(live, split_tokens=split_tokens)
        assert (segments == np.concatenate(shares_of(alone))).all()
        assert blocks_of(shares_of(plan)) == blocks_of(shares_of(alone))
    else:
        assert not len(segments)


def plain_cuts(lens: list[int], num_shares: int, smallest: int) -> tuple[list, list[int]]:
    """(row, begin, end) of each segment and the shares' cuts, as places among all blocks."""
    blocks = [-(-length // BLOCK) for length in lens]
    ends = list(itertools.accumulate(max(1, number) for number in blocks))
    starts = [0, *ends[:-1]]
    longest = max(1, *blocks)
    pieces = max(1, (longest + smallest // 2) // smallest)
    share = max(-(-ends[-1] // num_shares), -(-longest // pieces))
    cuts = []
    for cut in range(share, num_shares * share, share):
        row = min(bisect.bisect_right(ends, cut), len(lens) - 1)
        if cut - starts[row] < share // 32:
            cut = starts[row]
        elif ends[row] - cut < share // 32:
            cut = ends[row]
        cuts.append(cut)
    segments = []
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        places = [start, *(cut for cut in cuts if start < cut < end), end]
        segments += [(row, *piece) for piece in itertools.pairwise(places)]
    return segments, cuts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "processors"), [(1, 13), (9, 1), (20, 40), (40, 13), (70, 70)])
def test_even_cuts_are_those_of_a_plain_loop(rows, processors, seed):
    rng = np.random.default_rng(seed)
    lens = (rng.integers(0, 20_000, rows) * rng.integers(0, 2, rows)).tolist()
    plan = make_plan(tuple(lens), dataclasses.replace(TUNING, num_processors=processors))
    wanted, cuts = plain_cuts(lens, processors, TUNING.min_split_tokens // BLOCK)
    begins = [begin for _, begin, _ in wanted]
    ends = [*(bisect.bisect_left(begins, cut) for cut in cuts), len(wanted)]
    assert plan.shares[:, 1].tolist() == ends
    segments = np.asarray(plan.segments)[: len(wanted)]
    assert segments[:, 0].tolist() == [row for row, *_ in wanted]
    steps = [end - begin if lens[row] else 0 for row, begin, end in wanted]
    assert segments[:, 3].tolist() == steps
    assert (np.asarray(plan.segments)[len(wanted) :] == segments[-1]).all()


def test_long_and_short_rows_make_even_shares():
    blocks = blocks_of(shares_of(make_plan((3000, 100, 4000, 2500, 3000, 1500))))
    assert blocks == [18] * 12 + [223 - 12 * 18]


def test_rows_that_fit_the_shares_are_not_cut():
    tuning = dataclasses.replace(TUNING, num_processors=132)
    shares = shares_of(make_plan((1024,) * 64, tuning, num_kv_heads=8))
    assert blocks_of(shares) == [64] * 16
    assert all((share[:, 5] == 1).all() for share in shares)


def test_a_short_context_is_not_cut_and_a_long_one_fills_the_gpu():
    tuning = dataclasses.replace(TUNING, num_processors=132, min_split_tokens=512)
    short = blocks_of(shares_of(make_plan((512, *[0] * 7), tuning, num_kv_heads=8)))
    assert sorted(short)[-2:] == [0, 8]
    assert blocks_of(shares_of(make_plan((32_768,), tuning, num_kv_heads=8))) == [32] * 16


def test_padding_rows_are_shared_out():
    shares = shares_of(make_plan((0,) * 39))
    assert {len(share) for share in shares} == {3}


def test_split_tokens_of_no_whole_block_are_refused():
    with pytest.raises(ValueError, match="positive multiple of 64; got 96"):
        make_plan((100,), split_tokens=96)
