"""Buckets: the padded shapes that steps are compiled for; no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One compiled shape of a step.

    Attributes:
      num_tokens: T, padded tokens.
      num_rows: S, padded sequences.
      is_decode_only: every row has one token that was sampled on the device, and T = S.
    """

    num_tokens: int
    num_rows: int
    is_decode_only: bool

    def __str__(self) -> str:
        kind = "decode" if self.is_decode_only else "mixed"
        return f"{kind}[T={self.num_tokens},S={self.num_rows}]"


@dataclass(frozen=True, slots=True)
class BucketTable:
    """All buckets of an engine, and the choice among them.

    Attributes:
      row_buckets: ascending S of pure decode steps; the last takes `max_num_seqs`.
      token_buckets: ascending T of steps with prompt tokens; the last takes the token budget.
      mixed_row_buckets: ascending S of those; the last takes `max_num_seqs`.
    """

    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    mixed_row_buckets: tuple[int, ...]

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket, the cheap ones first."""
        decode = [Bucket(S, S, True) for S in self.row_buckets]
        mixed = [Bucket(T, S, False) for T in self.token_buckets for S in self._rows_of(T)]
        return tuple(decode + mixed)

    def select(self, num_tokens: int, num_rows: int, *, is_decode_only: bool) -> Bucket:
        """The smallest bucket that holds a step.

        Raises:
          ValueError: none does; the scheduler keeps within the last buckets, so this is a bug.
        """
        if is_decode_only:
            S = _smallest(self.row_buckets, num_rows)
            return Bucket(S, S, True)
        for T in self.token_buckets:
            fitting = [S for S in self._rows_of(T) if S >= num_rows]
            if num_tokens <= T and fitting:
                return Bucket(T, fitting[0], False)
        raise ValueError(f"no bucket holds {num_tokens} tokens of {num_rows} rows; have {self}")

    def _rows_of(self, num_tokens: int) -> tuple[int, ...]:
        """S of a T: a step never has more rows than tokens."""
        largest = min(num_tokens, self.mixed_row_buckets[-1])
        return tuple(S for S in self.mixed_row_buckets if S < largest) + (largest,)


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
    mixed_row_bucket: int,
    row_buckets: Sequence[int] | None = None,
    token_buckets: Sequence[int] | None = None,
) -> BucketTable:
    """The default table, or one from given sizes, capped at the limits and closed by them.

    Args:
      max_num_seqs: largest S, unless the first of `small_row_buckets` is larger.
      max_num_batched_tokens: largest T, unless the largest S is larger.
      small_row_buckets: S below 32 of pure decode steps; `limits.py` says which.
      mixed_row_bucket: S of steps with prompt tokens and few rows.
      row_buckets: S of pure decode steps. When not given the small ones, powers of two from 32 (up
        to there a step takes as long as reading the weights does), and two sizes between the
        large ones, where padding costs most.
      token_buckets: T of steps with prompt tokens; powers of two from 128 when not given.
    """
    largest_rows = max(max_num_seqs, small_row_buckets[0])
    if row_buckets is None:
        row_buckets = [*small_row_buckets, *_powers_of_two(32, largest_rows), 384, 768]
    if token_buckets is None:
        token_buckets = _powers_of_two(128, max_num_batched_tokens)
    return BucketTable(
        row_buckets=_closed(row_buckets, largest_rows),
        token_buckets=_closed(token_buckets, max(max_num_batched_tokens, largest_rows)),
        mixed_row_buckets=_closed((mixed_row_bucket,), largest_rows),
    )


def _powers_of_two(first: int, limit: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * 2 <= limit:
        sizes.append(sizes[-1] * 2)
    return sizes


def _closed(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    return tuple(sorted({size for size in sizes if 0 < size < limit} | {limit}))
