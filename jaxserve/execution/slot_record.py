"""The record of one state slot: the columns that a sequence has in the device state; no JAX."""

import enum
import struct

import numpy as np

from jaxserve.request import Sequence

MAX_STOP_IDS = 32


class SlotField(enum.IntEnum):
    """Columns of `DeviceState.slots`; those marked f32 hold the bits of a float."""

    NUM_TOKENS = 0
    """Tokens that exist: prompt and sampled."""
    NUM_COMPUTED = 1
    """Tokens whose keys and values are in pages."""
    LAST_TOKEN = 2
    IS_FROZEN = 3
    """1 after an end token was sampled or logits were not finite: nothing is sampled any more."""
    NUM_PROMPT_TOKENS = 4
    MIN_TOKENS = 5
    SEED_HIGH = 6
    SEED_LOW = 7
    TEMPERATURE = 8
    """f32; 0 = greedy."""
    TOP_K = 9
    """0 = off."""
    TOP_P = 10
    """f32."""
    MIN_P = 11
    """f32."""
    ADAPTER = 12
    """0 = none."""
    FIRST_STOP_ID = 13
    """`MAX_STOP_IDS` columns follow; -1 = unused."""


RECORD_SIZE = SlotField.FIRST_STOP_ID + MAX_STOP_IDS


def float_bits(value: float) -> int:
    """The bits of a float32 as an int32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def stop_ids_of(sequence: Sequence) -> tuple[int, ...]:
    """Ids that end a sequence on the device: end of sequence unless ignored, and stop ids."""
    params = sequence.request.sampling_params
    eos = () if params.ignore_eos else sequence.request.eos_token_ids
    return tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))


def write_record(record: np.ndarray, sequence: Sequence, num_computed_tokens: int) -> None:
    """Fill int32[RECORD_SIZE] with what the device must know of a sequence at admission."""
    params = sequence.request.sampling_params
    stop_ids = stop_ids_of(sequence)
    assert len(stop_ids) <= MAX_STOP_IDS, "checked when the request was made"
    seed = struct.pack("<Q", sequence.seed & (2**64 - 1))
    fields = [0] * SlotField.FIRST_STOP_ID  # a list: each assignment to an array takes 0.2 us
    fields[SlotField.NUM_TOKENS] = len(sequence.token_ids)
    fields[SlotField.NUM_COMPUTED] = num_computed_tokens
    fields[SlotField.NUM_PROMPT_TOKENS] = sequence.num_prompt_tokens
    fields[SlotField.MIN_TOKENS] = params.min_tokens
    fields[SlotField.SEED_LOW], fields[SlotField.SEED_HIGH] = struct.unpack("<ii", seed)
    fields[SlotField.TEMPERATURE] = 0 if params.is_greedy else float_bits(params.temperature)
    fields[SlotField.TOP_K] = max(params.top_k, 0)
    fields[SlotField.TOP_P] = float_bits(params.top_p)
    fields[SlotField.MIN_P] = float_bits(params.min_p)
    record[:] = (*fields, *stop_ids, *(-1,) * (MAX_STOP_IDS - len(stop_ids)))
