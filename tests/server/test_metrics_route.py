import asyncio
import types
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from jaxserve.async_llm_engine import EngineState
from jaxserve.config import EngineConfig
from jaxserve.distributed.messages import EngineStats
from server.routes.metrics import HttpMetrics, attach_metrics, metrics_route
from tests.server.scripted_engine import Served


def fake_engine() -> Any:
    return types.SimpleNamespace(
        config=EngineConfig(served_model_name=("tiny",)),
        state=EngineState.READY,
        info=None,
        stats=EngineStats(num_running=2),
        seconds_since_news=0.0,
        observers=[],
    )


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def stream(request: Request) -> StreamingResponse:
    return StreamingResponse(iter(["a", "b"]))


async def fail(request: Request) -> PlainTextResponse:
    raise RuntimeError("on purpose")


def make_client(registry: CollectorRegistry) -> TestClient:
    routes = [
        Route("/items/{name}", hello),
        Route("/stream", stream),
        Route("/fail", fail),
        metrics_route(registry),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(HttpMetrics, registry=registry)])
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def count(registry: CollectorRegistry, handler: str, status: str, method: str = "GET"):
    labels = {"handler": handler, "method": method, "status": status}
    return registry.get_sample_value("http_requests_total", labels)


def test_the_engine_is_observed_and_shown_with_its_process():
    engine = fake_engine()
    metrics = attach_metrics(engine)
    assert engine.observers == [metrics]
    answer = make_client(metrics.registry).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0' in answer.text
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"process_resident_memory_bytes", "python_info", "http_requests"} <= names


def test_openmetrics_is_given_to_those_who_accept_it():
    client = make_client(attach_metrics(fake_engine()).registry)
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("accept", ["", "*/*", "text/html;q=x, ,;", "application/openmetrics-text"])
def test_any_accept_header_gets_an_answer(accept):
    client = make_client(attach_metrics(fake_engine()).registry)
    assert client.get("/metrics", headers={"accept": accept}).status_code == 200


def test_requests_are_counted_by_template_method_and_class_of_status(registry):
    client = make_client(registry)
    for name in ("a", "b"):
        client.get(f"/items/{name}")
    client.post("/items/a")
    client.get("/stream")
    assert count(registry, "/items/{name}", "2xx") == 2
    assert count(registry, "/items/{name}", "4xx", "POST") == 1
    assert count(registry, "/stream", "2xx") == 1
    labels = {"handler": "/items/{name}", "method": "GET"}
    assert registry.get_sample_value("http_request_duration_seconds_count", labels) == 2


def test_a_handler_that_raises_counts_as_5xx(registry):
    assert make_client(registry).get("/fail").status_code == 500
    assert count(registry, "/fail", "5xx") == 1


def test_a_client_that_goes_before_its_answer_is_no_failure_of_the_server(registry):
    async def say_nothing(scope: Any, receive: Any, send: Any) -> None:
        return

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    asyncio.run(HttpMetrics(say_nothing, registry)(scope, None, None))  # pyright: ignore[reportArgumentType]
    assert count(registry, "none", "4xx", "POST") == 1


def test_paths_and_methods_that_clients_invent_add_no_series(registry):
    client = make_client(registry)
    for number in range(20):
        client.get(f"/secret-{number}")
        client.request(f"METHOD{number}", f"/secret-{number}")
    assert count(registry, "none", "4xx") == 20
    assert count(registry, "none", "4xx", "other") == 20
    shown = client.get("/metrics").text
    assert "secret" not in shown and "METHOD" not in shown


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_num_queued_reqs": 1}, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 9, "max_num_queued_tokens": 2}, "max_num_queued_tokens"),
    ],
)
def test_requests_that_find_the_queue_full_are_counted_by_the_setting(limits, reason):
    async def run() -> str:
        async with Served(**limits) as served:
            served.process.hold()
            first = asyncio.create_task(served.complete("abc"))
            async with asyncio.timeout(10):
                while not served.process.added:
                    await asyncio.sleep(0.001)
            for _ in range(2):
                assert (await served.complete("abc")).status_code == 429
            served.process.release()
            await first
            return (await served.client.get("/metrics")).text

    families = text_string_to_metric_families(asyncio.run(run()))
    (family,) = [f for f in families if f.name == "vllm:admission_rejections"]
    counts = {sample.labels["reason"]: sample.value for sample in family.samples}
    other = ({"max_num_queued_reqs", "max_num_queued_tokens"} - {reason}).pop()
    assert counts == {reason: 2, other: 0}
