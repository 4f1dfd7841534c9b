"""Sampling: the XLA and the Mosaic version against the plain meaning, and the noise's quality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling import sampling, sampling_reference, xla_sampling
from pallas_kernels.sampling.sampling_inputs import from_ordered, middle, to_ordered
from pallas_kernels.sampling.sampling_noise import gumbel_noise, row_keys
from pallas_kernels.sampling.sampling_passes import SamplingTuningConfig

VOCAB = 97
FEW_TILES = SamplingTuningConfig(warpgroups=2, tile_lines=4, num_stages=2)


def make_keys(num_rows: int, seed: int = 0) -> jax.Array:
    seeds = np.random.default_rng(seed).integers(0, 2**32, (num_rows, 2)).astype(np.uint32)
    return row_keys(jnp.asarray(seeds), jnp.arange(num_rows))


def random_case(seed: int, num_rows: int, vocab_size: int, spread: float = 3.0) -> list[jax.Array]:
    """Logits, some of them with ties, keys and mixed parameters."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (num_rows, vocab_size)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    choices = ([0, 0.5, 1, 1], [0, 0, 1, 5, 50, 600], [0.01, 0.3, 0.95, 1], [0, 0, 0.05, 1])
    types = (np.float32, np.int32, np.float32, np.float32)
    parameters = [
        jnp.asarray(rng.choice(values, num_rows), dtype)
        for values, dtype in zip(choices, types, strict=True)
    ]
    return [jnp.asarray(logits), make_keys(num_rows, seed), *parameters]


def make_case(logits: np.ndarray, temperature, top_k, top_p, min_p) -> list[jax.Array]:
    parameters = (np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p))
    return [
        jnp.asarray(logits, jnp.float32),
        make_keys(len(logits)),
        *(jnp.broadcast_to(value, len(logits)) for value in parameters),
    ]


def kept_by_the_definition(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """min-p, then top-k, then top-p, in float64 and one at a time."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    p = np.exp(logits.astype(np.float64) - logits.max())
    kept = [i for i in order if p[i] >= min_p * p.max()]
    if top_k:
        kept = kept[:top_k]
    total, nucleus = 0.0, []
    for i in kept:
        nucleus.append(i)
        total += p[i] / p[kept].sum()
        if total >= top_p:
            break
    return set(nucleus)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 0.995),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_the_reference_keeps_what_the_definition_keeps(seed, top_k, top_p, min_p) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    x = jnp.asarray(logits)[None] * np.float32(np.log2(np.e))
    limits = (jnp.array([top_k]), jnp.array([top_p]), jnp.log2(jnp.array([min_p])))
    kept = set(np.flatnonzero(sampling_reference.truncate(x, *limits)[0]).tolist())
    expected = kept_by_the_definition(logits, top_k, top_p, min_p)
    # A sum of probabilities may fall on either side of top_p by rounding: one token of slack.
    assert len(kept ^ expected) <= 1
    assert int(logits.argmax()) in kept


def test_ties_at_the_border_of_top_k_are_kept() -> None:
    case = make_case(np.tile([1.0, 3.0, 2.0, 2.0, 0.0], (200, 1)), 1.0, 2, 1.0, 0.0)
    assert set(xla_sampling.sample(*case)[0].tolist()) == {1, 2, 3}


@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 1.0), (97, 0.5), (1000, 4.0)])
def test_the_xla_version_draws_the_tokens_of_the_reference(vocab_size: int, spread: float) -> None:
    case = random_case(vocab_size, 128, vocab_size, spread)
    got, expected = xla_sampling.sample(*case), jax.jit(sampling_reference.sample)(*case)
    assert (np.asarray(got[0]) != np.asarray(expected[0])).sum() <= 1  # a border, by rounding
    assert np.asarray(got[1]).all()


def with_broken_rows(case: list[jax.Array]) -> list[jax.Array]:
    """Row 0 gets NaN, 1 infinity, 2 has no finite logit, 3 only one, and 4 is all NaN."""
    logits = np.array(case[0])
    logits[0, 3], logits[1, -1], logits[2], logits[3, :-1] = np.nan, np.inf, -np.inf, -np.inf
    logits[4] = np.uint32(0x7FFFFFFF).view(np.float32)  # as GPUs make it: 1 above it overflows
    return [jnp.asarray(logits), *case[1:]]


IS_FINITE = [False, False, False, True, False]


def test_rows_that_are_not_finite_are_told_and_end() -> None:
    for seed in range(3):
        case = with_broken_rows(random_case(seed, 6, 501))
        case[3] = jnp.full(6, 1 + 20 * seed, jnp.int32)  # top_k
        tokens, is_finite = map(np.asarray, xla_sampling.sample(*case))
        assert is_finite.tolist() == [*IS_FINITE, True]
        assert tokens[3] == 500 and tokens.min() >= 0 and tokens.max() < 501


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    case, order = random_case(5, 16, VOCAB), np.array([3, 0, 7, 7, 15])
    together, alone = xla_sampling.sample(*case), xla_sampling.sample(*(a[order] for a in case))
    assert np.asarray(together[0])[order].tolist() == alone[0].tolist()


@jax.jit
def noise_of(index: jax.Array, keys: jax.Array) -> jax.Array:
    return gumbel_noise(index, keys[:, :1], keys[:, 1:])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations above the mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("vocab_size", [2, 33, 300])
def test_draws_follow_the_distribution(vocab_size: int) -> None:
    num_draws = 10_000
    logits = np.random.default_rng(vocab_size).normal(0, 0.7, vocab_size).astype(np.float32)
    keys = row_keys(jnp.full((num_draws, 2), 7, jnp.uint32), jnp.arange(num_draws))
    scores = logits * np.log2(np.e) + np.asarray(noise_of(jnp.arange(vocab_size), keys))
    counts = np.bincount(scores.argmax(axis=1), minlength=vocab_size)
    expected = np.exp(logits) / np.exp(logits).sum() * num_draws
    assert abs(chi_square(counts, expected)) < 5


def uniforms(index: jax.Array, keys: jax.Array) -> np.ndarray:
    """What the noise was made of: exp(-e) for e = 2^-noise, in units of ln 2."""
    return np.exp2(-np.exp2(-np.asarray(noise_of(index, keys), np.float64)))


def test_noise_is_uniform_in_each_row_and_independent_of_its_neighbours() -> None:
    num_rows, size = 6, 20_000
    keys = row_keys(jnp.zeros((num_rows, 2), jnp.uint32), jnp.arange(num_rows))
    u = uniforms(jnp.arange(size), keys)
    for row in u:
        counts = np.histogram(row, bins=256, range=(0, 1))[0]
        assert abs(chi_square(counts, np.full(256, size / 256))) < 5
    centred = (u - 0.5) * np.sqrt(12)
    bound = 5 / np.sqrt(size)
    for shift in (1, 2, 3, 4, 32, 128, 512, 1024, 4096):
        assert np.abs((centred[:, shift:] * centred[:, :-shift]).mean(axis=1)).max() < bound
    between_rows = centred @ centred.T / size - np.eye(num_rows)
    assert np.abs(between_rows - np.diag(np.diag(between_rows))).max() < bound
    pairs = np.histogram2d(u[:, :-1].ravel(), u[:, 1:].ravel(), bins=32, range=[(0, 1)] * 2)[0]
    assert abs(chi_square(pairs, np.full((32, 32), pairs.sum() / 1024))) < 5


def test_one_token_over_many_positions_and_seeds_is_uniform() -> None:
    num_rows = 20_000
    for seeds, positions in (
        (jnp.zeros((num_rows, 2), jnp.uint32), jnp.arange(num_rows)),
        (jnp.stack([jnp.zeros(num_rows), jnp.arange(num_rows)], 1).astype(jnp.uint32),
         jnp.full(num_rows, 9)),
    ):  # fmt: skip
        u = uniforms(jnp.array([0, 1, 151_935]), row_keys(seeds, positions)).T
        for row in u:
            counts = np.histogram(row, bins=128, range=(0, 1))[0]
            assert abs(chi_square(counts, np.full(128, num_rows / 128))) < 5
            centred = row - 0.5
            assert abs((centred[1:] * centred[:-1]).mean() * 12) < 5 / np.sqrt(num_rows)


def test_the_tail_of_the_noise_is_that_of_an_exponential_variable() -> None:
    keys = make_keys(16)
    index = jnp.arange(2**17)
    e = np.exp2(-np.asarray(noise_of(index, keys), np.float64)) * np.log(2)
    assert np.isfinite(e).all() and e.min() > 0 and e.max() < 20
    for bound in (1e-6, 1e-5, 1e-4, 1e-2, 0.031, 0.032, 0.1, 1.0, 5.0):
        expected = e.size * -np.expm1(-bound)
        assert abs((e < bound).sum() - expected) < 5 * np.sqrt(expected)


def test_floats_keep_their_order_as_integers() -> None:
    values = jnp.array([-np.inf, -3e38, -1.5, -1e-38, -0.0, 0.0, 1e-38, 2.0, 3e38, np.inf])
    ordered = to_ordered(values)
    assert (np.diff(np.asarray(ordered, np.int64)) > 0).all()
    np.testing.assert_array_equal(from_ordered(ordered), values)
    low, high = jnp.int32(-(2**31) + 1), jnp.int32(2**31 - 2)
    assert int(middle(low, high)) == -1 and int(middle(jnp.int32(-3), jnp.int32(-2))) == -3


@pytest.mark.parametrize("version", [xla_sampling.sample, sampling.sample])
def test_inputs_that_do_not_fit_are_refused(version) -> None:
    case = random_case(0, 2, 8)
    with pytest.raises(ValueError, match=r"logits must be float32\[S, V\]; got bfloat16\[2, 8\]"):
        version(case[0].astype(jnp.bfloat16), *case[1:])
    with pytest.raises(ValueError, match=r"top_p must be of 2 rows; got \[1\]"):
        version(*case[:4], case[4][:1], case[5])


def interpreted(case: list[jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    options = {"interpret": plgpu.InterpretGPUParams(), "tuning": FEW_TILES}
    tokens, is_finite = sampling.sample(*case, **options)
    return np.asarray(tokens), np.asarray(is_finite)


def test_the_interpreted_kernel_draws_the_tokens_of_the_reference() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (6, 1100)).astype(np.float32)  # 9 lines, the last of them padded
    logits[1] = np.round(logits[1])
    temperature = np.array([0, 0.5, 1, 1, 1, 1], np.float32)
    top_k = np.array([0, 0, 5, 700, 0, 0], np.int32)
    top_p = np.array([1, 0.3, 0.8, 1, 0.95, 0.9], np.float32)
    min_p = np.array([0, 0, 0, 0, 0.1, 0], np.float32)
    logits[5, 1099] = np.nan
    case = [jnp.asarray(a) for a in (logits, make_keys(6), temperature, top_k, top_p, min_p)]
    tokens, is_finite = interpreted(case)
    assert is_finite.tolist() == [True] * 5 + [False]
    assert tokens[:5].tolist() == sampling_reference.sample(*case)[0][:5].tolist()


@pytest.mark.parametrize("vocab_size", [151_936, 50_257])
def test_the_kernel_lowers_for_cuda(vocab_size: int) -> None:
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((4, vocab_size), "float32"), ((4, 2), "int32"), ((4,), "float32"),
            ((4,), "int32"), ((4,), "float32"), ((4,), "float32"),
        )
    ]  # fmt: skip
    lowered = sampling.sample.trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [300, 32_000, 50_257, 151_936])
def test_the_kernel_on_a_gpu_draws_the_tokens_of_the_reference(vocab_size: int) -> None:
    case = with_broken_rows(random_case(vocab_size, 64, vocab_size))
    tokens, is_finite = map(np.asarray, sampling.sample(*case))
    expected, expected_finite = map(np.asarray, sampling_reference.sample(*case))
    np.testing.assert_array_equal(is_finite, expected_finite)
    assert (tokens != expected)[is_finite].sum() <= 1  # a border, by rounding
