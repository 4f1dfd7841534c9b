"""encode_chat: from messages to the prompt's text and ids, with content that stays content.

A control token typed into a message ("<|im_end|>") would become the real one when the rendered
text is encoded, and so forge a turn. Each such text in the messages gets a private-use character
in front before the template sees it; after rendering, what stands behind that character is encoded
as plain text. All other messages pass unchanged, so their ids are those of Hugging Face's
`apply_chat_template`.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.text.chat_template import ChatTemplateError, Message, render_chat, unused_character
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered chat.

    Attributes:
      text: the prompt.
      token_ids: its ids; BOS is there only if the template writes it.
    """

    text: str
    token_ids: list[int]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    parse_special_tokens_in_content: bool = False,
) -> ChatPrompt:
    """Render and encode a chat.

    Args:
      tokenizer: of the model, with its chat template.
      messages: see `render_chat`.
      chat_template: used instead of the model's own.
      add_generation_prompt: see `render_chat`.
      continue_final_message: see `render_chat`.
      tools: see `render_chat`; with tools, a template named "tool_use" is preferred.
      chat_template_kwargs: see `render_chat`.
      parse_special_tokens_in_content: let control tokens in the messages be control tokens. Off,
        an assistant's message may still hold those that are no special tokens ("</think>"), which
        templates look for.

    Raises:
      ChatTemplateError: there is no template, or `render_chat` refuses.
    """
    template = chat_template or _choose_template(tokenizer, bool(tools))

    def render(messages: Any, tools: Any, kwargs: Any) -> str:
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            special_tokens=tokenizer.special_tokens,
            chat_template_kwargs=kwargs,
        )

    if parse_special_tokens_in_content:
        text = render(messages, tools, chat_template_kwargs)
        return ChatPrompt(text=text, token_ids=tokenizer.encode(text, add_special_tokens=False))
    guard = _ContentGuard(tokenizer, template, [messages, tools, chat_template_kwargs, template])
    text = render(
        [guard.mark_message(message) for message in messages],
        guard.mark(tools),
        guard.mark(chat_template_kwargs),
    )
    return guard.encode(text)


def _choose_template(tokenizer: Tokenizer, has_tools: bool) -> str:
    templates = tokenizer.chat_templates
    template = templates.get("tool_use") if has_tools else None
    template = template or tokenizer.chat_template
    if template is None:
        raise ChatTemplateError(
            "chat_template must be given; the model has none", parameter="chat_template"
        )
    return template


class _ContentGuard:
    """Marks control tokens in what a client sent, and finds the marks again after rendering."""

    def __init__(self, tokenizer: Tokenizer, template: str, values: object):
        self._tokenizer = tokenizer
        self._mark = unused_character(values)
        self._control_tokens = tokenizer.control_tokens(template)
        added = tokenizer.added_tokens.items()
        self._added = {t.content: (i, t) for i, t in added if t.content in self._control_tokens}
        special = frozenset(t for t in self._control_tokens if self._added[t][1].special)
        self._all = _alternatives(self._control_tokens)
        self._before_any = re.compile(f"(?={self._all})")
        self._before_special = re.compile(f"(?={_alternatives(special)})")

    def mark_message(self, message: Any) -> Any:
        """Mark one message; what an assistant wrote only where it holds special tokens."""
        is_assistant = isinstance(message, Mapping) and message.get("role") == "assistant"
        return self._mark_all(message, self._before_special if is_assistant else self._before_any)

    def mark(self, value: Any) -> Any:
        """Mark every text inside nested lists and mappings."""
        return self._mark_all(value, self._before_any)

    def _mark_all(self, value: Any, places: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return places.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {
                self._mark_all(key, places): self._mark_all(item, places)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._mark_all(item, places) for item in value]
        return value

    def encode(self, text: str) -> ChatPrompt:
        """Encode a rendered text: marked control tokens as text, all others as themselves."""
        escaped = f"\\u{ord(self._mark):04x}"  # what a template's own JSON may have made of it
        if self._mark not in text and escaped not in text:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            return ChatPrompt(text=text, token_ids=ids)
        mark = f"(?:{self._mark}|{re.escape(escaped)})"
        found = re.compile(f"(?P<mark>{mark})?(?P<token>{self._all})|{mark}")
        texts: list[str] = [""]
        tokens: list[str] = []
        position = 0
        for match in found.finditer(text):
            texts[-1] += text[position : match.start()]
            position = match.end()
            token = match["token"]
            if token is None:
                continue
            if match["mark"] is not None:
                texts[-1] += token
            else:
                tokens.append(token)
                texts.append("")
        texts[-1] += text[position:]
        whole = texts[0] + "".join(a + b for a, b in zip(tokens, texts[1:], strict=True))
        return ChatPrompt(text=whole, token_ids=self._encode_parts(texts, tokens))

    def _encode_parts(self, texts: list[str], tokens: list[str]) -> list[int]:
        """Encode texts[0] tokens[0] texts[1] ... with the tokens as control tokens."""
        for index, content in enumerate(tokens):
            token = self._added[content][1]
            if token.lstrip:
                texts[index] = texts[index].rstrip()
            if token.rstrip:
                texts[index + 1] = texts[index + 1].lstrip()
        encoder = self._tokenizer.plain_encoder(self._control_tokens)
        ids = encoder.encode(texts[0])
        for content, text in zip(tokens, texts[1:], strict=True):
            ids.append(self._added[content][0])
            ids += encoder.encode(text, is_first=False)
        return ids


@functools.lru_cache(maxsize=16)
def _alternatives(texts: frozenset[str]) -> str:
    """A pattern of the longest of the texts; without any, of nothing."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
