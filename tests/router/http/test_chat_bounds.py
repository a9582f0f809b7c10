"""What a chat template may make of a small body: no more than could be a prompt."""

import asyncio
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from lorrery.router.reader import LONG_TEXT_CHARACTERS
from lorrery.service.settings.cluster import Settings
from lorrery.tokenizer.file import SHIPPED, BuiltinTokenizer, open_tokenizer
from tests.router.http.conftest import StartHttp, one_answer, refusal

ASKED = [{"role": "user", "content": "weather?"}]
ROUTES = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/responses": {"input": "weather?"},
    "/v1/messages": {"model": Settings().model, "messages": ASKED, "max_tokens": 1},
}


def tool(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as a route takes it."""
    if path == "/v1/messages":
        return {"name": "look", "input_schema": schema}
    function = {"name": "look", "parameters": schema}
    return {"type": "function", **function} if path == "/v1/responses" else {"type": "function", "function": function}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def indenting(folder: Path) -> str:
    """Return a tokenizer's folder whose template indents tools, as Llama 3.1's does."""
    shutil.copytree(SHIPPED, folder)
    template = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("path", ROUTES)
async def test_tools_that_would_become_too_long_a_text_are_refused(
    start_http: StartHttp, tmp_path: Path, path: str
) -> None:
    router = await start_http(
        router={"tokenizer": indenting(tmp_path / "tokenizer")},
        scheduler={"max_req_input_len": 1000, "max_req_total_len": 1200},
    )
    tools = [tool(path, {"a": nested(50)})] * 10  # less than 1,000 tokens as the client sends them
    async with router.connection() as connection:
        status, error = await refusal(connection, path, {**ROUTES[path], "tools": tools})
    longest = open_tokenizer(SHIPPED).longest_token_bytes
    assert status == 400
    told = re.search(r" has over (\d+) bytes; max_req_input_len is 1000 tokens, which are (\d+) ", error["message"])
    assert told is not None
    assert 1000 * longest == int(told[2]) < int(told[1]) < 1000 * longest + 2000
    assert error["message"].endswith(f"at most (the longest token has {longest}); give a shorter one")
    if path != "/v1/messages":
        assert error["param"] == "input_tokens"
        assert "your prompt contains at least 1" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
async def test_tools_nested_deeper_than_any_are_refused(start_http: StartHttp, path: str) -> None:
    router = await start_http()
    body = {**ROUTES[path], "tools": [tool(path, {"a": nested(900)})] * 3}
    async with router.connection() as (reader, writer):
        writer.write(posted(path, body))
        head, _, told = (await one_answer(reader)).partition(b"\r\n\r\n")
    assert b" 400 " in head
    why = re.fullmatch(
        r"the body is nested (\d+) levels deep; at most 64 are read; send fewer levels", json.loads(told)["detail"]
    )
    assert why is not None
    assert int(why[1]) > 900


async def test_arguments_nested_deeper_than_any_are_refused(start_http: StartHttp) -> None:
    router = await start_http()
    deep = '{"a":' * 65 + "1" + "}" * 65
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": deep}}
    for path, field, turn in (
        ("/v1/chat/completions", "messages", {"role": "assistant", "content": "", "tool_calls": [call]}),
        ("/v1/responses", "input", {"type": "function_call", "call_id": "c1", "name": "look", "arguments": deep}),
    ):
        async with router.connection() as connection:
            status, error = await refusal(connection, path, {field: [turn]})
        place = "messages[0].tool_calls[0].function.arguments" if field == "messages" else "input[0].arguments"
        assert (status, error["param"]) == (400, place)
        assert error["message"] == f"{place} is nested 65 levels deep; at most 64 are read; send fewer levels"


async def test_no_variable_of_a_client_lifts_the_bound(start_http: StartHttp, tmp_path: Path) -> None:
    router = await start_http(router={"tokenizer": indenting(tmp_path / "tokenizer")})
    variables = {"most characters": 10**9, "most_characters": 10**9}
    body = {"messages": ASKED, "tools": [tool("", {"a": nested(50)})] * 300, "chat_template_kwargs": variables}
    async with router.connection() as connection:
        status, error = await refusal(connection, "/v1/chat/completions", body)
    assert (status, error["param"]) == (400, "input_tokens")


async def test_a_conversation_of_long_tools_is_rendered_in_a_thread(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering: list[threading.Thread] = []
    render = BuiltinTokenizer.chat_prompt

    def noted(*given: Any, **further: Any) -> str:
        rendering.append(threading.current_thread())
        return render(*given, **further)

    monkeypatch.setattr(BuiltinTokenizer, "chat_prompt", noted)
    router = await start_http()
    long = "x" * LONG_TEXT_CHARACTERS
    async with router.connection() as (reader, writer):
        for further in ({}, {"tools": [{"name": "look", "input_schema": {"description": long}}]}):
            body = {"model": Settings().model, "messages": ASKED, **further}
            await counted(reader, writer, body)
    assert rendering[0] is threading.main_thread()
    assert rendering[1] is not threading.main_thread()


def posted(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(posted("/v1/messages/count_tokens", body))
    assert b" 200 " in await one_answer(reader)
