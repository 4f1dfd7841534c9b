"""The laws that the scheduler's books keep between any two calls."""

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable

from jaxserve.request import Sequence, SequenceStatus
from jaxserve.scheduling.page_digests import root_digest
from jaxserve.scheduling.roster import Roster
from jaxserve.step import ScheduledRow


def check_books(roster: Roster, rows_in_flight: Iterable[ScheduledRow]) -> None:
    """Check that slots, pages, states and steps in flight agree.

    Args:
      roster: the sequences and what they own.
      rows_in_flight: the rows of all steps that are not committed.

    Raises:
      RuntimeError: they do not agree; names the law and the counts.
    """
    owners = [*roster.running, *roster.leaving]
    _check_states(roster)
    _check_order(roster)
    _check_slots(roster, owners)
    rows = list(rows_in_flight)
    _check_pages(roster, owners)
    _check_freed_pages(roster, owners, rows)
    _check_partial_pages(roster, owners)
    _check_counts(roster, owners, rows)


def num_reserved_tokens(row: ScheduledRow) -> int:
    """Count the tokens that a row samples at most."""
    return row.num_scheduled_tokens if row.is_decode else int(row.can_sample)


def _require(is_kept: bool, law: str, got: object) -> None:
    if not is_kept:
        raise RuntimeError(f"{law}; got {got}")


def _check_states(roster: Roster) -> None:
    running, leaving, waiting = roster.running, roster.leaving, roster.waiting
    states = {
        SequenceStatus.RUNNING: running,
        SequenceStatus.LEAVING: leaving,
        SequenceStatus.WAITING: [s for s in waiting if s not in leaving],
    }
    for status, sequences in states.items():
        others = [s.status for s in sequences if s.status is not status]
        _require(not others, f"each sequence kept as {status.name} must have that status", others)
    preempted = {s for s in leaving if s.finish_reason is None}
    kept = {s for s in waiting if s in leaving}
    law = "preempted sequences must wait while they leave"
    _require(preempted == kept, law, (len(preempted), len(kept)))
    unfinished = [s for siblings in roster.unfinished.values() for s in siblings.values()]
    is_listed = sorted(map(id, unfinished)) == sorted(map(id, [*running, *waiting]))
    law = "unfinished sequences must run or wait, once"
    _require(is_listed, law, (len(unfinished), len(running), len(waiting)))
    ended = [s for s in unfinished if s.finish_reason is not None]
    _require(not ended, "unfinished sequences must have no finish_reason", len(ended))


def _check_order(roster: Roster) -> None:
    for name, sequences in (("running", roster.running), ("waiting", roster.waiting)):
        keys = [s.order_key for s in sequences]
        is_sorted = all(first < second for first, second in itertools.pairwise(keys))
        _require(is_sorted, f"{name} sequences must stand in the order of their keys", keys)


def _check_slots(roster: Roster, owners: list[Sequence]) -> None:
    roster.slot_pool.check_invariants()
    slots = [s.state_slot for s in owners]
    _require(None not in slots, "running and leaving sequences must own a slot", slots)
    _require(len(set(slots)) == len(slots), "no slot may have two owners", slots)
    num_used = roster.slot_pool.max_num_seqs - roster.slot_pool.num_free
    _require(len(slots) == num_used, f"owned slots must be the {num_used} used ones", len(slots))


def _check_pages(roster: Roster, owners: list[Sequence]) -> None:
    for group, pool in enumerate(roster.page_pools):
        pool.check_invariants()
        holders = Counter(page for s in owners for page in s.page_tables[group] if page)
        for page in range(pool.num_pages):
            law = f"page {page} of group {group} must have one reference a table that holds it"
            counts = (pool.num_references(page), holders[page])
            _require(counts[0] == counts[1], law, counts)
        for sequence in owners:
            num_held, num_tokens = len(sequence.page_tables[group]), sequence.num_computed_tokens
            law = f"pages of group {group} must hold {num_tokens} computed tokens"
            _require(num_held >= pool.num_pages_for(num_tokens), law, num_held)
    waiting = [s for s in roster.waiting if s not in roster.leaving]
    owning = [s for s in waiting if s.state_slot is not None or any(s.page_tables)]
    _require(not owning, "waiting sequences must own nothing", len(owning))


def _check_freed_pages(roster: Roster, owners: list[Sequence], rows: list[ScheduledRow]) -> None:
    """Freed pages are the first of a table, and no token still to be computed sees them.

    One that leaves computes nothing from them any more; steps that were taken back set its count of
    computed tokens back, but not the pages.
    """
    num_uncertain: Counter[Sequence] = Counter()
    for row in rows:
        if row.is_decode:
            num_uncertain[row.sequence] += row.num_scheduled_tokens - 1
    for sequence in owners:
        next_token = sequence.num_computed_tokens - num_uncertain[sequence]
        for group, pool in enumerate(roster.page_pools):
            num_freed, table = sequence.num_freed_pages[group], sequence.page_tables[group]
            law = f"the {num_freed} first pages of group {group} must be 0, and only they"
            _require([i for i, p in enumerate(table) if not p] == [*range(num_freed)], law, table)
            num_dead = pool.num_dead_pages(next_token)
            law = f"at most {num_dead} pages of group {group} may be freed at {next_token}"
            is_leaving = sequence.status is SequenceStatus.LEAVING
            _require(is_leaving or num_freed <= num_dead, law, num_freed)
            most = pool.max_held_pages(sequence.max_num_tokens, roster.max_row_tokens)
            law = f"a sequence must hold at most {most} pages of group {group}"
            _require(len(table) - num_freed <= most, law, len(table) - num_freed)


def _check_partial_pages(roster: Roster, owners: list[Sequence]) -> None:
    """Pages begin with the tokens by which others find them, and no copy of one is due."""
    law = "all copies of pages must have gone with a step"
    _require(not roster.prefixes.copies.num_pending, law, roster.prefixes.copies.num_pending)
    for group, pool in enumerate(roster.page_pools):
        begun = {page: (parent, content) for page, parent, content in pool.cache.partials.items()}
        for page in begun:
            law = f"partial page {page} of group {group} must be held or idle"
            is_there = pool.num_references(page) > 0 or pool.cache.is_idle(page)
            _require(is_there, law, "a blank page")
        for sequence in owners if begun else []:
            for index, page in enumerate(sequence.page_tables[group]):
                if page not in begun:
                    continue
                parent, content = begun[page]
                known = array("i", sequence.token_ids[index * pool.page_size :]).tobytes()
                law = f"page {page} of group {group} must begin with the tokens that it is known by"
                is_same = known.startswith(content) or content.startswith(known)
                _require(is_same, law, (known, content))
                digests = sequence.page_digests[group].up_to(index) if index else []
                root = root_digest(sequence.request.cache_salt)
                law = f"page {page} of group {group} must stand behind the prefix of its digest"
                _require(parent == (digests[index - 1][0] if index else root), law, parent)


def _check_counts(roster: Roster, owners: list[Sequence], rows: list[ScheduledRow]) -> None:
    num_steps = Counter(row.sequence for row in rows)
    num_pending: Counter[Sequence] = Counter()
    for row in rows:
        num_pending[row.sequence] += num_reserved_tokens(row)
    for sequence in {*owners, *roster.waiting, *num_steps}:
        got = (sequence.num_steps_in_flight, sequence.num_pending_tokens)
        expected = (num_steps[sequence], num_pending[sequence])
        _require(got == expected, f"steps in flight and pending tokens must be {expected}", got)
    for sequence in roster.leaving:
        law = "a leaving sequence must have a step in flight"
        _require(sequence.num_steps_in_flight > 0, law, sequence.num_steps_in_flight)
    for sequence in (*roster.running, *roster.waiting):
        got = (sequence.num_computed_tokens, sequence.num_tokens, sequence.max_num_tokens)
        law = "computed tokens must be fewer than all tokens, and those at most max_num_tokens"
        _require(got[0] < got[1] <= got[2], law, got)
