"""DeviceState: what the device knows of each running sequence between steps."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxserve.execution.packed_layout import PackedLayout
from jaxserve.execution.sampler import SamplingRows
from jaxserve.execution.slot_record import MAX_STOP_IDS, RECORD_SIZE, SlotField
from models.batch import ForwardBatch
from models.sharding import Sharder

NUM_CHANGING = 1 + max(
    SlotField.NUM_TOKENS, SlotField.NUM_COMPUTED, SlotField.LAST_TOKEN, SlotField.IS_FROZEN
)
"""The first columns of a record, which steps change; the others stay as they were admitted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Arrays indexed by state slot; donated to each program and rebound.

    Attributes:
      slots: int32[max_num_seqs, RECORD_SIZE]; columns are `SlotField`.
      page_tables: for each cache group int32[max_num_seqs, max_pages].
    """

    slots: jax.Array
    page_tables: tuple[jax.Array, ...]

    @property
    def num_slots(self) -> int:
        """How many there are; as a slot's id it stands for none."""
        return self.slots.shape[0]

    @classmethod
    def abstract(
        cls, sharder: Sharder, *, max_num_seqs: int, max_pages: int, num_groups: int
    ) -> "DeviceState":
        """The state's shapes, to lower programs with and to allocate from."""
        table = sharder.replicated((max_num_seqs, max_pages), jnp.int32)
        slots = sharder.replicated((max_num_seqs, RECORD_SIZE), jnp.int32)
        return cls(slots=slots, page_tables=(table,) * num_groups)  # pyright: ignore[reportArgumentType]


def apply_changes(state: DeviceState, inputs: dict[str, jax.Array]) -> DeviceState:
    """Write admitted records and new pages into the state; unused entries are dropped."""
    slots = state.slots
    if inputs["admitted_slots"].size:
        slots = slots.at[inputs["admitted_slots"]].set(inputs["admitted_records"], mode="drop")
    tables = []
    for table, updates in zip(state.page_tables, inputs["page_updates"], strict=True):
        tables.append(table.at[updates[:, 0], updates[:, 1]].set(updates[:, 2], mode="drop"))
    return replace(state, slots=slots, page_tables=tuple(tables))


def read_records(state: DeviceState, slot_ids: jax.Array) -> jax.Array:
    """int32[S, RECORD_SIZE]: the records of int32[S] slots; zeros for unused entries."""
    records = state.slots.at[slot_ids].get(mode="fill", fill_value=0)
    # Else XLA gathers anew wherever a record is read, and copies the state before it is written.
    return jax.lax.optimization_barrier(records)


def write_records(state: DeviceState, slot_ids: jax.Array, records: jax.Array) -> DeviceState:
    """Put back what steps change of int32[S, RECORD_SIZE]; unused entries are dropped."""
    slots = state.slots.at[slot_ids, :NUM_CHANGING].set(records[:, :NUM_CHANGING], mode="drop")
    return replace(state, slots=slots)


def _with_column(records: jax.Array, field: SlotField, values: jax.Array) -> jax.Array:
    """The records with int32[S] in a column, by elementwise work, which XLA fuses."""
    return jnp.where(jnp.arange(RECORD_SIZE) == field, values[:, None], records)


def make_forward_batch(
    state: DeviceState,
    records: jax.Array,
    inputs: dict[str, jax.Array],
    layout: PackedLayout,
    *,
    page_size: int,
) -> ForwardBatch:
    """Positions, slots, lengths and query offsets, computed from state, records and counts."""
    slot_ids, num_decode_rows = inputs["slot_ids"], inputs["counts"][1:2]
    S = layout.num_rows
    is_row = jnp.arange(S) < inputs["counts"][0]
    num_scheduled = jnp.where(is_row, inputs["num_scheduled"], 0)
    num_computed = records[:, SlotField.NUM_COMPUTED]
    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(num_scheduled)])
    rows, offsets, is_token = _tokens_to_rows(layout, num_scheduled, query_start_loc)
    positions = jnp.where(is_token, num_computed[rows] + offsets, 0)
    last_token = records[:, SlotField.LAST_TOKEN]
    token_ids = last_token if layout.num_tokens == 0 else _join_token_ids(inputs, last_token)
    tables = tuple(
        table[:, : layout.table_pages or None].at[slot_ids].get(mode="fill", fill_value=0)
        for table in state.page_tables
    )
    return ForwardBatch(
        token_ids=jnp.where(is_token, token_ids, 0),
        positions=positions[None],
        slot_mapping=tuple(
            _slot_mapping(table, rows, positions, is_token, page_size) for table in tables
        ),
        page_tables=tables,
        seq_lens=jnp.where(is_row, num_computed + num_scheduled, 0),
        query_start_loc=query_start_loc,
        num_decode_rows=num_decode_rows,
        logits_indices=jnp.maximum(query_start_loc[1:] - 1, 0),
        is_decode_only=layout.num_tokens == 0,
    )


def _tokens_to_rows(
    layout: PackedLayout, num_scheduled: jax.Array, query_start_loc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each token: its row, its offset in the row's chunk, and whether it is real."""
    S = layout.num_rows
    if layout.num_tokens == 0:
        return jnp.arange(S), jnp.zeros(S, jnp.int32), num_scheduled > 0
    tokens = jnp.arange(layout.num_tokens)
    rows = jnp.searchsorted(query_start_loc[1:], tokens, side="right", method="compare_all")
    rows = jnp.minimum(rows, S - 1)
    return rows, tokens - query_start_loc[rows], tokens < query_start_loc[-1]


def _join_token_ids(inputs: dict[str, jax.Array], last_token: jax.Array) -> jax.Array:
    """Decode rows stand first and take the token sampled on the device; others were sent."""
    sent = inputs["token_ids"]
    S = last_token.shape[0]
    is_decode = jnp.arange(S) < inputs["counts"][1]
    return sent.at[:S].set(jnp.where(is_decode, last_token, sent[:S]))


def _slot_mapping(
    table: jax.Array, rows: jax.Array, positions: jax.Array, is_token: jax.Array, page_size: int
) -> jax.Array:
    """Padding tokens write into page 0, the null page, which no sequence owns."""
    slots = table[rows, positions // page_size] * page_size + positions % page_size
    padding = jnp.arange(positions.shape[0]) % page_size
    return jnp.where(is_token, slots, padding)


def advance_computed(records: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """The records after a forward pass: the tokens up to int32[S] `seq_lens` are in pages."""
    return _with_column(records, SlotField.NUM_COMPUTED, seq_lens)


def sampling_rows(records: jax.Array) -> SamplingRows:
    """The sampler's view of int32[S, RECORD_SIZE]."""

    def as_float(field: SlotField) -> jax.Array:
        return jax.lax.bitcast_convert_type(records[:, field], jnp.float32)

    seeds = jnp.stack([records[:, SlotField.SEED_HIGH], records[:, SlotField.SEED_LOW]], axis=1)
    return SamplingRows(
        seeds=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
        positions=records[:, SlotField.NUM_TOKENS],
        temperature=as_float(SlotField.TEMPERATURE),
        top_k=records[:, SlotField.TOP_K],
        top_p=as_float(SlotField.TOP_P),
        min_p=as_float(SlotField.MIN_P),
        stop_ids=records[:, SlotField.FIRST_STOP_ID : SlotField.FIRST_STOP_ID + MAX_STOP_IDS],
        forbids_stop=_num_output_tokens(records) < records[:, SlotField.MIN_TOKENS],
    )


def can_sample(records: jax.Array) -> jax.Array:
    """bool[S]: all existing tokens are computed, and no end was sampled."""
    is_complete = records[:, SlotField.NUM_COMPUTED] == records[:, SlotField.NUM_TOKENS]
    is_live = (records[:, SlotField.IS_FROZEN] == 0) & (records[:, SlotField.NUM_TOKENS] > 0)
    return is_complete & is_live


def record_tokens(
    records: jax.Array, tokens: jax.Array, num_new: jax.Array, is_finite: jax.Array
) -> jax.Array:
    """The records with int32[S] sampled tokens where `num_new` is 1; rows that ended are frozen."""
    stop_ids = records[:, SlotField.FIRST_STOP_ID : SlotField.FIRST_STOP_ID + MAX_STOP_IDS]
    is_stop = jnp.any(stop_ids == tokens[:, None], axis=1)
    may_stop = _num_output_tokens(records) + 1 >= records[:, SlotField.MIN_TOKENS]
    ends = (is_stop & may_stop) | ~is_finite
    is_new = num_new > 0
    last = jnp.where(is_new, tokens, records[:, SlotField.LAST_TOKEN])
    frozen = records[:, SlotField.IS_FROZEN] | (ends & is_new).astype(jnp.int32)
    num_tokens = records[:, SlotField.NUM_TOKENS] + num_new
    records = _with_column(records, SlotField.NUM_TOKENS, num_tokens)
    records = _with_column(records, SlotField.LAST_TOKEN, last)
    return _with_column(records, SlotField.IS_FROZEN, frozen)


def _num_output_tokens(records: jax.Array) -> jax.Array:
    return records[:, SlotField.NUM_TOKENS] - records[:, SlotField.NUM_PROMPT_TOKENS]
