"""ServerState: what all routes of one server share."""

import hashlib
import itertools
import uuid

from starlette.types import Scope

import jaxserve
from jaxserve.async_llm_engine import AsyncLLMEngine, EngineState
from jaxserve.errors import EngineNotReadyError, ModelNotFoundError, describe_value
from jaxserve.metrics.engine_metrics import model_name
from server.access.queue_bound import QueueBound
from server.config import ServerConfig
from server.protocol.answers import AnswerStyle, now_seconds
from server.protocol.sampling import SamplingFields

REQUEST_ID_KEY = "jaxserve.request_id"
"""Where the door leaves a client's X-Request-Id in the scope."""


class ServerState:
    """One server.

    Attributes:
      engine: of the model.
      config: of the server.
      model_names: under which the model is served; the first is shown in answers.
      queue: of its requests.
      is_draining: set when the server is to leave: running requests end, new ones are refused.
      created: when it was made, seconds since 1970.
      system_fingerprint: of server and model.
    """

    def __init__(self, engine: AsyncLLMEngine, config: ServerConfig):
        self.engine, self.config = engine, config
        self.model_names = _model_names(engine)
        self.queue = QueueBound(engine, config)
        self.is_draining = False
        self.created = now_seconds()
        self.system_fingerprint = _fingerprint(engine, self.model_names[0])
        self._numbers = itertools.count()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, of which the engine tells when it is ready.

        Raises:
          EngineNotReadyError: it is not.
        """
        if self.engine.info is None:
            raise EngineNotReadyError("the engine must be ready; it is still starting")
        return self.engine.info.max_model_len

    def engine_id(self, response_id: str) -> str:
        """A name for the engine: clients may send the same id twice at a time."""
        return f"{response_id}-{next(self._numbers)}"

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are taken and the engine goes on."""
        return self.status == "ready"

    @property
    def status(self) -> str:
        """The state in a word."""
        if self.engine.state is not EngineState.READY:
            return self.engine.state.value
        if self.is_draining:
            return "draining"
        is_stalled = self.engine.seconds_since_news > self.config.watchdog_seconds
        return "stalled" if is_stalled else "ready"

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None asks for whatever there is.

        Raises:
          ModelNotFoundError: it is not served.
        """
        if name is not None and name not in self.model_names:
            aliases = ", ".join(f"`{alias}`" for alias in self.model_names)
            raise ModelNotFoundError(
                f"The model `{describe_value(name)[1:-1]}` does not exist. Valid aliases: {aliases}"
            )

    def answer_style(
        self, request: SamplingFields, scope: Scope, prefix: str, *, returns_text: bool = False
    ) -> AnswerStyle:
        """How an answer to a request looks.

        Args:
          request: of the client.
          scope: of the connection, with the client's X-Request-Id if it sent one.
          prefix: of the answer's id.
          returns_text: tell the text of the prompt.
        """
        config = self.config
        shows_ids = request.return_tokens_as_token_ids
        name = request.request_id or scope.get(REQUEST_ID_KEY) or uuid.uuid4().hex
        return AnswerStyle(
            response_id=f"{prefix}-{name}",
            model=self.model_names[0],
            created=now_seconds(),
            system_fingerprint=self.system_fingerprint,
            role=config.response_role,
            shows_ids_as_tokens=config.return_tokens_as_token_ids
            if shows_ids is None
            else shows_ids,
            returns_token_ids=bool(request.return_token_ids),
            returns_prompt_text=returns_text,
            tells_cached_tokens=config.enable_prompt_tokens_details,
        )


def state_of(scope: Scope) -> ServerState:
    """The state of the server that answers a request."""
    return scope["app"].state.server


def _model_names(engine: AsyncLLMEngine) -> tuple[str, ...]:
    """The names to serve under: the operator's, else the model as it was given."""
    return engine.config.served_model_name or (model_name(engine.config),)


def _fingerprint(engine: AsyncLLMEngine, name: str) -> str:
    config = engine.config
    parts = (name, config.dtype, config.tensor_parallel_size, config.seed, config.max_model_len)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    tensor_parallel = config.tensor_parallel_size
    degree = f"-tp{tensor_parallel}" if tensor_parallel > 1 else ""
    return f"jaxserve-{jaxserve.__version__}{degree}-{digest}"
