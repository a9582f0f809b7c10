"""Tool calls of earlier turns as a chat template sees them: the same on every route, and as vLLM passes them on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorrery.service.settings.cluster import Settings
from lorrery.tokenizer.file import SHIPPED
from tests.router.http.conftest import StartHttp, refusal

FOUND = "messages do not go with the chat template: "
ASKED = {"role": "user", "content": "weather?"}


def telling(folder: Path) -> str:
    """Return a tokenizer's folder whose template fails with the messages that it gets."""
    shutil.copytree(SHIPPED, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception(messages | tojson) }}", encoding="utf-8")
    return str(folder)


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [ASKED, *messages]}


def calling(arguments: object) -> dict[str, Any]:
    """Return an assistant's turn as OpenAI's client dumps it: what there is not is null."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call]}


async def seen(start_http: StartHttp, tmp_path: Path, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that the template gets."""
    router = await start_http(router={"tokenizer": telling(tmp_path / "tokenizer")})
    async with router.connection() as connection:
        status, error = await refusal(connection, path, body)
    assert status == 400
    messages, _ = json.JSONDecoder().raw_decode(error["message"], len(FOUND))
    return messages


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"city": "Paris", "days": [1, 2]}', {"city": "Paris", "days": [1, 2]}),
        ("", {}),
        ('{"city": "Par', {}),  # a call that the model got wrong does not end the conversation
        ("[1]", {}),
        ("9" * 5000, {}),
    ],
)
async def test_arguments_are_an_object(
    start_http: StartHttp, tmp_path: Path, path: str, given: object, read: object
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": read}}
    assert await seen(start_http, tmp_path, path, chat(calling(given))) == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("none", [None, []])
async def test_a_turn_without_calls_has_no_field_for_them(
    start_http: StartHttp, tmp_path: Path, path: str, none: object
) -> None:
    turn = {"role": "assistant", "content": "sunny", "tool_calls": none, "function_call": None}
    assert (await seen(start_http, tmp_path, path, chat(turn)))[1] == {"role": "assistant", "content": "sunny"}


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', "", '{"ci'])
async def test_items_of_responses_have_theirs_read(start_http: StartHttp, tmp_path: Path, arguments: str) -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}
    messages = await seen(start_http, tmp_path, "/v1/responses", {"input": [ASKED, item]})
    expected = {"city": "Paris"} if "Paris" in arguments else {}
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": expected}


@pytest.mark.parametrize("given", [{"city": "Paris"}, {}])
async def test_blocks_of_messages_have_theirs_as_they_come(
    start_http: StartHttp, tmp_path: Path, given: object
) -> None:
    block = {"type": "tool_use", "id": "c1", "name": "look", "input": given}
    body = {"model": Settings().model, **chat({"role": "assistant", "content": [block]})}
    messages = await seen(start_http, tmp_path, "/v1/messages/count_tokens", body)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": given or {}}


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("look", ""),
        (["look"], ".0"),
        ([{"id": "c1", "type": "function", "function": None}], ".0.function"),
        ([{"id": "c1", "type": "custom", "custom": {"name": "look", "input": "x"}}], ".0.type"),
        (calling({"city": "Paris"})["tool_calls"], ".0.function.arguments"),
        (calling(None)["tool_calls"], ".0.function.arguments"),
    ],
)
async def test_what_is_no_call_of_a_function_is_refused(start_http: StartHttp, calls: object, param: str) -> None:
    router = await start_http()
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    async with router.connection() as connection:
        status, error = await refusal(connection, "/v1/chat/completions", chat(turn))
    assert (status, error["param"]) == (400, f"body.messages.1.tool_calls{param}")
