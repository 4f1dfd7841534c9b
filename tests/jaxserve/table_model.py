"""A model that is a table: the next token's log-probabilities depend on the last token only."""

import numpy as np

from jaxserve.outputs import Logprob


class TableModel:
    """Random log-probabilities.

    Attributes:
      logprobs: float64[V, V], row = last token.
    """

    def __init__(self, vocab_size: int, seed: int, sharpness: float = 1.5):
        logits = np.random.default_rng(seed).normal(size=(vocab_size, vocab_size)) * sharpness
        self.logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def top(self, last_token: int, count: int) -> dict[int, Logprob]:
        """The most likely tokens after a token, in no order that matters."""
        row = self.logprobs[last_token]
        order = np.argsort(-row, kind="stable")[:count].tolist()
        ranked = [(token, Logprob(float(row[token]), rank)) for rank, token in enumerate(order, 1)]
        return dict(reversed(ranked))


def score(cum_logprob: float, length: int, penalty: float) -> float:
    return cum_logprob / max(length, 1) ** penalty


def plain_beam_search(
    model: TableModel,
    prompt: tuple[int, ...],
    *,
    beam_width: int,
    max_tokens: int,
    num_candidates: int,
    penalty: float = 1.0,
    ends: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search as vLLM's loop does it, to the last step, over arrays.

    Returns:
      Output tokens and log-probability of each of the best beams, best first.
    """
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        grown: list[tuple[tuple[int, ...], float]] = []
        for tokens, cum_logprob in live:
            row = model.logprobs[(prompt + tokens)[-1]]
            for token in np.argsort(-row, kind="stable")[:num_candidates].tolist():
                item = ((*tokens, token), cum_logprob + float(row[token]))
                (done if token in ends and not ignore_eos else grown).append(item)
        order = np.argsort([-cum_logprob for _, cum_logprob in grown], kind="stable")[:beam_width]
        live = [grown[index] for index in order]
    every = done + live

    def of_item(item: tuple[tuple[int, ...], float]) -> float:
        tokens, cum_logprob = item
        length = len(prompt) + len(tokens) - (tokens[-1] in ends)
        return score(cum_logprob, length, penalty)

    return sorted(every, key=of_item, reverse=True)[:beam_width]
