"""POST /v1/completions."""

from collections.abc import Sequence

from starlette.routing import Route
from starlette.types import Scope

from jaxserve.outputs import RequestOutput
from jaxserve.processing.request_loop import Submission
from server.access.prompt_size import check_prompt_sizes
from server.protocol.answers import encoder
from server.protocol.completion import (
    CompletionRequest,
    completion_sampling_params,
    decode_completion_request,
    engine_prompts,
    list_prompts,
)
from server.protocol.completion_answers import CompletionStream, completion_response
from server.protocol.sampling import make_request_options
from server.routes.beam_search import beam_streams
from server.routes.generation import GenerationEndpoint, Job, decode_body
from server.state import ServerState


async def _prepare(state: ServerState, scope: Scope, body: bytes) -> Job:
    config, engine = state.config, state.engine
    request, unknown = await decode_body(state, body, decode_completion_request)
    state.check_model(request.model)
    params = completion_sampling_params(request, engine.front_end.default_params)
    open_stream = beam_streams(engine, request)
    style = state.answer_style(request, scope, "cmpl")
    prompts = list(list_prompts(request))
    await check_prompt_sizes(state, (prompt for prompt in prompts if isinstance(prompt, str)))
    if request.add_special_tokens is False:
        tokenizer = engine.front_end.tokenizer
        prompts = await engine.in_text_thread(lambda: engine_prompts(request, tokenizer))
    submissions = await engine.prepare_prompts(
        prompts,
        params,
        request_id=state.engine_id(style.response_id),
        is_stream=bool(request.stream),
        request_options=make_request_options(request, config.default_request_timeout),
        priority=request.priority,
    )
    texts = await _prompt_texts(state, request, submissions)

    def make_body(outputs: Sequence[RequestOutput]) -> bytes:
        return encoder.encode(completion_response(request, outputs, style, prompt_texts=texts))

    writer = None
    if request.stream:
        forces_usage = config.enable_force_include_usage
        writer = CompletionStream(request, style, prompt_texts=texts, forces_usage=forces_usage)
    return Job(
        response_id=style.response_id,
        submissions=submissions,
        unknown_fields=unknown,
        writer=writer,
        make_body=make_body,
        open_stream=open_stream,
    )


async def _prompt_texts(
    state: ServerState, request: CompletionRequest, submissions: Sequence[Submission]
) -> list[str] | None:
    """What `echo` repeats: the prompts, those of ids decoded."""
    if not request.echo:
        return None
    tokenizer = state.engine.get_tokenizer()

    def decode() -> list[str]:
        return [
            tokenizer.decode(prompt.prompt_token_ids) if text is None else text
            for prompt, text in submissions
        ]

    return await state.engine.in_text_thread(decode)


routes = [Route("/v1/completions", GenerationEndpoint(_prepare), methods=["POST"])]
