"""Who is let in: keys, origins and headers."""

from typing import Any

import pytest
from starlette.routing import Route

from server.routes.status import OPEN_PATHS
from tests.server.answers import error_of
from tests.server.scripted_engine import Served

pytestmark = pytest.mark.asyncio


async def test_every_route_but_the_open_ones_needs_a_key():
    async with Served(api_key=("first", "second")) as served:
        paths = {route.path for route in served.app.routes if isinstance(route, Route)}
        assert OPEN_PATHS < paths and "/metrics" in paths
        tried = {path.replace("{name:path}", "tiny") for path in paths - OPEN_PATHS}
        tried |= {"/health/", "//health", "/Health", "/health/x", "/v1/models/", "//v1/models"}
        tried |= {"/V1/models", "/v1/../v1/models", "/", "/nope", "/healthz", "/health%00"}
        for path in sorted(tried):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "ANY"):
                response = await served.client.request(method, path)
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
            error_of(await served.client.get(path), 401)
        for path in OPEN_PATHS:
            assert (await served.client.get(path)).status_code == 200
        for key in ("first", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            response = await served.client.get("/v1/models", headers=headers)
            assert response.status_code == 200


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"first", b"Basic first", b"Bearer firs",
     b"Bearer firstt", b"Bearer first second", b"Bearer \xff\xfe", b"Bearer FIRST"],
)  # fmt: skip
async def test_a_wrong_key_is_refused_without_being_repeated(value):
    async with Served(api_key=("first",)) as served:
        response = await served.client.get("/v1/models", headers={b"authorization": value})
        assert "first" not in error_of(response, 401)
        headers = [(b"authorization", b"Bearer first"), (b"authorization", value)]
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 401


async def test_metrics_can_be_read_without_a_key_by_setting_only():
    async with Served(api_key=("k",), allow_metrics_without_api_key=True) as served:
        assert "vllm:" in (await served.client.get("/metrics")).text
        assert (await served.client.get("/v1/models")).status_code == 401


async def test_browsers_of_allowed_origins_get_their_headers_even_with_errors():
    async with Served(api_key=("k",), allowed_origins=("http://page",)) as served:
        headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST",
                   "Access-Control-Request-Headers": "authorization"}  # fmt: skip
        response = await served.client.options("/v1/chat/completions", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page"
        response = await served.client.get("/v1/models", headers={"Origin": "http://page"})
        assert response.headers["access-control-allow-origin"] == "http://page"
        error_of(response, 401)
        headers["Origin"] = "http://other"
        response = await served.client.options("/v1/chat/completions", headers=headers)
        assert "access-control-allow-origin" not in response.headers
        assert error_of(response, 400).startswith("origin must be one")


async def test_without_origins_no_page_gets_in():
    async with Served() as served:
        response = await served.client.get("/v1/models", headers={"Origin": "http://page"})
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_root_path_is_cut_off_before_routes_and_keys():
    async with Served(api_key=("k",)) as served:
        scope = {"root_path": "/api"}
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        for path in ("/api/health", "/api/v1/models", "/api/api/health"):
            full = {"type": "http", "method": "GET", "path": path, "headers": [], **scope}
            await served.app({**full, "query_string": b""}, receive, send)
        assert statuses == [200, 401, 401]


async def test_headers_have_a_limit():
    async with Served(max_header_bytes=2048) as served:
        response = await served.client.get("/v1/models", headers={"x": "y" * 3000})
        assert "2048" in error_of(response, 413)
        headers = [(f"h{number}", "v") for number in range(101)]
        assert "100" in error_of(await served.client.get("/v1/models", headers=headers), 413)
