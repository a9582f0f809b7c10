"""Errors on Anthropic's routes, wherever in the edge an answer comes from, and their headers."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.router.http.conftest import HttpRouter, StartHttp


async def answered(
    router: HttpRouter, *headers: str, method: str = "POST", path: str = "/v1/messages", content: bytes = b"{"
) -> tuple[int, object]:
    """Return the status of an answer to a body, and its own."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        "content-type: application/json",
        *headers,
    ]
    if not any(line.startswith("content-length") for line in headers):
        lines.append(f"content-length: {len(content)}")
    head, _, body = (await router.exchange("\r\n".join([*lines, "", ""]).encode() + content)).partition(b"\r\n\r\n")
    assert b"\r\nrequest-id: " in head
    return int(head.split()[1]), json.loads(body)


async def test_a_key_is_where_openais_is(start_http: StartHttp, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "one"\nsha256 = "{hashlib.sha256(b"abc").hexdigest()}"\ntenant = "acme"\n')
    router = await start_http(router={"keys": str(keys)})
    unauthorized = (401, {"error": "Unauthorized"})
    assert await answered(router) == unauthorized
    assert await answered(router, "x-api-key: abc") == unauthorized  # as in vLLM
    status, body = await answered(router, "authorization: Bearer abc")
    assert (status, "error" in str(body)) == (400, True)


async def test_what_a_route_refuses_has_anthropics_shape_and_what_comes_before_it_has_not(
    start_http: StartHttp,
) -> None:
    router = await start_http()
    body = {"model": "no such model", "max_tokens": 1, "messages": []}
    status, told = await answered(router, content=json.dumps(body).encode())
    assert isinstance(told, dict)
    assert (status, told["type"], set(told), set(told["error"])) in (
        (404, "error", {"type", "error"}, {"type", "message"}),
        (503, "error", {"type", "error"}, {"type", "message"}),  # no scheduler knows it here
    )
    status, told = await answered(router)
    assert isinstance(told, dict)
    assert (status, set(told), told["error"]["type"], told["error"]["code"]) == (400, {"error"}, "Bad Request", 400)


@pytest.mark.parametrize(
    ("method", "path", "error"),
    [
        ("GET", "/v1/messages", (405, {"detail": "Method Not Allowed"})),
        ("POST", "/v1/messages/batches", (404, {"detail": "Not Found"})),
    ],
)
async def test_a_route_that_there_is_not_is_told_as_anywhere(
    start_http: StartHttp, method: str, path: str, error: tuple[int, object]
) -> None:
    assert await answered(await start_http(), method=method, path=path) == error


async def test_a_browser_hears_in_plain_text_that_its_origin_is_not_allowed(
    start_http: StartHttp, tmp_path: Path
) -> None:
    (tmp_path / "keys.toml").write_text("keys = []")  # without keys its requests get no further than their head
    keys = str(tmp_path / "keys.toml")
    router = await start_http(router={"http_allowed_origins": ["https://a.example"], "keys": keys})
    lines = ("OPTIONS /v1/messages HTTP/1.1", "host: localhost", "connection: close", "origin: https://b.example")
    answer = await router.exchange("\r\n".join([*lines, "access-control-request-method: POST", "", ""]).encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: text/plain" in answer
    assert answer.endswith(b"Disallowed CORS origin")
