"""The schedulers that a worker process knows: which of them to attach to, and the channels to them.

With an address there is one scheduler and no choice. With a name, each GPU of the process asks every scheduler of that
name how much it needs workers, attaches where the need is greatest, and checks again every `resolve_seconds`. It moves
when two checks in a row give the same result, by draining: its running sequences finish there, its waiting ones go to
other workers. It leaves a scheduler that the name no longer has in the same way.

    pressure(s, n) = (open requests of s + IDLE_REQUESTS) / n     with n workers; infinite for n = 0

An unattached worker attaches to a scheduler without workers. If there is none, it draws a scheduler with probability
proportional to its pressure, so that workers that lose a scheduler together spread. An attached worker moves to the
scheduler with the highest pressure if that pressure exceeds, by a quarter, the pressure that the move would leave
behind:

    pressure(to, n_to) > MOVE_RATIO * pressure(from, n_from - 1)

Workers do not communicate, but they see the same numbers, so each computes all moves: schedulers give up a worker in
turn, first the one whose remaining pressure is lowest, and each move counts for the next. A draining worker counts at
the scheduler that needs it most. Hence a scheduler gets no more workers than it needs from several others at once, no
move is followed by its reverse while the requests stay the same, the last worker of a scheduler stays, and schedulers
without requests end up with even shares of the workers.
"""

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import grpc.aio

from lorrery.service.network.channel import Dialler, options_for
from lorrery.service.network.credentials import ClusterToken
from lorrery.service.network.discovery import Discovery
from lorrery.service.network.tls import watched_pems
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import scheduler_pb2_grpc as pb_grpc
from lorrery.worker.attachment import Call

IDLE_REQUESTS = 16
"""Added to a scheduler's open requests, so that a few requests alone move no worker."""
MOVE_RATIO = 1.25


class Demand(NamedTuple):
    """How much a scheduler needs workers.

    Attributes:
        num_workers: its workers that take new sequences.
        num_open: unfinished requests.
        first_to_leave: the worker that it can best spare; empty: it has none, or one is already leaving.
    """

    num_workers: int
    num_open: int
    first_to_leave: str = ""

    def pressure(self, more_workers: int = 0) -> float:
        """Return the requests per worker if the scheduler had `more_workers` more."""
        num_workers = self.num_workers + more_workers
        return (self.num_open + IDLE_REQUESTS) / num_workers if num_workers > 0 else math.inf


def neediest(demands: Mapping[str, Demand]) -> str:
    """Return the scheduler that needs a worker most; `demands` is not empty.

    Among schedulers without workers, the one with most requests; among equals, the first in the order of `demands`.
    """
    return max(demands, key=lambda name: (demands[name].pressure(), demands[name].num_open))


def drawn(demands: Mapping[str, Demand], at: float) -> str:
    """Return the scheduler that an unattached worker should attach to.

    Args:
        demands: of the schedulers that answered, at least one.
        at: a uniform random number in [0, 1).
    """
    able = {name: demand for name, demand in demands.items() if not demand.num_workers} or demands
    weights = [(demand.num_open + IDLE_REQUESTS) / max(1, demand.num_workers) for demand in able.values()]
    sums = list(accumulate(weights))
    return list(able)[bisect_right(sums, at * sums[-1], hi=len(sums) - 1)]


def better(own: str, worker: str, demands: Mapping[str, Demand]) -> str | None:
    """Return the scheduler that a worker should move to; None: it stays.

    Args:
        own: the scheduler that it is attached to.
        worker: its name; a scheduler gives up one worker at a time, its `first_to_leave`.
        demands: of the schedulers that answered.
    """
    here = demands.get(own)
    return moves(demands).get(own) if here is not None and here.first_to_leave == worker else None


def moves(demands: Mapping[str, Demand]) -> dict[str, str]:
    """Map schedulers whose `first_to_leave` should move to their destinations; the order of `demands` has no effect."""
    after = dict(sorted(demands.items()))

    def add(name: str, num_workers: int) -> None:
        after[name] = after[name]._replace(num_workers=after[name].num_workers + num_workers)

    for demand in demands.values():
        if demand.num_workers and not demand.first_to_leave:
            add(neediest(after), 1)
    found: dict[str, str] = {}
    parting = [name for name, demand in after.items() if demand.first_to_leave]
    for own in sorted(parting, key=lambda name: after[name].pressure(-1)):
        to = neediest(after)
        if after[to].pressure() <= MOVE_RATIO * after[own].pressure(-1):
            break
        found[own] = to
        add(own, -1)
        add(to, 1)
    return found


ASK_SECONDS = 2.0
"""Timeout of a `GetDemand` call."""

_AnyCall = TypeVar("_AnyCall", bound=grpc.aio.Call)
_log = get_logger("worker")


class Mover(Protocol):
    """An attached GPU."""

    name: str

    @property
    def scheduler(self) -> str:
        """The address that it is attached to; empty: none."""
        ...

    async def leave(self) -> None:
        """Drain, and end the attachment."""
        ...


class _Channel:
    """The channel to one scheduler, shared by all GPUs of the process.

    Args:
        dialler: opens the channel.
    """

    def __init__(self, dialler: Dialler) -> None:
        self.dialler = dialler
        self._calls: list[grpc.aio.Call] = []  # all calls that may still be open
        self._starting = asyncio.Lock()

    @property
    def in_use(self) -> bool:
        """Whether closing the channel would break a call."""
        return self._starting.locked() or any(not call.done() for call in self._calls)

    async def start(self, begin: "Callable[[pb_grpc.SchedulerServiceAsyncStub], _AnyCall]") -> _AnyCall:
        """Start a call; if no other call is open, first renew the channel with the current certificates."""
        async with self._starting:
            self._calls = [call for call in self._calls if not call.done()]
            if not self._calls:  # else renewing would break the other calls
                await self.dialler.renew()
            call = begin(pb_grpc.SchedulerServiceStub(self.dialler.channel))
            self._calls.append(call)
            return call


class Schedulers:
    """The schedulers of a worker process: chooses one for each GPU, and keeps them balanced.

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
        self._next: dict[str, str] = {}  # by worker: the scheduler that it moves to

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
        # A scheduler that does not answer may be starting; the attempt to attach will tell.
        return drawn(demands, random.random()) if demands else random.choice(addresses)

    async def open_stream(self, address: str) -> Call:
        """Open a stream to a scheduler."""
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
        """Move GPUs to schedulers that need them more, until cancelled."""
        gpus = list(gpus)
        seen: dict[str, str] = {}
        leaving: dict[str, asyncio.Task[None]] = {}
        if not self._discovery.has_names:
            await asyncio.Event().wait()
        try:
            while True:
                await asyncio.sleep(self._every_seconds * random.uniform(0.8, 1.2))  # workers spread
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
        """Start at most one move, of a GPU whose previous check had the same result; return this check's results.

        Args:
            gpus: of the process.
            seen: by worker: the result of the previous check, the scheduler to move to; empty: its own scheduler is
                gone.
            leaving: the moves under way; a new one is added.
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
            why = "" if gone else to  # if its scheduler is gone, it leaves whatever the destination
            if seen.get(gpu.name) != why:
                now[gpu.name] = why
                continue
            _log.info("moving", worker=gpu.name, scheduler=gpu.scheduler, to=to, demands=demands)
            self._next[gpu.name] = to
            leaving[gpu.name] = asyncio.create_task(gpu.leave(), name=f"move {gpu.name}")
            break  # one at a time: the next check sees the effect
        return now

    async def _ask(self, addresses: Iterable[str]) -> dict[str, Demand]:
        """Return the demand of each scheduler that answers and is not draining."""
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
