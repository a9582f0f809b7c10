"""The schedulers that a worker process knows: which of them to attach to, and the channels to them.

With an address there is one, and nothing to choose. With a name each GPU of the process asks every scheduler of that
name how much it needs workers (`need.py`), attaches where it is needed most, and looks again every `resolve_seconds`.
It moves when it has seen the same twice, by draining: what runs on it ends there, and what waits goes to others. It
also leaves, in the same way, a scheduler that the name has no more.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import grpc.aio

from lorrery.chassis.channel import Dialler, options_for
from lorrery.chassis.credentials import ClusterToken
from lorrery.chassis.discovery import Discovery
from lorrery.chassis.log import get_logger
from lorrery.chassis.tls import watched_pems
from lorrery.settings import Settings
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc as pb_grpc
from lorrery.worker.attachment import Call
from lorrery.worker.need import Demand, better, drawn

ASK_SECONDS = 2.0
"""How long a scheduler may take to say how much it needs workers."""

_AnyCall = TypeVar("_AnyCall", bound=grpc.aio.Call)
_log = get_logger("worker")


class Mover(Protocol):
    """A GPU that is attached."""

    name: str

    @property
    def scheduler(self) -> str:
        """The address that it is attached to; empty: none."""
        ...

    async def leave(self) -> None:
        """Drain, and end the attachment."""
        ...


class _Channel:
    """One scheduler's, for all GPUs of the process.

    Args:
        dialler: opens it.
    """

    def __init__(self, dialler: Dialler) -> None:
        self.dialler = dialler
        self._calls: list[grpc.aio.Call] = []  # welcomed, answered or not
        self._starting = asyncio.Lock()

    @property
    def in_use(self) -> bool:
        """Whether somebody would lose a call if it were closed."""
        return self._starting.locked() or any(not call.done() for call in self._calls)

    async def start(self, begin: "Callable[[pb_grpc.SchedulerServiceAsyncStub], _AnyCall]") -> _AnyCall:
        """Begin a call; if it is the only one, with our certificates as they are now."""
        async with self._starting:
            self._calls = [call for call in self._calls if not call.done()]
            if not self._calls:  # else the others' would break
                await self.dialler.renew()
            call = begin(pb_grpc.SchedulerServiceStub(self.dialler.channel))
            self._calls.append(call)
            return call


class Schedulers:
    """See the module.

    Args:
        settings: of the cluster.

    Raises:
        SettingsError: a certificate cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        own = settings.worker
        self._pems = watched_pems(settings.client_tls, "client_tls")
        self._token = ClusterToken(settings.cluster_token)
        self._every_seconds = own.resolve_seconds
        self._discovery = Discovery([own.scheduler], own.resolve_seconds)
        self._channels: dict[str, _Channel] = {}
        self._next: dict[str, str] = {}  # by worker: where it moves to

    # --- channels ---------------------------------------------------------------------------------------------------

    async def choose(self, worker: str) -> str | None:
        """Return the address of the scheduler that a worker should attach to; None: there is none now."""
        if not self._discovery.has_names:
            return next(iter(self._discovery.addresses))
        await self._discovery.look()
        if (chosen := self._next.pop(worker, None)) in self._discovery.addresses:
            return chosen
        addresses = list(self._discovery.addresses)
        if len(addresses) < 2:
            return next(iter(addresses), None)
        demands = await self._ask(addresses)
        # One that does not answer may be starting; an attempt to attach tells.
        return drawn(demands, random.random()) if demands else random.choice(addresses)

    async def open_stream(self, address: str) -> Call:
        """Dial a scheduler."""
        call: Call = await self._channel(address).start(lambda stub: stub.Attach(metadata=self._token.metadata()))
        return call

    def _channel(self, address: str) -> _Channel:
        channel = self._channels.get(address)
        if channel is None:
            host = self._discovery.addresses.get(address, "")
            channel = self._channels[address] = _Channel(Dialler(address, self._pems, options_for(host)))
        return channel

    async def _close_unused(self) -> None:
        for address in self._channels.keys() - self._discovery.addresses.keys():
            if not self._channels[address].in_use:
                await self._channels.pop(address).dialler.close()

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(channel.dialler.close() for channel in self._channels.values()))

    # --- moves ------------------------------------------------------------------------------------------------------

    async def keep_balanced(self, gpus: Iterable[Mover]) -> None:
        """Let GPUs move to where they are needed more, until cancelled."""
        gpus = list(gpus)
        seen: dict[str, str] = {}
        leaving: dict[str, asyncio.Task[None]] = {}
        if not self._discovery.has_names:
            await asyncio.Event().wait()
        try:
            while True:
                await asyncio.sleep(self._every_seconds * random.uniform(0.8, 1.2))  # workers do not look together
                await self._discovery.look()
                leaving = {name: task for name, task in leaving.items() if not task.done()}
                seen = {} if leaving else await self._look(gpus, seen, leaving)
                await self._close_unused()
        finally:
            for task in leaving.values():
                task.cancel()
            await asyncio.gather(*leaving.values(), return_exceptions=True)

    async def _look(
        self, gpus: list[Mover], seen: dict[str, str], leaving: dict[str, asyncio.Task[None]]
    ) -> dict[str, str]:
        """Let GPUs move for which the same was `seen` before; return those that may the next time.

        Seen is where it would move to; empty: its scheduler is gone.
        """
        addresses = self._discovery.addresses
        attached = [gpu for gpu in gpus if gpu.scheduler]
        if not attached or (len(addresses) < 2 and all(gpu.scheduler in addresses for gpu in attached)):
            return {}
        demands = await self._ask(addresses)
        now: dict[str, str] = {}
        for gpu in attached:
            gone = gpu.scheduler not in addresses
            to = (
                (drawn(demands, random.random()) if demands else None)
                if gone
                else better(gpu.scheduler, gpu.name, demands)
            )
            if to is None:
                continue
            why = "" if gone else to  # it leaves one that is gone wherever to
            if seen.get(gpu.name) != why:
                now[gpu.name] = why
                continue
            _log.info("moving", worker=gpu.name, scheduler=gpu.scheduler, to=to, demands=demands)
            self._next[gpu.name] = to
            leaving[gpu.name] = asyncio.create_task(gpu.leave(), name=f"move {gpu.name}")
            break  # one at a time: the next look sees what has changed
        return now

    async def _ask(self, addresses: Iterable[str]) -> dict[str, Demand]:
        """Return how much each scheduler needs workers that answers, and is not about to stop."""
        addresses = list(addresses)
        answers = await asyncio.gather(*(self._demand(address) for address in addresses))
        return {address: answer for address, answer in zip(addresses, answers, strict=True) if answer is not None}

    async def _demand(self, address: str) -> Demand | None:
        call = await self._channel(address).start(
            lambda stub: stub.GetDemand(pb.GetDemandRequest(), timeout=ASK_SECONDS, metadata=self._token.metadata())
        )
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            _log.debug("demand_unknown", scheduler=address, reason=error.details())
            return None
        finally:
            call.cancel()
        if answer.draining:
            return None
        return Demand(answer.load.num_workers, answer.load.num_open, answer.first_to_leave)
