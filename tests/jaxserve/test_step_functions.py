"""The step on the device: forward, sample, their fusion and admission, around the toy model."""

from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution import buckets
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.slot_record import RECORD_SIZE, SlotField, write_record
from jaxserve.execution.step_functions import MIN_GREEDY_HEAD_ROWS
from jaxserve.request import FinishReason, Sequence
from jaxserve.step import ScheduledRow, SchedulerOutput, SequenceUpdate
from pallas_kernels.sampling import xla_sampling
from tests.jaxserve.scheduler_builders import VOCABULARY
from tests.jaxserve.toy_steps import (
    FUNCTIONS,
    MAX_NUM_SEQS,
    PAGE_SIZE,
    POISON,
    ToyRun,
    make_state,
    prompt_sequence,
    random_prompts,
    sample,
    toy_logits,
    toy_output,
)


def outputs(updates: list[SequenceUpdate]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for update in updates:
        tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    return tokens


@pytest.mark.parametrize("threshold", [0, 1])
@pytest.mark.parametrize("num_pages", [40, 12])
def test_every_row_gets_the_tokens_of_its_own_context(threshold: int, num_pages: int) -> None:
    run = ToyRun.make(num_pages, long_prefill_token_threshold=threshold)
    prompts = random_prompts()
    for name, (prompt, max_tokens) in enumerate(prompts):
        run.add(prompt_sequence(str(name), prompt, max_tokens))
    assert outputs(run.drain()) == {
        str(name): toy_output(prompt, max_tokens)
        for name, (prompt, max_tokens) in enumerate(prompts)
    }
    assert (run.scheduler.num_preemptions > 0) == (num_pages == 12)


def test_a_step_writes_the_slots_of_its_tokens_and_the_null_page_only() -> None:
    run = ToyRun.make(20)
    for name, (prompt, max_tokens) in enumerate(random_prompts()):
        run.add(prompt_sequence(str(name), prompt, max_tokens))
    while run.scheduler.has_unfinished:
        output = run.schedule()
        expected = run.pages().copy()
        for row in output.rows:
            for position in range(row.start, row.start + row.num_scheduled_tokens):
                page = row.sequence.page_tables[0][position // PAGE_SIZE]
                token = row.sequence.token_ids[position]
                expected[page, position % PAGE_SIZE] = token + 1, position + 1
        slots_before = np.asarray(run.state.slots)
        result = run.run(output)
        np.testing.assert_array_equal(run.pages()[1:], expected[1:])
        scheduled = {row.sequence.state_slot for row in output.rows}
        others = [slot for slot in range(len(slots_before)) if slot not in scheduled]
        np.testing.assert_array_equal(np.asarray(run.state.slots)[others], slots_before[others])
        run.scheduler.commit(output, result)


def test_a_step_with_padding_rows_gives_what_a_step_without_gives() -> None:
    prompts = random_prompts(2)
    alone = {}
    for name, (prompt, max_tokens) in enumerate(prompts):
        run = ToyRun.make()
        run.add(prompt_sequence(str(name), prompt, max_tokens))
        alone |= outputs(run.drain())
        assert run.last_batch.bucket.num_rows == 2
    run = ToyRun.make()
    for name, (prompt, max_tokens) in enumerate(prompts):
        run.add(prompt_sequence(str(name), prompt, max_tokens))
    assert outputs(run.drain()) == alone


def decode_ahead(run: ToyRun, sequence: Sequence, num_steps: int) -> list[int]:
    """Decode steps that no one reads: `num_new` of each."""
    counts = []
    for _ in range(num_steps):
        start = sequence.num_computed_tokens
        row = ScheduledRow(
            sequence=sequence,
            start=start,
            num_scheduled_tokens=1,
            is_decode=True,
            is_admission=False,
            can_sample=True,
            new_pages=((),),
        )
        result = run.run(SchedulerOutput(rows=(row,), num_decode_rows=1, num_tokens=1))
        sequence.num_computed_tokens += 1
        counts.append(int(result.num_new[0]))
    return counts


def admitted(run: ToyRun, sequence: Sequence) -> list[int]:
    """Run the sequence's prompt, with pages for all that can come; `num_new`."""
    sequence.state_slot, sequence.page_tables = 3, [[5, 6, 7, 8, 9, 10]]
    row = ScheduledRow(
        sequence=sequence,
        start=0,
        num_scheduled_tokens=len(sequence.token_ids),
        is_decode=False,
        is_admission=True,
        can_sample=True,
        new_pages=(tuple(enumerate(sequence.page_tables[0])),),
    )
    num_tokens = len(sequence.token_ids)
    output = SchedulerOutput(rows=(row,), num_decode_rows=0, num_tokens=num_tokens)
    result = run.run(output)
    sequence.num_computed_tokens = num_tokens
    return result.num_new.tolist()


PROMPT = [4, 9, 2, 6]
OUTPUT = toy_output(PROMPT, 8)


@pytest.mark.parametrize("kind", ["eos", "stop id"])
@pytest.mark.parametrize("index", [0, 2, 4])
def test_after_an_end_token_a_row_samples_nothing_and_counts_nothing(kind: str, index: int) -> None:
    token = OUTPUT[index]
    assert OUTPUT.index(token) == index, "the test needs a token that is new there"
    run = ToyRun.make()
    ending: dict = {"eos": (token,)} if kind == "eos" else {"stop_token_ids": [token]}
    sequence = prompt_sequence("r", PROMPT, 20, **ending)
    num_new = admitted(run, sequence) + decode_ahead(run, sequence, 7)
    assert num_new == [1] * (index + 1) + [0] * (7 - index)
    record = np.asarray(run.state.slots)[3]
    assert record[SlotField.NUM_TOKENS] == len(PROMPT) + index + 1
    assert record[SlotField.LAST_TOKEN] == token
    assert record[SlotField.IS_FROZEN] == 1


@pytest.mark.parametrize("min_tokens", [3, 4, 5, 7])
def test_min_tokens_forbids_end_tokens_and_then_lets_them_end_the_row(min_tokens: int) -> None:
    stop = OUTPUT[4]
    assert OUTPUT.index(stop) == 4, "the test needs a token that is new there"
    expected = list(PROMPT)
    while expected[-1] != stop and len(expected) < len(PROMPT) + 20:
        logits = toy_logits(expected)
        if len(expected) - len(PROMPT) < min_tokens:
            logits[stop] = -np.inf
        expected.append(int(logits.argmax()))
    run = ToyRun.make()
    run.add(prompt_sequence("r", PROMPT, 20, min_tokens=min_tokens, stop_token_ids=[stop]))
    got = outputs(run.drain())["r"]
    assert got == expected[len(PROMPT) :]
    assert (got == OUTPUT[:5]) == (min_tokens <= 4)


def test_rows_frozen_ahead_of_the_host_end_once_and_return_their_pages() -> None:
    run = ToyRun.make(max_steps_in_flight=3)
    prompts = random_prompts(6)
    expected = {}
    for name, (prompt, _) in enumerate(prompts):
        answer = toy_output(prompt, 12)
        stop = answer[name]
        run.add(prompt_sequence(str(name), prompt, 12, stop_token_ids=[stop]))
        expected[str(name)] = answer[: answer.index(stop) + 1]
    in_flight, updates, num_frozen = deque(), [], 0
    while run.scheduler.has_unfinished:
        while (output := run.scheduler.schedule()) is not None:
            in_flight.append((output, run.run(output)))
        output, result = in_flight.popleft()
        num_frozen += sum(
            row.can_sample and not count
            for row, count in zip(output.rows, result.num_new, strict=True)
        )
        updates += run.scheduler.commit(output, result)
        run.scheduler.check_invariants()
    assert outputs(updates) == expected
    assert num_frozen > 0
    assert [u.finish_reason for u in updates if u.finish_reason] == [FinishReason.STOP] * 6
    assert run.scheduler.kv_cache_usage == 0


def test_a_row_with_nan_is_reported_and_frozen_and_no_other_row_notices() -> None:
    prompts = random_prompts(3)
    quiet = ToyRun.make()
    loud = ToyRun.make()
    for run in (quiet, loud):
        for name, (prompt, max_tokens) in enumerate(prompts):
            run.add(prompt_sequence(str(name), prompt, max_tokens))
    loud.add(prompt_sequence("nan", [3, POISON, 4], 9))
    updates = loud.drain()
    assert outputs(quiet.drain()) == {k: v for k, v in outputs(updates).items() if k != "nan"}
    (final,) = [update for update in updates if update.request_id == "nan"]
    assert final.finish_reason is FinishReason.ERROR and final.new_token_ids == ()
    assert final.error == "logits must be finite; got NaN, or no finite value"
    assert {u.request_id for u in updates if u.finish_reason is FinishReason.LENGTH} == set("012")


def test_the_row_with_nan_stays_frozen_when_steps_follow_before_the_host_knows() -> None:
    run = ToyRun.make()
    sequence = prompt_sequence("nan", [3, POISON, 4], 20)
    admitted(run, sequence)
    before = np.asarray(run.state.slots)[3]
    assert before[SlotField.IS_FROZEN] == 1
    assert decode_ahead(run, sequence, 3) == [0, 0, 0]
    after = np.asarray(run.state.slots)[3]
    assert after[SlotField.NUM_TOKENS] == before[SlotField.NUM_TOKENS] == 4


def test_nan_in_one_row_of_the_head_ends_every_row_with_an_error() -> None:
    run = ToyRun.make()
    run.head = run.head.at[7, 7].set(jnp.nan)
    for name, (prompt, max_tokens) in enumerate(random_prompts(3)):
        run.add(prompt_sequence(str(name), prompt, max_tokens))
    output = run.schedule()
    result = run.run(output)
    assert not result.is_finite.any()
    finals = run.scheduler.commit(output, result)
    assert len(finals) == len(output.rows)
    assert all(update.finish_reason is FinishReason.ERROR for update in finals)


@pytest.mark.parametrize("mode", [SampleMode.GREEDY, SampleMode.FULL])
def test_rows_with_nan_or_infinity_or_no_finite_logit_are_not_finite(mode: SampleMode) -> None:
    logits = np.zeros((6, VOCABULARY), np.float32)
    logits[1, 7], logits[2, 7], logits[3, 7], logits[4] = np.nan, np.inf, -np.inf, -np.inf
    # A row of the identity times the logits would make NaN of 0 * inf: so one hidden unit a row.
    for row, expected in enumerate([True, False, False, True, False, True]):
        head, hidden = logits[row][:, None], np.ones((6, 1), np.float32)
        result, _ = sample(mode, 6, head, hidden, np.arange(6), make_state())
        assert np.asarray(result)[:, 2].tolist() == [int(expected)] * 6


@pytest.mark.parametrize("most", [0, 2])
def test_decode_buckets_that_fuse_no_sampler_bring_the_same_tokens(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_all() -> tuple[list, list[tuple[bool, int]]]:
        run, updates, batches = ToyRun.make(), [], []
        for name, (prompt, max_tokens) in enumerate(random_prompts(5)):
            logprobs = None if name % 2 else 1
            run.add(prompt_sequence(str(name), prompt, max_tokens, logprobs=logprobs))
        while run.scheduler.has_unfinished:
            output = run.schedule()
            updates += run.scheduler.commit(output, run.run(output))
            batches.append((run.last_batch.bucket.is_decode_only, run.last_batch.sampler_rows))
        return [(u.request_id, u.new_token_ids, u.finish_reason) for u in updates], batches

    tokens, batches = run_all()
    assert {rows for is_decode, rows in batches if is_decode} == {0}
    monkeypatch.setattr(buckets, "MAX_FUSED_SAMPLER_ROWS", most)
    tokens_now, batches = run_all()
    assert tokens_now == tokens
    assert {rows for is_decode, rows in batches if is_decode} == ({6} if most == 0 else {0, 6})


def test_few_rows_are_padded_for_the_draw_and_draw_the_same() -> None:
    rng, seen = np.random.default_rng(1), []
    head = jnp.asarray(rng.normal(size=(VOCABULARY, 4)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    slots = np.zeros((MAX_NUM_SEQS, RECORD_SIZE), np.int32)
    for slot in range(3):
        sequence = prompt_sequence(str(slot), PROMPT, temperature=1.0, seed=slot, top_k=slot)
        write_record(slots[slot], sequence, 0)
    state = replace(make_state(), slots=jnp.asarray(slots))

    def draw(logits: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen.append({len(array) for array in (logits, *others)})
        return xla_sampling.sample(logits, *others)

    functions = replace(FUNCTIONS, draw=draw)
    alone, padded = (
        replace(functions, few_draw_rows=rows).sample(
            SampleMode.SAMPLED, 3, head, hidden, jnp.arange(3), state
        )[0]
        for rows in ((), (2, 5, 8))
    )
    assert seen == [{3}, {5}]
    np.testing.assert_array_equal(alone, padded)


def test_a_head_that_finds_greedy_tokens_takes_the_place_of_logits_of_many_rows() -> None:
    S = MIN_GREEDY_HEAD_ROWS

    def greedy_head(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert (hidden.shape, head.shape) == ((S, 4), (VOCABULARY, 4))
        return jnp.where(jnp.arange(S) % 3 == 1, jnp.nan, 1.5), jnp.arange(S) % 5 + 2

    functions = replace(FUNCTIONS, greedy_head=greedy_head)

    def sample(mode: SampleMode, rows: int) -> list[list[int]]:
        arrays = jnp.zeros((VOCABULARY, 4)), jnp.zeros((rows, 4)), jnp.arange(rows)
        result, _ = functions.sample(mode, rows, *arrays, make_state())
        return np.asarray(result)[:, [0, 2]].tolist()

    assert sample(SampleMode.GREEDY, S) == [[i % 5 + 2, i % 3 != 1] for i in range(S)]
    nothing_higher = [[0, 1]] * (S - 1)
    assert sample(SampleMode.GREEDY, S - 1) == nothing_higher
    assert [row[1] for row in sample(SampleMode.SAMPLED, S)] == [1] * S


def test_decode_steps_of_greedy_rows_run_as_one_program() -> None:
    run = ToyRun.make()
    run.add(prompt_sequence("r", PROMPT, 3))
    output = run.schedule()
    run.scheduler.commit(output, run.run(output))
    run.run(run.schedule())
    assert run.last_batch.mode is SampleMode.GREEDY
    assert run.last_batch.bucket.is_decode_only
