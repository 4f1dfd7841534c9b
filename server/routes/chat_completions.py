"""POST /v1/chat/completions."""

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import Scope

from jaxserve.outputs import RequestOutput
from server.access.prompt_size import check_prompt_sizes, shown_texts
from server.protocol.answers import encoder
from server.protocol.chat import chat_options, chat_sampling_params, decode_chat_request
from server.protocol.chat_answers import ChatStream, chat_response
from server.protocol.sampling import make_request_options
from server.routes.beam_search import beam_streams
from server.routes.generation import GenerationEndpoint, Job, decode_body
from server.state import ServerState


async def _prepare(state: ServerState, scope: Scope, body: bytes) -> Job:
    config, engine = state.config, state.engine
    request, unknown = await decode_body(state, body, decode_chat_request)
    state.check_model(request.model)
    params = chat_sampling_params(request, engine.front_end.default_params)
    options = chat_options(
        request,
        config.default_chat_template_kwargs,
        trusts_template=config.trust_request_chat_template,
        parse_special_tokens=config.parse_special_tokens_in_content,
    )
    open_stream = beam_streams(engine, request)
    style = state.answer_style(
        request, scope, "chatcmpl", returns_text=bool(request.return_prompt_text)
    )
    await check_prompt_sizes(state, [shown_texts(request.messages)])
    submission = await engine.prepare_chat(
        request.messages,
        params,
        request_id=state.engine_id(style.response_id),
        is_stream=bool(request.stream),
        request_options=make_request_options(request, config.default_request_timeout),
        priority=request.priority,
        **options,
    )

    def make_body(outputs: Sequence[RequestOutput]) -> bytes:
        return encoder.encode(chat_response(request, outputs[0], style))

    writer = None
    if request.stream:
        writer = ChatStream(request, style, forces_usage=config.enable_force_include_usage)
    return Job(
        response_id=style.response_id,
        submissions=[submission],
        unknown_fields=unknown,
        writer=writer,
        make_body=make_body,
        open_stream=open_stream,
    )


routes = [Route("/v1/chat/completions", GenerationEndpoint(_prepare), methods=["POST"])]
