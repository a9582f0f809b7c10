"""Which shard gets a request, and what happens to requests while there is none.

A request goes to the connected shard that wins its adapter's rendezvous hash, so that an adapter's requests meet on one
shard and stay there when another shard comes or goes. A shard that already has more than its share is skipped
(`max_shard_load`). Requests for the base model spread by request id. While no shard accepts requests, they wait for up
to `resume_timeout_seconds`. When a shard's stream breaks, all its requests are placed again, with the tokens received
so far; so are the requests of a shard without workers if another shard has some.

The set of shards may change: see `service.network.discovery`. A shard whose name has dropped its address gets no new
requests, and is disconnected once its requests are done.
"""

import asyncio
from collections.abc import Iterable
from uuid import uuid4

from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import OpenRequest
from lorrery.router.request import Finish
from lorrery.router.shard import Shard
from lorrery.service.clocks import UptimeClock
from lorrery.service.errors import Reason, Unavailable
from lorrery.service.network.discovery import Discovery
from lorrery.service.network.tls import watched_pems
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.vocabulary import rendezvous
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from lorrery.vocabulary.endings import CancelCause

LEAVING_SECONDS = 0.2
"""How often a leaving shard is checked for remaining requests."""
AFTER_STOP_SECONDS = 5.0
"""How long a router that was suspended runs before waits for a scheduler may time out: time to dial twice."""

_log = get_logger("router.placement")


class Placement:
    """Every shard of the cluster, and the requests that wait for one.

    Args:
        settings: of the cluster.
        metrics: of the router.

    Raises:
        SettingsError: a certificate cannot be used.

    Attributes:
        log: adapters loaded and unloaded at run time, through this router or another; every shard gets it, a new one
            before any request.
        any_connected: set once a shard has been up.
        shards: all current shards; replaced by a new tuple on each change.
    """

    def __init__(self, settings: Settings, metrics: RouterMetrics) -> None:
        self.router_id = uuid4().hex
        self.log = AdapterLog([name for name, _ in settings.adapters.expand()])
        self.any_connected = asyncio.Event()
        self._timeout_seconds = settings.router.resume_timeout_seconds
        self._metrics = metrics
        metrics.adapters.foresee(name for name, _ in settings.adapters.expand())
        self._uptime = UptimeClock()
        self._waiting: dict[OpenRequest, asyncio.TimerHandle] = {}
        self._settings = settings
        self._running = False
        self._none_to_come = False
        self._group: asyncio.TaskGroup
        self._pems = watched_pems(settings.client_tls, "client_tls")
        self._discovery = Discovery(settings.router.schedulers, settings.router.resolve_seconds)
        self.shards: tuple[Shard, ...] = ()
        self._tasks: dict[Shard, asyncio.Task[None]] = {}
        self._follow_names()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a shard."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Number of requests that shards work on."""
        return sum(shard.num_open for shard in self.shards)

    @property
    def wants_load(self) -> bool:
        """See `ShardOwner.wants_load`: true if there is a choice of shards, or may be."""
        return self._discovery.has_names or len(self.shards) > 1

    async def run(self) -> None:
        """Keep a stream to every shard, until cancelled."""
        self._uptime.now()  # starts the measurement
        try:
            async with asyncio.TaskGroup() as self._group:
                self._running = True
                self._follow_names()  # plain addresses do not wait for a name server
                await self._discovery.look()
                self._follow_names()
                await self._discovery.run(self._follow_names)
                await asyncio.Event().wait()
        finally:
            for open_request in list(self._waiting):
                self.release(open_request, CancelCause.FAILED, open_request.written)
                open_request.fail(Unavailable("the router is stopping", Reason.DRAINING))

    # --- which shards there are -------------------------------------------------------------------------------------

    def _follow_names(self) -> None:
        """Add the shards that have appeared, and start to leave those that have gone."""
        addresses = self._discovery.addresses
        known = {shard.address: shard for shard in self.shards}
        for address, host in addresses.items():
            if address in known:
                known[address].leaving = False
            else:
                self.shards += (Shard(address, self._settings, self._metrics, self, self._pems, host),)
        if not self._running:
            return
        for shard in self.shards:
            if shard not in self._tasks:
                self._tasks[shard] = self._group.create_task(self._keep(shard), name=f"shard {shard.address}")
            if shard.address not in addresses and not shard.leaving:
                shard.leaving = True
                self._group.create_task(self._leave(shard), name=f"leave shard {shard.address}")

    async def _keep(self, shard: Shard) -> None:
        """Run a shard until it has been left."""
        try:
            await shard.run()
        finally:
            self.shards = tuple(other for other in self.shards if other is not shard)
            del self._tasks[shard]
            self._metrics.shard_left(shard.address)

    async def _leave(self, shard: Shard) -> None:
        """End the stream to a shard once it has no requests and another accepts some; stop if its address returns."""
        _log.info("shard_leaving", shard=shard.address, num_open=shard.num_open)
        while shard.connected and (shard.num_open or not self._others_accept(shard)):
            await asyncio.sleep(LEAVING_SECONDS)
            if not shard.leaving:
                return
        if (task := self._tasks.get(shard)) is not None:
            task.cancel()

    def _others_accept(self, shard: Shard) -> bool:
        return any(other.accepts and not other.leaving for other in self.shards if other is not shard)

    # --- requests ---------------------------------------------------------------------------------------------------

    def check_standing_refusals(self, adapter_id: str, request_id: str, tenant_id: str) -> None:
        """Check that a new request, of which only these ids have been read, is not sure to be refused.

        Raises:
            RequestError: its shard has just announced that it refuses such requests.
        """
        accepting = self._accepting()
        if len(accepting) == 1 or (accepting and (adapter_id or request_id)):
            self._chosen(adapter_id or request_id, accepting).refusals.check(tenant_id)

    def submit(self, open_request: OpenRequest) -> None:
        """Submit a request to a shard, now or when one accepts."""
        accepting = self._accepting()
        if accepting:
            self._place(open_request, accepting)
        else:
            loop = asyncio.get_running_loop()
            seconds = 0.0 if self._none_to_come else self._timeout_seconds
            self._waiting[open_request] = loop.call_later(seconds, self._give_up, open_request)

    def expect_no_scheduler(self) -> None:
        """Stop requests from waiting for a scheduler, until one connects after all."""
        _log.warning("no_scheduler_to_come", num_waiting=self.num_waiting, num_open=self.num_in_flight)
        self._none_to_come = True
        for open_request, timer in list(self._waiting.items()):
            timer.cancel()
            self._give_up(open_request)

    def release(self, open_request: OpenRequest, cause: CancelCause, kept_tokens: int) -> None:
        """Forget a request wherever it is, and cancel it at its shard if it is not over.

        Args:
            open_request: the request.
            cause: why it ends, if it is not over.
            kept_tokens: output that its client has.
        """
        if (timer := self._waiting.pop(open_request, None)) is not None:
            timer.cancel()
        for shard in self.shards:
            if shard.owns(open_request):
                shard.cancel(open_request, cause, kept_tokens)

    def withdraw(self, open_request: OpenRequest, kept_tokens: int) -> "asyncio.Future[Finish | None]":
        """Release a request at a stop string in its text, which keeps so many of its tokens.

        Returns:
            A future for the finish that its shard reports, None if no shard has it; see `Fanout.withdraw`.
        """
        for shard in self.shards:
            if shard.owns(open_request):
                return shard.withdraw(open_request, kept_tokens)
        self.release(open_request, CancelCause.STOP_TEXT, kept_tokens)
        known: asyncio.Future[Finish | None] = asyncio.get_running_loop().create_future()
        known.set_result(open_request.finish)
        return known

    def learn(
        self, changes: Iterable[AdapterChange], forgotten: int | None = None, told_by: Shard | None = None
    ) -> None:
        """See `ShardOwner.learn`."""
        news = self.log.merge(changes) if forgotten is None else self.log.merge_all(changes, forgotten)
        self._metrics.adapters.foresee(adapter_id for _, adapter_id, rank in news if rank)
        if news:
            for shard in self.shards:
                if shard is not told_by:
                    shard.tell_adapters(news if forgotten is None else None)

    def shard_up(self, shard: Shard) -> None:
        """See `ShardOwner.shard_up`."""
        self.any_connected.set()
        self._none_to_come = False
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

    def shard_down(self) -> None:
        """See `ShardOwner.shard_down`."""
        self._discovery.look_soon()

    def load_said(self) -> None:
        """See `ShardOwner.load_said`: moves requests from shards without workers to shards with workers."""
        accepting = self._accepting()
        if any(shard.has_workers for shard in accepting):
            for shard in self.shards:
                if not shard.has_workers and shard.num_open:
                    _log.info("shard_without_workers", shard=shard.address, num_open=shard.num_open)
                    self.shard_lost(shard.take_back())

    def _accepting(self) -> list[Shard]:
        """Return the shards for a new request: accepting, with workers if any has some, not leaving if any stays."""
        accepting = [shard for shard in self.shards if shard.accepts]
        able = [shard for shard in accepting if shard.has_workers] or accepting
        return [shard for shard in able if not shard.leaving] or able

    def _place(self, open_request: OpenRequest, accepting: list[Shard]) -> None:
        request = open_request.request
        if not open_request.resumed:
            latest = self.log.latest(request.adapter_id)
            open_request.adapter = latest if latest is not None and latest.rank else None
        # Outputs of one request go to one shard, which counts them as one.
        key = request.adapter_id or (request.request_id if request.group is None else request.group.group_id)
        self._chosen(key, accepting).submit(open_request)

    def _chosen(self, key: str, accepting: list[Shard]) -> Shard:
        if len(accepting) == 1:
            return accepting[0]
        addresses = [shard.address for shard in accepting]
        if not all(shard.says_load for shard in accepting):
            return accepting[rendezvous.choose(key, addresses)]
        loads, sizes = [shard.load for shard in accepting], [shard.size for shard in accepting]
        bound = self._settings.router.max_shard_load
        return accepting[rendezvous.choose_bounded(key, addresses, loads, sizes, bound)]

    def _give_up(self, open_request: OpenRequest) -> None:
        missing = AFTER_STOP_SECONDS - self._uptime.steady_seconds()
        if missing > 0 and not self._none_to_come:  # a scheduler may have been there while this process was suspended
            loop = asyncio.get_running_loop()
            self._waiting[open_request] = loop.call_later(missing, self._give_up, open_request)
            return
        del self._waiting[open_request]
        tried = f"tried {', '.join(self._settings.router.schedulers)}"
        if self._none_to_come:
            open_request.fail(Unavailable(f"no scheduler, and none is to come; {tried}", Reason.NO_SCHEDULER))
            return
        open_request.fail(
            Unavailable(
                f"no scheduler for {self._timeout_seconds:g} s (resume_timeout_seconds); {tried}",
                Reason.NO_SCHEDULER,
                field="resume_timeout_seconds",
                limit=self._timeout_seconds,
            )
        )
