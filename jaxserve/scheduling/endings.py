"""Where a sequence ends: the rules for end-of-sequence ids, stop ids and lengths."""

from jaxserve.request import FinishReason, Request, Sequence

Ending = tuple[FinishReason, int | None]
"""Why a sequence ended, and the stop id that ended it (None for any other end)."""


def find_max_num_tokens(request: Request, max_model_len: int) -> int:
    """Find how many tokens, prompt included, a sequence of the request can have."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, max_model_len)


def find_end_token_ids(request: Request) -> frozenset[int]:
    """Collect the ids that end a sequence of the request."""
    params = request.sampling_params
    eos_token_ids = () if params.ignore_eos else request.eos_token_ids
    return frozenset(eos_token_ids).union(params.stop_token_ids or ())


def find_ending(sequence: Sequence) -> Ending | None:
    """Tell whether the last token ends the sequence, and why.

    Ending ids count once the sequence has `min_tokens` output tokens, the ending one included.
    The step must freeze the row by the same rule. An ending id at the last position is a stop.
    """
    token = sequence.token_ids[-1]
    params = sequence.request.sampling_params
    if token in sequence.end_token_ids and sequence.num_output_tokens >= params.min_tokens:
        is_eos = token in sequence.request.eos_token_ids and not params.ignore_eos
        return FinishReason.STOP, None if is_eos else token
    if len(sequence.token_ids) >= sequence.max_num_tokens:
        return FinishReason.LENGTH, None
    return None


def append_tokens(
    sequence: Sequence, new_tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], Ending | None]:
    """Append sampled tokens up to the end of the sequence.

    Returns:
      The tokens that were appended, and the ending if one of them is the last.
    """
    token_ids = sequence.token_ids
    is_long = len(token_ids) + len(new_tokens) >= sequence.max_num_tokens
    if not is_long and sequence.end_token_ids.isdisjoint(new_tokens):
        token_ids += new_tokens
        return new_tokens, None
    for num_appended, token in enumerate(new_tokens, 1):
        token_ids.append(token)
        ending = find_ending(sequence)
        if ending is not None:
            return new_tokens[:num_appended], ending
    return new_tokens, None
