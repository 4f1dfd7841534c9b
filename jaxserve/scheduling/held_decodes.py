"""When the decode rows are left out of a step: while prompts fill it, under `prefill_first`."""

from collections.abc import Iterator
from itertools import chain, islice

from jaxserve.request import Sequence
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.roster import Roster

MAX_HELD_STEPS = 1024
"""So many steps in a row may leave out all decode rows."""


def holds_decodes(config: SchedulerConfig, roster: Roster, budget: int) -> bool:
    """Tell whether decode rows are left out, for prompts that fill the step and find room.

    Args:
      config: asks for it.
      roster: what runs and waits, and which slots and pages are free.
      budget: tokens of the step.
    """
    if not (config.prefill_first and roster.waiting) or roster.num_held_steps == MAX_HELD_STEPS:
        return False
    if any(pool.num_free * pool.page_size < budget for pool in roster.page_pools):
        return False
    threshold = config.long_prefill_token_threshold or budget
    running = (
        sequence.num_prefill_tokens - sequence.num_computed_tokens
        for _, sequence in running_prompts(roster)
    )
    waiting = (
        len(sequence.token_ids) for sequence in islice(roster.waiting, roster.slot_pool.num_free)
    )
    num_tokens = 0
    for num_left in chain(running, waiting):
        num_tokens += min(num_left, threshold)
        if num_tokens >= budget:
            return True
    return False


def running_prompts(roster: Roster) -> Iterator[tuple[int, Sequence]]:
    """The running sequences that have prompt tokens left, with their places."""
    for index, sequence in enumerate(roster.running):
        if sequence.num_computed_tokens < sequence.num_prefill_tokens:
            yield index, sequence
