"""The pure functions that are compiled: forward, sample, their fusion for decode, and admit."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

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
    LogSoftmax,
    TopLogprobs,
    choose_draw,
    sample_tokens,
    split_over_rows,
    top_logprobs,
)
from models.kv_cache import KVCache
from models.layers import compute_logits
from models.sharding import Sharder
from models.weight_layout import WeightLayout

RESULT_COLUMNS = 3
"""Of every result: token, count of new tokens, finite flag. Log-probabilities follow."""


@dataclass(frozen=True)
class StepFunctions:
    """The step of one model. All methods are pure; arrays come in and go out.

    Attributes:
      weights: the layout of the leaves.
      sharder: of the devices that share the model; None = one device.
      draw: the version of the sampler.
      logits: (head, hidden, soft cap) to logits: `compute_logits`, or what rounds in another way.
      log_softmax: the same of `jax.nn.log_softmax`.
    """

    weights: WeightLayout
    sharder: Sharder | None = None
    draw: Draw = field(default_factory=choose_draw)
    logits: Callable[..., jax.Array] = compute_logits
    log_softmax: LogSoftmax = jax.nn.log_softmax

    def forward(
        self,
        layout: PackedLayout,
        leaves: list[jax.Array],
        cache: KVCache,
        state: DeviceState,
        packed: jax.Array,
    ) -> tuple[jax.Array, jax.Array, KVCache, DeviceState]:
        """Compute the scheduled tokens.

        Args:
          layout: static, of `packed`.
          leaves: weights; not donated.
          cache: donated.
          state: donated.
          packed: int32[layout.size].

        Returns:
          hidden [S, D] of each row's last token, slot_ids int32[S], cache, state.
        """
        hidden, slot_ids, records, cache, state = self._compute(
            layout, leaves, cache, state, packed
        )
        return hidden, slot_ids, cache, write_records(state, slot_ids, records)

    def sample(
        self,
        mode: SampleMode,
        head: jax.Array,
        hidden: jax.Array,
        slot_ids: jax.Array,
        state: DeviceState,
    ) -> tuple[jax.Array, DeviceState]:
        """Sample the rows whose existing tokens are all computed.

        Args:
          mode: static.
          head: [V, D].
          hidden: [S, D].
          slot_ids: int32[S].
          state: donated.

        Returns:
          result int32[S, RESULT_COLUMNS + ...] (one array, since one copy to the host is
          cheaper than several), and the state with the new tokens.
        """
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
        """Forward and sample in one program, for pure decode steps."""
        hidden, slot_ids, records, cache, state = self._compute(
            layout, leaves, cache, state, packed
        )
        head = leaves[self.weights.head_index]
        result, records = self._draw_tokens(mode, head, hidden, records)
        return result, cache, write_records(state, slot_ids, records)

    @staticmethod
    def admit(layout: PackedLayout, state: DeviceState, packed: jax.Array) -> DeviceState:
        """Only change the state: for admissions that bring more than a step's buffer holds."""
        return apply_changes(state, layout.split(packed))

    def _compute(
        self,
        layout: PackedLayout,
        leaves: list[jax.Array],
        cache: KVCache,
        state: DeviceState,
        packed: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, KVCache, DeviceState]:
        """Hidden states, slots, new records that are yet to be written, cache and state."""
        inputs = layout.split(packed)
        state = apply_changes(state, inputs)
        slot_ids = inputs["slot_ids"]
        records = read_records(state, slot_ids)
        page_size = cache.groups[0].geometry.page_size
        batch = make_forward_batch(state, records, inputs, layout, page_size=page_size)
        hidden, cache = self.weights.merge(leaves)(batch, cache)
        return hidden, slot_ids, advance_computed(records, batch.seq_lens), cache, state

    def _draw_tokens(
        self, mode: SampleMode, head: jax.Array, hidden: jax.Array, records: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The result of `sample`, and new records that are yet to be written."""
        logits = self.logits(head, hidden, self.weights.logit_soft_cap)
        draw = self.draw
        if mode != SampleMode.GREEDY and self.sharder is not None and self.sharder.mesh.size > 1:
            logits = self.sharder.whole_rows(logits)
            draw = split_over_rows(draw, self.sharder.mesh)
        tokens, is_finite = sample_tokens(logits, sampling_rows(records), mode, draw)
        num_new = can_sample(records).astype(jnp.int32)
        columns = [tokens, num_new, is_finite.astype(jnp.int32)]
        result = jnp.stack(columns, axis=1)
        if mode == SampleMode.FULL:
            top = top_logprobs(logits, tokens, self.log_softmax)
            result = jnp.concatenate([result, _logprob_columns(top)], axis=1)
        return result, record_tokens(records, tokens, num_new, is_finite)


def _logprob_columns(top: TopLogprobs) -> jax.Array:
    """int32[S, 2 + 2 * NUM_TOP_LOGPROBS]: rank, ids, and the bits of the log-probabilities."""
    values = jnp.concatenate([top.chosen[:, None], top.top_values], axis=1)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([top.rank[:, None], top.top_ids, bits], axis=1)
