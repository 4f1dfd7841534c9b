"""StepTimeModel: how long a step takes, learnt from the steps that ran."""

from typing import NamedTuple

import numpy as np

FORGETTING = 0.99
"""What a new step of a kind leaves of the weight of older ones: about the last 100 count."""
REFIT_STEPS = 8
"""Once so many steps were seen, the model is fitted again after each further so many."""
LARGEST_SURPRISE = 4.0
"""A step further from what was expected than by this factor counts as if it were just so far."""

_UNITS = np.array([1.0, 1e-3, 1e-2, 1e-5])
"""What the four terms are counted in, so that each adds milliseconds in a usual step."""
_RIDGE = 1e-8
"""Share of the moments' sum that keeps terms solvable which no step has told apart yet."""


class StepShape(NamedTuple):
    """What a step's time depends on.

    Attributes:
      prompt_tokens: tokens of its bucket that decode rows do not use; 0 in a pure decode step.
      decode_rows: rows that compute a sampled token.
      context_tokens: tokens that these rows see, together.
    """

    prompt_tokens: int
    decode_rows: int
    context_tokens: int


class StepTimeModel:
    """Predicts `seconds(step) = a + b prompt_tokens + c decode_rows + d context_tokens`.

    The terms are fitted by least squares of the relative error, so that a decode step of 5 ms
    counts as much as a prompt step of 200 ms; they are never negative. Older steps fade. Steps
    with and without prompt tokens fade apart: an hour of pure decode steps leaves what is known
    about prompts as it is. A step that took very long, since the host was busy with something
    else, moves the model no more than one of `LARGEST_SURPRISE` times the expected time; nor does
    the next, whose result was there long before the host asked for it.

    On a GPU a step is not linear in its tokens: below about two hundred it takes as long as
    reading the weights does. A line through a convex curve lies above it between the points that
    were measured, so there the model predicts too much rather than too little.

    The same steps always give the same model.
    """

    def __init__(self):
        """Know nothing: every prediction is 0 until a step is observed."""
        self._moments = np.zeros((2, 4, 4))  # of steps without and with prompt tokens
        self._targets = np.zeros((2, 4))
        self._num_observed = [0, 0]
        self._terms = (0.0, 0.0, 0.0, 0.0)

    @property
    def has_prompt_steps(self) -> bool:
        """Whether a step with prompt tokens was observed."""
        return self._num_observed[1] > 0

    @property
    def prompt_token_seconds(self) -> float:
        """Seconds that one more prompt token takes."""
        return self._terms[1]

    def seconds(self, shape: StepShape) -> float:
        """Predict the seconds of a step."""
        base, per_prompt, per_row, per_context = self._terms
        return (
            base
            + per_prompt * shape.prompt_tokens
            + per_row * shape.decode_rows
            + per_context * shape.context_tokens
        )

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that ran; a time of 0, which a coarse clock gives, teaches nothing."""
        if seconds <= 0:
            return
        kind = int(shape.prompt_tokens > 0)
        expected = self.seconds(shape)
        if self._num_observed[kind] < REFIT_STEPS or expected <= 0:
            expected = seconds
        surprise = seconds / expected
        surprise = min(max(surprise, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
        features = np.array((1.0, *shape)) * (_UNITS / expected)
        moments, targets = self._moments[kind], self._targets[kind]
        moments *= FORGETTING
        moments += features[:, None] * features
        targets *= FORGETTING
        targets += features * surprise
        self._num_observed[kind] += 1
        num_observed = self._num_observed[kind]
        if num_observed <= REFIT_STEPS or num_observed % REFIT_STEPS == 0:
            self._fit()

    def _fit(self) -> None:
        moments = self._moments.sum(axis=0)
        moments += _RIDGE * np.trace(moments) * np.eye(4)
        terms = _solve_nonnegative(moments, self._targets.sum(axis=0)) * _UNITS
        base, per_prompt, per_row, per_context = terms.tolist()
        self._terms = (base, per_prompt, per_row, per_context)


def _solve_nonnegative(moments: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Solve the normal equations; the most negative term is set to 0 until none is negative.

    Args:
      moments: [4, 4] float64, symmetric and positive definite.
      targets: [4] float64.

    Returns:
      [4] float64, at least 0.
    """
    terms, kept = np.zeros(4), np.arange(4)
    while kept.size:
        solution = np.linalg.solve(moments[np.ix_(kept, kept)], targets[kept])
        if solution.min() >= 0:
            terms[kept] = solution
            break
        kept = np.delete(kept, solution.argmin())
    return terms
