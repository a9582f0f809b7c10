"""Ten times the capacity for a minute: whether admitted requests keep their service level, and the cost of refusals.

A scheduler, a worker, a router and an open-loop client on this machine. First the capacity is measured, with clients
that send again as soon as they are answered, slightly more than the worker has seats. Then Poisson arrivals at 0.8 of
it, at 10 times it, and at 0.8 again, from several tenants of which one sends most. The scheduler refuses requests that
it does not expect to start within `START_WITHIN_SECONDS`.

The cost of refusals is the CPU time of a service under overload minus its CPU time at capacity, where as much is served
and nothing is refused. It is compared with a bare gRPC server that refuses the same number of calls of the same kind.
The time back to normal is when the last request was sent, after the overload, that was refused or whose TTFT exceeded
nearly every TTFT before the overload.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy as np

from lab.bench.bare_stream import REFUSE, SERVICE, bare_server
from lab.bench.cluster import BenchBrokenError, measured_cluster, while_alive
from lab.bench.meter import Meter, Usage
from lab.bench.scrape import Reading, fetch
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2

START_WITHIN_SECONDS = 1.0
SEATS = 32
SETTINGS = (
    "worker.gpu=H100-SXM",
    f"scheduler.max_num_seqs={SEATS}",
    "scheduler.max_req_total_len=4096",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.deadline_admission=true",
    f"scheduler.start_within_seconds={START_WITHIN_SECONDS:g}",
    "scheduler.max_waiting_requests_per_tenant=1000",
)
TENANTS = ("loud", "loud", "loud", "loud", "loud", "loud", "a", "b", "c", "d")
INPUT_RANGE, OUTPUT_RANGE = (100, 700), (50, 250)
NORMAL, OVERLOAD = 0.8, 10.0
NUM_CHANNELS = 4
WARM_UP_SECONDS = 4.0
UNUSUAL = 1.25
"""A TTFT above this multiple of the p99 of the preceding load is out of the ordinary."""


_T = TypeVar("_T")


@dataclass(slots=True)
class Answer:
    """Outcome of one request; times in seconds of `time.monotonic`."""

    tenant: str
    sent: float
    status: str = ""
    has_retry_info: bool = False
    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    @property
    def ttft_ms(self) -> float | None:
        """Time from sending to the first token."""
        return None if self.first is None else (self.first - self.sent) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first."""
        return None if self.first is None or self.tokens < 2 else (self.last - self.first) / (self.tokens - 1) * 1000


@dataclass(frozen=True, slots=True)
class Phase:
    """One load and its results.

    Attributes:
        rate: requests sent per second.
        served_per_second: requests that completed.
        statuses: of all requests that ended, by name.
        retry_info_ratio: share of refused requests that were told when to retry.
        ttft_ms: p50 and p99 of completed requests.
        tpot_ms: p50 and p99 of completed requests.
        own_ttft_ms: p50 and p99 of TTFT as measured by the scheduler, without router and client.
        cpu_share: cores used, by process.
        rss_mb: at the end, by process.
        tenants: share of each tenant's requests that completed.
    """

    name: str
    rate: float
    seconds: float
    served_per_second: float
    statuses: dict[str, int]
    retry_info_ratio: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    own_ttft_ms: tuple[float, float]
    cpu_share: dict[str, float]
    rss_mb: dict[str, float]
    tenants: dict[str, float] = field(default_factory=dict)

    @property
    def num_refused(self) -> int:
        """Requests that did not complete."""
        return sum(self.statuses.values()) - self.statuses.get("OK", 0)


@dataclass(frozen=True, slots=True)
class Overload:
    """The phases, and derived figures.

    Attributes:
        capacity: requests per second.
        refusal_cpu_share: cores used by refusals, by service.
        refusal_ms: CPU time of one refusal, by service.
        bare_refusal_ms: CPU time of one refusal by a bare gRPC server, at the same rate.
        back_to_normal_seconds: from the end of the overload; 0: at once.
    """

    capacity: float
    phases: list[Phase]
    refusal_cpu_share: dict[str, float]
    refusal_ms: dict[str, float]
    bare_refusal_ms: float
    back_to_normal_seconds: float

    def as_json(self) -> dict[str, object]:
        """Return all results as plain values."""
        return asdict(self)


async def measure(seconds: float, tell: Callable[[str], None] = lambda what: None) -> Overload:
    """Run all phases; the overload lasts `seconds`.

    Raises:
        BenchBrokenError: a service exited.
        LorreryError: the cluster did not start.
    """
    results: list[Overload] = []

    async def drive(cluster: LocalCluster) -> None:
        results.append(await _phases(cluster, seconds, tell))

    async with measured_cluster(SETTINGS) as cluster:
        await while_alive(cluster, drive(cluster))
    return results[0]


async def _phases(cluster: LocalCluster, seconds: float, tell: Callable[[str], None]) -> Overload:
    load = _Load(cluster)
    try:
        tell("capacity")
        full = await load.closed_loop("capacity", SEATS + 4, WARM_UP_SECONDS + seconds / 4)
        capacity = full.served_per_second
        if not capacity:
            raise BenchBrokenError(f"nothing was served: {full.statuses}")
        phases = [full]
        for name, factor, length in (
            ("before", NORMAL, seconds / 2),
            ("overload", OVERLOAD, seconds),
            ("after", NORMAL, seconds / 2),
        ):
            tell(f"{name}: {factor * capacity:.0f} requests/s for {length:.0f} s")
            phases.append(await load.open_loop(name, factor * capacity, length))
        after = load.answers
        tell("a bare server refuses as many")
        bare_ms = await load.bare_refusal_ms(phases[2].num_refused / phases[2].seconds, seconds / 4)
    finally:
        await load.close()
    _, before, over, _ = phases
    cost = {name: over.cpu_share[name] - full.cpu_share[name] for name in ("router", "scheduler", "worker-0")}
    per_second = over.num_refused / over.seconds
    return Overload(
        capacity=capacity,
        phases=phases,
        refusal_cpu_share=cost,
        refusal_ms={name: share / per_second * 1000 for name, share in cost.items()},
        bare_refusal_ms=bare_ms,
        back_to_normal_seconds=_seconds_until_normal(after, before.ttft_ms[1] * UNUSUAL),
    )


def _seconds_until_normal(answers: list[Answer], most_ttft_ms: float) -> float:
    start = answers[0].sent
    odd = [one.sent - start for one in answers if one.ttft_ms is None or one.ttft_ms > most_ttft_ms]
    return max(odd, default=0.0)


class _Load:
    """The clients of a cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.answers: list[Answer] = []
        self._pids = {process.name: process.pid for process in cluster.processes.values()} | {"client": os.getpid()}
        self._metrics_address = cluster.metrics_address("scheduler")
        self._before = Reading({})
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [
            open_channel(cluster.router_address, TlsSettings(), options=options) for _ in range(NUM_CHANNELS)
        ]
        self._stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in self._channels]
        self._rng = random.Random(1)
        self._num = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def closed_loop(self, name: str, num_clients: int, seconds: float) -> Phase:
        """Let `num_clients` clients send one request after another; responses during the warm-up do not count."""
        over = time.monotonic() + seconds
        answers: list[Answer] = []

        async def client() -> None:
            while time.monotonic() < over:
                answers.append(await self._send())

        tasks = [asyncio.create_task(client()) for _ in range(num_clients)]
        await asyncio.sleep(WARM_UP_SECONDS)
        self._before = await self._scrape()
        start, meter = time.monotonic(), Meter(self._pids)
        await asyncio.sleep(over - start)
        phase_seconds, usage = time.monotonic() - start, meter.read()
        await asyncio.gather(*tasks)
        ttft = await self._ttft_ms()
        counted = [one for one in answers if start <= one.last <= start + phase_seconds]
        return self._phase(name, counted, phase_seconds, ttft, _cpu_shares(usage))

    async def open_loop(self, name: str, rate: float, seconds: float) -> Phase:
        """Send requests at random times regardless of the responses, and wait for the last response."""
        self._before = await self._scrape()
        meter = Meter(self._pids)
        tasks = await self._at_random_times(rate, seconds, lambda number: self._send())
        usage = meter.read()
        self.answers = list(await asyncio.gather(*tasks))
        return self._phase(
            name, self.answers, seconds, await self._ttft_ms(), {n: u.cpu_share for n, u in usage.items()}
        )

    async def _at_random_times(
        self, rate: float, seconds: float, send: Callable[[int], Coroutine[Any, Any, _T]]
    ) -> list[asyncio.Task[_T]]:
        """Start `send(0)`, `send(1)` and so on as a Poisson process; return all tasks, started."""
        tasks: list[asyncio.Task[_T]] = []
        start = due = time.monotonic()
        while (due := due + self._rng.expovariate(rate)) < start + seconds:
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send(len(tasks))))
        return tasks

    async def bare_refusal_ms(self, rate: float, seconds: float) -> float:
        """Send a bare server calls that it refuses; return its CPU time per call."""
        async with bare_server() as (address, pid):
            options = (("grpc.use_local_subchannel_pool", 1),)
            channels = [open_channel(address, TlsSettings(), options=options) for _ in range(NUM_CHANNELS)]
            calls: list[grpc.aio.UnaryStreamMultiCallable[bytes, bytes]] = [
                channel.unary_stream(f"/{SERVICE}/{REFUSE}") for channel in channels
            ]

            async def send(number: int) -> None:
                try:
                    async for _ in calls[number % NUM_CHANNELS](self._request(number).SerializeToString()):
                        pass
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise BenchBrokenError(f"the bare server: {error.code()} {error.details()}") from None

            try:
                for number in range(NUM_CHANNELS):
                    await send(number)
                meter = Meter({"bare": pid})
                tasks = await self._at_random_times(rate, seconds, send)
                await asyncio.gather(*tasks)
                return meter.read()["bare"].cpu_seconds / len(tasks) * 1000
            finally:
                for channel in channels:
                    await channel.close()

    async def _scrape(self) -> Reading:
        return Reading.parse(await asyncio.to_thread(fetch, self._metrics_address))

    async def _ttft_ms(self) -> tuple[float, float]:
        grown = (await self._scrape()).since(self._before)
        p50, p99 = (grown.quantile("lorrery_scheduler_time_to_first_token_seconds", q) or 0.0 for q in (0.5, 0.99))
        return p50 * 1000, p99 * 1000

    def _request(self, number: int) -> router_pb2.GenerateRequest:
        rng = self._rng
        prompt_tokens, output_tokens = rng.randint(*INPUT_RANGE), rng.randint(*OUTPUT_RANGE)
        return router_pb2.GenerateRequest(
            request_id=f"r{number}",
            tenant_id=rng.choice(TENANTS),
            token_ids=router_pb2.TokenIds(ids=range(1, prompt_tokens + 1)),
            sampling=types_pb2.SamplingParams(ignore_eos=True, max_new_tokens=output_tokens),
            seed=number,
        )

    async def _send(self) -> Answer:
        self._num += 1
        request = self._request(self._num)
        answer = Answer(request.tenant_id, time.monotonic())
        call = self._stubs[self._num % NUM_CHANNELS].Generate(request, timeout=60.0)
        try:
            async for response in call:
                answer.last = time.monotonic()
                if answer.first is None:
                    answer.first = answer.last
                answer.tokens += len(response.token_ids)
            answer.status = "OK"
        except grpc.aio.AioRpcError as error:
            answer.last = time.monotonic()
            answer.status = error.code().name
            answer.has_retry_info = any(
                isinstance(value, bytes) and b"RetryInfo" in value for _, value in error.trailing_metadata() or ()
            )
        finally:
            call.cancel()
        return answer

    def _phase(
        self,
        name: str,
        answers: list[Answer],
        seconds: float,
        own_ttft_ms: tuple[float, float],
        cpu_share: dict[str, float],
    ) -> Phase:
        served = [one for one in answers if one.status == "OK"]
        refused = [one for one in answers if one.status != "OK"]
        ttft, tpot = [one.ttft_ms for one in served], [one.tpot_ms for one in served]
        ended_in_time = sum(one.last <= answers[0].sent + seconds for one in served) if answers else 0
        asked, got = Counter(one.tenant for one in answers), Counter(one.tenant for one in served)
        return Phase(
            name=name,
            rate=len(answers) / seconds,
            seconds=seconds,
            served_per_second=(ended_in_time if name != "capacity" else len(served)) / seconds,
            statuses=dict(Counter(one.status for one in answers)),
            retry_info_ratio=sum(one.has_retry_info for one in refused) / len(refused) if refused else 1.0,
            ttft_ms=_p50_p99([one for one in ttft if one is not None]),
            tpot_ms=_p50_p99([one for one in tpot if one is not None]),
            own_ttft_ms=own_ttft_ms,
            cpu_share=cpu_share,
            rss_mb={process: _rss_mb(pid) for process, pid in self._pids.items()},
            tenants={tenant: got[tenant] / num for tenant, num in sorted(asked.items())},
        )


def _cpu_shares(usage: dict[str, Usage]) -> dict[str, float]:
    return {name: used.cpu_share for name, used in usage.items()}


def _p50_p99(values: list[float]) -> tuple[float, float]:
    return (float(np.percentile(values, 50)), float(np.percentile(values, 99))) if values else (0.0, 0.0)


def _rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
