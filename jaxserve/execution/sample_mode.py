"""SampleMode: how much work the sampler has in a step; chosen on the host, no JAX."""

import enum

from jaxserve.step import ScheduledRow


class SampleMode(enum.IntEnum):
    """Each mode does all that the ones before it do."""

    GREEDY = 0
    """argmax only."""
    SAMPLED = 1
    """Temperature, top-k, top-p and min-p."""
    FULL = 2
    """Log-probabilities, and end tokens forbidden before min_tokens."""

    @property
    def is_fused(self) -> bool:
        """Whether decode steps of few rows have this mode's sampler in their forward's program."""
        return self <= SampleMode.SAMPLED


def mode_of_row(row: ScheduledRow) -> SampleMode:
    """The least mode that does all that a sampling row asks for."""
    sequence = row.sequence
    params = sequence.request.sampling_params
    num_output_tokens = row.start + row.num_scheduled_tokens - sequence.num_prompt_tokens
    if params.logprobs is not None or num_output_tokens < params.min_tokens:
        return SampleMode.FULL
    return SampleMode.GREEDY if params.is_greedy else SampleMode.SAMPLED
