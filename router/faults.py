"""Faults that requests meet at a router: chosen by rules of the settings, of an operator, and of the request itself.

Rules count the requests that reach this router; another one counts its own.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence

from lorrery.chassis.errors import InjectedFault, InvalidRequest
from lorrery.chassis.fault_calls import read_rules
from lorrery.chassis.fault_rules import FaultRules, RequestFaults, together
from lorrery.chassis.faults import REFUSE, REQUEST_KINDS, Fault
from lorrery.router.metrics import RouterMetrics
from lorrery.router.output import Output
from lorrery.router.request import Request
from lorrery.settings import Settings
from lorrery.vocabulary.units import PS_PER_SECOND

METADATA_KEY = "lorrery-fault"
"""In a request's metadata: a fault for this request only; may be there several times."""


class Injector:
    """Chooses what goes wrong with each request.

    Args:
        settings: of the cluster.
        metrics: counts the faults that have happened, by kind.
    """

    def __init__(self, settings: Settings, metrics: RouterMetrics) -> None:
        self._time_scale = settings.time_scale
        self._allowed = settings.router.request_faults
        self._metrics = metrics
        self._lasting = FaultRules(settings.planned_faults())
        self._operators: list[tuple[FaultRules, float]] = []  # of each call, and when it came
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Let the times of the settings' faults count from now."""
        self._begun = time.monotonic()

    @property
    def rules(self) -> list[tuple[Fault, int]]:
        """Every rule, the settings' first, and how many requests it has happened to."""
        every = [self._lasting, *(rules for rules, _ in self._operators)]
        return [pair for rules in every for pair in zip(rules.faults, rules.num_met, strict=True)]

    @property
    def operators(self) -> list[Fault]:
        """An operator's rules."""
        return [fault for rules, _ in self._operators for fault in rules.faults]

    def take(self, faults: Iterable[Fault], *, add: bool) -> None:
        """Take an operator's rules, in place of those of the calls before unless they `add`.

        Their times and counts begin now.
        """
        if not add:
            self._operators.clear()
        place = len(self._lasting.faults) + len(self.operators)
        self._operators.append((FaultRules(faults, place=place), time.monotonic()))

    def choose(self, request: Request, asked: Sequence[str]) -> RequestFaults:
        """Return what goes wrong with a request.

        Args:
            request: the next one.
            asked: faults that it asks for itself.

        Raises:
            InvalidRequest: it may not ask, or for what is no fault of requests.
        """
        if asked and not self._allowed:
            raise InvalidRequest(
                f"the metadata {METADATA_KEY} asks for a fault; this router takes none: set router.request_faults",
                field=METADATA_KEY,
            )
        chosen = read_rules(asked, METADATA_KEY, REQUEST_KINDS)
        now = time.monotonic()
        for rules, since in ((self._lasting, self._begun), *self._operators):
            if any(fault.kind == REFUSE for fault in chosen):
                break  # no other fault happens to it, and none counts it
            if rules.faults:
                at_ps = round((now - since) / self._time_scale * PS_PER_SECOND)
                chosen += rules.choose(request.tenant_id, request.adapter_id, at_ps)
        return together(chosen)

    async def before(self, faults: RequestFaults) -> None:
        """Let happen what happens before a request goes to a scheduler.

        Raises:
            InjectedFault: it is refused.
        """
        for fault in faults.faults:
            self._metrics.faults.labels(fault.kind).inc()
        if faults.delay_ps:
            await self._sleep(faults.delay_ps)
        if faults.refusal is not None:
            raise InjectedFault(faults.refusal.text, faults.refusal.status)

    async def stall(self, stalls: list[Fault], output: Output) -> None:
        """Stand still where a stream has come to a stall's tokens; take that one from the list."""
        while stalls and output.num_tokens >= stalls[0].after:
            await self._sleep(stalls.pop(0).duration_ps)

    async def _sleep(self, duration_ps: int) -> None:
        await asyncio.sleep(duration_ps / PS_PER_SECOND * self._time_scale)
