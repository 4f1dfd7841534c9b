"""What `LLM.beam_search` returns, under the names of vLLM's module."""

from dataclasses import dataclass
from typing import Any

from jaxserve.outputs import Logprob


@dataclass
class BeamSearchSequence:
    """One of the best beams.

    Attributes:
      orig_prompt: what was continued: `prompt_token_ids`, and `prompt` if it was text.
      tokens: ids of prompt and output; the one that ended the beam is among them.
      logprobs: for each output token, {id: Logprob} of the most likely ones, the chosen one first.
      lora_request: None until an engine fills it.
      cum_logprob: sum of the log-probabilities of the output tokens.
      text: of all `tokens`, special ones too; None without a tokenizer.
      finish_reason: "stop", "length", "timeout", "abort" or "error".
      stop_reason: the end-of-sequence id that ended it.
      error: what went wrong when `finish_reason` is "error".
    """

    orig_prompt: dict[str, Any]
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first; `beam_width` of them, or fewer if there are not."""

    sequences: list[BeamSearchSequence]
