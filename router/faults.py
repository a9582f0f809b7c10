"""Injects faults into requests at a router, by rules of the settings, of an operator, and of the request itself.

Rules count the requests that reach this router; another router has its own counts.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

from lorrery.router.adapters import CALL_SECONDS, connected
from lorrery.router.metrics import RouterMetrics
from lorrery.router.open_request import Output
from lorrery.router.placement import Placement
from lorrery.router.request import Request
from lorrery.service.errors import InjectedFault, InvalidRequest
from lorrery.service.faults.kinds import REFUSE, REQUEST_KINDS, Fault, check_number, further, read_rules
from lorrery.service.faults.rules import FaultRules, RequestFaults, together
from lorrery.service.network.channel import failing_when_closed
from lorrery.service.settings.cluster import Settings
from lorrery.v1 import router_pb2, scheduler_pb2
from lorrery.vocabulary.units import PS_PER_SECOND

METADATA_KEY = "lorrery-fault"
"""Metadata key of a fault for this request only; may be repeated."""


class Injector:
    """Chooses the faults of each request.

    Args:
        settings: of the cluster.
        metrics: counts injected faults by kind.
    """

    def __init__(self, settings: Settings, metrics: RouterMetrics) -> None:
        self._time_scale = settings.time_scale
        self._allowed = settings.router.request_faults
        self._metrics = metrics
        self._lasting = FaultRules(settings.planned_faults())
        self._operators: list[tuple[FaultRules, float]] = []  # rules of each operator call, and its time
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Set the origin of the times in the settings' faults to now."""
        self._begun = time.monotonic()

    @property
    def rules(self) -> list[tuple[Fault, int]]:
        """Every rule, the settings' first, with the number of requests that it has applied to."""
        every = [self._lasting, *(rules for rules, _ in self._operators)]
        return [pair for rules in every for pair in zip(rules.faults, rules.num_met, strict=True)]

    @property
    def active(self) -> list[tuple[Fault, int]]:
        """Those of `rules` that are on: now, and that have not applied to all the requests they are for."""
        return [
            (fault, num_met)
            for rules, at_ps in self._timed()
            for fault, num_met in zip(rules.faults, rules.num_met, strict=True)
            if fault.goes_on_at(at_ps) and (fault.first is None or num_met < fault.first)
        ]

    def _timed(self) -> list[tuple[FaultRules, int]]:
        """Return the rules, each set with the present time since its origin."""
        now = time.monotonic()
        return [
            (rules, round((now - since) / self._time_scale * PS_PER_SECOND))
            for rules, since in ((self._lasting, self._begun), *self._operators)
        ]

    @property
    def operators(self) -> list[Fault]:
        """Faults set by operators."""
        return [fault for rules, _ in self._operators for fault in rules.faults]

    def take(self, faults: Iterable[Fault], *, add: bool) -> None:
        """Set an operator's rules; without `add` they replace those of previous calls.

        Their times and counts start now.
        """
        if not add:
            self._operators.clear()
        place = len(self._lasting.faults) + len(self.operators)
        self._operators.append((FaultRules(faults, place=place), time.monotonic()))

    def choose(self, request: Request, asked: Sequence[str]) -> RequestFaults:
        """Return the faults of a request.

        Args:
            request: the request; each call counts one.
            asked: faults that the request itself asks for.

        Raises:
            InvalidRequest: requests may not ask for faults here, or a rule is no fault of requests.
        """
        if asked and not self._allowed:
            raise InvalidRequest(
                f"the metadata {METADATA_KEY} asks for a fault; this router takes none: set router.request_faults",
                field=METADATA_KEY,
            )
        chosen = read_rules(asked, METADATA_KEY, REQUEST_KINDS)
        for rules, at_ps in self._timed():
            if any(fault.kind == REFUSE for fault in chosen):
                break  # a refused request gets no other fault, and no other rule counts it
            if rules.faults:
                chosen += rules.choose(request.tenant_id, request.adapter_id, at_ps)
        return together(chosen)

    async def before(self, faults: RequestFaults) -> None:
        """Apply the faults that precede the submission to a scheduler.

        Raises:
            InjectedFault: the request is refused.
        """
        for fault in faults.faults:
            self._metrics.faults.labels(fault.kind).inc()
        if faults.delay_ps:
            await self._sleep(faults.delay_ps)
        if faults.refusal is not None:
            raise InjectedFault(faults.refusal.text, faults.refusal.status)

    async def stall(self, stalls: list[Fault], output: Output) -> None:
        """Pause if the output has reached the tokens of a stall; removes that stall from the list."""
        while stalls and output.num_tokens >= stalls[0].after:
            await self._sleep(stalls.pop(0).duration_ps)

    async def _sleep(self, duration_ps: int) -> None:
        await asyncio.sleep(duration_ps / PS_PER_SECOND * self._time_scale)


async def set_faults(placement: Placement, injector: Injector, texts: Sequence[str], *, add: bool) -> None:
    """Set fault rules, replacing or adding to those of previous calls.

    Raises:
        InvalidRequest: a rule is invalid, or there are too many.
        Unavailable: there are rules for schedulers, and none is connected.
        grpc.aio.AioRpcError: a scheduler did not accept them.
    """
    faults = read_rules(texts, "rules")
    own = [fault for fault in faults if fault.kind in REQUEST_KINDS]
    if add:
        own = further(own, injector.operators)
        check_number(len(injector.operators), len(own))
    request = scheduler_pb2.SetClusterFaultsRequest(
        rules=[fault.text for fault in faults if fault.kind not in REQUEST_KINDS], add=add
    )
    shards = connected(placement) if request.rules else [shard for shard in placement.shards if shard.connected]
    with failing_when_closed():
        await asyncio.gather(
            *(
                shard.stub.SetClusterFaults(request, timeout=CALL_SECONDS, metadata=shard.credentials)
                for shard in shards
            )
        )
    injector.take(own, add=add)


async def list_faults(placement: Placement, injector: Injector) -> router_pb2.ListFaultsResponse:
    """Return the rules in force and how often each has applied, summed over the schedulers.

    Raises:
        grpc.aio.AioRpcError: a scheduler did not answer.
    """
    request = scheduler_pb2.ListClusterFaultsRequest()
    with failing_when_closed():
        answers = await asyncio.gather(
            *(
                shard.stub.ListClusterFaults(request, timeout=CALL_SECONDS, metadata=shard.credentials)
                for shard in placement.shards
                if shard.connected
            )
        )
    own = [router_pb2.FaultRule(rule=fault.text, num_requests=num_met) for fault, num_met in injector.rules]
    others: dict[str, router_pb2.FaultRule] = {}
    for answer in answers:
        for fault in answer.faults:
            rule = others.setdefault(fault.rule, router_pb2.FaultRule(rule=fault.rule, waits_for_worker=True))
            rule.num_requests += fault.num_met
            rule.waits_for_worker = rule.waits_for_worker and fault.waits_for_worker
    return router_pb2.ListFaultsResponse(faults=[*own, *others.values()])
