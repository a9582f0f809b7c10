"""Endless streams read by the load generator's own clients as in a run: every message parsed, timed and recorded."""

import contextlib
from collections.abc import AsyncIterator

from lab.bench.streams import PROMPT_TOKENS, StreamCount, endless_tokens
from lorrery.chassis.sections import TlsSettings
from lorrery.loadgen.client import RouterClient
from lorrery.loadgen.http.client import HttpClient
from lorrery.loadgen.http.routes import Completions
from lorrery.loadgen.reception import Ask, Client, Reception
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.local.cluster import LocalCluster

_TIMEOUT_SECONDS = 600.0


@contextlib.asynccontextmanager
async def grpc_received(cluster: LocalCluster, num_streams: int) -> AsyncIterator[StreamCount]:
    """Read `num_streams` streams of the router over gRPC."""
    async with RouterClient(cluster.router_address, TlsSettings()) as client, _received(client, num_streams) as count:
        yield count


@contextlib.asynccontextmanager
async def http_received(cluster: LocalCluster, num_streams: int) -> AsyncIterator[StreamCount]:
    """Read `num_streams` streams of the router over HTTP."""
    route = Completions(prompt_ids=True)
    async with HttpClient(cluster.http_address, route, TlsSettings()) as client:
        await client.cluster(10.0)
        async with _received(client, num_streams) as count:
            yield count


@contextlib.asynccontextmanager
async def _received(client: Client, num_streams: int) -> AsyncIterator[StreamCount]:
    count, output_tokens = StreamCount(num_streams), endless_tokens(num_streams)

    async def stream(number: int) -> None:
        reception, begun = Reception(), False

        def note(num_tokens: int) -> None:
            nonlocal begun
            if not begun:
                begun = True
                count.began()
            count.events += num_tokens

        request = WorkloadRequest(number, 0.0, PROMPT_TOKENS, output_tokens)
        await client.prepare(Ask(request, 0, True, output_tokens, _TIMEOUT_SECONDS))(reception, note)
        count.failed(f"a stream ended: {reception.status} {reception.detail}")

    async with count.opened(stream):
        yield count
