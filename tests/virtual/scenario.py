"""One run of a whole cluster in virtual time, drawn from a seed: who is there, what is asked, and what goes wrong.

Routers, schedulers and workers are the services' own code on hosts of their own (`processes.py`), joined by connections
that are slow and break (`network.py`). Clients ask, cancel, read slowly and load adapters (`clients.py`); processes are
killed, drained and begun again, hosts stand still and clocks jump (`trouble.py`). Afterwards everything heals;
`oracle.py` says what is wrong.
"""

import asyncio
import gc
import hashlib
import logging
import random
import sys
from typing import Any

import pytest
import structlog

from tests.cluster.client import Ask
from tests.virtual.clients import Clients, Request
from tests.virtual.clock import HOST, Host, VirtualLoop, virtual_time
from tests.virtual.network import Network
from tests.virtual.processes import Process, read_disk_once
from tests.virtual.trouble import Trouble
from tests.virtual.ways import WAYS, settings_of

HEALED_SECONDS = 40.0
"""Within so long after the last fault every stream has ended: all that services wait for, one after the other."""


class Scenario:
    """What happens in one run.

    Attributes:
        calm: whether nothing goes wrong in it, so that no request may fail.
        timeline: what happened, a line each.
    """

    def __init__(self, seed: int, loop: VirtualLoop, rng: random.Random) -> None:
        self.seed, self._loop, self.rng = seed, loop, rng
        self.way = rng.choice(list(WAYS))
        self.overrides = WAYS[self.way]
        self.network = Network(loop, rng, rng.choice([0.0003, 0.003, 0.02]))
        self.timeline: list[str] = []
        self.errors: list[str] = []
        self.processes: list[Process] = []
        self.client = Host(loop, "client")
        self.calm = rng.random() < 0.15
        schedulers = [f"scheduler{n}:1" for n in range(rng.choice([1, 1, 2]))]
        routers = [f"router{n}:1" for n in range(rng.choice([1, 1, 2]))]
        num_workers = max(len(schedulers), rng.choice([1, 2, 2, 3]))
        workers = [f"worker{n}" for n in range(num_workers)]
        for name in schedulers:
            self._add("scheduler", name, ())
        for n, name in enumerate(workers):
            self._add("worker", name, (schedulers[n % len(schedulers)],))
        for name in routers:
            self._add("router", name, tuple(schedulers))
        settings = settings_of(self.way, "scheduler", schedulers[0], ())
        self.clients = Clients(self.client, self.network, rng, settings, self.note)
        self.trouble = Trouble(loop, self.network, rng, self.clients, self.processes, self.note)
        self.clients.calm = self.trouble.calm = self.calm

    def _add(self, kind: str, name: str, others: tuple[str, ...]) -> None:
        settings = settings_of(self.way, kind, name, others)
        offset = self.rng.choice([0.0, 0.0, self.rng.uniform(-900, 900)])
        self.processes.append(Process(kind, name, settings, self.network, self._loop, offset))

    @property
    def requests(self) -> list[Request]:
        """All that clients have sent."""
        return self.clients.requests

    def of(self, kind: str) -> list[Process]:
        """Return the processes of a kind."""
        return [process for process in self.processes if process.kind == kind]

    def note(self, *what: object) -> None:
        """Put a line into the timeline."""
        self.timeline.append(f"{self._loop.clock.now - 1000:10.6f} {' '.join(map(str, what))}")

    async def play(self) -> None:
        """Let it happen, and heal."""
        rng, later = self.rng, self.trouble.later
        for process in rng.sample(self.processes, len(self.processes)):
            if rng.random() < 0.15 and not self.calm:
                later(rng.random(), process.begin)
            else:
                process.begin()
        await asyncio.sleep(rng.choice([0.0, 0.3, 0.6]))
        span = rng.choice([0.1, 1.0, 3.0])
        routers = self.of("router")
        for number in range(rng.choice([rng.randint(2, 9), rng.randint(2, 9), rng.randint(8, 16)])):
            later(rng.random() * span, self.clients.ask_something, number, routers, later)
        if rng.random() < 0.35:
            self.clients.late = True
            for _ in range(rng.randint(1, 4)):
                later(rng.random() * span, self.clients.change_adapter, routers)
        if not self.calm:
            for _ in range(rng.randint(1, 5)):
                later(rng.random() * (span + 1), self.trouble.happen)
        await asyncio.sleep(span + 1.5)
        self.trouble.over = True
        for process in self.processes:
            if not process.runs:
                process.begin()
        self.note("healed")
        try:
            async with asyncio.timeout(HEALED_SECONDS):
                await self.all_over()
        except TimeoutError:
            for request in self.requests:
                if not request.over:
                    self.errors.append(f"a stream does not end: {request.ask}, {len(request.token_ids)} tokens")

    async def all_over(self) -> None:
        """Return once every stream has ended."""
        while not self.clients.all_over:  # noqa: ASYNC110  costs no time
            await asyncio.sleep(0.05)

    def ask(self, ask: Ask, router: Process) -> Request:
        """Ask a router, as an operator."""
        return self.clients.ask(ask, router)


class Run:
    """What a run came to.

    Attributes:
        wrong: everything that is; empty: nothing.
        timeline: what happened, a line each.
        digest: of all of it; the same in every process.
    """

    def __init__(self, wrong: list[str], timeline: list[str], title: str) -> None:
        self.wrong, self.timeline, self.title = wrong, timeline, title
        self.digest = hashlib.sha256("\n".join([*timeline, *wrong]).encode()).hexdigest()


def run(seed: int) -> Run:
    """Play the scenario of a seed.

    The garbage collector waits: when it comes by depends on what this process did before, and it closes the generators
    that it finds.
    """
    from tests.virtual.oracle import Cancelled, judge

    rng = random.Random(seed)
    logged: list[tuple[Host | None, str, str, dict[str, Any]]] = []
    scenario: Scenario | None = None

    def gather(_logger: Any, level: str, event: dict[str, Any]) -> str:
        host, text = HOST.get(), event.pop("event")
        if (error := event.pop("exc_info", None)) is not None:
            event["error"] = repr(sys.exc_info()[1] if error is True else error)
        logged.append((host, level, text, event))
        if scenario is not None and (host is None or host.alive):
            fields = {k: v for k, v in event.items() if k != "module"}
            scenario.note("" if host is None else host.name, text, fields)
        raise structlog.DropEvent

    before = structlog.get_config()
    every_level = structlog.make_filtering_bound_logger(logging.DEBUG)
    structlog.configure(processors=[gather], wrapper_class=every_level, cache_logger_on_first_use=False)
    gc.disable()
    try:
        with virtual_time(rng) as loop, pytest.MonkeyPatch.context() as patch:
            read_disk_once(patch)
            scenario = Scenario(seed, loop, rng)
            patch.setattr("grpc.aio.insecure_channel", scenario.network.channel)
            scenario.trouble.watch(patch)
            Cancelled(patch, scenario)
            unhandled: list[str] = []

            def note_unhandled(_loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
                unhandled.append(f"{what['message']}: {what.get('exception')!r}")

            loop.set_exception_handler(note_unhandled)

            async def main() -> list[str]:
                assert scenario is not None
                await scenario.play()
                wrong = scenario.errors + await judge(scenario)
                for process in scenario.processes:
                    process.kill()
                scenario.client.kill()
                await asyncio.sleep(0.01)
                return wrong

            wrong = loop.run_until_complete(main())
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks))
    finally:
        gc.enable()
        structlog.configure(**before)
    for host, level, text, fields in logged:
        if level in ("error", "exception", "critical") and text != "refused":
            wrong.append(f"{'' if host is None else host.name} logged {text} {fields}")
    wrong += unhandled
    return Run(wrong, scenario.timeline, f"{scenario.way}, {len(scenario.processes)} processes")
