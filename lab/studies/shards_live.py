"""The measurement of `lab.studies.shards` on live clusters: real processes and streams, on the wall clock.

One router and one scheduler, and two of each, with the same GPUs and the same requests, run at the same time, so that
other load on the machine slows both. Device time runs `TIME_SCALE` times slower than the wall clock, since about 25,000
tokens/s would be too many for a small machine. The schedulers' ten reports per second are therefore fresher in device
time; the simulation of the same requests, shown for comparison, accounts for that.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

import lorrery
from lab.studies import shards
from lab.studies.long_tail_live import overrides
from lab.studies.mixed_fleet import NUM_ADAPTERS, workload
from lorrery.chassis.sections import TlsSettings
from lorrery.loadgen.client import Reception, RouterClient
from lorrery.local.cluster import LocalCluster
from lorrery.local.processes import ForkServer
from lorrery.v1.router_pb2 import GenerateRequest, TokenIds
from lorrery.v1.types_pb2 import SamplingParams

NUMBERS = (1, 2)
RATE, TIME_SCALE = 120.0, 10.0
SECONDS = 6.0
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on one cluster: device milliseconds, live and simulated."""

    seed: int
    number: int
    ttft_ms: float
    ttft_p99_ms: float
    e2e_ms: float
    simulated_ttft_ms: float
    simulated_ttft_p99_ms: float
    simulated_e2e_ms: float


def measure_live(seed: int) -> list[Row]:
    """Run one workload on both clusters."""
    requests = workload(RATE, SECONDS, seed)
    live = asyncio.run(_measure(requests))
    rows: list[Row] = []
    for number in NUMBERS:
        seconds = [*live[number], *shards.measure(number, shards.BOUND, requests, TIME_SCALE)]
        rows.append(Row(seed, number, *(one * 1e3 for one in seconds)))
    return rows


async def _measure(requests: lorrery.Requests) -> dict[int, list[float]]:
    async with contextlib.AsyncExitStack() as stack:
        fork_server = stack.enter_context(ForkServer())
        routers = {number: await stack.enter_async_context(_cluster(number, fork_server)) for number in NUMBERS}
        async with asyncio.TaskGroup() as tasks:
            sent = {number: tasks.create_task(_send(routers[number], requests)) for number in NUMBERS}
        return {number: task.result() for number, task in sent.items()}


@contextlib.asynccontextmanager
async def _cluster(number: int, fork_server: ForkServer) -> AsyncIterator[list[str]]:
    """Run `number` schedulers and routers that share the GPUs evenly; yield the routers' addresses."""
    wanted = {**shards.settings(shards.BOUND), "time_scale": TIME_SCALE, "log": {"level": "warning"}}
    wanted["adapters"] = {"registry": f"[{{id='a', rank=16, count={NUM_ADAPTERS}}}]"}
    wanted["worker"] = {**wanted["worker"], "gpus": shards.NUM_WORKERS // number}
    settings = [*overrides(wanted)]
    async with LocalCluster(None, settings, num_workers=1, free_ports=True, fork_server=fork_server) as cluster:
        schedulers = [cluster.scheduler_address]
        for index in range(1, number):
            await cluster.add(f"scheduler-{index}", "scheduler")
            schedulers.append(cluster.processes[f"scheduler-{index}"].grpc)
            own = [f"worker.name=worker-{index}", f"worker.scheduler={schedulers[-1]}"]
            await cluster.add(f"worker-{index}", "worker", own)
            await cluster.serving(f"worker-{index}")
        routers = [f"router-{index}" for index in range(number)]
        for name in routers:
            await cluster.add(name, "router", [f"router.schedulers={schedulers}".replace("'", '"')])
            await cluster.serving(name)
        yield [cluster.processes[name].grpc for name in routers]


async def _send(routers: Sequence[str], requests: lorrery.Requests) -> list[float]:
    """Send the requests to the routers in turn; return the same figures as `shards.measure`."""
    adapters = requests.adapter_id
    assert not isinstance(adapters, str | None)
    prompts, outputs = np.asarray(requests.prompt_tokens), np.asarray(requests.output_tokens)
    first: list[float] = []
    last: list[float] = []

    async def send(router: RouterClient, index: int, due: float) -> None:
        await asyncio.sleep(due - time.monotonic())
        reception = Reception()
        request = GenerateRequest(
            token_ids=TokenIds(ids=range(1, int(prompts[index]) + 1)),
            adapter_id=str(adapters[index]),
            sampling=SamplingParams(max_new_tokens=int(outputs[index]), ignore_eos=True),
        )
        await router.receive(request, reception, timeout_seconds=_TIMEOUT_SECONDS, on_tokens=lambda _num_tokens: None)
        assert reception.status == "OK", f"{reception.status}: {reception.detail}"
        first.append((reception.message_seconds[0] - due) / TIME_SCALE)
        last.append((reception.message_seconds[-1] - due) / TIME_SCALE)

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RouterClient(address, TlsSettings())) for address in routers]
        start = time.monotonic() + 1
        async with asyncio.TaskGroup() as tasks:
            for index, at in enumerate(np.asarray(requests.at_seconds)):
                tasks.create_task(send(clients[index % len(clients)], index, start + float(at) * TIME_SCALE))
    return [float(mean(first)), float(np.quantile(first, 0.99)), float(mean(last))]
