"""The cluster that chaos happens to, and what is done to it: real processes, with a line for each event.

Three routers and four workers know two schedulers by one name, which a name server of the run's own answers for. More
of each come and go (`EXTRAS`): a scheduler joins the name when it listens, and leaves it when it is told to end.
`lorrery load` runs beside, a client like any other that is killed, too.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio

from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import start_python
from lorrery.service.network.credentials import bearer
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.chaos.logs import Logs
from tests.chaos.plan import LOADGEN, Action, Kind
from tests.cluster.harness import fork_server
from tests.cluster.name_server import NameServer, name_server
from tests.router.test_access import entry

ROUTERS = ("router", "router-1", "router-2")
SCHEDULERS = ("scheduler", "scheduler-1")
WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")
SERVICES = (*ROUTERS, *SCHEDULERS, *WORKERS, LOADGEN)
HOSTS = {"scheduler": "127.0.0.2", "scheduler-1": "127.0.0.3", "scheduler-2": "127.0.0.4"}
"""Of schedulers, which listen at one port."""
EXTRAS = ("scheduler-2", "router-3", "worker-4", "worker-5")
"""Services that are added and removed."""
NAME = "schedulers.test"

CALL_SECONDS = 40.0
"""An operator's call may meet a scheduler that is stopped for ten seconds, twice."""

MARGIN_SECONDS = 5.0
"""By how much what a client sees may follow what was done: its channel dials again once a second, on a busy machine."""

KEYS = "".join(
    (
        entry("acme-secret", name="acme", tenant="acme"),
        entry("beta-secret", name="beta", tenant="beta", adapters=["lora-*", "x-*"], weight=2.0),
        entry("few-secret", name="few", tenant="few", requests_per_minute=40),
        entry("narrow-secret", name="narrow", tenant="narrow", max_running=3, max_waiting=3),
        entry("root-secret", name="root", tenant="ops", operator=True),
    )
)

SETTINGS = """
format = 1
model = "Llama-3-8B"
time_scale = {time_scale}

[adapters]
registry = [{{ id = "lora", rank = 16, count = 4 }}, {{ id = "big", rank = 64 }}]
max_loras = 6

[scheduler]
listen = "127.0.0.2:0"
metrics = "127.0.0.1:0"
policy = "fcfs"
memory = "paged"
prefix_cache = {{ kind = "blocks" }}
max_total_token_num = 12000
max_num_seqs = 32
max_req_input_len = 1024
max_req_total_len = 2048
worker_timeout_seconds = 3.0
worker_wait_seconds = 60.0
drain_seconds = 3.0

[worker]
listen = "127.0.0.1:0"
metrics = "127.0.0.1:0"
gpu = "H100-SXM"
heartbeat_seconds = 0.5
drain_seconds = 2.0
resolve_seconds = 1.0

[router]
listen = "127.0.0.1:0"
metrics = "127.0.0.1:0"
http = "127.0.0.1:0"
keys = "{keys}"
request_faults = true
reader_timeout_seconds = 4.0
resume_timeout_seconds = 60.0
drain_seconds = 2.0
resolve_seconds = 0.5

[log]
format = "json"
"""


@dataclass(slots=True)
class Event:
    """What was done to a process, from its beginning until the process served again.

    Attributes:
        ended: `time.monotonic()`; None: not over.
    """

    kind: Kind
    target: str
    began: float
    ended: float | None = None

    def overlaps(self, began: float, ended: float, margin: float) -> bool:
        """Tell whether it may have touched something that lasted from `began` to `ended`."""
        return self.began <= ended + margin and (self.ended is None or self.ended >= began - margin)


@dataclass(slots=True)
class History:
    """What has happened so far; `lines` for people, `events` to judge streams by, `wrong` what must not have been."""

    started: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Note something, with the time."""
        self.lines.append(f"{time.monotonic() - self.started:8.3f} s  {text}")

    def touched(self, targets: Sequence[str], began: float, ended: float, kinds: Sequence[Kind] = tuple(Kind)) -> bool:
        """Tell whether any of `kinds` was done to one of these processes in this time."""
        return any(
            event.target in targets and event.kind in kinds and self._felt(event).overlaps(began, ended, MARGIN_SECONDS)
            for event in self.events
        )

    def _felt(self, event: Event) -> Event:
        """Return the event as long as clients feel it: they cannot dial again while the process is stopped."""
        ended = event.ended
        for stop in self.events:
            follows = stop.kind is Kind.STOP and stop.target == event.target and stop.began > event.began
            if follows and ended is not None and stop.began <= ended + MARGIN_SECONDS:
                ended = stop.ended
        return replace(event, ended=ended)


class ChaosCluster:
    """The running cluster; `perform` does what a plan says.

    Attributes:
        routers: where each listens, or will again.
    """

    def __init__(self, cluster: LocalCluster, names: NameServer, history: History, logs: Logs, folder: Path) -> None:
        self.cluster = cluster
        self.history = history
        self.logs = logs
        self._folder = folder
        self._names = names
        self._busy = {name: asyncio.Lock() for name in (*SERVICES, *EXTRAS)}
        self._loadgen: asyncio.subprocess.Process | None = None
        self._num_loadgens = 0
        self.routers = {name: cluster.processes[name].grpc for name in ROUTERS}

    def address(self, router: str) -> str:
        """Return where a router listens, or will again."""
        return self.routers[router]

    async def perform(self, action: Action) -> None:
        """Do what an action says, and wait until its target serves again; actions on one target take turns."""
        if action.kind in (Kind.LOAD, Kind.UNLOAD):
            await self._change_adapter(action)
            return
        async with self._busy[action.target]:
            event = Event(action.kind, action.target, time.monotonic())
            self.history.events.append(event)
            self.history.say(f"{action.kind} {action.target}")
            if action.target == LOADGEN:
                await self._hit_loadgen(action)
            elif action.kind is Kind.ADD:
                await self._add(action.target)
            elif action.kind is Kind.REMOVE:
                await self._remove(action.target)
            else:
                await self._hit_service(action)
            event.ended = time.monotonic()
            self.history.say(f"{action.target} {'has gone' if action.kind is Kind.REMOVE else 'serves'}")

    async def _hit_service(self, action: Action) -> None:
        cluster, name = self.cluster, action.target
        if action.kind is Kind.STOP:
            cluster.kill(name, signal.SIGSTOP)
            await asyncio.sleep(action.seconds)
            cluster.kill(name, signal.SIGCONT)
        else:
            cluster.kill(name, signal.SIGTERM if action.kind is Kind.TERMINATE else signal.SIGKILL)
            code = await cluster.ended(name)
            if code != (0 if action.kind is Kind.TERMINATE else -signal.SIGKILL):
                self.history.wrong.append(f"{name} ended with exit code {code} after {action.kind}")
            await asyncio.sleep(action.seconds)
            await cluster.restart(name, wait=False)
        await cluster.serving(name, 60.0)

    async def _add(self, name: str) -> None:
        await self.cluster.add(name, *start_of(name, self._port, self._names))
        await self.cluster.serving(name, 60.0)
        if name in HOSTS:
            self._names.addresses[NAME] = [*self._names.addresses[NAME], HOSTS[name]]
        elif name.startswith("router"):
            self.routers[name] = self.cluster.processes[name].grpc

    async def _remove(self, name: str) -> None:
        """Remove it as Kubernetes does: from the name, and at once it is told to end."""
        self.routers.pop(name, None)
        self._names.addresses[NAME] = [host for host in self._names.addresses[NAME] if host != HOSTS.get(name)]
        if code := await self.cluster.remove(name):
            self.history.wrong.append(f"{name} ended with exit code {code} when it was removed")

    @property
    def _port(self) -> int:
        return int(self.cluster.scheduler_address.rpartition(":")[2])

    async def start_loadgen(self) -> None:
        """Start `lorrery load` against one of the routers."""
        router = ROUTERS[self._num_loadgens % len(ROUTERS)]
        self._num_loadgens += 1
        with (self._folder / f"{LOADGEN}-{self._num_loadgens}.log").open("wb") as output:
            self._loadgen = await start_python(
                [
                    *("-m", "lorrery.loadgen", "--target", self.address(router), "--rate", "6", "--duration", "3600"),
                    *("--adapters", "lora-{0..3}", "--input-range", "8:200", "--output-range", "8:60"),
                    *("--out", str(self._folder / f"{LOADGEN}-{self._num_loadgens}")),
                ],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=asyncio.subprocess.STDOUT,
                variables={"LORRERY_API_KEY": "acme-secret"},
            )

    async def _hit_loadgen(self, action: Action) -> None:
        process = self._loadgen
        assert process is not None
        if process.returncode is None and action.kind is Kind.STOP:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(action.seconds)
            os.kill(process.pid, signal.SIGCONT)
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM if action.kind is Kind.TERMINATE else signal.SIGKILL)
        await process.wait()
        await asyncio.sleep(action.seconds)
        await self.start_loadgen()

    async def end_loadgen(self) -> None:
        """Kill `lorrery load` for good."""
        if self._loadgen is not None and self._loadgen.returncode is None:
            self._loadgen.kill()
            await self._loadgen.wait()

    async def _change_adapter(self, action: Action) -> None:
        """Ask a router; what it answers depends on who is away and what others have asked meanwhile."""
        began = time.monotonic()
        channel = grpc.aio.insecure_channel(self.address(action.target))
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        outcome = "ok"
        try:
            if action.kind is Kind.LOAD:
                adapter = types_pb2.Adapter(adapter_id=action.adapter_id, rank=action.rank)
                load = router_pb2.LoadAdapterRequest(adapter=adapter)
                await stub.LoadAdapter(load, timeout=CALL_SECONDS, metadata=bearer("root-secret"))
            else:
                unload = router_pb2.UnloadAdapterRequest(adapter_id=action.adapter_id)
                await stub.UnloadAdapter(unload, timeout=CALL_SECONDS, metadata=bearer("root-secret"))
        except grpc.aio.AioRpcError as error:
            outcome = error.code().name
            self._judge_call(action, error, began)
        finally:
            await channel.close()
        self.history.say(f"{action.kind} {action.adapter_id} through {action.target}: {outcome}")

    def _judge_call(self, action: Action, error: grpc.aio.AioRpcError, began: float) -> None:
        allowed = {"ALREADY_EXISTS"} if action.kind is Kind.LOAD else {"NOT_FOUND"}
        if self.history.touched((action.target, *HOSTS), began, time.monotonic()):
            allowed |= {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
        if error.code().name not in allowed:
            self.history.wrong.append(f"{action}: {error.code().name}: {error.details()}")


def start_of(name: str, port: int, names: NameServer) -> tuple[str, list[str]]:
    """Return the service that a process is, and its own settings."""
    schedulers = names.target(NAME, port)
    if name in HOSTS:
        return "scheduler", [f"scheduler.listen={HOSTS[name]}:{port}"]
    if name.startswith("router"):
        return "router", [f"router.schedulers={json.dumps([schedulers])}"]
    return "worker", [f"worker.name={name}", f"worker.scheduler={schedulers}"]


@asynccontextmanager
async def chaos_cluster(folder: Path, history: History, time_scale: float) -> AsyncIterator[ChaosCluster]:
    """Run the cluster; settings, keys and every process's output go into `folder`."""
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    config = folder / "cluster.toml"
    config.write_text(SETTINGS.format(keys=keys, time_scale=time_scale))
    async with name_server() as names:
        with Logs(folder) as logs:
            async with LocalCluster(config, num_workers=1, show=logs.line, fork_server=fork_server()) as cluster:
                # It starts its own by address; all but the scheduler start again, by name.
                port = int(cluster.scheduler_address.rpartition(":")[2])
                names.addresses[NAME] = [HOSTS[name] for name in SCHEDULERS]
                for name in ("router", "worker-0"):
                    await cluster.remove(name)
                for name in (*SCHEDULERS[1:], *WORKERS, *ROUTERS):
                    await cluster.add(name, *start_of(name, port, names))
                for name in (*ROUTERS, *SCHEDULERS, *WORKERS):
                    await cluster.serving(name)
                running = ChaosCluster(cluster, names, history, logs, folder)
                await running.start_loadgen()
                try:
                    yield running
                finally:
                    await running.end_loadgen()
