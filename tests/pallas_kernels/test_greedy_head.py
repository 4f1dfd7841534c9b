"""The head that keeps the highest logit: against jnp in interpret mode; for CUDA; (gpu) run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.products.greedy_head import fits_greedy_head, greedy_head
from pallas_kernels.products.greedy_head_plan import GreedyHeadTuning

INTERPRET = plgpu.InterpretGPUParams()
REAL = [(4096, 128256), (1024, 151936)]  # D and V of Llama-3-8B and of Qwen3-0.6B


def make_inputs(rows, depth, vocabulary, dtype="bfloat16"):
    """Small whole numbers: sums are exact, so that many columns are equal, the highest too."""
    rng = np.random.default_rng(rows)
    hidden = rng.integers(-1, 2, (rows, depth))
    head = rng.integers(-1, 2, (vocabulary, depth))
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype)


def expected(hidden, head):
    """The highest logit and its first column, of exact sums."""
    logits = np.asarray(hidden, np.float32) @ np.asarray(head, np.float32).T
    return logits.max(1), logits.argmax(1)


# S, D, V, dtype, tuning: warpgroups lie side by side or below each other; the ends of rows and
# columns overlap, or fit, or are padded; a program has one tile or several; the ring is shorter and
# longer than a tile.
CASES = [
    (1, 64, 128, "bfloat16", {}),
    (64, 128, 1000, "float16", {"stages": 2, "programs": 2, "columns": 192}),
    (13, 192, 776, "bfloat16", {"stages": 2, "programs": 1}),
    (104, 64, 904, "bfloat16", {"programs": 2}),
    (128, 192, 136, "float16", {"stages": 2}),
    (136, 128, 600, "bfloat16", {"programs": 6, "row_tile": 64}),
    (150, 64, 504, "bfloat16", {"programs": 2, "columns": 192}),
    (256, 64, 328, "float16", {"programs": 2, "columns": 192}),
]


@pytest.mark.parametrize(("rows", "depth", "vocabulary", "dtype", "changes"), CASES)
def test_it_is_the_highest_logit_and_its_first_column(rows, depth, vocabulary, dtype, changes):
    hidden, head = make_inputs(rows, depth, vocabulary, dtype)
    tuning = GreedyHeadTuning(**changes)
    highest, tokens = greedy_head(hidden, head, interpret=INTERPRET, tuning=tuning)
    assert (highest.dtype, tokens.dtype) == (jnp.float32, jnp.int32)
    want_highest, want_tokens = expected(hidden, head)
    np.testing.assert_array_equal(highest, want_highest)
    np.testing.assert_array_equal(tokens, want_tokens)


def unit_rows(rows, depth=64):
    """Row r is 1 in place r, so that its logits are column r of what it is multiplied by."""
    return jnp.eye(rows, depth, dtype=jnp.bfloat16)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(
    "places",
    [(0, 703), (3, 4), (3, 11), (127, 128), (130, 200, 390), (571, 572, 703), (573, 580)],
)
def test_the_first_of_equals_wins_wherever_they_lie(places, programs):
    head = jnp.zeros((704, 64), jnp.bfloat16).at[jnp.array(places), 5].set(2.5)
    tuning = GreedyHeadTuning(columns=128, programs=programs)
    highest, tokens = greedy_head(unit_rows(16), head, interpret=INTERPRET, tuning=tuning)
    is_row = np.arange(16) == 5
    np.testing.assert_array_equal(highest, np.where(is_row, 2.5, 0))
    np.testing.assert_array_equal(tokens, np.where(is_row, places[0], 0))


@pytest.mark.parametrize("rows", [8, 136])
def test_a_nan_shows_in_its_row_alone_and_infinities_are_numbers(rows):
    first = jnp.array([[1], [jnp.nan], [-jnp.inf], [jnp.inf]] + [[1]] * (rows - 4), jnp.bfloat16)
    hidden = jnp.zeros((rows, 64), jnp.bfloat16).at[:, :1].set(first)
    head = jnp.zeros((704, 64), jnp.bfloat16).at[:, 0].set(1).at[300, 0].set(2)
    highest, tokens = greedy_head(hidden, head, interpret=INTERPRET)
    np.testing.assert_array_equal(highest, [2, np.nan, -np.inf, np.inf] + [2] * (rows - 4))
    np.testing.assert_array_equal(tokens[np.arange(rows) != 1], [300, 0, 0] + [300] * (rows - 4))
    assert 0 <= tokens[1] < 704


def test_one_nan_among_numbers_is_seen():
    head = jnp.ones((704, 64), jnp.bfloat16).at[401, :].set(jnp.nan).at[650, :].set(3)
    highest, tokens = greedy_head(unit_rows(9), head, interpret=INTERPRET)
    assert jnp.isnan(highest).all()
    assert ((tokens >= 0) & (tokens < 704)).all()


def lower(rows, depth, vocabulary, dtype="bfloat16", **options):
    args = [jax.ShapeDtypeStruct((size, depth), dtype) for size in (rows, vocabulary)]
    traced = jax.jit(lambda *args: greedy_head(*args, **options)).trace(*args)
    return traced.out_info, traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 8, 64, 128, 256, 1024])
@pytest.mark.parametrize(("depth", "vocabulary"), REAL)
def test_real_shapes_lower_for_cuda_and_write_no_logits(depth, vocabulary, rows):
    (highest, tokens), text = lower(rows, depth, vocabulary)
    assert highest.shape == tokens.shape == (rows,)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert f"x{vocabulary}x" not in text
    assert ("stablehlo.pad" in text) == (rows % 8 != 0)


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (256, {"row_tile": 64}),
        (256, {"columns": 192}),
        (64, {"columns": 128, "stages": 4}),
        (128, {"columns": 128}),
    ],
)
def test_other_tunings_and_float16_lower_for_cuda(rows, changes):
    _, text = lower(rows, 1024, 151936, "float16", tuning=GreedyHeadTuning(**changes))
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("hidden", "head", "message"),
    [
        (((8, 64), "float32"), ((256, 64), "float32"), "or float16; got float32"),
        (((8, 64), "bfloat16"), ((256, 64), "float16"), "one dtype; got bfloat16"),
        (((8, 64), "bfloat16"), ((64, 256), "bfloat16"), r"head \[V, D\]; got"),
        (((0, 64), "bfloat16"), ((256, 64), "bfloat16"), "at least 1 row; got 0"),
        (((8, 96), "bfloat16"), ((256, 96), "bfloat16"), "got 96 and 256"),
        (((8, 64), "bfloat16"), ((120, 64), "bfloat16"), "got 64 and 120"),
        (
            ((8, 64), "bfloat16"),
            ((50257, 64), "bfloat16"),
            "V of 8 and at least 128; got 64 and 50257",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(hidden, head, message):
    hidden, head = jnp.zeros(*hidden), jnp.zeros(*head)
    with pytest.raises(ValueError, match=message):
        greedy_head(hidden, head)
    if hidden.dtype == head.dtype:
        assert not fits_greedy_head(hidden.shape, head.shape, hidden.dtype)


@pytest.mark.parametrize(
    "sizes", [{"stages": 1}, {"programs": 0}, {"row_tile": 256}, {"columns": 64}]
)
def test_a_tuning_that_would_not_run_is_refused(sizes):
    with pytest.raises(ValueError, match="must be"):
        GreedyHeadTuning(**sizes)


def test_a_tile_of_more_columns_than_the_vocabulary_is_refused():
    hidden, head = make_inputs(8, 64, 128)
    with pytest.raises(ValueError, match="at least 192; got 128"):
        greedy_head(hidden, head, tuning=GreedyHeadTuning(columns=192))


def test_what_fits_can_be_asked():
    assert fits_greedy_head((1, 1024), (151936, 1024), jnp.bfloat16)
    assert fits_greedy_head((1024, 4096), (128256, 4096), jnp.float16)
    assert not fits_greedy_head((8, 1000), (151936, 1000), jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "depth", "vocabulary"),
    [
        *((rows, *sizes) for sizes in REAL for rows in (1, 8, 64, 104, 128, 256, 320, 1024)),
        (77, 192, 50264),  # padded rows; a vocabulary that is a multiple of 8 alone
    ],
)
def test_on_a_gpu_it_is_the_highest_logit_and_its_first_column(rows, depth, vocabulary):
    hidden, head = make_inputs(rows, depth, vocabulary)
    highest, tokens = greedy_head(hidden, head)
    want_highest, want_tokens = expected(hidden, head)
    np.testing.assert_array_equal(highest, want_highest)
    np.testing.assert_array_equal(tokens, want_tokens)
