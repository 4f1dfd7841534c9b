"""DecodePlan: every block of every row in exactly one segment, in even shares."""

import dataclasses

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
