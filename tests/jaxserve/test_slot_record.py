"""The record of a slot: what the device is told of a sequence at its admission."""

import numpy as np
import pytest

from jaxserve.execution.slot_record import (
    MAX_STOP_IDS,
    RECORD_SIZE,
    SlotField,
    float_bits,
    stop_ids_of,
    write_record,
)
from jaxserve.request import Request, Sequence
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.endings import find_end_token_ids

UINT64 = 2**64


def make(seed: int = 0, token_ids: tuple[int, ...] = (5, 6, 7), eos=(2,), **params) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=token_ids[:3],
        sampling_params=SamplingParams(**params),
        eos_token_ids=eos,
    )
    return Sequence(request=request, index=0, seed=seed, token_ids=list(token_ids))


def record_of(sequence: Sequence) -> np.ndarray:
    record = np.full(RECORD_SIZE, -77, np.int32)
    write_record(record, sequence, 0)
    return record


def test_a_record_holds_counts_and_parameters() -> None:
    record = record_of(make(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, min_tokens=4))
    as_float = record.view(np.float32)
    assert record[SlotField.NUM_TOKENS] == record[SlotField.NUM_PROMPT_TOKENS] == 3
    assert record[SlotField.NUM_COMPUTED] == record[SlotField.LAST_TOKEN] == 0
    assert record[SlotField.IS_FROZEN] == record[SlotField.ADAPTER] == 0
    assert record[SlotField.MIN_TOKENS] == 4
    assert record[SlotField.TOP_K] == 5
    assert as_float[SlotField.TEMPERATURE] == np.float32(0.7)
    assert as_float[SlotField.TOP_P] == np.float32(0.9)
    assert as_float[SlotField.MIN_P] == np.float32(0.1)


def test_a_sequence_that_was_preempted_keeps_its_output_tokens_apart_from_its_prompt() -> None:
    record = record_of(make(token_ids=(5, 6, 7, 8, 9)))
    assert record[SlotField.NUM_TOKENS] == 5
    assert record[SlotField.NUM_PROMPT_TOKENS] == 3
    assert record[SlotField.NUM_COMPUTED] == 0


def test_greedy_sequences_have_temperature_zero_and_top_k_minus_one_is_off() -> None:
    assert record_of(make(temperature=0))[SlotField.TEMPERATURE] == 0
    assert record_of(make(temperature=1.0, top_k=-1))[SlotField.TOP_K] == 0


@pytest.mark.parametrize(
    "seed", [0, 1, -1, -(2**63), 2**31, 2**63 - 1, 2**63 + 2, 0x123456789ABCDEF]
)
def test_all_64_bits_of_a_seed_arrive(seed: int) -> None:
    record = record_of(make(seed))
    low, high = record[[SlotField.SEED_LOW, SlotField.SEED_HIGH]].view(np.uint32).tolist()
    assert (high << 32 | low) == seed % UINT64


def test_stop_ids_are_eos_and_stop_token_ids_without_repeats() -> None:
    sequence = make(eos=(2, 3), stop_token_ids=[9, 3])
    assert stop_ids_of(sequence) == (2, 3, 9)
    stop_ids = record_of(sequence)[SlotField.FIRST_STOP_ID :]
    assert stop_ids.tolist() == [2, 3, 9] + [-1] * (MAX_STOP_IDS - 3)


def test_ignored_eos_is_no_stop_id() -> None:
    assert stop_ids_of(make(eos=(2, 3), ignore_eos=True, stop_token_ids=[9])) == (9,)
    assert stop_ids_of(make(eos=(2,), ignore_eos=True)) == ()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_device_and_scheduler_end_a_sequence_at_the_same_ids(ignore_eos: bool) -> None:
    sequence = make(eos=(2, 3), ignore_eos=ignore_eos, stop_token_ids=[9, 3])
    assert set(stop_ids_of(sequence)) == find_end_token_ids(sequence.request)


def test_a_record_holds_as_many_stop_ids_as_a_request_may_have_and_no_more() -> None:
    stop_ids = list(range(10, 10 + MAX_STOP_IDS))
    full = make(ignore_eos=True, stop_token_ids=stop_ids)
    assert record_of(full)[SlotField.FIRST_STOP_ID :].tolist() == stop_ids
    with pytest.raises(AssertionError):
        record_of(make(eos=(2,), stop_token_ids=stop_ids))


def test_float_bits_are_those_of_float32() -> None:
    assert float_bits(1.0) == 0x3F800000
    assert np.array([float_bits(-0.3)], np.int32).view(np.float32)[0] == np.float32(-0.3)
