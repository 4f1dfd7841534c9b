"""How many tokens to take off a step so that it fills its bucket; pure arithmetic."""

from bisect import bisect_left, bisect_right

WEIGHT_BOUND_TOKENS = 184
"""Below so many tokens a step takes as long as reading the weights does, whatever their number.

One H200, bf16: 790 TFLOP/s of products over 4.3 TB/s of reading, two FLOPs and two bytes a weight.
"""


def find_surplus(
    num_tokens: int,
    num_decode_tokens: int,
    *,
    last_chunk: int,
    buckets: tuple[int, ...],
    has_more: bool,
) -> int:
    """Find how many tokens the last prompt chunk should leave for the next step.

    While more prompt tokens wait than the step takes, it is cut down to the largest bucket that
    it fills. When the step takes all of them, it is cut only if two steps then cost less, in
    padded tokens, than one: 1 100 tokens in a bucket of 2 048 are better run as 1 024 and 76.
    The last chunk always keeps a token.

    Args:
      num_tokens: tokens that the step could take; at most the last bucket.
      num_decode_tokens: how many of them belong to decode rows.
      last_chunk: how many of them belong to the last prompt chunk.
      buckets: padded token counts, ascending.
      has_more: whether prompt tokens are left out of the step.
    """
    index = bisect_right(buckets, num_tokens) - 1
    if index < 0:
        return 0
    surplus = num_tokens - buckets[index]
    if surplus == 0 or surplus >= last_chunk:
        return 0
    if has_more:
        return surplus
    one_step = _cost(num_tokens, buckets) + _cost(num_decode_tokens, buckets)
    two_steps = _cost(buckets[index], buckets) + _cost(num_decode_tokens + surplus, buckets)
    return surplus if two_steps < one_step else 0


def _cost(num_tokens: int, buckets: tuple[int, ...]) -> int:
    """Measure a step in padded tokens; one that needs not run costs nothing."""
    if num_tokens == 0:
        return 0
    return max(buckets[bisect_left(buckets, num_tokens)], WEIGHT_BOUND_TOKENS)
