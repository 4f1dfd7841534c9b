"""SamplingFields: what both kinds of generating requests share, and the SamplingParams of it."""

from typing import Annotated, Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import check_int, check_number
from jaxserve.processing.request_options import RequestOptions
from jaxserve.processing.sampling_limits import refuse_unsupported
from jaxserve.sampling_params import RepetitionDetectionParams, SamplingParams

MAX_SEQUENCES = 256
"""Prompts times `n` of one request."""
UNSET_MAX_TOKENS = SamplingParams().max_tokens
"""`max_tokens` of defaults in which no model's file has set another."""


def chat_limit(defaults: SamplingParams) -> int | None:
    """Tokens of a chat's answer that its client does not limit: the model's own `max_tokens`.

    None, the rest of the model's length, where no file of the model has set one.
    """
    return None if defaults.max_tokens == UNSET_MAX_TOKENS else defaults.max_tokens


Name = Annotated[str, msgspec.Meta(max_length=512)]
RequestId = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[!-~]+$")]
Sequences = Annotated[int, msgspec.Meta(ge=1, le=128)]


class StreamOptions(msgspec.Struct):
    """What a stream tells besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of chat and completion requests that choose tokens or are hints; vLLM's names.

    `timeout`, `ttft_goal_ms`, `tpot_goal_ms` and `skip_reading_prefix_cache` are ours. None means
    "not given". `user`, `safety_identifier`, `prompt_cache_key`, `metadata`, `store`,
    `service_tier` and `session_id` ask for nothing that this server could do or leave.
    """

    model: Name | None = None
    n: Sequences | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    vllm_xargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, int] | None = None
    watermarking: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    ttft_goal_ms: float | None = None
    tpot_goal_ms: float | None = None
    request_id: RequestId | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    session_id: Any = None
    best_of: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_run_sequences(self) -> int:
        """Sequences that the engine runs for each prompt; of a beam search, its beams."""
        return self.best_of if self.use_beam_search and self.best_of else self.num_sequences


_REFUSED: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_params": (None, {}),
}
"""Fields that this release does not apply, with the values that ask nothing of it."""

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_interval", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs",
    "logprob_token_ids", "thinking_token_budget", "watermarking", "skip_reading_prefix_cache",
)  # fmt: skip
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def refuse_fields(request: Any, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Refuse by name each field that asks for something this release does not do.

    Raises:
      InvalidRequestError: one does.
    """
    for name, values in neutral.items():
        value = getattr(request, name)
        if value not in values:
            raise InvalidRequestError.for_field(name, "is not supported in this release", value)


def check_shared_fields(request: SamplingFields) -> None:
    """Check what does not concern the sampling, and refuse what is not supported.

    Raises:
      InvalidRequestError: a field breaks its rule, or is not supported.
    """
    refuse_fields(request, _REFUSED)
    if request.use_beam_search:
        _check_beam_search(request)
    elif request.length_penalty not in (None, 1.0):
        rule = "must be given only with use_beam_search"
        raise InvalidRequestError.for_field("length_penalty", rule, request.length_penalty)
    elif request.best_of is not None and request.best_of != request.num_sequences:
        rule = "must equal n: choosing the best of more is not supported in this release"
        raise InvalidRequestError.for_field("best_of", rule, request.best_of)
    if request.stream_options is not None and not request.stream:
        rule = "must be given only with stream"
        raise InvalidRequestError(f"stream_options {rule}", parameter="stream_options")


def _check_beam_search(request: SamplingFields) -> None:
    if request.stream:
        rule = "must not be set with use_beam_search: the best beams are known at the end only"
        raise InvalidRequestError.for_field("stream", rule, True)
    for name in ("stop", "stop_token_ids", "min_tokens"):
        if value := getattr(request, name):
            rule = "must not be given with use_beam_search"
            raise InvalidRequestError.for_field(name, rule, value)
    if request.best_of is not None:
        request.best_of, n = check_int("best_of", request.best_of), request.num_sequences
        if request.best_of < n:
            raise InvalidRequestError.for_field(
                "best_of", f"must be at least n = {n}", request.best_of
            )
    if request.temperature is not None:
        check_number("temperature", request.temperature, 0, 2)
    if request.length_penalty is not None:
        check_number("length_penalty", request.length_penalty)


def make_request_options(
    request: SamplingFields, default_timeout: float | None = None
) -> RequestOptions:
    """What a request asks besides its prompt and the choice of tokens.

    Args:
      request: of the client.
      default_timeout: seconds, where the client gives no `timeout`.

    Raises:
      InvalidRequestError: a value breaks its rule.
    """
    return RequestOptions.from_fields(
        cache_salt=request.cache_salt,
        timeout=default_timeout if request.timeout is None else request.timeout,
        ttft_goal_ms=request.ttft_goal_ms,
        tpot_goal_ms=request.tpot_goal_ms,
    )


def make_sampling_params(
    request: SamplingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """The parameters of a request: the client's, else the model's, else the built-in ones.

    Args:
      request: of the client.
      defaults: of the model's generation_config.json.
      max_tokens: output tokens; None = as many as the model's length leaves.
      logprobs: log-probabilities of so many most likely tokens.

    Raises:
      InvalidRequestError: a value breaks its rule.
    """
    fields: dict[str, Any] = {name: getattr(defaults, name) for name in _FROM_MODEL}
    for name in _SAME_NAME:
        if (value := getattr(request, name)) is not None:
            fields[name] = value
    if request.vllm_xargs:
        fields["extra_args"] = request.vllm_xargs
    if request.repetition_detection is not None:
        fields["repetition_detection"] = _repetition_detection(request.repetition_detection)
    if request.use_beam_search:  # nothing is drawn, so these only say how many beams there are
        fields |= {"n": request.num_run_sequences, "temperature": 1.0}
    params = SamplingParams.from_optional(**fields, max_tokens=max_tokens, logprobs=logprobs)
    _check_defaults(params, request)
    return params


def _repetition_detection(fields: dict[str, int]) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams(**fields)
    except TypeError as error:
        rule = "must hold max_pattern_size, min_pattern_size and min_count"
        raise InvalidRequestError.for_field("repetition_detection", rule, fields) from error


def _check_defaults(params: SamplingParams, request: SamplingFields) -> None:
    """Say where a value that is not supported comes from when it is not the client's."""
    try:
        refuse_unsupported(params)
    except InvalidRequestError as error:
        name = error.parameter
        if name not in _FROM_MODEL or getattr(request, name) is not None:
            raise
        raise InvalidRequestError(
            f"{error}; it comes from the model's generation_config.json: send another, or start "
            f"the server with --generation-config vllm",
            parameter=name,
            value=error.value,
        ) from error
