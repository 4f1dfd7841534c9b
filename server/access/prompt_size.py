"""Refuses texts that are far too long before all of them is tokenized, which takes much memory.

A tokenizer needs more than 100 bytes a token on the way: 8 MiB of text can take 2 GB (measured).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestTooLongError
from jaxserve.text.tokenizer import Tokenizer
from server.state import ServerState

CHARACTERS_PER_TOKEN = 8
"""Texts with fewer characters for each token of the model are not looked at."""
_GROWTH = 4
_SLACK_SHARE, _SLACK_TOKENS = 1.1, 64
"""The tokens of a beginning can be a few more than its share of the whole text's."""


async def check_prompt_sizes(state: ServerState, texts: Iterable[str]) -> None:
    """Refuse texts that cannot fit the model; those that may fit are checked exactly later.

    Raises:
      RequestTooLongError: a text has more tokens than the model takes.
    """
    info, tokenizer = state.engine.info, state.engine.front_end.tokenizer
    if info is None or tokenizer is None:
        return
    max_tokens = info.max_model_len
    for text in texts:
        if len(text) > CHARACTERS_PER_TOKEN * max_tokens:  # spares the others a thread
            await state.engine.in_text_thread(
                lambda text=text: check_text_size(tokenizer, text, max_tokens)
            )


def check_text_size(tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    """Tokenize longer and longer beginnings of a text until it is known to be too long.

    Raises:
      RequestTooLongError: it has more than `max_tokens` tokens.
    """
    if len(text) <= CHARACTERS_PER_TOKEN * max_tokens:
        return
    size = 2 * max_tokens
    while size < len(text):
        num_tokens = len(tokenizer.encode(text[:size], add_special_tokens=False))
        if num_tokens > _SLACK_SHARE * max_tokens + _SLACK_TOKENS:
            raise RequestTooLongError(
                f"This model's maximum context length is {max_tokens} tokens. However, the first "
                f"{size} of your prompt's {len(text)} characters are {num_tokens} tokens already; "
                f"shorten the prompt",
                parameter="prompt",
                value=len(text),
            )
        size *= _GROWTH


def shown_texts(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of a chat that templates show whole; of an assistant's they may drop thoughts."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "assistant":
            continue
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
    return "\n".join(texts)
