"""When the decode rows are left out of a step: while prompts fill it, under `prefill_first`."""

import operator
from collections.abc import Iterator
from itertools import islice

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
    if not config.prefill_first or roster.num_held_steps == MAX_HELD_STEPS:
        return False
    threshold = config.long_prefill_token_threshold or budget
    num_tokens, pages = 0, [0] * len(roster.page_pools)
    for num_left, wanted in _prompts(roster):
        pages = list(map(operator.add, pages, wanted))
        if any(count > pool.num_free for count, pool in zip(pages, roster.page_pools, strict=True)):
            return False
        num_tokens += min(num_left, threshold)
        if num_tokens >= budget:
            return True
    return False


def running_prompts(roster: Roster) -> Iterator[tuple[int, Sequence]]:
    """The running sequences that have prompt tokens left, with their places."""
    for index, sequence in enumerate(roster.running):
        if sequence.num_computed_tokens < sequence.num_prefill_tokens:
            yield index, sequence


def _prompts(roster: Roster) -> Iterator[tuple[int, list[int]]]:
    """Tokens to compute, and pages to take, of each prompt that a step could hold.

    Those that run come first, then those that find a slot, up to the first that has to wait for a
    page that another is about to compute.
    """
    for _, sequence in running_prompts(roster):
        num_left = sequence.num_prefill_tokens - sequence.num_computed_tokens
        yield num_left, roster.count_reserved_pages(sequence, sequence.num_prefill_tokens)
    for sequence in islice(roster.waiting, roster.slot_pool.num_free):
        hit, num_tokens = roster.prefixes.find(sequence), len(sequence.token_ids)
        if hit.is_promised:
            return
        yield num_tokens - hit.num_tokens, roster.count_admission_pages(hit, num_tokens)
