"""Keys and errors on Anthropic's routes, wherever in the edge an answer comes from."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.router.http.conftest import HttpRouter, StartHttp


async def answered(router: HttpRouter, *headers: str, method: str = "POST", path: str = "/v1/messages") -> bytes:
    """Return the answer to a body that is no JSON."""
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", "content-type: application/json", *headers]
    if not any(line.startswith("content-length") for line in headers):
        lines.append("content-length: 1")
    return await router.exchange("\r\n".join([*lines, "", "{"]).encode())


def told(answer: bytes) -> tuple[int, str]:
    """Return the status and the type of an error."""
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"\r\nrequest-id: " in head
    error = json.loads(content)
    assert (error["type"], set(error)) == ("error", {"type", "error", "request_id"})
    return int(head.split()[1]), error["error"]["type"]


async def test_a_key_is_in_x_api_key_or_where_openais_is(start_http: StartHttp, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "one"\nsha256 = "{hashlib.sha256(b"abc").hexdigest()}"\ntenant = "acme"\n')
    router = await start_http(router={"keys": str(keys)})
    assert told(await answered(router)) == (401, "authentication_error")
    assert told(await answered(router, "x-api-key: other")) == (401, "authentication_error")
    assert told(await answered(router, "x-api-key: abc")) == (400, "invalid_request_error")
    assert told(await answered(router, "authorization: Bearer abc")) == (400, "invalid_request_error")
    elsewhere = await answered(router, "x-api-key: abc", path="/v1/responses")
    assert elsewhere.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("method", "path", "headers", "error"),
    [
        ("POST", "/v1/messages", ("content-length: 999999999",), (413, "request_too_large")),
        ("GET", "/v1/messages", (), (405, "invalid_request_error")),
        ("POST", "/v1/messages/batches", (), (404, "not_found_error")),
    ],
)
async def test_errors_before_a_route_have_anthropics_shape_too(
    start_http: StartHttp, method: str, path: str, headers: tuple[str, ...], error: tuple[int, str]
) -> None:
    router = await start_http()
    assert told(await answered(router, *headers, method=method, path=path)) == error


async def test_a_browser_hears_in_plain_text_that_its_origin_is_not_allowed(start_http: StartHttp) -> None:
    router = await start_http(router={"http_allowed_origins": ["https://a.example"]})
    asked = ("origin: https://b.example", "access-control-request-method: POST")
    answer = await answered(router, *asked, method="OPTIONS")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: text/plain" in answer
    assert answer.endswith(b"Disallowed CORS origin")
