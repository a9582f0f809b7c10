"""Prompts with different salts share no cached block, whatever the door; the journal replays."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lorrery.vllm import inference_pb2_grpc
from tests.cluster.client import TIMEOUT_SECONDS, Ask
from tests.cluster.engines import native
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import exchange, json_of
from tests.cluster.test_journal import replayed

pytestmark = pytest.mark.cluster

SETTINGS = ("scheduler.memory=paged", "scheduler.prefix_cache.kind=blocks", "router.vllm_grpc=127.0.0.1:0")
CACHED = 32  # of 40 tokens, in blocks of 16


async def test_a_prompt_finds_the_blocks_of_its_own_salt_alone_and_the_journal_replays(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with (
        running_cluster(tmp_path, *SETTINGS, f"scheduler.journal={path}", num_workers=1) as cluster,
        grpc.aio.insecure_channel(cluster.engine_addresses["vllm_grpc"]) as channel,
    ):
        ask = Ask(seed=1, prompt_tokens=40, max_new_tokens=1)
        prompt = list(native(ask).token_ids.ids)

        async def cached(route: str = "/v1/completions", **fields: Any) -> int:
            answer = json_of(await exchange(cluster, "POST", route, {"max_tokens": 1, **fields}))
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        found = [await cached(prompt=prompt, **salt) for salt in ({}, {}, {"cache_salt": None})]
        assert found == [0, CACHED, CACHED]
        salts = ("pepper", "sugar", "pepper", "sugar")
        assert [await cached(prompt=prompt, cache_salt=salt) for salt in salts] == [0, 0, CACHED, CACHED]
        request = native(ask)
        for salt, expected in (("pepper", CACHED), ("thyme", 0), ("thyme", CACHED), ("", CACHED)):
            request.kv.cache_salt = salt
            answer = await generate(request, timeout=TIMEOUT_SECONDS)
            assert answer.outputs.finish_info.num_cached_tokens == expected, salt
        assert await cached(prompt=prompt, cache_salt="thyme") == CACHED
        messages = [{"role": "user", "content": " ".join(["word"] * 40)}]
        chat = [await cached("/v1/chat/completions", messages=messages, cache_salt=salt) for salt in ("a", "b", "a")]
        assert chat[:2] == [0, 0]
        assert chat[2] > 0
        for salt in ("x" * 129, "user@host", "a/b", "a\\b", "a\0b"):
            request.kv.cache_salt = salt
            with pytest.raises(grpc.aio.AioRpcError, match="cache_salt") as caught:
                await generate(request, timeout=TIMEOUT_SECONDS)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    _, result = replayed(path)
    assert result.differences == []
