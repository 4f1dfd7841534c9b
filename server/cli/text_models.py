"""What chat and complete talk to: a model in this process, or one behind a server's URL."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxserve.llm import LLM
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from server.cli.failures import CommandError

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0
"""A server may be busy with other requests for a while before it answers."""


class Piece(NamedTuple):
    """A part of an answer."""

    text: str
    num_tokens: int


class TextModel(Protocol):
    """Answers with text as it comes; leaving an iterator early ends the answer."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]:
        """The next message of a conversation."""
        ...

    def complete(self, prompt: str) -> Iterator[Piece]:
        """What follows a text."""
        ...


class LocalModel:
    """A model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams):
        self._llm, self._params = llm, params

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]:
        """See TextModel; raises as `LLM.chat`."""
        return _pieces(self._llm.stream_chat(messages, self._params))

    def complete(self, prompt: str) -> Iterator[Piece]:
        """See TextModel; raises as `LLM.generate`."""
        return _pieces(self._llm.stream(prompt, self._params))


def _pieces(outputs: Iterator[RequestOutput]) -> Iterator[Piece]:
    for output in outputs:
        yield Piece(output.outputs[0].text, len(output.outputs[0].token_ids))


class RemoteModel:
    """A model behind an OpenAI API.

    Args:
      url: of the API, as http://localhost:8000/v1.
      api_key: None sends none.
      name: of the model; the server's first if not given.
      sampling: fields of each request.
    """

    def __init__(
        self, url: str, *, api_key: str | None, name: str | None, sampling: dict[str, Any]
    ):
        import httpx

        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, timeout=timeout)
        self._sampling = sampling
        self.name = name or self._first_name()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Piece]:
        """See TextModel.

        Raises:
          CommandError: the server refuses it, or cannot be reached.
        """
        for event in self._stream("/chat/completions", {"messages": list(messages)}):
            for choice in event.get("choices", []):
                yield Piece(choice["delta"].get("content") or "", 0)
            yield from _usage(event)

    def complete(self, prompt: str) -> Iterator[Piece]:
        """See TextModel; raises as `chat`."""
        for event in self._stream("/completions", {"prompt": prompt}):
            for choice in event.get("choices", []):
                yield Piece(choice.get("text") or "", 0)
            yield from _usage(event)

    def _first_name(self) -> str:
        with self._reachable():
            response = self._http.get(f"{self.url}/models")
            if response.status_code == 404 and not self.url.endswith("/v1"):
                raise CommandError(
                    f"the server answers 404 at {self.url}/models; --url is most often one that "
                    "ends in /v1"
                )
            _check(response)
            names = [model["id"] for model in _json(response).get("data", [])]
        if not names:
            raise CommandError(f"the server at {self.url} serves no model")
        return names[0]

    def _stream(self, path: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of one answer."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.name, **fields, **self._sampling, **usage}
        with self._reachable():
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.is_error:
                    response.read()
                    _check(response)
                yield from _events(response)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Tell in one line what goes wrong between here and the server."""
        import httpx

        try:
            yield
        except httpx.InvalidURL as error:
            raise CommandError(f"--url must be a URL; got {self.url!r}: {error}", 2) from error
        except httpx.UnsupportedProtocol as error:
            rule = "must begin with http:// or https://"
            raise CommandError(f"--url {rule}; got {self.url!r}", 2) from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise CommandError(f"no answer from {self.url}: {_cause(error) or reason}") from error


def _cause(error: BaseException) -> str:
    """The system's own words, which stand at the bottom of a chain of errors."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.errno:
            # Names that are not found have negative numbers, which os.strerror does not know.
            return str(below.strerror) if below.errno < 0 else os.strerror(below.errno)
        below = below.__cause__ or below.__context__
    return ""


def _events(response: "httpx.Response") -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise CommandError(f"the server sent what is no JSON: {data[:80]!r}") from error
        if "error" in event:
            raise CommandError(_error_text(event))
        yield event


def _usage(event: dict[str, Any]) -> Iterator[Piece]:
    if event.get("usage") and not event.get("choices"):
        yield Piece("", event["usage"]["completion_tokens"])


def _check(response: "httpx.Response") -> None:
    if response.is_error:
        text = _error_text(_json(response)) if response.content else response.reason_phrase
        raise CommandError(f"the server answers {response.status_code}: {text}")


def _json(response: "httpx.Response") -> Any:
    try:
        return response.json()
    except ValueError as error:
        text = " ".join(response.text[:120].split())
        status = response.status_code
        raise CommandError(f"the server answers {status}, with what is no JSON: {text}") from error


def _error_text(body: Any) -> str:
    """One line, whatever form the server's error has."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())


class AnswerClock:
    """Prints an answer as it comes, and keeps its speed."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self.text, self.num_tokens = "", 0

    def print(self, pieces: Iterator[Piece]) -> str:
        """Print to stdout; returns the whole text."""
        with contextlib.closing(pieces):  # pyright: ignore[reportArgumentType]
            for piece in pieces:
                if piece.text:
                    self._first = self._first or time.perf_counter()
                self.text += piece.text
                self.num_tokens += piece.num_tokens
                print(piece.text, end="", flush=True)
        print()
        return self.text

    def __str__(self) -> str:
        now = time.perf_counter()
        seconds, first = now - self._start, (self._first or now) - self._start
        return (
            f"{self.num_tokens} tokens in {seconds:.2f} s ({self.num_tokens / seconds:.1f} "
            f"tokens/s), the first after {first:.3f} s"
        )
