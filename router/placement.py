"""Which shard gets a request, and what happens to requests while there is none.

A request goes to the connected shard that wins its adapter's rendezvous hash, so that an adapter's requests meet on one
shard, and stay there when another shard comes or goes. Requests for the base model spread by request id. While no shard
accepts requests they wait, up to `resume_timeout_seconds`; when a shard's stream breaks, everything it worked on is
placed anew, with the tokens received so far.
"""

import asyncio
from collections.abc import Iterable
from uuid import uuid4

from lorrery.chassis import rendezvous
from lorrery.chassis.awake import AwakeClock
from lorrery.chassis.errors import Reason, Unavailable
from lorrery.router.metrics import RouterMetrics
from lorrery.router.request import Finish
from lorrery.router.shard import Shard
from lorrery.router.streams import OpenRequest
from lorrery.settings import Settings
from lorrery.vocabulary.adapter_log import AdapterChange, AdapterLog

AFTER_STOP_SECONDS = 5.0
"""How long a router that was stopped runs before it lets a wait for a scheduler end: time to dial twice."""


class Placement:
    """Every shard of the cluster, and the requests that wait for one.

    Attributes:
        log: what was loaded and unloaded at run time, through this router or another; each shard hears of it, one that
            connects before any request.
        any_connected: set once a shard has been up.
    """

    def __init__(self, settings: Settings, metrics: RouterMetrics) -> None:
        self.router_id = uuid4().hex
        self.log = AdapterLog([name for name, _ in settings.adapters.expand()])
        self.any_connected = asyncio.Event()
        self._timeout_seconds = settings.router.resume_timeout_seconds
        self._metrics = metrics
        self._awake = AwakeClock()
        self._waiting: dict[OpenRequest, asyncio.TimerHandle] = {}
        self.shards = [Shard(address, settings, metrics, self) for address in settings.router.schedulers]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a shard."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Requests that a shard works on."""
        return sum(shard.num_open for shard in self.shards)

    async def run(self) -> None:
        """Keep a stream to every shard, until cancelled."""
        self._awake.now()  # it counts from here
        try:
            async with asyncio.TaskGroup() as tasks:
                for shard in self.shards:
                    tasks.create_task(shard.run(), name=f"shard {shard.address}")
        finally:
            for open_request in list(self._waiting):
                self.release(open_request)
                open_request.fail(Unavailable("the router is stopping", Reason.DRAINING))

    def check_hold_off(self, adapter_id: str, request_id: str, tenant_id: str) -> None:
        """Check that a new request, of which no more has been read, may be worth asking for.

        Raises:
            RequestError: the shard that would get it has just said that it would refuse it.
        """
        accepting = [shard for shard in self.shards if shard.accepts]
        if len(accepting) == 1 or (accepting and (adapter_id or request_id)):
            self._chosen(adapter_id or request_id, accepting).hold_off.check(tenant_id)

    def submit(self, open_request: OpenRequest) -> None:
        """Give a request to a shard, now or when there is one."""
        accepting = [shard for shard in self.shards if shard.accepts]
        if accepting:
            self._place(open_request, accepting)
        else:
            loop = asyncio.get_running_loop()
            self._waiting[open_request] = loop.call_later(self._timeout_seconds, self._give_up, open_request)

    def release(self, open_request: OpenRequest) -> None:
        """Forget a request wherever it is, and cancel it at its shard if it is not over."""
        if (timer := self._waiting.pop(open_request, None)) is not None:
            timer.cancel()
        for shard in self.shards:
            if shard.owns(open_request):
                shard.cancel(open_request)

    def withdraw(self, open_request: OpenRequest) -> "asyncio.Future[Finish | None]":
        """Release a request, and return what will be done with the finish that its shard knows; None: no shard does.

        See `Fanout.withdraw`.
        """
        for shard in self.shards:
            if shard.owns(open_request):
                return shard.withdraw(open_request)
        self.release(open_request)
        known: asyncio.Future[Finish | None] = asyncio.get_running_loop().create_future()
        known.set_result(open_request.finish)
        return known

    def learn(
        self, changes: Iterable[AdapterChange], forgotten: int | None = None, told_by: Shard | None = None
    ) -> None:
        """See `ShardOwner.learn`."""
        if self.log.merge(changes) if forgotten is None else self.log.merge_all(changes, forgotten):
            for shard in self.shards:
                if shard is not told_by:
                    shard.tell_adapters()

    def shard_up(self, shard: Shard) -> None:
        """See `ShardOwner.shard_up`."""
        self.any_connected.set()
        waiting, self._waiting = self._waiting, {}
        for open_request, timer in waiting.items():
            timer.cancel()
            self._place(open_request, [shard])

    def shard_lost(self, open_requests: list[OpenRequest]) -> None:
        """See `ShardOwner.shard_lost`."""
        for open_request in open_requests:
            if not open_request.finish_if_complete():
                self._metrics.resumed.inc()
                self.submit(open_request)

    def _place(self, open_request: OpenRequest, accepting: list[Shard]) -> None:
        request = open_request.request
        if not open_request.resumed:
            latest = self.log.latest(request.adapter_id)
            open_request.adapter = latest if latest is not None and latest.rank else None
        self._chosen(request.adapter_id or request.request_id, accepting).submit(open_request)

    def _chosen(self, key: str, accepting: list[Shard]) -> Shard:
        if len(accepting) == 1:
            return accepting[0]
        return accepting[rendezvous.choose(key, [shard.address for shard in accepting])]

    def _give_up(self, open_request: OpenRequest) -> None:
        missing = AFTER_STOP_SECONDS - self._awake.steady_seconds()
        if missing > 0:  # a scheduler may have been there while this process was stopped
            loop = asyncio.get_running_loop()
            self._waiting[open_request] = loop.call_later(missing, self._give_up, open_request)
            return
        del self._waiting[open_request]
        open_request.fail(
            Unavailable(
                f"no scheduler for {self._timeout_seconds:g} s (resume_timeout_seconds);"
                f" tried {', '.join(shard.address for shard in self.shards)}",
                Reason.NO_SCHEDULER,
                field="resume_timeout_seconds",
                limit=self._timeout_seconds,
            )
        )
