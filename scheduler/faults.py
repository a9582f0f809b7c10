"""Faults on request that a scheduler lets happen: to the loads of its workers, and to whoever may attach.

What makes a worker slow, or freezes it, is its own doing; those that an operator asks for are passed on to it. A worker
that was lost frozen does not come back before it thaws, as one whose GPU hangs does not. A worker that settings lose is
killed by whoever runs it; one that an operator loses has its stream ended here, and is kept away for as long.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import prometheus_client

from lorrery.chassis.clock import DeviceClock
from lorrery.chassis.errors import InjectedFault, InvalidRequest
from lorrery.chassis.fault_calls import read_rules
from lorrery.chassis.fault_rules import LoadRules, RuleBook
from lorrery.chassis.faults import (
    FREEZE_WORKER,
    LOAD_FAILURE,
    LOAD_KINDS,
    SLOW_WORKER,
    WORKER_KINDS,
    WORKER_LOSS,
    Fault,
)
from lorrery.chassis.log import get_logger
from lorrery.chassis.names import quoted
from lorrery.scheduler.watch import Loss
from lorrery.settings import Settings
from lorrery.vocabulary.units import PS_PER_SECOND

log = get_logger("scheduler.faults")


class ClusterFaults:
    """The faults of one scheduler.

    Args:
        settings: of the cluster.
        clock: of the scheduler.
        happened: counts them, by kind.
        lose: ends the stream of a worker, by name, if it is attached; the fault says why.
    """

    def __init__(
        self,
        settings: Settings,
        clock: DeviceClock,
        happened: prometheus_client.Counter,
        lose: Callable[[str, Fault], None],
    ) -> None:
        self.book = RuleBook()
        self._settings = settings
        self._clock = clock
        self._happened = happened
        self._lose = lose
        self._num_met: Counter[Fault] = Counter()
        self._timers: list[asyncio.TimerHandle] = []
        self._frozen_out: set[str] = set()  # workers, of rules only

    @property
    def from_ps(self) -> int:
        """Since when the times of the settings' faults count."""
        return 0 if self.book.planned is None else self.book.planned.from_ps

    @property
    def rules(self) -> list[tuple[Fault, int]]:
        """Those of workers and loads that hold, the settings' first, and how often each has happened."""
        sets = [one for one in (self.book.planned, self.book.latest) if one is not None]
        faults = [fault for one in sets for fault in one.faults if fault.kind in WORKER_KINDS | LOAD_KINDS]
        return [(fault, self._num_met[fault]) for fault in faults]

    def begin(self, at_ps: int) -> None:
        """Let the times of the settings' faults count from now, unless they do already."""
        self.book.plan(self._settings.planned_faults(), at_ps)

    def replace(self, texts: Sequence[str], from_ps: int) -> None:
        """Take an operator's rules in place of those of the last call; their times and counts begin now.

        Args:
            texts: of faults.
            from_ps: after everything that was decided before.

        Raises:
            InvalidRequest: one is none, or none of workers and loads.
        """
        faults = read_rules(texts, "rules", WORKER_KINDS | LOAD_KINDS)
        blocking = self._settings.scheduler.strict or self._settings.adapters.loading == "blocking"
        if blocking and any(fault.kind == LOAD_FAILURE and fault.never_ends for fault in faults):
            message = "rules: adapter_load_failure without for: a prefill that waits for the load never runs"
            raise InvalidRequest(message, field="rules")
        log.warning("faults_set", num_rules=len(faults), first=quoted(faults[0].text) if faults else "")
        for timer in self._timers:
            timer.cancel()
        planned = () if self.book.planned is None else self.book.planned.faults
        self._num_met = Counter({fault: self._num_met[fault] for fault in planned})
        self.book.replace(faults, from_ps)
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(fault.at_ps / PS_PER_SECOND * self._clock.time_scale, self._lose_now, fault)
            for fault in faults
            if fault.kind == WORKER_LOSS
        ]

    def _lose_now(self, fault: Fault) -> None:
        self._lose(fault.worker, fault)

    def load_rules(self, worker_id: str) -> LoadRules:
        """Return what goes wrong with the loads of a worker that attaches."""
        return LoadRules(self.book, worker_id, self.met)

    def of_worker(self, worker_id: str) -> list[str] | None:
        """Return an operator's rules that a worker follows by itself; None: no operator has set any."""
        if (latest := self.book.latest) is None:
            return None
        own = (SLOW_WORKER, FREEZE_WORKER)
        return [fault.text for fault in latest.faults if fault.worker == worker_id and fault.kind in own]

    def met(self, fault: Fault) -> None:
        """Count a fault that has happened."""
        self._num_met[fault] += 1
        self._happened.labels(fault.kind).inc()

    def given_up(self, worker_id: str, loss: Loss, at_ps: int) -> None:
        """Take note of a worker whose stream is to end."""
        fault = self.book.going_on(FREEZE_WORKER, worker_id, at_ps)
        if loss is Loss.STALLED and fault is not None:
            self._frozen_out.add(worker_id)
            self.met(fault)

    def check_attach(self, worker_id: str, at_ps: int) -> None:
        """Let a worker attach, or not.

        Raises:
            InjectedFault: a fault keeps it away.
        """
        fault = self.book.going_on(FREEZE_WORKER, worker_id, at_ps) if worker_id in self._frozen_out else None
        fault = fault or self.book.going_on(WORKER_LOSS, worker_id, at_ps, by_operator=True)
        if fault is not None:
            raise InjectedFault(fault.text, "UNAVAILABLE")
        self._frozen_out.discard(worker_id)
