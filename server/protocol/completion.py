"""CompletionRequest: the body of /v1/completions, and what the engine is asked because of it."""

from typing import Annotated, Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.processing.prompts import Prompt
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from server.protocol.sampling import (
    MAX_SEQUENCES,
    SamplingFields,
    check_shared_fields,
    make_sampling_params,
    refuse_fields,
)
from server.protocol.typed_body import decode_request

MAX_PROMPTS = 128


class CompletionRequest(SamplingFields, kw_only=True):
    """A completion; None means "not given"."""

    prompt: str | list[Any] | None = None
    echo: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    suffix: Any = None
    prompt_embeds: Any = None


_REFUSED: dict[str, tuple[Any, ...]] = {"suffix": (None, ""), "prompt_embeds": (None,)}


def decode_completion_request(
    body: bytes | dict[str, Any], *, max_depth: int = 64, strict: bool = False
) -> tuple[CompletionRequest, list[str]]:
    """A checked completion request, and the names of fields that were not known.

    Raises:
      InvalidRequestError: the body is malformed, or a field breaks its rule or is not supported.
      RequestTooLargeError: it holds too many values.
    """
    request, unknown = decode_request(CompletionRequest, body, max_depth=max_depth, strict=strict)
    check_shared_fields(request)
    refuse_fields(request, _REFUSED)
    if request.echo and request.logprobs is not None:
        rule = "must not be given with logprobs: those of prompts are not supported in this release"
        raise InvalidRequestError(f"echo {rule}", parameter="echo")
    num_prompts = len(list_prompts(request))
    if num_prompts * request.num_run_sequences > MAX_SEQUENCES:
        rule = f"must be at most {MAX_SEQUENCES} together with {num_prompts} prompts"
        raise InvalidRequestError.for_field("n", rule, request.n)
    return request, unknown


def completion_sampling_params(
    request: CompletionRequest, defaults: SamplingParams
) -> SamplingParams:
    """The parameters of a completion; without a limit it gets the defaults', 16 tokens.

    Args:
      request: of the client.
      defaults: of the model, see `AsyncLLMEngine.get_default_sampling_params`.

    Raises:
      InvalidRequestError: a value breaks its rule.
    """
    max_tokens = defaults.max_tokens if request.max_tokens is None else request.max_tokens
    return make_sampling_params(request, defaults, max_tokens=max_tokens, logprobs=request.logprobs)


def list_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request: text or token ids, one or several.

    Raises:
      InvalidRequestError: there is none, too many, or of mixed kinds.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        rule = "must be text, token ids, or a list of these, and not empty"
        raise InvalidRequestError.for_field("prompt", rule, prompt)
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        rule = "must hold only texts, only token ids, or only lists of token ids"
        raise InvalidRequestError.for_field("prompt", rule, prompt)
    if len(prompt) > MAX_PROMPTS:
        rule = f"must hold at most {MAX_PROMPTS} prompts"
        raise InvalidRequestError.for_field("prompt", rule, len(prompt))
    return prompt


def engine_prompts(request: CompletionRequest, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The prompts in the form that the engine takes; tokenizes, so call it in a text thread.

    Args:
      request: of the client.
      tokenizer: of the engine; used only where `add_special_tokens` is False.

    Raises:
      InvalidRequestError: see `list_prompts`; or an empty text gives no token.
    """
    prompts = list_prompts(request)
    if request.add_special_tokens is not False or tokenizer is None:
        return list(prompts)
    made: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            made.append({"prompt": prompt, "prompt_token_ids": ids})
        else:
            made.append(prompt)
    return made
