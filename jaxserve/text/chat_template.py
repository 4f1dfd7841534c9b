"""render_chat: the only place that renders Jinja, from messages to the text of a prompt."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from jaxserve.errors import InvalidRequestError
from jaxserve.text.template_sandbox import (
    BUDGET,
    Budget,
    TemplateEnvironment,
    parse_template,
)

MAX_TEMPLATE_CHARACTERS = 1 << 20
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_BASE_STEPS, _STEPS_PER_MESSAGE = 100_000, 1_000

Message = Mapping[str, Any]


class ChatTemplateError(InvalidRequestError):
    """The messages do not fit the template, or the template is refused or fails."""


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render a chat as Hugging Face's `apply_chat_template` does.

    Args:
      template: Jinja source.
      messages: at least one, each with a role. A content of text parts is joined with newlines;
        arguments of tool calls given as JSON text are parsed.
      add_generation_prompt: end with the beginning of an assistant's message.
      continue_final_message: end inside the last message, so that the model goes on with it;
        not together with `add_generation_prompt`.
      tools: definitions, as in the OpenAI API; an empty list is the same as None.
      special_tokens: the template's variables `bos_token`, `eos_token` and so on.
      chat_template_kwargs: further variables of the template, none of the names above.

    Raises:
      ChatTemplateError: the template is refused (see check_chat_template), raises (its own
        message is the error's) or spends too many steps; or the messages are malformed.
    """
    if add_generation_prompt and continue_final_message:
        raise ChatTemplateError(
            "continue_final_message must not be given with add_generation_prompt; got both",
            parameter="continue_final_message",
        )
    compiled = _compile(template)
    chat = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not chat:
        raise ChatTemplateError.for_field("messages", "must not be empty", messages)
    variables: dict[str, Any] = dict(chat_template_kwargs or {})
    _check_kwargs(variables, special_tokens)
    variables = {
        "documents": None,  # as in transformers, where templates ask whether it is none
        **variables,
        **special_tokens,
        "messages": chat,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }
    if not continue_final_message:
        return _render(compiled, variables)
    mark = unused_character(variables)
    if not isinstance(chat[-1]["content"], str):
        raise ChatTemplateError.for_field("messages[-1].content", "must be a text", None)
    chat[-1]["content"] += f"{mark} "
    return _cut_at(_render(compiled, variables), mark)


def check_chat_template(template: str) -> None:
    """Refuse a template that must not be rendered; a server calls it when a model is loaded.

    Raises:
      ChatTemplateError: longer than 1 MiB, a syntax error, `include`, `import` or `extends`, an
        attribute whose name begins with an underscore.
    """
    _compile(template)


def unused_character(values: object) -> str:
    """A private-use character that no text inside the values holds."""
    used = set().union(*map(set, _texts(values)))
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(
            f"chat_template must have at most {MAX_TEMPLATE_CHARACTERS} characters; "
            f"got {len(template)}",
            parameter="chat_template",
        )
    try:
        return _environment().from_string(parse_template(_environment(), template))
    except (jinja2.TemplateError, RecursionError) as error:
        raise ChatTemplateError(
            f"chat_template must be a template that can be rendered safely; got {error}",
            parameter="chat_template",
        ) from error


def _render(compiled: jinja2.Template, variables: Mapping[str, Any]) -> str:
    num_characters = sum(map(len, _texts(variables)))
    steps = _BASE_STEPS + _STEPS_PER_MESSAGE * len(variables["messages"])
    budget = Budget(steps=steps, max_characters=4 * num_characters + (1 << 20))
    token = BUDGET.set(budget)
    try:
        pieces: list[str] = []
        num_left = budget.max_characters
        for piece in compiled.generate(variables):
            pieces.append(piece)
            num_left -= len(piece)
            if num_left < 0:
                raise jinja2.TemplateError(
                    f"a chat must render to at most {budget.max_characters} characters"
                )
        return "".join(pieces)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(error.message or str(error), parameter="messages") from error
    except Exception as error:  # whatever a template does to the client's messages
        raise ChatTemplateError(
            f"messages must fit the chat template; got {type(error).__name__}: {error}",
            parameter="messages",
        ) from error
    finally:
        BUDGET.reset(token)


def _cut_at(rendered: str, mark: str) -> str:
    """End the text where the last message ends, and drop the space only if the template did."""
    end = rendered.rfind(mark)
    if end < 0:
        raise ChatTemplateError(
            "continue_final_message must have a template that shows the last message; "
            "this one leaves it out",
            parameter="continue_final_message",
        )
    is_kept = rendered.startswith(f"{mark} ", end)
    return rendered[:end] if is_kept else rendered[:end].rstrip()


def _check_kwargs(kwargs: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    reserved = {
        "messages", "tools", "conversation", "add_generation_prompt", "continue_final_message",
        "chat_template", "tokenize", "return_dict", "return_tensors", "padding", "truncation",
        *special_tokens, *_environment().globals,
    }  # fmt: skip
    wrong = sorted(reserved.intersection(kwargs))
    if wrong:
        raise ChatTemplateError.for_field(
            "chat_template_kwargs", "must not hold reserved names", wrong
        )


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    """A copy in the form that templates expect: no None, content a text, arguments an object."""
    if not isinstance(message, Mapping):
        raise ChatTemplateError.for_field(where, "must be an object", message)
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError.for_field(f"{where}.role", "must be a text", message.get("role"))
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _joined_content(plain.get("content", ""), f"{where}.content")
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ChatTemplateError.for_field(f"{where}.tool_calls", "must be a list", calls)
        plain["tool_calls"] = [
            _plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return plain


def _joined_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatTemplateError.for_field(where, "must be a text or a list of parts", content)
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") not in _TEXT_PARTS:
            rule = "must be 'text', since this engine reads text only"
            raise ChatTemplateError.for_field(f"{where}[{index}].type", rule, part.get("type"))
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ChatTemplateError.for_field(f"{where}[{index}].text", "must be a text", text)
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ChatTemplateError.for_field(where, "must be an object with a function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            name = f"{where}.function.arguments"
            raise ChatTemplateError.for_field(name, "must be JSON", arguments) from error
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _texts(value: object) -> Iterator[str]:
    """Every text inside nested lists and mappings, keys too."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, Sequence):
            stack.extend(item)
