"""Adapters loaded over HTTP, from a folder that may hold anything."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from lorrery.router import peft
from tests.router.http.conftest import TIMEOUT_SECONDS, StartHttp, refusal


async def test_a_fifo_in_place_of_a_config_is_refused(start_http: StartHttp, tmp_path: Path):
    os.mkfifo(tmp_path / peft.CONFIG)
    router = await start_http()
    async with router.connection() as connection:
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        status, error = await refusal(connection, "/v1/load_lora_adapter", body)
    assert (status, error["param"], error["code"]) == (400, "lora_path", "invalid_value")
    assert "adapter_config.json is no regular file" in error["message"]


async def test_others_are_answered_while_a_config_is_being_read(
    start_http: StartHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, over = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(folder: str, max_lora_rank: int) -> peft.Config:
        loop.call_soon_threadsafe(begun.set)
        over.wait(TIMEOUT_SECONDS)
        raise peft.FormatError(f"{folder} answers at last; max_lora_rank is {max_lora_rank}")

    monkeypatch.setattr(peft, "read_config", hang)
    router = await start_http()
    async with router.connection() as connection, asyncio.timeout(TIMEOUT_SECONDS), asyncio.TaskGroup() as tasks:
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        loading = tasks.create_task(refusal(connection, "/v1/load_lora_adapter", body))
        await begun.wait()
        answer = await router.exchange(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        over.set()
        status, error = await loading
    assert status == 400
    assert "answers at last" in error["message"]
