"""ChunkWriter: the bytes of a stream's events, with all that repeats encoded once."""

from typing import Any

from jaxserve.outputs import RequestOutput
from server.protocol.answers import AnswerStyle, Usage, encoder, make_usage
from server.protocol.sampling import StreamOptions

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Frames the choices of one stream, and counts its tokens.

    Args:
      kind: the chunks' "object".
      style: of the answer.
      options: of the client: whether a chunk of the usage stands at the end, and whether each chunk
        tells the usage so far, too.
      forces_usage: end with the usage even when the client has not asked.
    """

    def __init__(
        self,
        kind: str,
        style: AnswerStyle,
        options: StreamOptions | None,
        *,
        forces_usage: bool = False,
    ):
        options = options or StreamOptions()
        has_usage = forces_usage or options.include_usage
        head = {
            "id": style.response_id,
            "object": kind,
            "created": style.created,
            "model": style.model,
        }
        if style.system_fingerprint is not None:
            head["system_fingerprint"] = style.system_fingerprint
        self._head = b"data: " + encoder.encode(head)[:-1]
        self._start = self._head + b',"choices":['
        self._end = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._style, self._has_usage = style, has_usage
        self._has_running_usage = has_usage and options.continuous_usage_stats
        self._num_prompt: dict[int, int] = {}
        self._num_cached: dict[int, int] = {}
        self._num_output = 0

    def count(self, prompt_index: int, output: RequestOutput) -> bool:
        """Count what an output brings; returns whether it is the first of its prompt."""
        is_first = prompt_index not in self._num_prompt
        if is_first:
            self._num_prompt[prompt_index] = len(output.prompt_token_ids or ())
        self._num_cached[prompt_index] = output.num_cached_tokens or 0
        for part in output.outputs:
            self._num_output += len(part.token_ids)
        return is_first

    def chunk(self, choice: bytes, **more: Any) -> bytes:
        """One event with one choice.

        Args:
          choice: as JSON.
          more: further fields of the chunk.
        """
        start = self._start
        if more:
            start = self._head + b"," + encoder.encode(more)[1:-1] + b',"choices":['
        if not self._has_running_usage:
            return b"%b%b%b" % (start, choice, self._end)
        return b'%b%b],"usage":%b}\n\n' % (start, choice, encoder.encode(self.usage))

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        num_cached = sum(self._num_cached.values()) if self._style.tells_cached_tokens else None
        return make_usage(sum(self._num_prompt.values()), self._num_output, num_cached)

    def last_events(self) -> bytes:
        """The usage, if it is wanted, and the end mark."""
        if not self._has_usage:
            return DONE
        usage = encoder.encode(self.usage)
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._head, usage, DONE)
