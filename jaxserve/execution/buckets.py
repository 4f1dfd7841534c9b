"""Buckets: the padded shapes that steps are compiled for; no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_FUSED_SAMPLER_ROWS = 64
"""Rows of decode buckets whose programs sample, too: a second dispatch would cost as much time as
the device needs. Beyond, samplers are programs of their own, which all buckets share."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One compiled shape of a step.

    Attributes:
      num_tokens: T, padded tokens.
      num_rows: S, padded sequences.
      is_decode_only: every row has one token that was sampled on the device, and T = S.
      num_steps: W, decode steps that one program runs; 1 unless `is_decode_only`.
      max_context: tokens of a sequence after the step; 0 = any number.
    """

    num_tokens: int
    num_rows: int
    is_decode_only: bool
    num_steps: int = 1
    max_context: int = 0

    @property
    def fuses_sampler(self) -> bool:
        """Whether its programs sample, each in one `SampleMode` that `is_fused`."""
        return self.is_decode_only and self.num_rows <= MAX_FUSED_SAMPLER_ROWS

    def __str__(self) -> str:
        kind = "decode" if self.is_decode_only else "mixed"
        steps = f",W={self.num_steps}" if self.num_steps > 1 else ""
        context = f",context={self.max_context}" if self.max_context else ""
        return f"{kind}[T={self.num_tokens},S={self.num_rows}{steps}{context}]"


@dataclass(frozen=True, slots=True)
class BucketTable:
    """All buckets of an engine, and the choice among them.

    Attributes:
      row_buckets: ascending S of pure decode steps; the last takes `max_num_seqs`.
      token_buckets: ascending T of steps with prompt tokens; the last takes the token budget. S is
        T there, but at most the last of `row_buckets`.
      num_scheduler_steps: W of programs that run several decode steps; 1 = there are none.
      multi_step_rows: the row buckets up to it have such a program, too; at most
        `MAX_FUSED_SAMPLER_ROWS`.
      short_context: the row buckets up to `short_context_rows` have a program more for sequences of
        at most so many tokens. It runs all steps that one dispatch can: the last few tokens, which
        come one by one, take the program for any context.
      short_context_rows: see above; 0 = there are none.
      small_sampler_rows: the smallest R, at most the largest S.
    """

    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    num_scheduler_steps: int = 1
    multi_step_rows: int = 0
    short_context: int = 0
    short_context_rows: int = 0
    small_sampler_rows: int = 16

    @property
    def max_num_rows(self) -> int:
        """The largest S."""
        return self.row_buckets[-1]

    def sampler_sizes(self, *, is_greedy: bool) -> tuple[int, ...]:
        """Ascending R of samplers that are programs of their own; the last takes the largest S.

        Args:
          is_greedy: of those that only find the highest logits. The others take a start's time, so
            that there are fewer sizes, each at least half more than the one before.
        """
        smallest = min(self.small_sampler_rows, self.max_num_rows)
        sizes = [self.max_num_rows]
        for S in reversed(self.row_buckets[:-1]):
            is_far = is_greedy or 3 * S <= 2 * sizes[-1]
            if S > max(MAX_FUSED_SAMPLER_ROWS, smallest) and is_far:
                sizes.append(S)
        return tuple(sorted({smallest, *sizes}))

    @property
    def most_multi_rows(self) -> int:
        """Rows that a program of several decode steps takes at most; 0 = there is none."""
        if self.num_scheduler_steps == 1:
            return 0
        return max((S for S in self.row_buckets if S <= self.multi_step_rows), default=0)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket, the cheap ones first."""
        decode = [Bucket(S, S, True) for S in self.row_buckets]
        W = self.num_scheduler_steps
        several = [Bucket(S, S, True, W) for S in self.row_buckets if S <= self.most_multi_rows]
        short = [
            replace(bucket, max_context=self.short_context)
            for bucket in decode + several
            if self._may_be_short(bucket)
        ]
        return tuple(decode + several + short + [self._mixed(T) for T in self.token_buckets])

    def select(
        self,
        num_tokens: int,
        num_rows: int,
        *,
        is_decode_only: bool,
        num_steps: int = 1,
        context: int | None = None,
    ) -> Bucket:
        """The smallest bucket that holds a step.

        Args:
          num_tokens: of all rows.
          num_rows: of the step.
          is_decode_only: whether every row decodes.
          num_steps: tokens of the row that has most; more than 1 only if `is_decode_only`.
          context: tokens of the longest sequence after the step; None = not told.

        Raises:
          ValueError: none does; the scheduler keeps within the last buckets, so this is a bug.
        """
        if is_decode_only:
            S = _smallest(self.row_buckets, num_rows)
            if num_steps > self.num_scheduler_steps or (num_steps > 1 and S > self.most_multi_rows):
                raise ValueError(f"no bucket holds {num_steps} steps of {num_rows}; have {self}")
            bucket = Bucket(S, S, True, 1 if num_steps == 1 else self.num_scheduler_steps)
            is_short = context is not None and context <= self.short_context
            if is_short and self._may_be_short(bucket):
                return replace(bucket, max_context=self.short_context)
            return bucket
        for bucket in map(self._mixed, self.token_buckets):
            if num_tokens <= bucket.num_tokens and num_rows <= bucket.num_rows:
                return bucket
        raise ValueError(f"no bucket holds {num_tokens} tokens of {num_rows} rows; have {self}")

    def fuses_sampler(self, num_rows: int) -> bool:
        """Whether the decode bucket of so many rows does."""
        return _smallest(self.row_buckets, num_rows) <= MAX_FUSED_SAMPLER_ROWS

    def select_sampler(self, num_rows: int, *, is_greedy: bool) -> int:
        """The smallest R that holds the rows of a step.

        Args:
          num_rows: of the step.
          is_greedy: whether all that is asked for are the highest logits.
        """
        return _smallest(self.sampler_sizes(is_greedy=is_greedy), num_rows)

    def _may_be_short(self, bucket: Bucket) -> bool:
        """Whether a decode bucket has another one for short contexts."""
        most_steps = self.num_scheduler_steps if bucket.num_rows <= self.most_multi_rows else 1
        return bucket.num_rows <= self.short_context_rows and bucket.num_steps == most_steps

    def _mixed(self, num_tokens: int) -> Bucket:
        """The bucket of a T: a step never has more rows than tokens."""
        return Bucket(num_tokens, min(num_tokens, self.max_num_rows), False)


def _smallest(buckets: tuple[int, ...], needed: int) -> int:
    for bucket in buckets:
        if bucket >= needed:
            return bucket
    raise ValueError(f"no bucket holds {needed}; have {buckets}")


def make_bucket_table(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    small_row_buckets: tuple[int, ...],
    small_sampler_rows: int,
    row_buckets: Sequence[int] | None = None,
    token_buckets: Sequence[int] | None = None,
    num_scheduler_steps: int = 1,
    multi_step_rows: int = 0,
    short_context: int = 0,
    short_context_rows: int = 0,
) -> BucketTable:
    """The default table, or one from given sizes, capped at the limits and closed by them.

    Args:
      max_num_seqs: largest S, unless the first of `small_row_buckets` is larger.
      max_num_batched_tokens: largest T, unless the largest S is larger.
      small_row_buckets: S below 32 of pure decode steps; `limits.py` says which.
      small_sampler_rows: see `BucketTable`.
      row_buckets: S of pure decode steps. When not given the small ones, 32 and 64 (up to there a
        step takes as long as reading the weights does), then multiples of 64 up to 512, and of 128
        beyond, since there each padded row costs its products.
      token_buckets: T of steps with prompt tokens; powers of two from 128 when not given.
      num_scheduler_steps: see `BucketTable`.
      multi_step_rows: likewise.
      short_context: likewise.
      short_context_rows: likewise.
    """
    largest_rows = max(max_num_seqs, small_row_buckets[0])
    if row_buckets is None:
        row_buckets = [*small_row_buckets, 32, *range(64, 513, 64), *range(640, largest_rows, 128)]
    if token_buckets is None:
        token_buckets = _powers_of_two(128, max_num_batched_tokens)
    row_buckets = _closed(row_buckets, largest_rows)
    multi_step_rows = min(multi_step_rows, MAX_FUSED_SAMPLER_ROWS)
    if row_buckets[0] > multi_step_rows:
        num_scheduler_steps = 1
    return BucketTable(
        row_buckets=row_buckets,
        token_buckets=_closed(token_buckets, max(max_num_batched_tokens, largest_rows)),
        num_scheduler_steps=num_scheduler_steps,
        multi_step_rows=multi_step_rows,
        short_context=short_context,
        short_context_rows=short_context_rows,
        small_sampler_rows=small_sampler_rows,
    )


def _powers_of_two(first: int, limit: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * 2 <= limit:
        sizes.append(sizes[-1] * 2)
    return sizes


def _closed(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    return tuple(sorted({size for size in sizes if 0 < size < limit} | {limit}))
