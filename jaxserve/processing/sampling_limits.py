"""What one engine allows: SamplingLimits, and the checked copy of parameters for a request."""

from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError, RequestTooLongError
from jaxserve.field_checks import check_int
from jaxserve.sampling_params import RepetitionDetectionParams, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """What one engine allows of every request.

    Attributes:
      vocab_size: token ids must be below it.
      max_model_len: tokens that prompt and output may have together.
      max_n: largest `n`.
      max_num_stop: stop strings of a request.
      max_stop_chars: characters of a stop string.
      max_num_logit_bias: entries of `logit_bias`.
      max_num_bad_words: entries of `bad_words`.
      max_logprobs: largest `logprobs` and `prompt_logprobs`.
      max_num_stop_token_ids: entries of `stop_token_ids`; the device tests them in every step.
    """

    vocab_size: int
    max_model_len: int
    max_n: int = 128
    max_num_stop: int = 16
    max_stop_chars: int = 256
    max_num_logit_bias: int = 1024
    max_num_bad_words: int = 256
    max_logprobs: int = 20
    max_num_stop_token_ids: int = 28


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "flat_logprobs": (False,),
    "structured_outputs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None, RepetitionDetectionParams()),
    "watermarking": (None, {}),
    "trace_decode_token_ids": (None,),
    "routed_experts_prompt_start": (0,),
}
"""Fields that the engine does not apply yet, with the values that ask nothing of it."""


def resolve_sampling_params(
    params: SamplingParams, limits: SamplingLimits, *, num_prompt_tokens: int
) -> SamplingParams:
    """Make the private, checked copy that a Request holds.

    Args:
      params: the client's; not changed, and later changes of it do not reach the copy.
      limits: of the engine that the request goes to.
      num_prompt_tokens: tokens of the prompt.

    Returns:
      A deep copy in which `max_tokens` is an integer that the model has room for.

    Raises:
      InvalidRequestError: a value breaks its rule, a limit, or is not in this release.
      RequestTooLongError: prompt and `max_tokens` are longer than the model.
    """
    resolved = params.clone()
    refuse_unsupported(resolved)
    _check_limits(resolved, limits)
    resolved.max_tokens = _resolve_max_tokens(resolved, limits, num_prompt_tokens)
    return resolved


def refuse_stop_strings(params: SamplingParams) -> None:
    """Refuse what an engine without a tokenizer cannot find.

    Raises:
      InvalidRequestError: there are stop strings.
    """
    if params.stop_strings:
        rule = "must be empty when the engine has no tokenizer"
        raise InvalidRequestError.for_field("stop", rule, params.stop)


def refuse_unsupported(params: SamplingParams) -> None:
    """Refuse by name what the engine does not do yet.

    Raises:
      InvalidRequestError: a field of `_UNSUPPORTED` asks for something, or `logprobs` is -1.
    """
    for name, neutral_values in _UNSUPPORTED.items():
        value = getattr(params, name)
        if value not in neutral_values:
            raise InvalidRequestError.for_field(name, "is not supported in this release", value)
    if params.logprobs == -1:
        rule = "of all tokens is not supported in this release"
        raise InvalidRequestError.for_field("logprobs", rule, -1)


def _check_limits(params: SamplingParams, limits: SamplingLimits) -> None:
    check_int("n", params.n, 1, limits.max_n)
    for name, maximum in (
        ("stop", limits.max_num_stop),
        ("logit_bias", limits.max_num_logit_bias),
        ("bad_words", limits.max_num_bad_words),
        ("stop_token_ids", limits.max_num_stop_token_ids),
    ):
        count = len(getattr(params, name) or ())
        if count > maximum:
            raise InvalidRequestError.for_field(name, f"must hold at most {maximum} entries", count)
    for string in params.stop_strings:
        if len(string) > limits.max_stop_chars:
            rule = f"must hold strings of at most {limits.max_stop_chars} characters"
            raise InvalidRequestError.for_field("stop", rule, len(string))
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name)) is not None:
            check_int(name, value, -1, limits.max_logprobs)
    for name in _ID_FIELDS:
        for token_id in getattr(params, name) or ():
            if token_id >= limits.vocab_size:
                rule = f"must be inside the vocabulary of {limits.vocab_size} tokens"
                raise InvalidRequestError.for_field(name, rule, token_id)


_ID_FIELDS = (
    "stop_token_ids",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "trace_decode_token_ids",
)


def _resolve_max_tokens(params: SamplingParams, limits: SamplingLimits, num_prompt: int) -> int:
    room = limits.max_model_len - num_prompt
    if room < 1:
        raise RequestTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your "
            f"prompt contains {num_prompt} input tokens; at least one must be left for the output",
            parameter="prompt",
            value=num_prompt,
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise RequestTooLongError(
            f"prompt and max_tokens need {num_prompt + max_tokens} tokens, but this model holds "
            f"{limits.max_model_len}; shorten the prompt or lower max_tokens",
            parameter="max_tokens",
            value=max_tokens,
        )
    check_int("min_tokens", params.min_tokens, 0, max_tokens)
    return max_tokens
