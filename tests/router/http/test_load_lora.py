"""Adapters loaded over HTTP, from a folder that may hold anything."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lorrery.router import peft
from tests.router.adapter_folder import weights, write_adapter
from tests.router.http.conftest import TIMEOUT_SECONDS, StartHttp, refusal
from tests.router.test_access import ACME, ROOT


async def test_a_fifo_in_place_of_a_config_is_refused(start_http: StartHttp, tmp_path: Path):
    os.mkfifo(tmp_path / peft.CONFIG)
    router = await start_http()
    async with router.connection() as connection:
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        status, error = await refusal(connection, "/v1/load_lora_adapter", body)
    assert (status, error["param"], error["code"]) == (500, None, 500)
    assert "adapter_config.json is no regular file" in error["message"]


async def test_others_are_answered_while_a_config_is_being_read(
    start_http: StartHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, over = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(folder: str, max_lora_rank: int, *, quirks: bool) -> peft.Config:
        loop.call_soon_threadsafe(begun.set)
        over.wait(TIMEOUT_SECONDS)
        raise peft.FormatError(f"{folder} answers at last; max_lora_rank is {max_lora_rank}")

    monkeypatch.setattr(peft, "read_adapter", hang)
    router = await start_http()
    async with router.connection() as connection, asyncio.timeout(TIMEOUT_SECONDS), asyncio.TaskGroup() as tasks:
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        loading = tasks.create_task(refusal(connection, "/v1/load_lora_adapter", body))
        await begun.wait()
        answer = await router.exchange(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        over.set()
        status, error = await loading
    assert status == 400
    assert "answers at last" in error["message"]


pytestmark = pytest.mark.usefixtures("known_adapters")
WORKER = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"
WORKER += " for the root cause"
"""As vLLM 0.32 answered when it was given the same folders."""


@pytest.mark.parametrize(
    ("broken", "status", "kind", "message"),
    [
        ({"use_dora": True}, 500, "InternalServerError", WORKER.format("vLLM does not yet support DoRA.")),
        ({"bias": "all"}, 500, "InternalServerError", WORKER.format("Adapter bias is not supported.")),
        (
            {"rank_pattern": {"q_proj": 65}},
            500,
            "InternalServerError",
            WORKER.format("LoRA rank 65 is greater than max_lora_rank 64."),
        ),
        ({"r": 65}, 500, "InternalServerError", WORKER.format("LoRA rank 65 is greater than max_lora_rank 64.")),
        (
            {"lora_alpha": None},
            500,
            "InternalServerError",
            WORKER.format("Missing required configuration fields: {'lora_alpha'}"),
        ),
        (
            {"file": b""},
            500,
            "InternalServerError",
            WORKER.format("Error while deserializing header: header too small"),
        ),
        (
            {"file": weights()[:300]},
            500,
            "InternalServerError",
            WORKER.format("Error while deserializing header: incomplete metadata, file not fully covered"),
        ),
        ({"no": "weights"}, 500, "InternalServerError", WORKER.format("<path> doesn't contain tensors")),
        ({"no": "config"}, 404, "NotFoundError", "Loading lora x failed: No adapter found for <path>"),
        ({"peft_type": "PREFIX_TUNING"}, 503, "ServiceUnavailableError", "no scheduler is connected"),
    ],
)
async def test_a_broken_adapter_has_vllms_status_and_words(
    start_http: StartHttp, tmp_path: Path, broken: dict[str, Any], status: int, kind: str, message: str
):
    missing = broken.pop("no", "")
    body = {"lora_name": "x", "lora_path": write_adapter(tmp_path, **broken)}
    if missing:
        (tmp_path / {"weights": "adapter_model.safetensors", "config": peft.CONFIG}[missing]).unlink()
    router = await start_http(router={"vllm_quirks": True})
    async with router.connection() as connection:
        answered, error = await refusal(connection, "/v1/load_lora_adapter", body)
    expected = {"message": message, "type": kind, "param": None, "code": status}
    assert (answered, error) == (status, expected)


async def test_other_kinds_of_adapters_are_refused_without_vllms_quirks(start_http: StartHttp, tmp_path: Path):
    router = await start_http()
    body = {"lora_name": "x", "lora_path": write_adapter(tmp_path, peft_type="PREFIX_TUNING")}
    async with router.connection() as connection:
        status, error = await refusal(connection, "/v1/load_lora_adapter", body)
    assert (status, error["type"]) == (500, "InternalServerError")
    assert "PREFIX_TUNING" in error["message"]


async def test_without_mock_adapters_a_rank_needs_a_folder(start_http: StartHttp, tmp_path: Path):
    both = {"lora_name": "x", "rank": 8}
    for mock, body, status in (
        (True, both, 503),  # no scheduler is connected
        (True, both | {"lora_path": str(tmp_path / "none")}, 503),
        (False, both, 400),
        (False, both | {"lora_path": str(tmp_path / "none")}, 404),
    ):
        router = await start_http(router={"mock_adapters": mock})
        async with router.connection() as connection:
            assert (await refusal(connection, "/v1/load_lora_adapter", body))[0] == status


async def test_only_an_operator_learns_what_a_path_is(start_http: StartHttp, tmp_path: Path):
    (tmp_path / "file").write_text("")
    dora = '{"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": true}'
    for name, config in (("broken", "{"), ("weightless", dora.replace("true", "false")), ("dora", dora)):
        (tmp_path / name).mkdir()
        (tmp_path / name / peft.CONFIG).write_text(config)
    (tmp_path / "folder" / peft.CONFIG).mkdir(parents=True)
    (tmp_path / "keys.toml").write_text(ACME + ROOT)
    paths = ["missing", "file", "file/x", "broken", "weightless", "dora", "folder", "x" * 300]
    for settings in ({}, {"mock_adapters": True}):
        router = await start_http(router={"keys": str(tmp_path / "keys.toml"), **settings})
        said: dict[str, set[tuple[int, str]]] = {"acme-secret": set(), "root-secret": set()}
        async with router.connection() as connection:
            for secret, answers in said.items():
                for path in paths:
                    body = {"lora_name": "acme-x", "lora_path": str(tmp_path / path)}
                    key = f"Bearer {secret}"
                    status, error = await refusal(connection, "/v1/load_lora_adapter", body, authorization=key)
                    answers.add(
                        (status, error["message"].replace(str(tmp_path / path), "PATH").replace("<path>", "PATH"))
                    )
        assert said["acme-secret"] == {(404, "Loading lora acme-x failed: No adapter found for PATH")}
        assert len(said["root-secret"]) >= 5
