"""The pure functions that are compiled: forward, sample, their fusion for decode, and admit."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.device_state import (
    DeviceState,
    advance_computed,
    apply_changes,
    can_sample,
    make_forward_batch,
    read_records,
    record_tokens,
    sampling_rows,
    write_records,
)
from jaxserve.execution.packed_layout import PackedLayout
from jaxserve.execution.sample_mode import SampleMode
from jaxserve.execution.sampler import (
    Draw,
    GreedyHead,
    LogSoftmax,
    TopLogprobs,
    choose_draw,
    padded_rows,
    sample_tokens,
    split_over_rows,
    top_logprobs,
)
from models.kv_cache import KVCache
from models.layers import compute_logits
from models.sharding import Sharder
from models.weight_layout import WeightLayout

MIN_GREEDY_HEAD_ROWS = 16
"""Rows from which the greedy head is faster than logits (docs/performance.md): not yet at 8."""
RESULT_COLUMNS = 3
"""Of every result: token, count of new tokens, finite flag. Log-probabilities follow."""


@dataclass(frozen=True)
class StepFunctions:
    """The step of one model. All methods are pure; arrays come in and go out.

    Attributes:
      weights: the layout of the leaves.
      sharder: of the devices that share the model; None = one device.
      draw: the version of the sampler.
      few_draw_rows: ascending; few rows are padded to one of these before they are drawn, since a
        draw of each number of rows takes a start's time.
      logits: (head, hidden, soft cap) to logits: `compute_logits`, or what rounds in another way.
      log_softmax: the same of `jax.nn.log_softmax`.
      greedy_head: (hidden, head) to the highest logits and their tokens, without writing all
        logits; None = there is no such version. Few rows do without, whose logits are small.
    """

    weights: WeightLayout
    sharder: Sharder | None = None
    draw: Draw = field(default_factory=choose_draw)
    few_draw_rows: tuple[int, ...] = ()
    logits: Callable[..., jax.Array] = compute_logits
    log_softmax: LogSoftmax = jax.nn.log_softmax
    greedy_head: GreedyHead | None = None

    def forward(
        self,
        layout: PackedLayout,
        num_outputs: int,
        leaves: list[jax.Array],
        cache: KVCache,
        state: DeviceState,
        packed: jax.Array,
    ) -> tuple[jax.Array, jax.Array, KVCache, DeviceState]:
        """Compute the scheduled tokens.

        Args:
          layout: static, of `packed`.
          num_outputs: static, the largest S of any bucket, so that any sampler takes the outputs.
          leaves: weights; not donated.
          cache: donated.
          state: donated.
          packed: int32[layout.size].

        Returns:
          hidden [num_outputs, D] of each row's last token, slot_ids int32[num_outputs], cache,
          state.
        """
        inputs = layout.split(packed)
        state = apply_changes(state, inputs)
        slot_ids = inputs["slot_ids"]
        records = read_records(state, slot_ids)
        hidden, records, cache = self._advance(layout, leaves, inputs, cache, state, records)
        state = write_records(state, slot_ids, records)
        num_missing = num_outputs - layout.num_rows
        hidden = jnp.pad(hidden, ((0, num_missing), (0, 0)))
        slot_ids = jnp.pad(slot_ids, (0, num_missing), constant_values=state.num_slots)
        return hidden, slot_ids, cache, state

    def sample(
        self,
        mode: SampleMode,
        num_rows: int,
        head: jax.Array,
        hidden: jax.Array,
        slot_ids: jax.Array,
        state: DeviceState,
    ) -> tuple[jax.Array, DeviceState]:
        """Sample the rows whose existing tokens are all computed.

        Args:
          mode: static.
          num_rows: static, R; the step has no more rows.
          head: [V, D].
          hidden: [S, D], S at least R.
          slot_ids: int32[S].
          state: donated.

        Returns:
          result int32[R, RESULT_COLUMNS + ...] (one array, since one copy to the host is
          cheaper than several), and the state with the new tokens.
        """
        hidden, slot_ids = hidden[:num_rows], slot_ids[:num_rows]
        records = read_records(state, slot_ids)
        result, records = self._draw_tokens(mode, head, hidden, records)
        return result, write_records(state, slot_ids, records)

    def decode(
        self,
        layout: PackedLayout,
        mode: SampleMode,
        leaves: list[jax.Array],
        cache: KVCache,
        state: DeviceState,
        packed: jax.Array,
    ) -> tuple[jax.Array, KVCache, DeviceState]:
        """Forward and sample in one program, `layout.num_steps` times; for pure decode steps.

        Returns:
          result int32[S, W * RESULT_COLUMNS], cache, state.
        """
        inputs = layout.split(packed)
        state = apply_changes(state, inputs)
        records = read_records(state, inputs["slot_ids"])
        head, S, W = leaves[self.weights.head_index], layout.num_rows, layout.num_steps

        def step(inputs, cache, records):
            hidden, records, cache = self._advance(layout, leaves, inputs, cache, state, records)
            result, records = self._draw_tokens(mode, head, hidden, records)
            return result, cache, records

        def body(index, carried):
            results, cache, records = carried
            has_token = index < inputs["num_scheduled"]
            now = inputs | {"num_scheduled": has_token.astype(jnp.int32)}
            result, cache, records = step(now, cache, records)
            return lax.dynamic_update_index_in_dim(results, result, index, 0), cache, records

        if W == 1:
            results, cache, records = step(inputs, cache, records)
        else:
            results = jnp.zeros((W, S, RESULT_COLUMNS), jnp.int32)
            results, cache, records = lax.fori_loop(0, W, body, (results, cache, records))
            results = results.swapaxes(0, 1).reshape(S, W * RESULT_COLUMNS)
        return results, cache, write_records(state, inputs["slot_ids"], records)

    @staticmethod
    def admit(layout: PackedLayout, state: DeviceState, packed: jax.Array) -> DeviceState:
        """Only change the state: for admissions that bring more than a step's buffer holds."""
        return apply_changes(state, layout.split(packed))

    def _advance(
        self,
        layout: PackedLayout,
        leaves: list[jax.Array],
        inputs: dict[str, jax.Array],
        cache: KVCache,
        state: DeviceState,
        records: jax.Array,
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Hidden states of the tokens of `inputs`, new records to be written, cache."""
        page_size = cache.groups[0].geometry.page_size
        batch = make_forward_batch(state, records, inputs, layout, page_size=page_size)
        hidden, cache = self.weights.merge(leaves)(batch, cache)
        return hidden, advance_computed(records, batch.seq_lens), cache

    def _draw_tokens(
        self, mode: SampleMode, head: jax.Array, hidden: jax.Array, records: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The result of `sample`, and new records that are yet to be written."""
        is_many = hidden.shape[0] >= MIN_GREEDY_HEAD_ROWS
        if mode == SampleMode.GREEDY and is_many and self.greedy_head is not None:
            highest, tokens = self.greedy_head(hidden, head)
            is_finite, logprobs = jnp.isfinite(highest), None
        else:
            tokens, is_finite, logprobs = self._draw_of_logits(mode, head, hidden, records)
        num_new = can_sample(records).astype(jnp.int32)
        columns = [tokens, num_new, is_finite.astype(jnp.int32)]
        result = jnp.stack(columns, axis=1)
        if logprobs is not None:
            result = jnp.concatenate([result, _logprob_columns(logprobs)], axis=1)
        return result, record_tokens(records, tokens, num_new, is_finite)

    def _draw_of_logits(
        self, mode: SampleMode, head: jax.Array, hidden: jax.Array, records: jax.Array
    ) -> tuple[jax.Array, jax.Array, TopLogprobs | None]:
        """Tokens and whether their rows are finite, with log-probabilities if `mode` has them."""
        num_rows = hidden.shape[0]
        num_padding = padded_rows(num_rows, self.few_draw_rows) - num_rows
        if mode != SampleMode.GREEDY and num_padding:
            hidden = jnp.pad(hidden, ((0, num_padding), (0, 0)))
            records = jnp.pad(records, ((0, num_padding), (0, 0)))
        logits = self.logits(head, hidden, self.weights.logit_soft_cap)
        draw = self.draw
        if mode != SampleMode.GREEDY and self.sharder is not None and self.sharder.mesh.size > 1:
            logits = self.sharder.whole_rows(logits)
            draw = split_over_rows(draw, self.sharder.mesh)
        tokens, is_finite = sample_tokens(logits, sampling_rows(records), mode, draw)
        top = None
        if mode == SampleMode.FULL:
            top = top_logprobs(logits, tokens, self.log_softmax)
        return jax.tree.map(lambda array: array[:num_rows], (tokens, is_finite, top))


def _logprob_columns(top: TopLogprobs) -> jax.Array:
    """int32[S, 2 + 2 * NUM_TOP_LOGPROBS]: rank, ids, and the bits of the log-probabilities."""
    values = jnp.concatenate([top.chosen[:, None], top.top_values], axis=1)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([top.rank[:, None], top.top_ids, bits], axis=1)
