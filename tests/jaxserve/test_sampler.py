"""The sampler against plain numpy, row by row."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.sampler import SamplingRows, choose_draw, sample_tokens, top_logprobs
from pallas_kernels.sampling.xla_sampling import finite_rows

VOCAB = 97


def make_rows(num_rows: int, **columns) -> SamplingRows:
    defaults = {
        "seeds": np.stack([np.zeros(num_rows), np.arange(num_rows)], 1).astype(np.uint32),
        "positions": np.full(num_rows, 5, np.int32),
        "temperature": np.ones(num_rows, np.float32),
        "top_k": np.zeros(num_rows, np.int32),
        "top_p": np.ones(num_rows, np.float32),
        "min_p": np.zeros(num_rows, np.float32),
        "stop_ids": np.full((num_rows, 3), -1, np.int32),
        "forbids_stop": np.zeros(num_rows, bool),
    }
    return SamplingRows(**{k: jnp.asarray(v) for k, v in (defaults | columns).items()})


def random_logits(seed: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB)).astype(np.float32)


def sample(logits, rows: SamplingRows, mode: SampleMode) -> np.ndarray:
    tokens, is_finite = sample_tokens(jnp.asarray(logits), rows, mode, choose_draw())
    assert is_finite.all()
    return np.asarray(tokens)


@pytest.mark.parametrize("mode", list(SampleMode))
def test_greedy_rows_take_the_most_likely_token_in_every_mode(mode: SampleMode) -> None:
    logits = random_logits(1, 6)
    rows = make_rows(6, temperature=np.zeros(6, np.float32))
    tokens = sample(logits, rows, mode)
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals_and_reports_rows_that_are_not_finite() -> None:
    logits = np.zeros((7, VOCAB), np.float32)
    logits[0, [40, 7, 90]] = 3
    logits[1, :] = -np.inf
    logits[2, 5], logits[2, 60] = np.inf, np.nan
    logits[3, 5], logits[3, 60] = np.nan, np.inf
    logits[4, 30] = -np.inf
    logits[5, [0, VOCAB - 1]] = np.nan
    logits[6, 50] = np.inf
    tokens, is_finite = sample_tokens(
        jnp.asarray(logits), make_rows(7), SampleMode.GREEDY, choose_draw()
    )
    assert tokens[0] == 7 and tokens[4] == 0
    assert is_finite.tolist() == [True, False, False, False, True, False, False]
    assert is_finite.tolist() == finite_rows(jnp.asarray(logits)).tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = random_logits(2, 8)
    rows = make_rows(8, top_k=np.full(8, 20, np.int32), top_p=np.full(8, 0.9, np.float32))
    together = sample(logits, rows, SampleMode.SAMPLED)
    order = np.array([3, 0, 7, 7, 1])
    fewer = SamplingRows(**{f: getattr(rows, f)[order] for f in SamplingRows.__slots__})
    again = sample(logits[order], fewer, SampleMode.FULL)
    assert again.tolist() == together[order].tolist()


def test_seed_and_position_both_change_the_draw() -> None:
    logits = jnp.zeros((1, VOCAB))
    draws = {
        (seed, position): int(
            sample(
                logits,
                make_rows(
                    1,
                    seeds=np.array([[0, seed]], np.uint32),
                    positions=np.array([position], np.int32),
                ),
                SampleMode.SAMPLED,
            )[0]
        )
        for seed in range(4)
        for position in range(4)
    }
    assert len(set(draws.values())) > 8


def test_draws_follow_the_distribution() -> None:
    num_draws = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (num_draws, 4))
    rows = make_rows(num_draws, temperature=np.full(num_draws, 0.5, np.float32))
    tokens = sample(logits, rows, SampleMode.SAMPLED)
    expected = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    counts = np.bincount(tokens, minlength=4)
    assert np.abs(counts / num_draws - expected / expected.sum()).max() < 0.03


def test_end_tokens_are_never_drawn_while_they_are_forbidden() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 7] = 50.0
    rows = make_rows(
        2,
        stop_ids=np.array([[7, -1, 3], [7, -1, 3]], np.int32),
        forbids_stop=np.array([True, False]),
        temperature=np.zeros(2, np.float32),
    )
    tokens = sample(logits, rows, SampleMode.FULL).tolist()
    assert tokens[0] not in (7, 3)
    assert tokens[1] == 7


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3, 4)
    tokens = np.array([0, 5, int(logits[2].argmax()), 96], np.int32)
    top = top_logprobs(jnp.asarray(logits), jnp.asarray(tokens))
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    rows = np.arange(4)
    np.testing.assert_allclose(top.chosen, expected[rows, tokens], atol=1e-5)
    ranks = (logits > logits[rows, tokens][:, None]).sum(-1) + 1
    assert top.rank.tolist() == ranks.tolist()
    order = np.argsort(-logits, axis=-1)[:, :20]
    assert top.top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(top.top_values, np.take_along_axis(expected, order, -1), atol=1e-5)


def test_a_vocabulary_smaller_than_the_list_of_log_probabilities_is_padded() -> None:
    top = top_logprobs(jnp.zeros((1, 5)), jnp.array([1]))
    assert top.top_ids.shape == (1, 20)
    assert np.isneginf(np.asarray(top.top_values)[0, 5:]).all()
