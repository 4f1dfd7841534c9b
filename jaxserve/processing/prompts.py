"""What a user hands to `generate` and `chat`, brought into one form."""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.processing.request_options import NO_OPTIONS, OPTION_KEYS, RequestOptions
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; dicts may hold OPTION_KEYS."""
type Message = Mapping[str, Any]
type Params = SamplingParams | Sequence[SamplingParams]

_IDS_AND_TEXT = frozenset(("prompt", "prompt_token_ids"))
_PROMPT_KEYS = ("prompt", "prompt_token_ids", *OPTION_KEYS)
_KEYS_NOT_YET = {
    "decoder_prompt",
    "encoder_prompt",
    "mm_processor_kwargs",
    "multi_modal_data",
    "multi_modal_uuids",
    "prompt_embeds",
}


class ParsedPrompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt.

    Attributes:
      token_ids: at least one, each inside the vocabulary.
      text: what the ids were made of, if it was given.
      options: what the prompt itself asks.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    options: RequestOptions = NO_OPTIONS


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list; an empty one holds no prompt.

    Raises:
      InvalidRequestError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        rule = "must be text, token ids, a dict, or a list of these"
        raise InvalidRequestError.for_field("prompts", rule, prompts)
    if len(prompts) and all(map(_is_id, prompts)):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]


def list_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or many, as a list.

    Raises:
      InvalidRequestError: it is neither; what is inside a conversation is checked later.
    """
    rule = "must be a list of messages, or a list of such lists"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError.for_field("messages", rule, messages)
    if messages and all(isinstance(item, Mapping) for item in messages):
        return [messages]  # pyright: ignore[reportReturnType]
    for item in messages:
        if not isinstance(item, Sequence) or isinstance(item, str | bytes):
            raise InvalidRequestError.for_field("messages", rule, item)
    return list(messages)  # pyright: ignore[reportReturnType]


def list_params(sampling_params: Params, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt.

    Raises:
      InvalidRequestError: they are neither one SamplingParams nor one for each prompt.
    """
    name = "sampling_params"
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, list | tuple):
        rule = "must be a SamplingParams, or a list of one for each prompt"
        raise InvalidRequestError.for_field(name, rule, sampling_params)
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError.for_field(name, "must hold only SamplingParams", params)
    if len(sampling_params) != num_prompts:
        rule = f"must be one, or one for each of {num_prompts} prompts"
        raise InvalidRequestError.for_field(name, rule, len(sampling_params))
    return list(sampling_params)


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> ParsedPrompt:
    """Tokenize and check one prompt.

    Raises:
      InvalidRequestError: it is empty, of a wrong type, holds an id outside the vocabulary, is
        text without a tokenizer, or an option of it breaks its rule.
    """
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, tokenizer, vocab_size)
    if isinstance(prompt, str):
        return _parse_text(prompt, tokenizer, vocab_size)
    if not _is_list(prompt):
        rule = "must be text, a list of token ids, or a dict"
        raise InvalidRequestError.for_field("prompt", rule, prompt)
    return ParsedPrompt(check_prompt_ids(prompt, vocab_size))


def check_prompt_ids(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Check that ids are integers inside the vocabulary, at least one.

    Raises:
      InvalidRequestError: they are not.
    """
    name = "prompt_token_ids"
    if not _is_list(token_ids):
        raise InvalidRequestError.for_field(name, "must be a list of integers", token_ids)
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    if not ids:
        raise InvalidRequestError.for_field(name, "must hold at least one id", token_ids)
    try:  # each id of a long prompt costs 12 ns instead of 200
        return msgspec.convert(ids, _ids_type(vocab_size))
    except msgspec.ValidationError:
        pass
    for token_id in ids:
        if not _is_id(token_id) or not 0 <= token_id < vocab_size:
            rule = f"must hold integers in [0, {vocab_size})"
            raise InvalidRequestError.for_field(name, rule, token_id)
    return tuple(map(int, ids))


@functools.cache
def _ids_type(vocab_size: int) -> Any:
    """The type of a tuple of plain ints inside the vocabulary, for msgspec."""
    return tuple[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)], ...]


def _parse_mapping(
    prompt: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int
) -> ParsedPrompt:
    for key, value in prompt.items():
        if key in _KEYS_NOT_YET and value is not None:
            raise InvalidRequestError.for_field(key, "is not supported in this release", value)
        if key not in _PROMPT_KEYS and key not in _KEYS_NOT_YET:
            rule = f"must have no keys but {', '.join(_PROMPT_KEYS)}"
            raise InvalidRequestError.for_field("prompt", rule, key)
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError.for_field("prompt", "must be text", text)
    options = NO_OPTIONS
    if not _IDS_AND_TEXT.issuperset(prompt):
        options = RequestOptions.from_fields(**{key: prompt.get(key) for key in OPTION_KEYS})
    if prompt.get("prompt_token_ids") is not None:
        token_ids = check_prompt_ids(prompt["prompt_token_ids"], vocab_size)
        return ParsedPrompt(token_ids, text, options)
    if text is None:
        rule = "must hold prompt or prompt_token_ids"
        raise InvalidRequestError.for_field("prompt", rule, dict(prompt))
    return _parse_text(text, tokenizer, vocab_size, options)


def _parse_text(
    text: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    options: RequestOptions = NO_OPTIONS,
) -> ParsedPrompt:
    if tokenizer is None:
        rule = "must be token ids when the engine has no tokenizer"
        raise InvalidRequestError.for_field("prompt", rule, text)
    token_ids = tokenizer.encode(text)
    if not token_ids:
        raise InvalidRequestError.for_field("prompt", "must give at least one token", text)
    return ParsedPrompt(check_prompt_ids(token_ids, vocab_size), text, options)


def _is_list(value: Any) -> bool:
    """Whether it is a list, a tuple or the like, or an array with a first axis."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
