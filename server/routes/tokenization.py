"""POST /tokenize and /detokenize."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat_prompt import encode_chat
from server.access.limits import read_body
from server.access.prompt_size import check_text_size, shown_texts
from server.protocol.answers import encoder
from server.protocol.chat import chat_options
from server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    decode_detokenize_request,
    decode_tokenize_request,
)
from server.protocol.typed_body import ignored_fields_header
from server.routes.generation import decode_body
from server.state import ServerState, state_of

MAX_TOKENS = 1 << 18
"""Tokens of one text, even where the model takes fewer."""


async def _tokenize(request: Request) -> Response:
    state = state_of(request.scope)
    asked, unknown = await _read(request, state, decode_tokenize_request)
    tokens = await state.engine.in_text_thread(lambda: _encode(state, asked))
    strings = None
    if asked.return_token_strs:
        name_of = state.engine.get_tokenizer().vocabulary_token
        strings = await state.engine.in_text_thread(lambda: list(map(name_of, tokens)))
    max_len = state.max_model_len
    return _answer(TokenizeResponse(len(tokens), max_len, tokens, strings), unknown)


async def _detokenize(request: Request) -> Response:
    state = state_of(request.scope)
    asked, unknown = await _read(request, state, decode_detokenize_request)
    text = await state.engine.in_text_thread(lambda: _decode(state, asked))
    return _answer(DetokenizeResponse(text), unknown)


async def _read(request: Request, state: ServerState, decode: Any) -> tuple[Any, list[str]]:
    max_bytes = state.config.max_body_bytes
    body = await read_body(request.scope, request.receive, max_bytes)
    asked, unknown = await decode_body(state, body, decode)
    state.check_model(asked.model)
    return asked, unknown


def _encode(state: ServerState, asked: TokenizeRequest) -> list[int]:
    tokenizer, config = state.engine.get_tokenizer(), state.config
    text = asked.prompt if asked.messages is None else shown_texts(asked.messages)
    check_text_size(tokenizer, text or "", max(MAX_TOKENS, state.max_model_len))
    if asked.messages is None:
        adds_special = asked.add_special_tokens is not False
        return tokenizer.encode(asked.prompt or "", add_special_tokens=adds_special)
    options = chat_options(
        asked,
        config.default_chat_template_kwargs,
        trusts_template=config.trust_request_chat_template,
        parse_special_tokens=config.parse_special_tokens_in_content,
    )
    options["chat_template"] = options["chat_template"] or state.engine.front_end.chat_template
    return encode_chat(tokenizer, asked.messages, **options).token_ids


def _decode(state: ServerState, asked: DetokenizeRequest) -> str:
    vocab_size = state.engine.model_config.vocab_size
    wrong = next((token_id for token_id in asked.tokens if token_id >= vocab_size), None)
    if wrong is not None:
        rule = f"must hold integers in [0, {vocab_size})"
        raise InvalidRequestError.for_field("tokens", rule, wrong)
    return state.engine.get_tokenizer().decode(asked.tokens, skip_special_tokens=False)


def _answer(body: msgspec.Struct, unknown: list[str]) -> Response:
    headers = {"x-jaxserve-ignored-fields": ignored_fields_header(unknown)} if unknown else None
    return Response(encoder.encode(body), headers=headers, media_type="application/json")


routes = [
    Route("/tokenize", _tokenize, methods=["POST"]),
    Route("/detokenize", _detokenize, methods=["POST"]),
]
