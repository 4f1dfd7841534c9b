"""Beam searches of both generating routes: instead of a request's stream, its best beams."""

from collections.abc import AsyncGenerator

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.outputs import RequestOutput
from jaxserve.processing.beam_requests import PromptSearch
from jaxserve.processing.beam_runs import run_search
from jaxserve.processing.beam_search import check_beam_width
from jaxserve.processing.request_loop import Submission
from jaxserve.sampling_params import BeamSearchParams
from server.protocol.sampling import SamplingFields
from server.routes.generation import OpenStream


def beam_streams(engine: AsyncLLMEngine, request: SamplingFields) -> OpenStream | None:
    """What searches the best beams of a prompt; None: the client has not asked for a beam search.

    Args:
      engine: runs the steps.
      request: of the client; checked.

    Raises:
      InvalidRequestError: there are more beams than the engine gives log-probabilities for.
    """
    if not request.use_beam_search:
        return None
    name = "n" if request.best_of is None else "best_of"
    beam_width, max_logprobs = request.num_run_sequences, engine.front_end.max_logprobs
    check_beam_width(name, beam_width, max_logprobs)

    async def search(submission: Submission) -> AsyncGenerator[RequestOutput]:
        asked = submission[0].sampling_params
        assert asked.max_tokens is not None  # resolved when the submission was made
        params = BeamSearchParams(
            beam_width=beam_width,
            max_tokens=asked.max_tokens,
            ignore_eos=asked.ignore_eos,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        )
        beams = PromptSearch(submission, params, max_logprobs=max_logprobs)
        await run_search(beams, engine.stream)
        tokenizer, num_beams = engine.front_end.tokenizer, request.num_sequences
        yield await engine.in_text_thread(lambda: beams.request_output(tokenizer, num_beams))

    return search
