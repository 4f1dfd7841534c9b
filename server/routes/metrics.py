"""GET /metrics: the engine's, the process's and the HTTP server's metrics for Prometheus."""

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.async_llm_engine import AsyncLLMEngine
from jaxserve.metrics.engine_metrics import EngineMetrics

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
"""Methods with a label of their own; a client can invent others, and they must not add series."""
DURATION_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0),
)
_CLIENT_GONE = 499
"""As nginx counts a client that went before its answer; nothing is sent."""


def attach_metrics(engine: AsyncLLMEngine) -> EngineMetrics:
    """Observe an engine from now on; its registry shows this process, too."""
    metrics = EngineMetrics(engine)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=metrics.registry)
    engine.observers.append(metrics)
    return metrics


def metrics_route(registry: CollectorRegistry) -> Route:
    """The route; its answer is OpenMetrics for those who accept it, else plain text."""

    async def show_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return Route("/metrics", show_metrics)


class HttpMetrics:
    """ASGI middleware that counts requests and their seconds, by route, method and status.

    The names are those of prometheus-fastapi-instrumentator. A route is shown by its template,
    never by the path that came: a client can invent paths, and they may hold what is private.
    Put it outside of all other middleware, so that it sees every answer.

    Args:
      app: what answers.
      registry: where the metrics are shown.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        self._app = app
        self._requests = Counter(
            "http_requests",
            "Requests by route, method and class of status.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds until the end of the answer.",
            ("handler", "method"),
            buckets=DURATION_SECONDS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on.

        One that raises counts as 5xx; one whose client has gone before its answer, as 4xx.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
            status = status or _CLIENT_GONE
        finally:
            self._count(scope, status or 500, time.perf_counter() - start)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        handler = route.path if isinstance(route, Route) else "none"
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)
