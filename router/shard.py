"""One scheduler as the router sees it: a Route stream that is dialled, kept up, and dialled again.

One task reads, one writes (`session.py`).
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from lorrery.router import wire
from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import OpenRequest
from lorrery.router.request import Finish
from lorrery.router.session import Fanout, RouteCall, Session
from lorrery.service.errors import Overloaded, Reason, RequestError, Unattainable
from lorrery.service.network.channel import Dialler, options_for
from lorrery.service.network.credentials import ClusterToken, Metadata, Watched
from lorrery.service.network.tls import Pems
from lorrery.service.settings.cluster import Settings
from lorrery.service.tasks import until_first_ends
from lorrery.service.telemetry.log import BoundedLog, get_logger
from lorrery.v1 import scheduler_pb2, scheduler_pb2_grpc
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog
from lorrery.vocabulary.endings import CancelCause

MAX_HOLD_SECONDS = 0.1
MAX_RETRY_SECONDS = 60.0
MAX_TENANTS = 1000
"""Tenants remembered at once; bounded because clients may name any tenant."""


class _Hold:
    """One refusal that holds for further requests."""

    __slots__ = ("error", "retry_seconds", "step_seconds", "until")

    def __init__(self, error: RequestError, until: float, step_seconds: float) -> None:
        self.error = error
        self.until = until
        self.step_seconds = step_seconds
        self.retry_seconds = error.retry_seconds  # of the latest refused request

    def raise_for_another(self) -> None:
        first = self.error
        if self.retry_seconds is not None:
            self.retry_seconds = min(self.retry_seconds + self.step_seconds, MAX_RETRY_SECONDS)
        kind = Unattainable if isinstance(first, Unattainable) else Overloaded
        raise kind(str(first), first.reason, self.retry_seconds, **first.facts)


class StandingRefusals:
    """Refusals of one scheduler that hold for further requests, which therefore need not be sent to it.

    A scheduler that refuses a request because of its queue says whether the refusal holds for all requests or for all
    of the tenant. Until the scheduler expects a change, and for at most `MAX_HOLD_SECONDS`, further such requests are
    refused here before they are parsed: at ten times the load that a cluster can serve, that is nearly all of them.
    Each gets a retry delay one queue place longer than the one before it, as the scheduler would have given. The queue
    is full meanwhile, so no worker idles.
    """

    def __init__(self) -> None:
        self._all: _Hold | None = None
        self._of_tenant: dict[str, _Hold] = {}

    def note(self, error: RequestError, tenant_id: str | None, step_seconds: float) -> None:
        """Record a refusal that holds for further requests.

        Args:
            error: the error for the client.
            tenant_id: the tenant that it holds for; None: all.
            step_seconds: increment of the retry delay from one refused request to the next.
        """
        now, retry_seconds = time.monotonic(), error.retry_seconds
        hold_seconds = MAX_HOLD_SECONDS if retry_seconds is None else min(retry_seconds, MAX_HOLD_SECONDS)
        hold = _Hold(error, now + hold_seconds, step_seconds)
        if tenant_id is None:
            self._all = hold
            return
        if len(self._of_tenant) >= MAX_TENANTS:
            self._of_tenant = {name: one for name, one in self._of_tenant.items() if one.until > now}
        if len(self._of_tenant) < MAX_TENANTS:
            self._of_tenant[tenant_id] = hold

    def check(self, tenant_id: str) -> None:
        """Check that a new request of a tenant is not sure to be refused.

        Raises:
            RequestError: the scheduler would refuse it.
        """
        if self._all is None and not self._of_tenant:
            return
        now = time.monotonic()
        if self._all is not None:
            if now < self._all.until:
                self._all.raise_for_another()
            self._all = None
        hold = self._of_tenant.get(tenant_id)
        if hold is not None:
            if now < hold.until:
                hold.raise_for_another()
            del self._of_tenant[tenant_id]


FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 2.0
DIAL_SECONDS = 2.0
"""How long an attempt waits for its channel; the next attempt uses the certificates and token of that time."""
WARN_AFTER_SECONDS, WARN_EVERY_SECONDS = 10.0, 60.0
"""When an unreachable scheduler is logged: first at info, then as a warning; interval of the warnings."""
WHY_SECONDS = 1.0
"""Timeout of the call that finds out why a scheduler cannot be reached."""
HELLO_SECONDS = 10.0
"""How long a connected scheduler may take to answer the router's hello."""


_log = get_logger("router.shard")


class ShardOwner(Protocol):
    """Places requests on shards."""

    router_id: str

    log: AdapterLog

    @property
    def wants_load(self) -> bool:
        """Whether shards should report their load."""
        ...

    def learn(self, changes: Iterable[AdapterChange], forgotten: int | None, told_by: "Shard | None") -> None:
        """Merge adapter changes, and send them to the other shards; `forgotten`: see `AdapterLog.merge_all`."""
        ...

    def shard_up(self, shard: "Shard") -> None:
        """Called when the shard accepts requests."""
        ...

    def shard_down(self) -> None:
        """Called when a shard does not answer."""
        ...

    def load_said(self) -> None:
        """Called when a shard has reported its load."""
        ...

    def shard_lost(self, open_requests: list[OpenRequest]) -> None:
        """Place these open requests again; their shard is gone, or takes no new ones."""
        ...


class Shard:
    """One scheduler's address, and the stream to it while there is one.

    Args:
        address: HOST:PORT.
        settings: of the cluster.
        metrics: of the router.
        owner: places requests.
        pems: current certificates and trust roots.
        host: name that the scheduler's certificate must have; empty: that of the address.

    Attributes:
        leaving: its name no longer has this address: it gets new requests only if no other shard takes them, and is not
            dialled again.
    """

    def __init__(
        self,
        address: str,
        settings: Settings,
        metrics: RouterMetrics,
        owner: ShardOwner,
        pems: Watched[Pems],
        host: str = "",
    ) -> None:
        self.address = address
        self.leaving = False
        self.model = ""
        self.refusals = StandingRefusals()
        self._log_failed = BoundedLog(_log, "request_failed")
        self._settings = settings
        self._metrics = metrics
        self._owner = owner
        self._session: Session | None = None
        self._draining = False
        self._unreached_since: float | None = None  # monotonic, as is `_say_at`
        self._say_at = -math.inf
        self._load: scheduler_pb2.SchedulerLoad | None = None
        self._num_open_then = 0  # own open requests at the time of that report
        self._dialler = Dialler(address, pems, options_for(host))
        self._token = ClusterToken(settings.cluster_token)
        self.stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(
            self._dialler.channel
        )
        metrics.shard_connected(address, False)

    @property
    def credentials(self) -> Metadata:
        """Metadata of every call to the scheduler."""
        return self._token.metadata()

    @property
    def connected(self) -> bool:
        """Whether the Route stream is up."""
        return self._session is not None

    @property
    def accepts(self) -> bool:
        """Whether new requests may go to this shard."""
        return self._session is not None and not self._draining

    @property
    def has_workers(self) -> bool:
        """Whether a request would find a worker there; true until a load is reported."""
        return self._load is None or self._load.num_workers > 0

    @property
    def says_load(self) -> bool:
        """Whether the shard has reported a load."""
        return self._load is not None

    @property
    def size(self) -> int:
        """Its capacity in workers; a shard without workers counts as one."""
        return 1 if self._load is None else max(1, self._load.num_workers)

    @property
    def load(self) -> int:
        """Requests that the shard works on, from all routers.

        The last reported number, plus the change in this router's own requests since then times the number of routers:
        all routers have the same figures and follow the same rule, so they are taken to behave alike.
        """
        if self._load is None:
            return self.num_open
        change = self.num_open - self._num_open_then
        return max(0, self._load.num_open + max(1, self._load.num_routers) * change)

    @property
    def num_open(self) -> int:
        """This router's requests that the shard works on."""
        return len(self._session.fanout.open_requests) if self._session is not None else 0

    def submit(self, open_request: OpenRequest) -> None:
        """Submit a request, or the rest of one, to this shard, which must be connected."""
        assert self._session is not None
        self._session.submit(open_request)

    def tell_adapters(self, changes: Sequence[AdapterChange] | None) -> None:
        """Send adapter changes to this shard; None: the whole log.

        A shard that is not connected gets the log when it connects.
        """
        if self._session is not None:
            self._session.tell(self._owner.log, changes)

    def owns(self, open_request: OpenRequest) -> bool:
        """Return whether the request is open on this shard."""
        return self._session is not None and open_request.fanout is self._session.fanout

    def cancel(self, open_request: OpenRequest, cause: CancelCause, kept_tokens: int) -> None:
        """Drop a request that is open here, and cancel it at the scheduler; see `Placement.release`."""
        assert self._session is not None
        fanout = self._session.fanout
        if self._session.cancel(open_request.handle, cause, kept_tokens):
            fanout.leave(open_request)
        else:
            fanout.remove(open_request)

    def withdraw(self, open_request: OpenRequest, kept_tokens: int) -> "asyncio.Future[Finish | None]":
        """End a request that is open here at a stop string in its text, which keeps so many of its tokens.

        Returns:
            A future for the scheduler's finish, None if it cannot come; see `Fanout.withdraw`.
        """
        assert self._session is not None
        last_word = self._session.fanout.withdraw(open_request)
        if not self._session.cancel(open_request.handle, CancelCause.STOP_TEXT, kept_tokens):
            last_word.set_result(None)
        return last_word

    def take_back(self) -> list[OpenRequest]:
        """Cancel all requests that are open here, and return them to be resumed elsewhere."""
        if self._session is None:
            return []
        open_requests = list(self._session.fanout.open_requests.values())
        for open_request in open_requests:
            self.cancel(open_request, CancelCause.MOVED, len(open_request.token_ids))
            _resume(open_request)
        return open_requests

    async def run(self) -> None:
        """Keep the stream up, until cancelled, or until it breaks after the name has dropped the address."""
        retry_seconds = FIRST_RETRY_SECONDS
        try:
            while not self.leaving:
                if (call := await self._dial()) is None:
                    continue
                if await self._live(call):
                    retry_seconds = FIRST_RETRY_SECONDS
                self._owner.shard_down()
                await asyncio.sleep(retry_seconds * random.uniform(0.8, 1.2))
                retry_seconds = min(LAST_RETRY_SECONDS, 2 * retry_seconds)
        finally:
            await self._dialler.close()

    async def _dial(self) -> RouteCall | None:
        """Return a stream on which the router's hello was written; None: this attempt did not reach the scheduler."""
        if await self._dialler.renew():
            self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self._dialler.channel)
        call: RouteCall = self.stub.Route(wait_for_ready=True, metadata=self.credentials)
        hello = wire.router_hello(self._owner.router_id, self._owner.log, wants_load=self._owner.wants_load)
        written = False
        try:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the read returns the error
                async with asyncio.timeout(DIAL_SECONDS):
                    await call.write(hello)
            written = True
        except TimeoutError:
            await self._say_not_connected()
        finally:
            if not written:
                call.cancel()
        return call if written else None

    async def _say_not_connected(self) -> None:
        """Log now and then that the scheduler is unreachable, with the reason, which a waiting call does not give."""
        now = time.monotonic()
        self._unreached_since = now if self._unreached_since is None else self._unreached_since
        if now < self._say_at:
            return
        try:
            await self.stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=WHY_SECONDS, metadata=self.credentials)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        else:
            return  # it has just connected
        late = now >= self._unreached_since + WARN_AFTER_SECONDS
        self._say_at = now + WARN_EVERY_SECONDS if late else self._unreached_since + WARN_AFTER_SECONDS
        (_log.warning if late else _log.info)("shard_not_connected", shard=self.address, reason=reason)

    async def _live(self, call: RouteCall) -> bool:
        """Serve one stream until it ends; return whether it got past the hellos."""
        session: Session | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await call.read()
            hello = wire.scheduler_hello(first)
            self._owner.learn(hello.changes, hello.forgotten, self)
            session = self._begin(call, hello)
            await self._serve(call, session)
            _log.warning("shard_closed_stream", shard=self.address)
        except* TimeoutError:
            _log.warning("shard_lost", shard=self.address, reason=f"no hello within {HELLO_SECONDS:g} s")
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError, wire.ProtocolError) as errors:
            _log.warning("shard_lost", shard=self.address, reason=_first_line(errors))
        finally:
            call.cancel()
            if session is not None:
                self._end(session)
        return session is not None

    def _begin(self, call: RouteCall, hello: wire.SchedulerHello) -> Session:
        if hello.model != self._settings.model:
            _log.warning("shard_serves_another_model", shard=self.address, model=hello.model, ours=self._settings.model)
        self.model = hello.model
        fanout = Fanout(
            hello.time_scale,
            max_pending_tokens=self._settings.router.max_pending_tokens,
            max_gap_seconds=self._settings.router.max_flush_gap_seconds,
            metrics=self._metrics,
            on_slow_reader=self._cut_slow_reader,
        )
        session = self._session = Session(self.address, call, fanout, self._settings.scheduler.submit_bytes)
        if list(hello.changes) != self._owner.log.changes:  # something changed between the hellos
            session.tell(self._owner.log)
        self._draining = False
        self._unreached_since, self._say_at = None, -math.inf
        self.refusals = StandingRefusals()
        self._metrics.shard_connected(self.address, True)
        _log.info("shard_connected", shard=self.address, model=hello.model, time_scale=hello.time_scale)
        self._owner.shard_up(self)
        return session

    def _end(self, session: Session) -> None:
        self._session = self._load = None
        self._metrics.shard_connected(self.address, False)
        open_requests = session.fanout.close()
        for open_request in open_requests:
            _resume(open_request)
        self._owner.shard_lost(open_requests)

    async def _serve(self, call: RouteCall, session: Session) -> None:
        async def read() -> None:
            while isinstance(message := await call.read(), scheduler_pb2.RouteResponse):
                self._receive(session, message)

        await until_first_ends(read(), session.write())

    def _receive(self, session: Session, message: scheduler_pb2.RouteResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "tokens":
            session.fanout.deliver(wire.tokens_frame(message.tokens))
        elif kind == "refused":
            self._refused(session, wire.refusal(message.refused, session.fanout.time_scale))
        elif kind == "adapter_changes":
            changes = message.adapter_changes
            forgotten = changes.forgotten if changes.whole else None
            self._owner.learn(wire.read_changes(changes), forgotten, self)
        elif kind == "adapter_pinned":
            pinned = message.adapter_pinned
            open_request = session.fanout.open_requests.get(pinned.handle)
            if open_request is not None:
                open_request.adapter = wire.adapter_change(pinned.adapter)
        elif kind == "draining":
            _log.info("shard_draining", shard=self.address)
            self._draining = True
        elif kind == "load":
            self._load, self._num_open_then = message.load, self.num_open
            self._owner.load_said()

    def _refused(self, session: Session, refusal: wire.Refusal) -> None:
        open_request = session.fanout.refused(refusal.handle)
        if open_request is None:
            return
        if refusal.draining:
            self._draining = True
            self._owner.shard_lost([open_request])
        else:
            if refusal.holds_for_all or refusal.holds_for_tenant:
                tenant_id = None if refusal.holds_for_all else open_request.request.tenant_id
                self.refusals.note(refusal.error, tenant_id, refusal.retry_step_seconds)
            if refusal.error.reason is Reason.INTERNAL:  # the client's error refers to this log
                self._log_failed.say(
                    "internal", **open_request.log_fields, shard=self.address, reason=f"{refusal.error}"
                )
            open_request.fail(refusal.error)

    def _cut_slow_reader(self, open_request: OpenRequest) -> None:
        assert self._session is not None
        self._session.cancel(open_request.handle, CancelCause.SLOW_READER, open_request.written)
        self._metrics.slow_readers.inc()
        limit = self._settings.router.max_pending_tokens
        open_request.cut_off(
            Overloaded(
                f"the reader left more than {limit} tokens waiting; max_pending_tokens is {limit}",
                Reason.SLOW_READER,
                field="max_pending_tokens",
                limit=limit,
            )
        )


def _resume(open_request: OpenRequest) -> None:
    """Mark a request whose shard is gone as one that another shard has to resume."""
    open_request.resumed = True
    if open_request.trace is not None:
        open_request.trace.shard_lost()


def _first_line(errors: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
