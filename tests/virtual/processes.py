"""The services as processes of virtual hosts: begun, drained, killed and begun again, with an empty memory."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lorrery.router.service import Router
from lorrery.scheduler.core.build import TABLES_PACKAGE, Devices
from lorrery.scheduler.service import SchedulerService
from lorrery.service.files.reading import read_tables
from lorrery.service.network.server import Health
from lorrery.service.process import STOP_GRACE_SECONDS, Service, _serve
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.metrics import ServiceState
from lorrery.tokenizer.file import BuiltinTokenizer
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.catalogue.tables import Catalogue
from lorrery.worker.service import WorkerService
from tests.virtual.clock import Host, VirtualLoop
from tests.virtual.network import Network
from tests.virtual.server import Server

MAKE: dict[str, Callable[[Settings, CollectorRegistry], Any]] = {
    "router": Router,
    "scheduler": SchedulerService,
    "worker": WorkerService,
}


@cache
def _shipped() -> tuple[BuiltinTokenizer, Devices, Catalogue]:
    return BuiltinTokenizer(), Devices(read_tables(TABLES_PACKAGE)), read_catalogue()


def read_disk_once(patch: pytest.MonkeyPatch) -> None:
    """Let services share what each reads from its disk as it starts and never changes."""
    vocabulary, devices, catalogue = _shipped()
    patch.setattr("lorrery.router.handler.open_tokenizer", lambda path, vocab_size: vocabulary)
    patch.setattr("lorrery.scheduler.replicas.read_tables", lambda package, extra: ())
    patch.setattr("lorrery.scheduler.replicas.Devices", lambda tables: devices)
    patch.setattr("lorrery.worker.build.read_catalogue", lambda extra: catalogue)


class Process:
    """A service on a host; what it was before it was killed is forgotten.

    Args:
        kind: of service.
        name: its address, and a worker's name.
        settings: its own.
        network: to dial and to listen on.
        loop: everybody's.
        offset_seconds: by which the host's monotonic clock is ahead.

    Attributes:
        runs: whether there is a process.
        escaped: what went wrong in a way that nobody expects.
    """

    def __init__(
        self, kind: str, name: str, settings: Settings, network: Network, loop: VirtualLoop, offset_seconds: float
    ) -> None:
        self.kind, self.name = kind, name
        self.runs = False
        self.escaped: list[str] = []
        self._settings, self._network, self._loop = settings, network, loop
        self._offset_seconds = offset_seconds
        self._hosts: list[Host] = []
        self.host: Host
        self.server: Server
        self.service: Any
        self.registry: CollectorRegistry
        self._stop: asyncio.Event

    def begin(self) -> None:
        """Start the process."""
        self.runs = True
        self.host = Host(self._loop, self.name, self._offset_seconds)
        self._hosts.append(self.host)
        self.host.call(self._make)

    def _make(self) -> None:
        self.registry = CollectorRegistry()
        self.service: Service = MAKE[self.kind](self._settings, self.registry)
        self.server = Server(self._network, self.host)
        self.service.register(self.server)  # type: ignore[arg-type]
        self._stop = asyncio.Event()
        if self.kind != "worker":
            self.server.listen(self.name)
        self.host.run(self._live(ServiceState(self.registry)))

    async def _live(self, state: ServiceState) -> None:
        seconds = getattr(self._settings, self.kind).drain_seconds
        try:
            await _serve(self.service, Health(), state, self._stop, seconds)
        except Exception as error:
            self.escaped.append(f"{self.name} ended: {error!r}")
        await self.server.stop(STOP_GRACE_SECONDS)
        self.kill()

    @property
    def is_ending(self) -> bool:
        """Whether it drains."""
        return self.runs and self._stop.is_set()

    def terminate(self) -> None:
        """SIGTERM: drain and end."""
        if self.runs:
            self._stop.set()

    def kill(self) -> None:
        """SIGKILL."""
        if self.runs:
            self.runs = False
            self._network.lose(self.host)
            self.host.kill()

    def look(self) -> None:
        """Gather exceptions that escaped from tasks, of this process and of those before it."""
        for host in self._hosts:
            for task in host.failed:
                if task._log_traceback:  # type: ignore[attr-defined]
                    what = getattr(task.get_coro(), "__qualname__", "a task")
                    self.escaped.append(f"{self.name}: {what} raised {task.exception()!r}")
            host.failed.clear()

    def metrics(self) -> dict[str, float]:
        """Return its metrics by name, each summed over its labels."""
        values: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values
