"""Turns the engine's updates of tokens into the client's RequestOutputs, and finds stop strings."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import RequestOutput, RequestStateStats
from jaxserve.processing.sampling_limits import refuse_stop_strings
from jaxserve.processing.sequence_output import SequenceOutput, gathers_until_end
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind
from jaxserve.step import SequenceUpdate, StopAbort
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What one round of updates gives: outputs for the clients, aborts for the engine."""

    outputs: list[RequestOutput]
    aborts: list[StopAbort]


class OutputProcessor:
    """Keeps the text, tokens and times of every unfinished request.

    Not safe to use from two threads at once.

    Args:
      tokenizer: makes text of tokens; None leaves all text empty.
      clock: monotonic seconds, the clock of `Request.arrival_seconds`.
    """

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.monotonic):
        """Hold no request yet."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, _RequestState] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that have been added and neither finished nor dropped."""
        return len(self._requests)

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """Expect the updates of a request's `n` sequences; call it before the engine has it.

        Args:
          request: as the engine gets it.
          prompt_text: what the prompt's ids were made of, when it was text.

        Raises:
          InvalidRequestError: the id is in use, or stop strings are given without a tokenizer.
        """
        if request.request_id in self._requests:
            rule = "must differ from those of unfinished requests"
            raise InvalidRequestError.for_field("request_id", rule, request.request_id)
        params = request.sampling_params
        if self._tokenizer is None:
            refuse_stop_strings(params)
        tokenizer = self._tokenizer if params.detokenize else None
        self._requests[request.request_id] = _RequestState(
            request=request,
            prompt_text=prompt_text,
            sequences=[SequenceOutput.start(request, i, tokenizer) for i in range(params.n)],
            gathers=gathers_until_end(params),
            stats=RequestStateStats(arrival_time=request.arrival_seconds, queued_ts=self._clock()),
        )

    def drop(self, request_id: str) -> bool:
        """Forget a request whose client has gone; its later updates are ignored.

        Returns:
          Whether the request was unfinished.
        """
        return self._requests.pop(request_id, None) is not None

    def process(self, updates: list[SequenceUpdate]) -> ProcessedStep:
        """Take in one step's updates.

        Updates of finished, dropped or unknown requests are ignored: steps in flight still
        bring some after a stop string or an abort.

        Returns:
          At most one output a request, in the order of the updates, and the sequences to end.
        """
        now = self._clock()
        aborts: list[StopAbort] = []
        touched: dict[str, _RequestState] = {}
        for update in updates:
            state = self._requests.get(update.request_id)
            if state is None:
                continue
            sequence = state.sequences[update.index]
            if sequence.finish_reason is not None:
                continue
            if state.gathers and update.finish_reason is None:
                # Not a tenth of `take`'s time: 256 rows a step are on the host's critical path
                # offline. Preemptions and cached tokens are in the last update, too.
                sequence.token_ids += update.new_token_ids
                state.note_tokens(now)
                continue
            touched[update.request_id] = state
            abort = state.take(update, now)
            if abort is not None:
                aborts.append(abort)
        outputs = [output for state in touched.values() if (output := state.make_output())]
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        return ProcessedStep(outputs, aborts)


@dataclass(slots=True, kw_only=True, eq=False)
class _RequestState:
    """One unfinished request.

    All its outputs share one list of prompt ids, which may be long. It is made when the first token
    comes: the device works then, but may wait for `add`, and for the outputs of many requests that
    end in one step.
    """

    request: Request
    prompt_text: str | None
    sequences: list[SequenceOutput]
    gathers: bool
    stats: RequestStateStats
    num_cached_tokens: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        for sequence in self.sequences:  # all(...) takes nine times as long for one
            if sequence.finish_reason is None:
                return False
        return True

    def take(self, update: SequenceUpdate, now: float) -> StopAbort | None:
        """Take in an update; returns what the engine must end because of it."""
        sequence = self.sequences[update.index]
        num_tokens = len(sequence.token_ids)
        is_failed = False
        try:
            stop = sequence.take(update)
        except Exception as error:
            # Text made from a model's tokens must never end the loop of all other requests.
            logger.exception("no text for request %s", self.request.request_id)
            sequence.fail(f"the output could not be decoded: {type(error).__name__}")
            stop, is_failed = None, True
        self._note_start(update)
        if update.num_preemptions:
            self.stats.num_preemptions = sum(s.num_preemptions for s in self.sequences)
        if len(sequence.token_ids) > num_tokens:
            self.note_tokens(now)
        if update.finish_reason is not None or not (stop or is_failed):
            return None
        return StopAbort(
            request_id=self.request.request_id,
            index=sequence.index,
            num_output_tokens=len(sequence.token_ids),
            stop=stop,
        )

    def _note_start(self, update: SequenceUpdate) -> None:
        """Keep when the first of the request's sequences was scheduled, and what it found cached.

        Its siblings find the prompt that it computed, which was not there before the request.
        """
        known, seconds = self.stats.scheduled_ts, update.scheduled_seconds
        if seconds is not None and (known is None or seconds < known):
            self.stats.scheduled_ts = seconds
            self.num_cached_tokens = update.num_cached_tokens

    def note_tokens(self, now: float) -> None:
        """Keep the times of the first and the newest tokens, and get ready for their outputs."""
        stats = self.stats
        stats.last_token_ts = now
        if stats.first_token_ts is None:
            stats.first_token_ts = now
            stats.first_token_latency = now - stats.arrival_time
            self._list_prompt()

    def _list_prompt(self) -> None:
        if not self.prompt_token_ids:
            self.prompt_token_ids += self.request.prompt_token_ids

    def make_output(self) -> RequestOutput | None:
        """Make what the client is to hear now, or None; not None when it has just finished."""
        kind, is_finished = self.request.sampling_params.output_kind, self.is_finished
        due = [sequence for sequence in self.sequences if sequence.is_due]
        if not due or (kind is RequestOutputKind.FINAL_ONLY and not is_finished):
            return None
        shown = due if kind is RequestOutputKind.DELTA else self.sequences
        self._list_prompt()
        self.stats.num_generation_tokens = sum([len(s.token_ids) for s in self.sequences])
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt_text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.make_completion() for sequence in shown],
            finished=is_finished,
            metrics=self.stats.copy(),
            num_cached_tokens=self.num_cached_tokens,
        )
