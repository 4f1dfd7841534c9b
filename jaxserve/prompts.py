"""What a user hands to `generate` and `chat`, brought into one form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.text.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt.

    Attributes:
      token_ids: at least one.
      text: what the ids were made of, if it was given.
    """

    token_ids: tuple[int, ...]
    text: str | None = None


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list.

    Raises:
      InvalidRequestError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        rule = "must be text, token ids, a dict, or a list of these"
        raise InvalidRequestError.for_field("prompts", rule, type(prompts).__name__)
    if len(prompts) and all(_is_id(item) for item in prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> ParsedPrompt:
    """Tokenize and check one prompt.

    Raises:
      InvalidRequestError: it is empty, of a wrong type, holds an id outside the vocabulary, or
        is text without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, tokenizer, vocab_size)
    if isinstance(prompt, str):
        return ParsedPrompt(_encode(prompt, tokenizer), prompt)
    return ParsedPrompt(check_prompt_ids(prompt, vocab_size))


def check_prompt_ids(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Check that ids are integers inside the vocabulary, at least one."""
    name = "prompt_token_ids"
    if not isinstance(token_ids, Sequence | np.ndarray) or isinstance(token_ids, str | bytes):
        raise InvalidRequestError.for_field(name, "must be a list of integers", token_ids)
    if not len(token_ids):
        raise InvalidRequestError.for_field(name, "must hold at least one id", token_ids)
    for token_id in token_ids:
        if not _is_id(token_id) or not 0 <= token_id < vocab_size:
            rule = f"must hold integers in [0, {vocab_size})"
            raise InvalidRequestError.for_field(name, rule, token_id)
    return tuple(map(int, token_ids))


def _parse_mapping(
    prompt: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int
) -> ParsedPrompt:
    unknown = sorted(set(prompt) - _PROMPT_KEYS)
    if unknown:
        raise InvalidRequestError.for_field(unknown[0], "is not supported in this release", unknown)
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError.for_field("prompt", "must be text", text)
    if prompt.get("prompt_token_ids") is not None:
        return ParsedPrompt(check_prompt_ids(prompt["prompt_token_ids"], vocab_size), text)
    if text is None:
        rule = "must hold prompt or prompt_token_ids"
        raise InvalidRequestError.for_field("prompt", rule, dict(prompt))
    return ParsedPrompt(_encode(text, tokenizer), text)


def _encode(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is None:
        rule = "must be token ids when the engine has no tokenizer"
        raise InvalidRequestError.for_field("prompt", rule, text)
    token_ids = tuple(tokenizer.encode(text))
    if not token_ids:
        raise InvalidRequestError.for_field("prompt", "must give at least one token", text)
    return token_ids


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
