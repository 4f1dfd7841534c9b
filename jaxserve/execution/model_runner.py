"""ModelRunner: the only object that holds arrays between steps."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.execution.batch_builder import PackedBatch
from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.programs import ProgramTable
from jaxserve.execution.sampler import NUM_TOP_LOGPROBS
from jaxserve.execution.step_functions import RESULT_COLUMNS
from jaxserve.step import StepResult, TokenLogprobs
from models.kv_cache import KVCache
from models.sharding import compile_zeros

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched step whose result may still be under way."""

    batch: PackedBatch
    result: jax.Array | None


class ModelRunner:
    """Weights, cache and state of one engine, and the dispatch of steps on them.

    Attributes:
      num_uploaded_bytes: bytes of steps' buffers sent to the device since the start.
      page_mover: copies pages to the host and back; None = there is no host tier.
    """

    def __init__(
        self,
        leaves: Sequence[jax.Array],
        cache: KVCache,
        state: DeviceState,
        programs: ProgramTable,
        *,
        head_index: int,
        page_mover: PageMover | None = None,
        allocate: Callable[[], tuple[KVCache, DeviceState]] | None = None,
        load_weights: Callable[[], list[jax.Array]] | None = None,
    ):
        """Hold the arrays of one engine.

        Args:
          leaves: the weights.
          cache: of keys and values.
          state: of the slots.
          programs: all compiled.
          head_index: of the leaf that makes logits.
          page_mover: of the host tier.
          allocate: makes a cache and a state of zeros, compiled; it is compiled here if not given.
          load_weights: reads the weights again from where they came from.
        """
        self._leaves, self._head = list(leaves), leaves[head_index]
        self._head_index = head_index
        self._cache, self._state = cache, state
        self._allocate = allocate or compile_zeros((cache, state))
        self._load_weights = load_weights
        self._programs, self.page_mover = programs, page_mover
        self._cache_changes: deque[Callable[[KVCache], KVCache]] = deque()
        self.num_uploaded_bytes = 0

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        """Start a step and return at once; its tokens stay on the device for the next one."""
        if self.page_mover is not None:
            self._cache = self.page_mover.apply(batch.offloads, batch.fetches, self._cache)
        for pairs in batch.copies:
            self._cache = self._programs.copy_pages()(self._cache, self._count_upload(pairs))
        while self._cache_changes:
            self._cache = self._cache_changes.popleft()(self._cache)
        for admission in batch.admissions:
            self._state = self._programs.admit()(self._state, self._count_upload(admission))
        packed = self._count_upload(batch.packed)
        mode, bucket = batch.mode, batch.bucket
        if mode is not None and bucket.fuses_sampler:
            program = self._programs.decode(bucket, mode)
            result, self._cache, self._state = program(
                self._leaves, self._cache, self._state, packed
            )
        else:
            result = self._forward_and_sample(batch, packed)
        if result is not None:
            result.copy_to_host_async()
        return StepHandle(batch, result)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and read its result."""
        batch = handle.batch
        if handle.result is None:
            nothing = np.zeros(batch.num_rows, np.int32)
            return StepResult(
                tokens=nothing[:, None], num_new=nothing, is_finite=np.ones(batch.num_rows, bool)
            )
        result = np.asarray(handle.result)[: batch.num_rows]
        width = batch.bucket.num_steps
        columns = result[:, : width * RESULT_COLUMNS].reshape(-1, width, RESULT_COLUMNS)
        tokens, num_new, is_finite = columns[..., 0], columns[..., 1], columns[..., 2] != 0
        if width > 1:
            is_finite |= num_new == 0  # what a row computes behind its end does not count
        return StepResult(
            tokens=tokens,
            num_new=num_new.sum(axis=1),
            is_finite=is_finite.all(axis=1),
            logprobs=_read_logprobs(result, batch.num_logprobs),
        )

    def is_intact(self) -> bool:
        """Whether cache and state are there; waits for the steps in flight.

        A program that fails leaves errors in place of the arrays that were donated to it.
        """
        try:
            jax.block_until_ready((self._cache, self._state))
        except Exception as error:
            logger.warning("cache and state are lost: %s", error)
            return False
        return True

    def drop_moves(self) -> bool:
        """Forget the pages on their way to the host; returns whether one failed to get there."""
        return self.page_mover is not None and self.page_mover.drop_pending()

    def reset(self) -> None:
        """Allocate cache and state anew, zeros; what they held is freed first.

        Raises:
          JaxRuntimeError: the device has no memory for them, or does not answer.
        """
        self.drop_cache()
        self._cache, self._state = self._allocate()
        jax.block_until_ready(self._cache)
        jax.device_get(self._state)

    def drop_cache(self) -> None:
        """Free cache, state and host pages; `reset` must come before the next step."""
        self.drop_host_pages()
        _delete((self._cache, self._state))

    def drop_host_pages(self) -> None:
        """Free the memory of all pages on the host, to which nothing may refer any more."""
        if self.page_mover is not None:
            self.page_mover.clear()

    @property
    def cache(self) -> KVCache:
        """As the newest step leaves it; the next one takes it away."""
        return self._cache

    def change_cache(self, change: Callable[[KVCache], KVCache]) -> None:
        """Give the cache to a function that may donate it, and keep what that returns."""
        self._cache = change(self._cache)

    @property
    def weights(self) -> Sequence[jax.Array]:
        """All leaves, in the layout's order."""
        return self._leaves

    def drop_weights(self) -> None:
        """Free the weights; `put_weights` must come before the next step."""
        _delete(self._leaves)

    def put_weights(self, values: Sequence[jax.Array] | None) -> None:
        """Put weights where those lie that were dropped.

        Args:
          values: of all leaves, on the host; None = as the model's files have them now.

        Raises:
          JaxRuntimeError: the device has no memory for them.
          ModelLoadError: the files are missing or refused.
        """
        if values is None:
            assert self._load_weights is not None
            leaves = self._load_weights()
        else:
            pairs = zip(values, self._leaves, strict=True)
            leaves = [jax.device_put(value, leaf.sharding) for value, leaf in pairs]
        self._leaves = jax.block_until_ready(leaves)
        self._head = self._leaves[self._head_index]

    def change_cache_in_next_step(self, changes: Sequence[Callable[[KVCache], KVCache]]) -> None:
        """Let the next dispatch give the cache to these functions, when pages have been moved.

        They take the place of those that no dispatch came to.
        """
        self._cache_changes = deque(changes)

    def device_page_tables(self, slot: int) -> tuple[list[int], ...]:
        """For each cache group the row of a state slot, as the newest step leaves it; waits."""
        return tuple(np.asarray(table)[slot].tolist() for table in self._state.page_tables)

    def _forward_and_sample(self, batch: PackedBatch, packed: np.ndarray) -> jax.Array | None:
        program = self._programs.forward(batch.bucket)
        hidden, slot_ids, self._cache, self._state = program(
            self._leaves, self._cache, self._state, packed
        )
        if batch.mode is None:
            return None
        sample = self._programs.sample(batch.sampler_rows, batch.mode)
        result, self._state = sample(self._head, hidden, slot_ids, self._state)
        return result

    def _count_upload(self, buffer: np.ndarray) -> np.ndarray:
        """A program takes the numpy buffer itself: cheaper than a device_put before the call."""
        self.num_uploaded_bytes += buffer.nbytes
        return buffer


def _delete(arrays: object) -> None:
    for leaf in jax.tree.leaves(arrays):
        if not leaf.is_deleted():
            leaf.delete()


def _read_logprobs(
    result: np.ndarray, num_logprobs: tuple[int | None, ...]
) -> tuple[tuple[TokenLogprobs, ...] | None, ...] | None:
    """The log-probabilities of the rows that asked for them, from a FULL result."""
    if all(count is None for count in num_logprobs):
        return None
    ranks = result[:, RESULT_COLUMNS]
    start = RESULT_COLUMNS + 1
    ids = result[:, start : start + NUM_TOP_LOGPROBS]
    values = np.ascontiguousarray(result[:, start + NUM_TOP_LOGPROBS :]).view(np.float32)
    return tuple(
        None if count is None else (_row_logprobs(values[i], int(ranks[i]), ids[i], count),)
        for i, count in enumerate(num_logprobs)
    )


def _row_logprobs(values: np.ndarray, rank: int, ids: np.ndarray, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=float(values[0]),
        rank=rank,
        top_ids=tuple(ids[:count].tolist()),
        top_logprobs=tuple(values[1 : 1 + count].tolist()),
    )
