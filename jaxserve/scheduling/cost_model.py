"""CostModel: what a sequence will probably cost, by the steps and sequences before it."""

from jaxserve.scheduling.step_time_model import FORGETTING, StepShape, StepTimeModel

FIRST_PROMPT_TOKEN_SECONDS = 2e-5
FIRST_OUTPUT_TOKEN_SECONDS = 1e-4
"""Rates until a step was measured, near those of 8B parameters on one H200 (2026-11-30)."""


class CostModel:
    """Estimates the device time of sequences.

    An output token costs its row's share of a decode step, so it is cheaper the more rows share
    the step. How many output tokens come is not known: the mean of those that ended lately is
    taken, or `max_tokens` where that is less or nothing has ended yet. Prompt tokens count in full,
    whether or not the prefix cache will hold some of them.

    Attributes:
      step_times: what the steps took.
    """

    def __init__(self):
        """Start with rates that were measured on another machine."""
        self.step_times = StepTimeModel()
        self._step_seconds = self._steps = 0.0
        self._decode_seconds = self._decode_rows = 0.0
        self._output_tokens = self._outputs = 0.0

    def observe_step(self, shape: StepShape, seconds: float, num_steps: int = 1) -> None:
        """Learn from a step that ran, or from so many decode steps of one shape that were one."""
        self.step_times.observe(shape, seconds / num_steps)
        self._step_seconds = FORGETTING * self._step_seconds + seconds
        self._steps = FORGETTING * self._steps + 1
        if shape.decode_rows:
            of_decode = self.step_times.seconds(shape._replace(prompt_tokens=0))
            self._decode_seconds = FORGETTING * self._decode_seconds + of_decode
            self._decode_rows = FORGETTING * self._decode_rows + shape.decode_rows

    def observe_output(self, num_tokens: int) -> None:
        """Learn from a sequence that ended by itself with so many output tokens."""
        self._output_tokens = FORGETTING * self._output_tokens + num_tokens
        self._outputs = FORGETTING * self._outputs + 1

    def prefill_seconds(self, num_prompt_tokens: int) -> float:
        """Estimate the device time of a prompt."""
        known = self.step_times.has_prompt_steps
        rate = self.step_times.prompt_token_seconds if known else FIRST_PROMPT_TOKEN_SECONDS
        return rate * num_prompt_tokens

    def first_token_seconds(self, num_prompt_tokens: int, num_steps_in_flight: int) -> float:
        """Estimate the time from a slot to the first token, for one that shares its steps little.

        Args:
          num_prompt_tokens: of the sequence.
          num_steps_in_flight: steps of the usual length that stand before its own, or end with it.
        """
        usual = self._step_seconds / self._steps if self._steps else 0.0
        return self.prefill_seconds(num_prompt_tokens) + num_steps_in_flight * usual

    def sequence_seconds(self, num_prompt_tokens: int, max_output_tokens: int) -> float:
        """Estimate a sequence's share of the device's time, from prompt to end."""
        if self._decode_seconds:
            rate = self._decode_seconds / self._decode_rows
        else:
            rate = FIRST_OUTPUT_TOKEN_SECONDS
        num_output_tokens = float(max_output_tokens)
        if self._outputs:
            num_output_tokens = min(num_output_tokens, self._output_tokens / self._outputs)
        return self.prefill_seconds(num_prompt_tokens) + rate * num_output_tokens
