"""ChatRequest: the body of /v1/chat/completions, and what the engine is asked because of it."""

from typing import Annotated, Any, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from server.protocol.sampling import (
    SamplingFields,
    chat_limit,
    check_shared_fields,
    make_sampling_params,
    refuse_fields,
)
from server.protocol.typed_body import decode_request

MAX_MESSAGES = 4096
MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING_EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")

Messages = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]


class TemplateFields(Protocol):
    """Fields that shape a rendered chat; requests of /tokenize have them, too."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: Tools | None


class ChatRequest(SamplingFields, kw_only=True):
    """A chat; None means "not given".

    Tools are shown by templates, but calls are not read out of answers in this release: tools are
    taken with `tool_choice` "none", and an empty list always.
    """

    messages: Messages
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Any = None
    include_reasoning: bool = True
    echo: bool = False
    return_prompt_text: bool | None = None
    functions: Any = None
    function_call: Any = None
    media_io_kwargs: Any = None


_REFUSED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "include_reasoning": (True,),
    "add_special_tokens": (None, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "media_io_kwargs": (None, {}),
}


def decode_chat_request(
    body: bytes | dict[str, Any], *, max_depth: int = 64, strict: bool = False
) -> tuple[ChatRequest, list[str]]:
    """A checked chat request, and the names of fields that were not known.

    Raises:
      InvalidRequestError: the body is malformed, or a field breaks its rule or is not supported.
      RequestTooLargeError: it holds too many values.
    """
    request, unknown = decode_request(ChatRequest, body, max_depth=max_depth, strict=strict)
    check_shared_fields(request)
    refuse_fields(request, _REFUSED)
    check_roles(request.messages)
    _check_tools(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError.for_field(
            "top_logprobs", "must be given only with logprobs", request.top_logprobs
        )
    if request.reasoning_effort not in REASONING_EFFORTS:
        rule = f"must be one of {', '.join(filter(None, REASONING_EFFORTS))}"
        raise InvalidRequestError.for_field("reasoning_effort", rule, request.reasoning_effort)
    return request, unknown


def chat_sampling_params(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """The parameters of a chat; without a limit it may use the rest of the model's length.

    Args:
      request: of the client.
      defaults: of the model, see `AsyncLLMEngine.get_default_sampling_params`.

    Raises:
      InvalidRequestError: a value breaks its rule.
    """
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    elif request.max_tokens not in (None, max_tokens):
        rule = f"must equal max_completion_tokens={max_tokens} when both are given"
        raise InvalidRequestError.for_field("max_tokens", rule, request.max_tokens)
    if max_tokens is None:
        max_tokens = chat_limit(defaults)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return make_sampling_params(request, defaults, max_tokens=max_tokens, logprobs=logprobs)


def chat_options(
    request: TemplateFields,
    default_kwargs: dict[str, Any] | None = None,
    *,
    trusts_template: bool = False,
    parse_special_tokens: bool = False,
) -> dict[str, Any]:
    """The keywords of `encode_chat`, `RequestMaker.of_chats` and `AsyncLLMEngine.prepare_chat`.

    Args:
      request: of the client.
      default_kwargs: variables of the template that the client has not given.
      trusts_template: take a template that the client sends.
      parse_special_tokens: let control tokens in the messages be control tokens.

    Raises:
      InvalidRequestError: the client sends a template without being trusted to.
    """
    if request.chat_template is not None and not trusts_template:
        raise InvalidRequestError(
            "chat_template must not be sent to this server: a template is a program; the server "
            "takes it with --trust-request-chat-template",
            parameter="chat_template",
        )
    kwargs = {**(default_kwargs or {}), **(request.chat_template_kwargs or {})}
    if isinstance(request, ChatRequest):
        if request.documents:
            kwargs["documents"] = request.documents
        if request.reasoning_effort is not None:
            kwargs["reasoning_effort"] = request.reasoning_effort
    return {
        "chat_template": request.chat_template,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "tools": request.tools or None,
        "chat_template_kwargs": kwargs or None,
        "parse_special_tokens_in_content": parse_special_tokens,
    }


def check_roles(messages: list[dict[str, Any]]) -> None:
    """Refuse messages of unknown roles, whatever a template would make of them.

    Raises:
      InvalidRequestError: a role is not known.
    """
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            name = f"messages[{index}].role"
            rule = f"must be one of {', '.join(ROLES)}"
            raise InvalidRequestError.for_field(name, rule, message.get("role"))


def _check_tools(request: ChatRequest) -> None:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError.for_field(
                "tool_choice", "must be given only with tools", choice
            )
        return
    if choice != "none":
        rule = "must be 'none' with tools: calls are not read out of answers in this release"
        raise InvalidRequestError.for_field("tool_choice", rule, choice)
    for index, tool in enumerate(request.tools):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            rule = "must be {'type': 'function', 'function': {...}}"
            raise InvalidRequestError.for_field(f"tools[{index}]", rule, tool)
