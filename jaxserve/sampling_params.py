"""How the tokens of a request are chosen and returned: SamplingParams and its companions."""

import copy
import enum
import logging
from typing import Any, Self

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import (
    check_bool,
    check_instance,
    check_int,
    check_nesting,
    check_number,
    check_strings,
    check_token_ids,
)

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 1e-5
"""Below it the most likely token is taken."""
LOWEST_TEMPERATURE = 1e-2
"""Positive temperatures below it are raised to it: the logits would overflow."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 100.0


class SamplingType(enum.IntEnum):
    """How a token is drawn."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.Enum):
    """What each RequestOutput of an unfinished request holds."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Nothing comes before the end; then all."""


class StructuredOutputsParams(msgspec.Struct):
    """The form that the output must have: exactly one of the first six."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            rule = f"must hold exactly one of {', '.join(kinds)}"
            raise InvalidRequestError.for_field("structured_outputs", rule, given)
        schema = self.json
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, RecursionError) as error:
                rule = "must hold valid JSON"
                raise InvalidRequestError.for_field("json", rule, self.json) from error
        check_nesting("json", schema)


class RepetitionDetectionParams(msgspec.Struct):
    """When to end a sequence that repeats itself; `max_pattern_size` 0 switches it off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_int("max_pattern_size", self.max_pattern_size, 0)
        check_int("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        check_int("min_count", self.min_count, 2 if self.max_pattern_size else 0)


class BeamSearchParams(msgspec.Struct):
    """Parameters of `LLM.beam_search`.

    Attributes:
      beam_width: beams that are followed and returned; at most half of the engine's
        `max_logprobs`.
      max_tokens: output tokens of a beam.
      ignore_eos: an end-of-sequence token does not end a beam.
      temperature: in [0, 2]; checked only, since nothing is drawn and log-probabilities are those
        of the raw logits, as in vLLM.
      length_penalty: a beam's score is its log-probability over its length to this power, prompt
        included; larger ones favour long beams.
      include_stop_str_in_output: of a server's answer: keep the text of the end token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_number("temperature", self.temperature, 0, 2)
        check_number("length_penalty", self.length_penalty)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)


class SamplingParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """How the tokens of one request are chosen and returned.

    Fields stand in vLLM's order, may be given by position or name, and are checked when the
    object is made. It can be changed afterwards, so `resolve_sampling_params` checks again when
    a request is added. Fields under "not in this release" are known and checked, but a request
    that sets one is refused.

    Attributes:
      n: sequences to generate; 1 when greedy. Sequence i of a seeded request has seed + i.
      temperature: in [0, 2]; 0 is greedy, which sets top_p, top_k and min_p to "off". Positive
        values below 0.01 are raised to 0.01.
      top_p: in (0, 1]; keep the fewest most likely tokens whose probabilities reach it.
      top_k: keep this many most likely tokens; 0 and -1 keep all.
      min_p: in [0, 1]; drop tokens less likely than this share of the most likely one's.
      seed: 64-bit integer; None (or -1) draws differently each time.
      stop: a string or strings that end the output; [] when None was given.
      stop_token_ids: ids that end the output, without repeats; [] when None was given.
      ignore_eos: go on after the model's end-of-sequence token.
      max_tokens: output tokens of a sequence; None = what the model's length leaves.
      min_tokens: end-of-sequence and stop ids are not chosen before so many tokens.
      logprobs: log-probabilities of so many most likely tokens, besides the chosen one's.
      detokenize: make text; False leaves it empty and allows no `stop`.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: put spaces between the special tokens that are shown.
      include_stop_str_in_output: keep the stop string at the end of the text.
      output_kind: what outputs before the last one hold.
      stream_interval: tokens of a sequence between two outputs; the first and the last always
        come. None = 1.
      skip_reading_prefix_cache: compute the whole prompt even where pages of it are cached.

    Not in this release: presence_penalty, frequency_penalty, repetition_penalty,
    prompt_logprobs, logprob_token_ids, prompt_logprob_token_ids, prompt_logprob_start,
    flat_logprobs, structured_outputs, logit_bias, allowed_token_ids, bad_words, extra_args,
    thinking_token_budget, repetition_detection, watermarking, trace_decode_token_ids,
    routed_experts_prompt_start, and logprobs = -1 (all).

    Raises:
      InvalidRequestError: a value breaks its rule; `.parameter` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = msgspec.field(default_factory=list)
    stop_token_ids: list[int] | None = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = msgspec.field(default_factory=list)
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    watermarking: dict[str, Any] | None = None
    trace_decode_token_ids: list[int] | None = None
    routed_experts_prompt_start: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        self.verify()

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Make the parameters where None means "not given"; `max_tokens` None stays None.

        Values of `logit_bias` are clamped to [-100, 100].
        """
        given: dict[str, Any] = {
            name: value
            for name, value in fields.items()
            if value is not None or name == "max_tokens"
        }
        params = cls(**given)
        if params.logit_bias is not None:
            params.logit_bias = {
                int(token_id): min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
                for token_id, bias in params.logit_bias.items()
            }
        return params

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def sampling_type(self) -> SamplingType:
        """How the tokens are drawn."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings of `stop`, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def all_stop_token_ids(self) -> set[int]:
        """A new set of `stop_token_ids`; the model's end-of-sequence ids are the request's."""
        return set(self.stop_token_ids or ())

    def clone(self) -> Self:
        """Copy the parameters deeply; the copy is checked as a new object is."""
        return copy.deepcopy(self)

    def verify(self) -> None:
        """Check every rule that needs no engine, and bring each field to its plain form.

        Raises:
          InvalidRequestError: a value breaks its rule.
        """
        self._verify_flags()
        self._verify_distribution()
        self._verify_ends()
        self._verify_logprobs()
        self._verify_constraints()
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise InvalidRequestError.for_field("n", "must be 1 when temperature is 0", self.n)

    def _verify_flags(self) -> None:
        for name in _FLAGS:
            check_bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        check_instance("output_kind", self.output_kind, RequestOutputKind)
        if self.stream_interval is not None:
            self.stream_interval = check_int("stream_interval", self.stream_interval, 1)

    def _verify_distribution(self) -> None:
        self.n = check_int("n", self.n, 1)
        self.presence_penalty = check_number("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = check_number(
            "repetition_penalty", self.repetition_penalty, 0, is_low_open=True
        )
        self.temperature = check_number("temperature", self.temperature, 0, 2)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            message = "temperature %g is raised to %g, below which logits may overflow"
            logger.warning(message, self.temperature, LOWEST_TEMPERATURE)
            self.temperature = LOWEST_TEMPERATURE
        self.top_p = check_number("top_p", self.top_p, 0, 1, is_low_open=True)
        self.top_k = check_int("top_k", self.top_k, -1)
        self.min_p = check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            seed = check_int("seed", self.seed)
            self.seed = None if seed == -1 else seed

    def _verify_ends(self) -> None:
        stop = self.stop_strings if isinstance(self.stop, str | None) else self.stop
        self.stop = check_strings("stop", stop)
        if self.stop and not self.detokenize:
            rule = "must be empty when detokenize is False"
            raise InvalidRequestError.for_field("stop", rule, self.stop)
        stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = list(dict.fromkeys(check_token_ids("stop_token_ids", stop_token_ids)))
        self.min_tokens = check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                rule = f"must be at most max_tokens={self.max_tokens}"
                raise InvalidRequestError.for_field("min_tokens", rule, self.min_tokens)

    def _verify_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, 1 if value is True else check_int(name, value, -1))
        for name in ("logprob_token_ids", "prompt_logprob_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, check_token_ids(name, getattr(self, name)))
        if self.prompt_logprob_start is not None:
            check_int("prompt_logprob_start", self.prompt_logprob_start, 0)
        if self.logprob_token_ids is not None:
            count = len(self.logprob_token_ids)
            if count > MAX_LOGPROB_TOKEN_IDS:
                rule = f"must hold at most {MAX_LOGPROB_TOKEN_IDS} ids"
                raise InvalidRequestError.for_field("logprob_token_ids", rule, count)
            if self.logprobs is not None and self.logprobs != count:
                rule = f"must equal the number of logprob_token_ids, {count}"
                raise InvalidRequestError.for_field("logprobs", rule, self.logprobs)
        if self.skip_reading_prefix_cache is None and (
            self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None
        ):
            self.skip_reading_prefix_cache = True

    def _verify_constraints(self) -> None:
        if self.structured_outputs is not None:
            check_instance("structured_outputs", self.structured_outputs, StructuredOutputsParams)
        if self.repetition_detection is not None:
            check_instance(
                "repetition_detection", self.repetition_detection, RepetitionDetectionParams
            )
        if self.logit_bias is not None:
            self.logit_bias = _check_logit_bias(self.logit_bias)
        for name in ("allowed_token_ids", "trace_decode_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, check_token_ids(name, getattr(self, name)))
        if self.allowed_token_ids == []:
            rule = "must hold at least one id"
            raise InvalidRequestError.for_field("allowed_token_ids", rule, self.allowed_token_ids)
        bad_words = check_strings("bad_words", [] if self.bad_words is None else self.bad_words)
        self.bad_words = list(dict.fromkeys(bad_words))
        for name in ("extra_args", "watermarking"):
            if getattr(self, name) is not None:
                check_nesting(name, check_instance(name, getattr(self, name), dict))
        if self.thinking_token_budget is not None:
            budget = check_int("thinking_token_budget", self.thinking_token_budget, -1)
            self.thinking_token_budget = None if budget == -1 else budget
        check_int("routed_experts_prompt_start", self.routed_experts_prompt_start, 0)


_FLAGS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _check_logit_bias(value: Any) -> dict[int, float]:
    bias_by_id = {}
    for key, bias in check_instance("logit_bias", value, dict).items():
        is_number = isinstance(key, str) and key.isdecimal() and len(key) <= 10
        token_id = check_token_ids("logit_bias", [int(key) if is_number else key])[0]
        bias_by_id[token_id] = check_number("logit_bias", bias)
    return bias_by_id
