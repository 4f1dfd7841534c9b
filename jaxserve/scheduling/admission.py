"""Which sequences the scheduler takes at all."""

from jaxserve.errors import RequestTooLongError
from jaxserve.scheduling.page_pool import PagePool


def max_sequence_tokens(
    page_pools: tuple[PagePool, ...], *, max_model_len: int, max_row_tokens: int
) -> int:
    """Tokens, prompt included, that one sequence alone can have: the model's, or the pages'."""
    too_small = [
        pool.num_usable * pool.page_size
        for pool in page_pools
        if pool.max_held_pages(max_model_len, max_row_tokens) > pool.num_usable
    ]
    return min([max_model_len, *too_small])


def check_length(
    num_prompt_tokens: int,
    max_num_tokens: int,
    *,
    max_model_len: int,
    max_row_tokens: int,
    page_pools: tuple[PagePool, ...],
) -> None:
    """Check that a sequence can run to its end when it is alone; else it would wait for ever.

    Args:
      num_prompt_tokens: tokens of the prompt.
      max_num_tokens: tokens that the sequence can come to have, prompt included.
      max_model_len: tokens that the model takes.
      max_row_tokens: see `SchedulerConfig.max_row_tokens`; with it a sequence that runs alone
        never lacks a page of a window group either.
      page_pools: the pool of each cache group.

    Raises:
      RequestTooLongError: the prompt leaves no room for a token under `max_model_len`, or the
        pages of some group are fewer than the sequence needs at the same time.
    """
    if num_prompt_tokens >= max_model_len:
        raise RequestTooLongError(
            f"prompt must have at most {max_model_len - 1} tokens, since the model takes "
            f"{max_model_len} with the output; got {num_prompt_tokens}; shorten the prompt",
            parameter="prompt",
            value=num_prompt_tokens,
        )
    for pool in page_pools:
        num_needed = pool.max_held_pages(max_num_tokens, max_row_tokens)
        if num_needed > pool.num_usable:
            raise RequestTooLongError(
                f"prompt and max_tokens must fit the KV cache of "
                f"{pool.num_usable * pool.page_size} tokens ({pool.num_usable} pages of "
                f"{pool.page_size}); got {num_prompt_tokens} + "
                f"{max_num_tokens - num_prompt_tokens}; lower max_tokens or shorten the prompt",
                parameter="max_tokens",
                value=max_num_tokens,
            )
