"""PromptSearch: the beam search of one prompt as requests of one token."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxserve.beam_search import BeamSearchOutput, BeamSearchSequence
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxserve.processing.beam_search import Beam, BeamRules, BeamSearchState, advance, end
from jaxserve.processing.request_loop import Submission
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer


class PromptSearch:
    """The beam search of one prompt: asks for steps, takes their outputs, tells the best beams.

    A step is a request of one token for each live beam. What the steps before it computed is found
    in the prefix cache, so a beam computes its newest token alone.

    Args:
      submission: the prompt, and the options that the requests of all steps have. It is not sent
        itself; of its parameters those count that say how the answer looks.
      params: of the search; `max_tokens` fits the engine.
      max_logprobs: log-probabilities that the engine gives of a token.
      clock: monotonic seconds, the clock of `Request.arrival_seconds`.

    Raises:
      InvalidRequestError: `max_logprobs` is too small for the beam width.
    """

    def __init__(
        self,
        submission: Submission,
        params: BeamSearchParams,
        *,
        max_logprobs: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._request, self._prompt_text = submission
        self._rules = BeamRules.of(
            params,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            eos_token_ids=self._request.eos_token_ids,
            max_logprobs=max_logprobs,
        )
        asked = self._request.sampling_params
        self._step_params = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            logprobs=max(self._rules.num_candidates, asked.logprobs or 0),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=asked.skip_reading_prefix_cache,
        )
        self._clock = clock
        self._state = BeamSearchState()
        self._num_steps = 0
        self._stats: RequestStateStats | None = None
        self._num_cached_tokens: int | None = None
        self._error: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the search is over."""
        return not self._state.live

    def next_step(self) -> list[Submission]:
        """The requests of the next step, one for each live beam.

        There are none when the deadline has passed; the search is then over.
        """
        request, now = self._request, self._clock()
        arrival, timeout = request.arrival_seconds, request.timeout_seconds
        if self._num_steps:  # the first waits as long as any request may, later ones anew
            if timeout is not None:
                timeout -= now - arrival
                if timeout <= 0:
                    self._state = end(self._state, FinishReason.TIMEOUT.value, self._rules)
            arrival = now
        return [
            (
                msgspec.structs.replace(
                    request,
                    request_id=f"{request.request_id}-step-{self._num_steps}-beam-{index}",
                    prompt_token_ids=request.prompt_token_ids + beam.token_ids,
                    sampling_params=self._step_params,
                    arrival_seconds=arrival,
                    timeout_seconds=timeout,
                ),
                None,
            )
            for index, beam in enumerate(self._state.live)
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the finished outputs of the requests of `next_step`, in their order."""
        if not outputs:
            return
        self._num_steps += 1
        self._note(outputs)
        parts = [output.outputs[0] for output in outputs]
        failed = [part for part in parts if part.finish_reason == FinishReason.ERROR]
        cut = [part.finish_reason for part in parts if not part.logprobs]
        if failed:
            self._error = failed[0].error or "a step of the search has failed"
            self._state = BeamSearchState((), ())
        elif cut:
            self._state = end(self._state, cut[0] or FinishReason.ABORT.value, self._rules)
        else:
            entries = [part.logprobs[0] for part in parts if part.logprobs]
            self._state = advance(self._state, entries, self._rules)

    def request_output(self, tokenizer: Tokenizer | None, num_beams: int) -> RequestOutput:
        """The best beams as the sequences of the submitted request.

        Args:
          tokenizer: makes text; None leaves it empty.
          num_beams: how many of them.
        """
        request = self._request
        beams = self._state.ended[:num_beams]
        make_logprobs = _LogprobsMaker(tokenizer)
        has_logprobs = request.sampling_params.logprobs is not None
        outputs = [
            CompletionOutput(
                index=index,
                text=_output_text(tokenizer, request, beam),
                token_ids=list(beam.token_ids),
                cumulative_logprob=beam.cum_logprob,
                logprobs=make_logprobs(beam) if has_logprobs else None,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
            for index, beam in enumerate(beams)
        ]
        if self._error is not None:
            outputs = [CompletionOutput(0, "", [], finish_reason="error", error=self._error)]
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            finished=True,
            metrics=self._stats,
            num_cached_tokens=self._num_cached_tokens,
        )

    def beam_output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """The best beams as `LLM.beam_search` returns them.

        Args:
          tokenizer: makes text; None leaves it out.
        """
        prompt_ids = list(self._request.prompt_token_ids)
        prompt: dict[str, Any] = {"prompt_token_ids": prompt_ids}
        if self._prompt_text is not None:
            prompt["prompt"] = self._prompt_text
        if self._error is not None:
            failed = BeamSearchSequence(prompt, prompt_ids, [], error=self._error)
            failed.finish_reason = FinishReason.ERROR.value
            return BeamSearchOutput([failed])
        make_logprobs = _LogprobsMaker(tokenizer)
        sequences: list[BeamSearchSequence] = []
        for beam in self._state.ended:
            tokens = [*prompt_ids, *beam.token_ids]
            text = None
            if tokenizer is not None:
                text = tokenizer.decode(tokens, skip_special_tokens=False)
            sequences.append(
                BeamSearchSequence(
                    orig_prompt=prompt,
                    tokens=tokens,
                    logprobs=make_logprobs(beam),
                    cum_logprob=beam.cum_logprob,
                    text=text,
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                )
            )
        return BeamSearchOutput(sequences)

    def _note(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep the times of the first step and the newest, and what the first found cached."""
        newest = [output.metrics for output in outputs if output.metrics is not None]
        if self._num_cached_tokens is None:
            self._num_cached_tokens = outputs[0].num_cached_tokens
        if not newest:
            return
        if self._stats is None:
            self._stats = RequestStateStats(**vars(newest[0]))
            self._stats.num_generation_tokens = self._stats.num_preemptions = 0
        self._stats.last_token_ts = newest[0].last_token_ts or self._stats.last_token_ts
        self._stats.num_generation_tokens += sum(part.num_generation_tokens for part in newest)
        self._stats.num_preemptions += sum(part.num_preemptions for part in newest)


def _output_text(tokenizer: Tokenizer | None, request: Request, beam: Beam) -> str:
    """The text of a beam's output, made as that of any other request."""
    params = request.sampling_params
    if tokenizer is None or not params.detokenize:
        return ""
    token_ids = beam.token_ids
    if beam.finish_reason == FinishReason.STOP and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    detokenizer = Detokenizer(
        tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return detokenizer.feed(token_ids) + detokenizer.flush()


class _LogprobsMaker:
    """Adds the texts of tokens to the log-probabilities of beams, each text made once."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._text: Callable[[int], str | None] = lambda token_id: None
        if tokenizer is not None:
            self._text = functools.cache(tokenizer.token_text)

    def __call__(self, beam: Beam) -> list[dict[int, Logprob]]:
        made: list[dict[int, Logprob]] = []
        for token_id, entries in zip(beam.token_ids, beam.entries, strict=True):
            chosen_first = {token_id: entries[token_id], **entries}
            made.append(
                {
                    i: Logprob(entry.logprob, entry.rank, self._text(i))
                    for i, entry in chosen_first.items()
                }
            )
        return made
