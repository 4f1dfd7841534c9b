"""Beam search of one prompt, step by step: which beams live on, and which are the best."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import Logprob
from jaxserve.sampling_params import BeamSearchParams

type TokenEntries = Mapping[int, Logprob]
"""The most likely tokens of one position by id, each with its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRules:
    """What the search of one prompt goes by.

    Attributes:
      beam_width: beams that live at the same time, and that are returned.
      max_tokens: output tokens of a beam.
      num_candidates: most likely tokens by which a beam is continued.
      num_prompt_tokens: the score counts them, as vLLM's does.
      length_penalty: exponent of the length in the score; larger ones favour long beams.
      eos_token_ids: end-of-sequence ids; as the last token they do not count in the length.
      ignore_eos: these ids do not end a beam.
    """

    beam_width: int
    max_tokens: int
    num_candidates: int
    num_prompt_tokens: int
    length_penalty: float
    eos_token_ids: frozenset[int]
    ignore_eos: bool

    @classmethod
    def of(
        cls,
        params: BeamSearchParams,
        *,
        num_prompt_tokens: int,
        eos_token_ids: Collection[int],
        max_logprobs: int,
    ) -> Self:
        """The rules of a request.

        Twice the width of candidates, as in vLLM, or more where a model has many end ids: so many
        that `beam_width` of them do not end the beam.

        Args:
          params: of the client; `max_tokens` fits the model.
          num_prompt_tokens: of the prompt.
          eos_token_ids: of the model.
          max_logprobs: candidates that the engine gives at most.

        Raises:
          InvalidRequestError: the width is more than that allows.
        """
        check_beam_width("beam_width", params.beam_width, max_logprobs)
        num_ends = 0 if params.ignore_eos else len(eos_token_ids)
        return cls(
            beam_width=params.beam_width,
            max_tokens=params.max_tokens,
            num_candidates=min(max_logprobs, params.beam_width + max(params.beam_width, num_ends)),
            num_prompt_tokens=num_prompt_tokens,
            length_penalty=float(params.length_penalty),
            eos_token_ids=frozenset(eos_token_ids),
            ignore_eos=params.ignore_eos,
        )

    def score(self, beam: "Beam") -> float:
        """How good a beam is: its log-probability over a power of its length, as in vLLM."""
        length = self.num_prompt_tokens + len(beam.token_ids)
        if beam.token_ids and beam.token_ids[-1] in self.eos_token_ids:
            length -= 1
        return self._penalized(beam.cum_logprob, length)

    def best_future_score(self, beam: "Beam") -> float:
        """A bound of the score of everything that a live beam may become.

        Log-probabilities only fall, so what is left is the length that flatters them most.
        """
        longest = self.num_prompt_tokens + self.max_tokens
        shortest = self.num_prompt_tokens + len(beam.token_ids)
        length = longest if self.length_penalty >= 0 else shortest
        return self._penalized(beam.cum_logprob, length)

    def _penalized(self, cum_logprob: float, length: int) -> float:
        try:
            return cum_logprob / max(length, 1) ** self.length_penalty
        except (OverflowError, ZeroDivisionError):  # a power that no float holds
            return 0.0 if self.length_penalty > 0 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One continuation of the prompt.

    Attributes:
      token_ids: output tokens.
      cum_logprob: sum of their log-probabilities, of the raw logits.
      entries: the candidates of each position, among which the token was.
      finish_reason: "stop", "length", or why the search was ended; None while the beam lives.
      stop_reason: the id that ended it, when that is why.
    """

    token_ids: tuple[int, ...] = ()
    cum_logprob: float = 0.0
    entries: tuple[TokenEntries, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchState:
    """Where the search of one prompt stands.

    Attributes:
      live: beams that the next step continues, the most likely first; none when it is over.
      ended: the best of those that have ended, best first, at most `beam_width`.
    """

    live: tuple[Beam, ...] = (Beam(),)
    ended: tuple[Beam, ...] = ()


def check_beam_width(name: str, beam_width: int, max_logprobs: int) -> None:
    """Refuse a width for which the engine gives too few candidates.

    Args:
      name: of the client's field.
      beam_width: its value.
      max_logprobs: log-probabilities that the engine gives of a token.

    Raises:
      InvalidRequestError: the width is too large.
    """
    if 2 * beam_width > max_logprobs:
        rule = (
            f"must be at most {max_logprobs // 2}: a beam takes twice as many log-probabilities, "
            f"and max_logprobs is {max_logprobs}"
        )
        raise InvalidRequestError.for_field(name, rule, beam_width)


def advance(
    state: BeamSearchState, entries: Sequence[TokenEntries], rules: BeamRules
) -> BeamSearchState:
    """Continue each live beam by its candidates, and keep the most likely of all.

    Of equal beams those of the better parent and of the better rank come first.

    Args:
      state: the search so far.
      entries: for each live beam, the most likely next tokens.
      rules: of the search.

    Returns:
      The search one token later. It is over when the beams are as long as they may be, or when
      none that lives can still become one of the best; to go on would not change the result.
    """
    ended = list(state.ended)
    candidates: list[tuple[float, int, int]] = []
    for parent, tokens in enumerate(entries):
        for token_id, entry in _most_likely(tokens, rules.num_candidates):
            cum_logprob = state.live[parent].cum_logprob + entry.logprob
            if token_id in rules.eos_token_ids and not rules.ignore_eos:
                beam = _continue(state.live[parent], token_id, cum_logprob, tokens)
                ended.append(replace(beam, finish_reason="stop", stop_reason=token_id))
            else:
                candidates.append((cum_logprob, parent, token_id))
    candidates.sort(key=lambda candidate: -candidate[0])
    live = tuple(
        _continue(state.live[parent], token_id, cum_logprob, entries[parent])
        for cum_logprob, parent, token_id in candidates[: rules.beam_width]
    )
    best = _best(ended, rules)
    if live and len(live[0].token_ids) >= rules.max_tokens:
        return end(BeamSearchState(live, best), "length", rules)
    if live and len(best) == rules.beam_width:
        # The first is the most likely. If it cannot win any more, then neither can the others.
        if rules.best_future_score(live[0]) <= rules.score(best[-1]):
            live = ()
    return BeamSearchState(live, best)


def end(state: BeamSearchState, reason: str, rules: BeamRules) -> BeamSearchState:
    """End all live beams as they are.

    Args:
      state: the search so far.
      reason: the finish reason of those that lived.
      rules: of the search.
    """
    cut = [replace(beam, finish_reason=reason) for beam in state.live]
    return BeamSearchState((), _best([*state.ended, *cut], rules))


def _continue(beam: Beam, token_id: int, cum_logprob: float, tokens: TokenEntries) -> Beam:
    return Beam(
        token_ids=(*beam.token_ids, token_id),
        cum_logprob=cum_logprob,
        entries=(*beam.entries, tokens),
    )


def _best(beams: Sequence[Beam], rules: BeamRules) -> tuple[Beam, ...]:
    """The best of beams, best first; of equal ones the first."""
    return tuple(sorted(beams, key=rules.score, reverse=True)[: rules.beam_width])


def _most_likely(entries: TokenEntries, num_candidates: int) -> list[tuple[int, Logprob]]:
    """The candidates in the order of their ranks; what cannot follow at all is none."""
    possible = [item for item in entries.items() if item[1].logprob > -math.inf]
    possible.sort(key=lambda item: item[1].rank or math.inf)
    return possible[:num_candidates]
