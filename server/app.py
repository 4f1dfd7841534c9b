"""create_app: the OpenAI-compatible application in front of one engine."""

from starlette.applications import Starlette
from starlette.middleware import Middleware

from jaxserve.async_llm_engine import AsyncLLMEngine
from server.access.cors import Cors
from server.access.door import Door
from server.config import ServerConfig
from server.errors import EXCEPTION_HANDLERS
from server.routes import chat_completions, completions, development, models, status, tokenization
from server.routes.metrics import HttpMetrics, attach_metrics, metrics_route
from server.state import ServerState


def create_app(engine: AsyncLLMEngine, config: ServerConfig) -> Starlette:
    """The application; it neither starts nor closes the engine.

    `app.state.server` is the ServerState: who is told to leave sets its `is_draining`.

    Args:
      engine: started or not; until it is ready all but the status routes answer 503.
      config: of the server.
    """
    state = ServerState(engine, config)
    registry = attach_metrics(engine).registry
    middleware = [Middleware(HttpMetrics, registry=registry)]
    if config.allowed_origins:
        # In front of the door: a browser's preflight carries no key, and errors need the headers.
        middleware.append(
            Middleware(
                Cors,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
            )
        )
    middleware.append(Middleware(Door, state=state))
    app = Starlette(
        routes=[
            *chat_completions.routes,
            *completions.routes,
            *models.routes,
            *tokenization.routes,
            *status.routes,
            *(development.routes if config.enable_dev_routes else ()),
            metrics_route(registry),
        ],
        middleware=middleware,
        exception_handlers=EXCEPTION_HANDLERS,
    )
    # A redirect would send the client's key and body to wherever a proxy says we are.
    app.router.redirect_slashes = False
    app.state.server = state
    return app
