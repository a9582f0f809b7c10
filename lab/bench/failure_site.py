"""Test site for faults: a cluster, streams whose messages are time-stamped, the log and the metrics."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lab.bench.cluster import CONFIG, BenchBrokenError
from lab.bench.scrape import Reading, fetch
from lorrery.chassis.channel import open_channel
from lorrery.chassis.sections import TlsSettings
from lorrery.local.cluster import LocalCluster
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2

NUM_STREAMS = 8
OUTPUT_TOKENS = 300
PROMPT_TOKENS = 16
END_SECONDS = 60.0
"""Every stream ends within this time, whatever happens."""
POLL_SECONDS = 0.02
OVERRIDES = (
    "log.level=info",
    "log.format=json",
    "scheduler.policy=lab.bench.raising_policy:RaisingPolicy",
    "scheduler.memory=paged",
    "scheduler.max_total_token_num=3000",
    "scheduler.max_req_total_len=2500",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.worker_wait_seconds=6",
    "router.resume_timeout_seconds=6",
    "router.reader_timeout_seconds=3",
    'adapters.registry=[{id="broken", rank=8}]',
    'faults=["adapter_load_failure,at=0,adapter=broken"]',
)
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 512))


@dataclass(frozen=True, slots=True)
class End:
    """How a stream ended: `code` is OK, or a status with its ErrorInfo's reason and its RetryInfo's seconds."""

    code: str
    reason: str = ""
    retry_seconds: float | None = None

    def __str__(self) -> str:
        """Return the text for the table."""
        retry = "" if self.retry_seconds is None else f", retry after {self.retry_seconds:g} s"
        return f"{self.code} {self.reason}".strip() + retry


@dataclass(slots=True)
class Probe:
    """One stream.

    Attributes:
        times: `time.monotonic()` of its start, each message and its end.
        end: None until it ends.
    """

    call: grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=lambda: [time.monotonic()])
    end: End | None = None

    async def read(self, num_messages: int | None = None) -> None:
        """Read `num_messages`, or all, and note when each arrived."""
        try:
            while num_messages is None or num_messages > 0:
                message = await self.call.read()
                if not isinstance(message, router_pb2.GenerateResponse):
                    self.end = End("OK")
                    break
                self.times.append(time.monotonic())
                self.token_ids += message.token_ids
                num_messages = None if num_messages is None else num_messages - 1
        except grpc.aio.AioRpcError as error:
            self.end = _end(error)
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
            self.end = End("CANCELLED", "by the client")
        self.times.append(time.monotonic())

    def longest_silence(self, since: float) -> float:
        """Return the longest gap between messages, or a message and the end, counting only the part after `since`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - max(earlier, since) for earlier, later in pairs if later > since), default=0.0)


def _end(error: grpc.aio.AioRpcError) -> End:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an error of grpc.aio has what it reads
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    seconds: float | None = None
    for detail in () if status is None else status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return End(error.code().name, info.reason, seconds)


@dataclass(frozen=True, slots=True)
class Failure:
    """Effect of a fault.

    Attributes:
        num_streams: streams that ran when it happened, or started while it lasted.
        num_exact: how many of them ended well with the tokens of an undisturbed run.
        ends: of the others, the number by kind of end.
        seconds: see `what`.
        what: the meaning of the seconds.
        counted: metrics that grew, and by how much.
        logged: events that the services logged.
        settings: settings that govern the behaviour.
    """

    fault: str
    num_streams: int
    num_exact: int
    ends: dict[str, int]
    seconds: float
    what: str
    counted: dict[str, float]
    logged: list[str]
    settings: str


class Site:
    """The cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.events: list[str] = []
        self._reference: dict[tuple[str, int, int], list[int]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(self, router: str) -> "router_pb2_grpc.RouterServiceAsyncStub":
        """Return a client of a running router."""
        address = self.cluster.processes[router].grpc
        if address not in self._channels:
            self._channels[address] = open_channel(address, TlsSettings())
        return router_pb2_grpc.RouterServiceStub(self._channels[address])

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    def start(
        self,
        count: int = NUM_STREAMS,
        *,
        router: str = "router",
        adapter_id: str = "",
        output_tokens: int = OUTPUT_TOKENS,
        prompt_tokens: int = PROMPT_TOKENS,
        stub: "router_pb2_grpc.RouterServiceAsyncStub | None" = None,
    ) -> list[Probe]:
        """Send requests with the seeds 0, 1, ..."""
        stub = stub or self.stub(router)
        return [
            Probe(
                stub.Generate(
                    router_pb2.GenerateRequest(
                        token_ids=router_pb2.TokenIds(ids=range(1, prompt_tokens + 1)),
                        adapter_id=adapter_id,
                        seed=seed,
                        sampling=types_pb2.SamplingParams(ignore_eos=True, max_new_tokens=output_tokens),
                    ),
                    timeout=END_SECONDS,
                ),
                seed,
            )
            for seed in range(count)
        ]

    async def learn(self, count: int = NUM_STREAMS, adapter_id: str = "", output_tokens: int = OUTPUT_TOKENS) -> None:
        """Record the tokens of an undisturbed run as the reference, if there is none yet."""
        wanted = [seed for seed in range(count) if (adapter_id, output_tokens, seed) not in self._reference]
        if wanted:
            probes = self.start(count, adapter_id=adapter_id, output_tokens=output_tokens)
            await asyncio.gather(*(probe.read() for probe in probes))
            for probe in probes:
                if probe.end != End("OK"):
                    raise BenchBrokenError(f"an undisturbed stream ended with {probe.end}")
                self._reference[adapter_id, output_tokens, probe.seed] = probe.token_ids

    def is_exact(self, probe: Probe, adapter_id: str, output_tokens: int) -> bool:
        """Return whether a stream ended well with the tokens of an undisturbed run."""
        return probe.end == End("OK") and probe.token_ids == self._reference[adapter_id, output_tokens, probe.seed]

    async def counts(self) -> dict[str, float]:
        """Return every counter of all processes that respond, summed by name and outcome or reason."""
        counted: dict[str, float] = {}
        for entry in list(self.cluster.processes.values()):
            with contextlib.suppress(OSError):
                text = await asyncio.to_thread(fetch, entry.metrics)
                for (name, labels), value in Reading.parse(text).samples.items():
                    shown = [label for key, label in labels if key in ("outcome", "reason")]
                    if name in COUNTERS:
                        shown_name = name + (f"{{{shown[0]}}}" if shown else "")
                        counted[shown_name] = counted.get(shown_name, 0.0) + value
        return counted

    async def observe(
        self,
        fault: str,
        act: Callable[[list[Probe]], Awaitable[None]],
        *,
        settings: str,
        expect: Sequence[str],
        what: str = "longest silence",
        count: int = NUM_STREAMS,
        router: str = "router",
        adapter_id: str = "",
        output_tokens: int = OUTPUT_TOKENS,
    ) -> Failure:
        """Cause a fault while streams run, and wait for all of them to end.

        Args:
            fault: its name.
            act: causes it; receives the streams, and may add others.
            settings: settings that govern the behaviour.
            expect: events to look for in the log.
            what: the meaning of the seconds.
            count: number of streams.
            router: router of the streams.
            adapter_id: adapter of the streams.
            output_tokens: output tokens of each stream.
        """
        await self.learn(count, adapter_id, output_tokens)
        before = await self.counts()
        probes = self.start(count, router=router, adapter_id=adapter_id, output_tokens=output_tokens)
        await asyncio.gather(*(probe.read(3) for probe in probes))
        self.events.clear()
        at = time.monotonic()
        reading = asyncio.gather(*(probe.read() for probe in probes))
        await act(probes)
        await reading
        # Streams added by `act` have ended by now; their gaps are not caused by this fault.
        exact = sum(self.is_exact(probe, adapter_id, output_tokens) for probe in probes)
        ends = Counter(str(probe.end) for probe in probes if not self.is_exact(probe, adapter_id, output_tokens))
        after = await self.counts()
        return Failure(
            fault,
            len(probes),
            exact,
            dict(ends),
            max(probe.longest_silence(at) for probe in probes[:count]),
            what,
            {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)},
            [event for event in expect if event in self.events],
            settings,
        )

    async def until(self, what: str, predicate: Callable[[], Awaitable[bool]]) -> float:
        """Wait until `predicate` holds; return the seconds."""
        began = time.monotonic()
        while not await predicate():
            if time.monotonic() > began + END_SECONDS:
                raise BenchBrokenError(f"not within {END_SECONDS:g} s: {what}")
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    async def gauge(self, process: str, name: str, **labels: str) -> float:
        """Read one metric."""
        text = await asyncio.to_thread(fetch, self.cluster.metrics_address(process))
        return Reading.parse(text).total(name, **labels)

    async def all_well(self, num_workers: int = 2) -> None:
        """Wait until all workers are attached and nothing runs."""

        async def so() -> bool:
            try:
                ready = await self.gauge("scheduler", "lorrery_scheduler_workers", state="ready")
                live = await self.gauge("scheduler", "lorrery_scheduler_in_flight_requests")
                up = await self.gauge("router", "lorrery_router_shard_connected")
            except OSError:
                return False
            return (ready, live, up) == (num_workers, 0, 1)

        await self.until("all workers attached, and nothing running", so)


COUNTERS = frozenset(
    f"lorrery_{name}_total"
    for name in (
        "router_requests",
        "router_resumed",
        "router_slow_readers",
        "scheduler_workers_lost",
        "scheduler_workers_given_up",
        "scheduler_requeued_sequences",
        "scheduler_orphaned_requests",
        "scheduler_preemptions",
        "scheduler_requests",
    )
)


@contextlib.asynccontextmanager
async def failure_site() -> AsyncIterator[Site]:
    """Run a scheduler, two workers and two routers."""
    site: Site | None = None

    def note(_name: str, line: str) -> None:
        with contextlib.suppress(ValueError, AttributeError):
            if site is not None:
                site.events.append(json.loads(line).get("event", ""))

    async with LocalCluster(CONFIG, OVERRIDES, num_workers=2, show=note) as cluster:
        await cluster.add("router-1", "router", [f"router.schedulers={json.dumps([cluster.scheduler_address])}"])
        await cluster.serving("router-1")
        site = Site(cluster)
        try:
            yield site
        finally:
            await site.close()
