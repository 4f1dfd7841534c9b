"""The real step functions, batch builder and scheduler around a model that plain Python repeats.

The model writes each token into its slot, reads the whole context back through the page table,
and answers by a sum over it: a wrong position, slot, length, table, token or query offset gives
another answer. One compilation takes a fraction of a second.
"""

import functools
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.batch_builder import BatchBuilder, PackedBatch
from jaxserve.execution.buckets import BucketTable
from jaxserve.execution.device_state import (
    DeviceState,
    apply_changes,
    make_forward_batch,
    read_records,
)
from jaxserve.execution.packed_layout import PackedLayout
from jaxserve.execution.step_functions import StepFunctions
from jaxserve.request import Request, Sequence
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import SchedulerOutput, SequenceUpdate, StepResult
from models.batch import ForwardBatch
from models.kv_cache import CacheGeometry, KVCache, allocate_cache
from models.sharding import Sharder, make_mesh
from models.weight_layout import WeightLayout
from tests.jaxserve.scheduler_builders import VOCABULARY, make_scheduler

PAGE_SIZE, MAX_PAGES, MAX_NUM_SEQS = 4, 16, 6
POISON = VOCABULARY - 1
"""Where this token is in a context, the hidden state is NaN."""


def toy_logits(token_ids: Items[int]) -> np.ndarray:
    """float32[VOCABULARY]: what the model answers to a context, in plain Python."""
    if POISON in token_ids:
        return np.full(VOCABULARY, np.nan, np.float32)
    total = sum((token + 1) * (position % 11 + 1) for position, token in enumerate(token_ids))
    logits = np.zeros(VOCABULARY, np.float32)
    logits[(total + 5 * token_ids[-1] + 3 * (len(token_ids) - 1)) % POISON] = 10
    return logits


def toy_output(token_ids: Items[int], count: int) -> list[int]:
    """The next greedy tokens of a context."""
    known = list(token_ids)
    for _ in range(count):
        known.append(int(toy_logits(known).argmax()))
    return known[len(token_ids) :]


def prompt_sequence(
    name: str, prompt: list[int], max_tokens: int = 8, *, eos: tuple[int, ...] = (), **params: Any
) -> Sequence:
    """A sequence with this prompt, greedy unless told otherwise."""
    params.setdefault("temperature", 0)
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=eos,
    )
    return Sequence(request=request, index=0, seed=0, token_ids=list(prompt))


def random_prompts(count: int = 8) -> list[tuple[list[int], int]]:
    """Up to 8 prompts without poison, and how many tokens each shall get."""
    lengths = [(5, 16), (1, 20), (20, 9), (4, 22), (13, 4), (8, 30), (3, 3), (30, 5)]
    rng = np.random.default_rng(0)
    return [(rng.integers(2, POISON, length).tolist(), n) for length, n in lengths[:count]]


def _toy_model(batch: ForwardBatch, cache: KVCache) -> tuple[jax.Array, KVCache]:
    group, slots = cache.groups[0], batch.slot_mapping[0]
    place = (0, slots // PAGE_SIZE, slots % PAGE_SIZE, 0, 0)
    k_pages = group.k_pages.at[place].set(batch.token_ids + 1.0)
    v_pages = group.v_pages.at[place].set(batch.positions[0] + 1.0)
    table = batch.page_tables[0]
    context = k_pages[0][table].reshape(table.shape[0], -1)
    offsets = jnp.arange(context.shape[1])
    context = jnp.where(offsets < batch.seq_lens[:, None], context, 0)
    total = (context * (offsets % 11 + 1)).sum(-1).astype(jnp.int32)
    last_token = batch.token_ids[batch.logits_indices]
    last_position = batch.positions[0][batch.logits_indices]
    answer = (total + 5 * last_token + 3 * last_position) % POISON
    hidden = 10 * jax.nn.one_hot(answer, VOCABULARY)
    is_poisoned = (context == POISON + 1).any(-1)
    hidden = jnp.where(is_poisoned[:, None], jnp.nan, hidden)
    return hidden, cache.with_group(0, replace(group, k_pages=k_pages, v_pages=v_pages))


class _ToyLayout:
    head_index = 0
    logit_soft_cap = None

    def merge(self, leaves: Items[jax.Array]) -> Any:
        return _toy_model


FUNCTIONS = StepFunctions(cast(WeightLayout, _ToyLayout()))
_forward = jax.jit(FUNCTIONS.forward, static_argnums=(0, 1))
_decode = jax.jit(FUNCTIONS.decode, static_argnums=(0, 1))
sample = jax.jit(FUNCTIONS.sample, static_argnums=(0, 1))
admit = jax.jit(FUNCTIONS.admit, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _observe(layout: PackedLayout, state: DeviceState, packed: np.ndarray) -> ForwardBatch:
    inputs = layout.split(packed)
    state = apply_changes(state, inputs)
    records = read_records(state, inputs["slot_ids"])
    return make_forward_batch(state, records, inputs, layout, page_size=PAGE_SIZE)


def make_builder(buckets: BucketTable, **limits: Any) -> BatchBuilder:
    """A builder for the toy model."""
    defaults: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS,
        "page_size": PAGE_SIZE,
        "num_pages": (40,),
        "max_pages_per_seq": MAX_PAGES,
        "vocab_size": VOCABULARY,
    }
    return BatchBuilder(buckets, **(defaults | limits))


def make_state(max_num_seqs: int = MAX_NUM_SEQS, max_pages: int = MAX_PAGES) -> DeviceState:
    """A state of zeros with one cache group."""
    sharder = Sharder(make_mesh())
    shapes = DeviceState.abstract(
        sharder, max_num_seqs=max_num_seqs, max_pages=max_pages, num_groups=1
    )
    return sharder.zeros(shapes)


@dataclass
class ToyRun:
    """A scheduler and the arrays of a toy device; every step is kept as it was before and after.

    Attributes:
      cache, state: after the last step.
      last_batch: the packed batch of the last step.
      forward_batch: what the model read in the last step.
    """

    scheduler: Scheduler
    buckets: BucketTable
    builder: BatchBuilder
    cache: KVCache
    state: DeviceState
    head: jax.Array = field(default_factory=lambda: jnp.eye(VOCABULARY))
    last_batch: PackedBatch = field(init=False)
    forward_batch: ForwardBatch = field(init=False)

    @classmethod
    def make(cls, num_pages: int = 40, **limits: Any) -> "ToyRun":
        """At most 6 rows and 16 tokens a step, in buckets of 2 and 6 rows."""
        config: dict[str, Any] = {
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": 16,
            "max_model_len": PAGE_SIZE * MAX_PAGES,
            "token_buckets": (16,),
            "row_buckets": (2, MAX_NUM_SEQS),
            "max_steps_in_flight": 1,
            **limits,
        }
        buckets = BucketTable((2, MAX_NUM_SEQS), (16,))
        geometry = CacheGeometry(
            num_layers=1, page_size=PAGE_SIZE, num_kv_heads=1, stored_head_dim=1, dtype="float32"
        )
        return cls(
            make_scheduler(num_pages, PAGE_SIZE, **config),
            buckets,
            make_builder(buckets, num_pages=(num_pages,)),
            allocate_cache((geometry,), (num_pages,), Sharder(make_mesh())),
            make_state(),
        )

    def run(self, output: SchedulerOutput) -> StepResult:
        """Build a step and run it by the programs that the runner would take."""
        batch = self.last_batch = self.builder.build(output)
        layout, leaves = self.builder.layout(batch.bucket), [self.head]
        for buffer in batch.admissions:
            self.state = admit(self.builder.admission_layout, self.state, buffer)
        self.forward_batch = _observe(layout, self.state, batch.packed)
        arrays = (leaves, self.cache, self.state, batch.packed)
        if batch.mode is not None and batch.bucket.fuses_sampler:
            result, self.cache, self.state = _decode(layout, batch.mode, *arrays)
            return _read(result, batch.num_rows)
        hidden, slot_ids, self.cache, self.state = _forward(layout, MAX_NUM_SEQS, *arrays)
        if batch.mode is None:
            return _read(np.tile(np.array([[0, 0, 1]], np.int32), (batch.num_rows, 1)), None)
        static = (batch.mode, batch.sampler_rows)
        result, self.state = sample(*static, self.head, hidden, slot_ids, self.state)
        return _read(result, batch.num_rows)

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences."""
        for sequence in sequences:
            self.scheduler.add(sequence)

    def schedule(self) -> SchedulerOutput:
        """The next step, which must be there."""
        output = self.scheduler.schedule()
        assert output is not None
        return output

    def drain(self) -> list[SequenceUpdate]:
        """Run everything, one step in flight."""
        updates: list[SequenceUpdate] = []
        while self.scheduler.has_unfinished:
            output = self.schedule()
            updates += self.scheduler.commit(output, self.run(output))
            self.scheduler.check_invariants()
        return updates

    def pages(self) -> np.ndarray:
        """float32[P, B, 2]: token + 1 and position + 1 of every slot."""
        group = self.cache.groups[0]
        return np.stack([group.k_pages[0, :, :, 0, 0], group.v_pages[0, :, :, 0, 0]], -1)


def _read(result: jax.Array | np.ndarray, num_rows: int | None) -> StepResult:
    rows = np.asarray(result)[:num_rows]
    return StepResult(tokens=rows[:, :1], num_new=rows[:, 1], is_finite=rows[:, 2] > 0)
