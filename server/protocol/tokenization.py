"""Bodies of /tokenize and /detokenize."""

from typing import Annotated, Any

import msgspec

from jaxserve.errors import InvalidRequestError
from server.protocol.chat import Messages, Tools, check_roles
from server.protocol.sampling import Name
from server.protocol.typed_body import decode_request

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text or a chat whose tokens are asked for."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class TokenizeResponse(msgspec.Struct):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Tokens whose text is asked for."""

    model: Name | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct):
    """The text."""

    prompt: str


def decode_tokenize_request(
    body: bytes | dict[str, Any], *, max_depth: int = 64, strict: bool = False
) -> tuple[TokenizeRequest, list[str]]:
    """A checked request, and the names of unknown fields.

    Raises:
      InvalidRequestError: the body is malformed, or holds not exactly one of prompt and messages.
      RequestTooLargeError: it holds too many values.
    """
    request, unknown = decode_request(TokenizeRequest, body, max_depth=max_depth, strict=strict)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("body must hold either prompt or messages", parameter="prompt")
    if request.messages is not None:
        check_roles(request.messages)
        if request.add_special_tokens:
            rule = "must not be set for messages: the chat template writes them"
            raise InvalidRequestError(f"add_special_tokens {rule}", parameter="add_special_tokens")
    return request, unknown


def decode_detokenize_request(
    body: bytes | dict[str, Any], *, max_depth: int = 64, strict: bool = False
) -> tuple[DetokenizeRequest, list[str]]:
    """The same for ids; raises as `decode_tokenize_request`."""
    return decode_request(DetokenizeRequest, body, max_depth=max_depth, strict=strict)
