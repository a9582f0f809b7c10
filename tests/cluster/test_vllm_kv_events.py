"""A worker publishes, over real sockets, what a real vLLM has published for the same requests, field by field.

`data/vllm_kv_events.jsonl` was recorded from vLLM 0.32.0 on CPU (`vllm serve` with `--enable-lora --block-size 32
--num-gpu-blocks-override 40 --max-model-len 1024` and two adapters, `--kv-events-config` with a ZeroMQ publisher): one
request after the other, and the batches that came before the next one. Hashes are numbered in order of first mention,
since their values depend on vLLM's seed; of `token_ids` it has the count, since its outputs are another model's.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.harness import PATIENCE_SECONDS, running_cluster, wait_until
from tests.cluster.http_client import exchange, json_of, status_of

pytestmark = pytest.mark.cluster

STEPS = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "vllm_kv_events.jsonl").read_text().splitlines()
]
BLOCK = 32
END = b"\xff" * 8


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with running_cluster(
        tmp_path,
        "engine='vllm-0.32'",
        "worker.step_time='constant'",
        f"scheduler.block_size={BLOCK}",
        f"scheduler.max_total_token_num={39 * BLOCK}",
        "scheduler.max_req_input_len=1023",
        "scheduler.max_req_total_len=1024",
        "adapters.registry=[{id='l0', rank=8}, {id='l1', rank=8}]",
        "worker.kv_events.endpoint='tcp://127.0.0.1:0'",
        "worker.kv_events.bind=true",
        "worker.kv_events.replay_endpoint='tcp://127.0.0.1:0'",
        num_workers=1,
    ) as cluster:
        yield cluster


class Numbered:
    """Reads batches, with numbers for hashes and counts for tokens, which are those of the prompts."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}

    def read(self, payload: bytes, prompt: list[int]) -> list[Any]:
        at_seconds, events, rank = msgspec.msgpack.decode(payload)
        assert at_seconds > 1.7e9
        for event in events:
            if "block_hashes" in event:
                event["block_hashes"] = [self._number(one) for one in event["block_hashes"]]
            if event["type"] == "BlockStored":
                parent = event["parent_block_hash"]
                event["parent_block_hash"] = parent = None if parent is None else self._number(parent)
                tokens = self._tokens[parent] if parent is not None else []
                for index, number in enumerate(event["block_hashes"]):
                    tokens = tokens + event["token_ids"][index * BLOCK : (index + 1) * BLOCK]
                    assert self._tokens.setdefault(number, tokens) == tokens
                assert tokens[: len(prompt)] == prompt[: len(tokens)]
                event["token_ids"] = len(event["token_ids"])
        return [events, rank]

    def _number(self, block_hash: int) -> int:
        return self._numbers.setdefault(block_hash, len(self._numbers))


async def ask(cluster: LocalCluster, path: str, body: dict[str, Any]) -> None:
    if path == "/v1/completions":
        body = {**body, "temperature": 0, "ignore_eos": True, "stream": False}
        if body["model"] == "tiny":
            del body["model"]
    elif "lora_path" in body:
        body = {"lora_name": body["lora_name"], "rank": 8}
    answer = await exchange(cluster, "POST", path, body)
    assert status_of(answer) == 200, answer


async def test_a_worker_publishes_what_vllm_has_published(cluster: LocalCluster) -> None:
    (name,) = cluster.worker_names
    context, numbered, expected = zmq.asyncio.Context(), Numbered(), 0
    got: list[bytes] = []
    replay = context.socket(zmq.DEALER)
    replay.connect(cluster.processes[name].others["kv_events_replay"])

    async def all_came() -> bool:
        """Ask for the batches that are missing; a subscription would have to be waited for."""
        await replay.send_multipart((b"", len(got).to_bytes(8, "big")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (message := await replay.recv_multipart())[2] != END:
                assert message[:3] == [b"", b"", len(got).to_bytes(8, "big")]
                got.append(message[3])
        return len(got) >= expected

    try:
        for step in STEPS:
            await ask(cluster, step["path"], step["body"])
            expected += len(step["batches"])
            await wait_until(all_came)
            batches = [numbered.read(one, step["body"]["prompt"]) for one in got[expected - len(step["batches"]) :]]
            assert batches == step["batches"], step["name"]
    finally:
        context.destroy(linger=0)


async def test_sources_are_listed_as_in_vllm(cluster: LocalCluster) -> None:
    (name,) = cluster.worker_names
    others = cluster.processes[name].others
    assert json_of(await exchange(cluster, "GET", "/kv_event_sources")) == {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": others["kv_events"],
            "replay_endpoint": others["kv_events_replay"],
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }
    }
