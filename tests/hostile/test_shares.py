"""Clients that take more than their share: of a key's minute, and of the CPU of a router."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.client import Client
from tests.cluster.harness import running_cluster
from tests.cluster.http_client import PROMPT, exchange, json_of, status_of
from tests.hostile.watch import watched
from tests.router.test_access import entry, replace

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

MOST_GAP_SECONDS = 0.5
"""Of a router that is saturated; it was 0.7, with every output writing whenever it had a token."""
MANY = {"prompt": [PROMPT] * 8, "n": 128, "max_tokens": 60, "ignore_eos": True, "logprobs": 20, "stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """A cluster that waits for a client on a busy machine."""
    folder = tmp_path_factory.mktemp("cluster")
    async with running_cluster(folder, "router.reader_timeout_seconds=60", num_workers=2) as cluster:
        yield cluster


async def _posted(cluster: LocalCluster, path: str, body: dict[str, Any], secret: str) -> tuple[int, Any]:
    answer = await exchange(cluster, "POST", path, body, f"authorization: Bearer {secret}")
    status = status_of(answer)
    return status, None if status == 200 else json_of(answer)


async def test_a_refused_request_for_many_outputs_does_not_use_up_the_minute(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    replace(
        keys,
        entry("few", name="few", tenant="a", requests_per_minute=100)
        + entry("tokens", name="tokens", tenant="b", tokens_per_minute=12_500),
    )
    async with running_cluster(tmp_path, f"router.keys={keys}") as cluster:
        for secret in ("few", "tokens"):
            for prompts, n in ((PROMPT, 128), ([PROMPT] * 4, 32)):  # refused within a prompt, and after whole prompts
                many = {"prompt": prompts, "n": n, "max_tokens": 250}
                status, error = await _posted(cluster, "/v1/completions", many, secret)
                assert status == 429, error
            whole = {"prompt": PROMPT, "n": 48, "max_tokens": 250}
            for _ in range(50):  # until the scheduler has been told of the cancels
                status, error = await _posted(cluster, "/v1/completions", whole, secret)
                if status != 429:
                    break
                await asyncio.sleep(0.05)
            assert status == 200, (secret, error)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_tokenizer_counts_as_a_prompt(tmp_path: Path, path: str) -> None:
    keys = tmp_path / "keys.toml"
    replace(
        keys,
        entry("few", name="few", tenant="a", requests_per_minute=3)
        + entry("tokens", name="tokens", tenant="b", tokens_per_minute=100)
        + entry("free", name="free", tenant="c"),
    )
    body: dict[str, Any] = {"tokens": PROMPT * 5} if path == "/detokenize" else {"prompt": "hello " * 30}
    async with running_cluster(tmp_path, f"router.keys={keys}") as cluster:
        for secret, most in (("few", 3), ("tokens", 2)):
            for _ in range(most):
                status, answer = await _posted(cluster, path, body, secret)
                assert status == 200, answer
            status, error = await _posted(cluster, path, body, secret)
            assert status == 429, error
            status, error = await _posted(cluster, "/v1/completions", {"prompt": PROMPT, "max_tokens": 90}, secret)
            assert status == 429, error  # the same minute
        for _ in range(5):
            assert (await _posted(cluster, path, body, "free"))[0] == 200
        status, error = await _posted(cluster, "/detokenize", {"tokens": PROMPT * 20}, "tokens")
        assert status == 403, error


@pytest.mark.timing
async def test_streams_of_a_thousand_outputs_leave_others_their_turns(
    attacked: Client, shared_cluster: LocalCluster
) -> None:
    async with watched(shared_cluster.processes["router"]) as watch:
        answers = await asyncio.gather(*[exchange(shared_cluster, "POST", "/v1/completions", MANY) for _ in range(3)])
        figures = await watch.figures()
    print(figures)
    for answer in answers:
        assert status_of(answer) == 200
        assert answer.count(b'"finish_reason": "length"') == 8 * 128, answer[-500:]
    assert figures.gap_seconds <= MOST_GAP_SECONDS
