"""The cluster under test, and its requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer
from lorrery.v1 import router_pb2, types_pb2

CONFIG = Path(__file__).with_name("cluster.toml")


class BenchBrokenError(Exception):
    """Something does not work, so nothing can be measured."""


@contextlib.asynccontextmanager
async def measured_cluster(
    overrides: Sequence[str], fork_server: ForkServer | None = None
) -> AsyncIterator[LocalCluster]:
    """Run a scheduler, one worker and a router with `cluster.toml` and `overrides`, forked from the given process."""
    async with LocalCluster(CONFIG, overrides, num_workers=1, fork_server=fork_server) as cluster:
        yield cluster


async def while_alive(cluster: LocalCluster, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to completion.

    Raises:
        BenchBrokenError: a service exited meanwhile.
    """
    task = asyncio.create_task(work)
    exit_watch = asyncio.create_task(cluster.unexpected_exit())
    try:
        await asyncio.wait((task, exit_watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            ended = exit_watch.result()
            raise BenchBrokenError(f"{ended.name} ended with exit code {ended.exit_code}: {' / '.join(ended.tail)}")
        task.result()
    finally:
        for pending in (task, exit_watch):
            pending.cancel()
        await asyncio.wait((task, exit_watch))


def endless_request(request_id: str, prompt_tokens: int, max_new_tokens: int) -> router_pb2.GenerateRequest:
    """Return a request that yields `max_new_tokens` tokens whatever the model's output; equal ids, equal tokens."""
    return router_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=router_pb2.TokenIds(ids=range(1, prompt_tokens + 1)),
        sampling=types_pb2.SamplingParams(ignore_eos=True, max_new_tokens=max_new_tokens),
        seed=sum(request_id.encode()),
    )
