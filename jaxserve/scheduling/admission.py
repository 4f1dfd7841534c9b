"""Which sequences the scheduler takes at all."""

from jaxserve.errors import RequestTooLongError
from jaxserve.scheduling.page_pool import PagePool


def check_length(
    num_prompt_tokens: int,
    max_num_tokens: int,
    *,
    max_model_len: int,
    page_pools: tuple[PagePool, ...],
) -> None:
    """Check that a sequence can run to its end when it is alone; else it would wait for ever.

    Args:
      num_prompt_tokens: tokens of the prompt.
      max_num_tokens: tokens that the sequence can come to have, prompt included.
      max_model_len: tokens that the model takes.
      page_pools: the pool of each cache group.

    Raises:
      RequestTooLongError: the prompt leaves no room for a token under `max_model_len`, or prompt
        and `max_tokens` do not fit into all the pages of some group.
    """
    if num_prompt_tokens >= max_model_len:
        raise RequestTooLongError(
            f"prompt must have at most {max_model_len - 1} tokens, since the model takes "
            f"{max_model_len} with the output; got {num_prompt_tokens}; shorten the prompt",
            parameter="prompt",
            value=num_prompt_tokens,
        )
    for pool in page_pools:
        if pool.num_pages_for(max_num_tokens) > pool.num_usable:
            raise RequestTooLongError(
                f"prompt and max_tokens must fit the KV cache of "
                f"{pool.num_usable * pool.page_size} tokens ({pool.num_usable} pages of "
                f"{pool.page_size}); got {num_prompt_tokens} + "
                f"{max_num_tokens - num_prompt_tokens}; lower max_tokens or shorten the prompt",
                parameter="max_tokens",
                value=max_num_tokens,
            )
