"""Injected faults that a scheduler applies: to its workers' adapter loads, and to attaching workers.

A worker slows down or freezes by itself; an operator's faults of that kind are passed on to it. A worker that was lost
while frozen does not come back before it thaws, as one whose GPU hangs does not. A worker to be lost by the settings is
killed by whatever runs it; one that an operator loses has its stream ended here, and is kept away for as long.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from lorrery.scheduler import wire_workers
from lorrery.scheduler.facts import FaultsSet
from lorrery.scheduler.liveness import Loss
from lorrery.scheduler.messages import ProtocolError
from lorrery.service.clocks import DeviceClock
from lorrery.service.errors import InjectedFault
from lorrery.service.faults.kinds import (
    FREEZE_WORKER,
    LOAD_KINDS,
    SLOW_WORKER,
    WORKER_KINDS,
    WORKER_LOSS,
    Fault,
    check_number,
    further,
    parse_fault,
    read_rules,
)
from lorrery.service.faults.rules import LoadRules, RuleBook, RuleSet
from lorrery.service.names import quoted
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.log import get_logger
from lorrery.service.telemetry.series import Labelled, Number
from lorrery.vocabulary.units import PS_PER_SECOND

MAX_UNTAKEN = 64
"""Most operator calls with faults of one worker that may be unacknowledged."""

log = get_logger("scheduler.faults")


class ClusterFaults:
    """The faults of one scheduler.

    Args:
        settings: of the cluster.
        clock: of the scheduler.
        happened: counts faults, by kind.
        attached: names of the attached workers; a live view.
        lose: ends the stream of a worker, by name, if it is attached; called with the fault.
    """

    def __init__(
        self,
        settings: Settings,
        clock: DeviceClock,
        happened: Labelled[Number],
        attached: Collection[str],
        lose: Callable[[str, Fault], None],
    ) -> None:
        self.book = RuleBook()
        self._settings = settings
        self._clock = clock
        self._happened = happened
        self._attached = attached
        self._lose = lose
        self._num_met: Counter[Fault] = Counter()
        self._followed: set[tuple[Fault, str]] = set()  # an operator's, with the worker that follows them
        self._timers: list[asyncio.TimerHandle] = []
        self._frozen_out: set[str] = set()  # workers lost while a fault froze them

    @property
    def from_ps(self) -> int:
        """Time from which the times of the settings' faults count."""
        return 0 if self.book.planned is None else self.book.planned.from_ps

    @property
    def rules(self) -> list[tuple[Fault, int]]:
        """Active faults of workers and loads, the settings' first, each with the number of times it has happened."""
        faults = [fault for one in self._sets for fault in one.faults if fault.kind in WORKER_KINDS | LOAD_KINDS]
        return [(fault, self._num_met[fault]) for fault in faults]

    @property
    def _sets(self) -> list[RuleSet]:
        return [*([] if self.book.planned is None else [self.book.planned]), *self.book.current]

    def active(self, at_ps: int) -> list[tuple[Fault, int]]:
        """Return those of `rules` that are on at a time."""
        timed = {fault: at_ps - one.from_ps for one in self._sets for fault in one.faults}
        return [(fault, num_met) for fault, num_met in self.rules if fault.goes_on_at(timed[fault])]

    def waits_for_worker(self, fault: Fault) -> bool:
        """Return whether a fault of a worker has never happened, and no worker of that name is attached."""
        return not self._num_met[fault] and bool(fault.worker) and not any(map(fault.concerns, self._attached))

    def begin(self, at_ps: int) -> None:
        """Let the times of the settings' faults count from `at_ps`, unless they already do."""
        self.book.plan(self._settings.planned_faults(), at_ps)

    def take(self, texts: Sequence[str], from_ps: int, *, add: bool) -> list[Fault]:
        """Add an operator's rules; their times and counts begin now. Return those that are new.

        Args:
            texts: of faults.
            from_ps: later than all decisions so far.
            add: whether those of earlier calls stay active.

        Raises:
            InvalidRequest: a rule is invalid, or not for workers and loads; or they conflict with active ones.
        """
        asked = read_rules(texts, "rules", WORKER_KINDS | LOAD_KINDS)
        held = [fault for one in self.book.current for fault in one.timed] if add else []
        faults = further(asked, held, from_ps)
        check_number(len(held), len(faults))
        if not add:
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
            planned = () if self.book.planned is None else self.book.planned.faults
            self._num_met = Counter({fault: self._num_met[fault] for fault in planned})
            self._followed.clear()
        self.book.take(faults, from_ps, add=add)
        log.warning("faults_added" if add else "faults_set", num_rules=len(faults), first=_first(faults))
        waiting = [fault for fault in faults if self.waits_for_worker(fault)]
        if waiting:
            log.warning("faults_wait_for_workers", num_rules=len(waiting), first=_first(waiting))
        loop = asyncio.get_running_loop()
        self._timers += [
            loop.call_later(fault.at_ps / PS_PER_SECOND * self._clock.time_scale, self._lose_now, fault)
            for fault in faults
            if fault.kind == WORKER_LOSS
        ]
        return faults

    def _lose_now(self, fault: Fault) -> None:
        for worker_id in filter(fault.concerns, list(self._attached)):
            self._lose(worker_id, fault)

    def load_rules(self, worker_id: str) -> LoadRules:
        """Return the load faults of a worker that attaches."""
        return LoadRules(self.book, worker_id, self.met)

    def of_worker(self, worker_id: str) -> list[tuple[list[str], int]]:
        """Return an operator's rules that a worker follows by itself, by call, each with the start of its times."""
        sets = [(told_to(worker_id, one.faults), one.from_ps) for one in self.book.current]
        return [(rules, from_ps) for rules, from_ps in sets if rules]

    def taken(self, fault: Fault, worker_id: str) -> None:
        """Count a fault that a worker follows from now on; once per worker, however often it attaches."""
        if (fault, worker_id) not in self._followed:
            self._followed.add((fault, worker_id))
            self.met(fault)

    def met(self, fault: Fault) -> None:
        """Count a fault that has happened."""
        self._num_met[fault] += 1
        self._happened.labels(fault.kind).inc()

    def given_up(self, worker_id: str, loss: Loss, at_ps: int) -> None:
        """Handle a worker whose stream is about to end."""
        fault = self.book.going_on(FREEZE_WORKER, worker_id, at_ps)
        if loss is Loss.STALLED and fault is not None:
            self._frozen_out.add(worker_id)
            self.met(fault)

    def check_attach(self, worker_id: str, at_ps: int) -> None:
        """Check whether a worker may attach.

        Raises:
            InjectedFault: a fault keeps it away.
        """
        fault = self.book.going_on(FREEZE_WORKER, worker_id, at_ps) if worker_id in self._frozen_out else None
        fault = fault or self.book.going_on(WORKER_LOSS, worker_id, at_ps, by_operator=True)
        if fault is not None:
            raise InjectedFault(fault.text, "UNAVAILABLE")
        self._frozen_out.discard(worker_id)


class ToldFaults:
    """The faults that one worker follows by itself: those it was sent, and those it has acknowledged.

    A worker reports from when the faults it was sent hold, in the order in which they were sent.

    Args:
        worker_id: of the worker.
        clock: device clock.
        faults: of the cluster; counts each fault that the worker follows.
    """

    def __init__(self, worker_id: str, clock: DeviceClock, faults: ClusterFaults) -> None:
        self._worker_id = worker_id
        self._clock, self._faults = clock, faults
        self._told = False
        self._untaken: deque[tuple[list[str], bool]] = deque()

    def tell(self, rules: list[str], *, add: bool, from_ps: int | None) -> wire_workers.ToWorker | None:
        """Return the message for the worker; None: there is nothing to send.

        Args:
            rules: a text each.
            add: whether those that it was sent before stay active.
            from_ps: start of their times; None: when the worker takes them.

        Raises:
            ProtocolError: it has left too many unacknowledged.
        """
        if len(self._untaken) == MAX_UNTAKEN:
            raise ProtocolError(f"the worker has not confirmed the faults of {MAX_UNTAKEN} calls")
        if not rules and (add or not self._told):
            return None
        self._told = True
        self._untaken.append((rules, add))
        return wire_workers.worker_faults(rules, add=add, from_ps=from_ps, sent_ps=self._clock.now_ps())

    def taken(self, from_ps: int, earliest_ps: int, latest_ps: int) -> FaultsSet:
        """Count the faults that the worker was sent, and return from when they hold.

        Args:
            from_ps: as the worker reports.
            earliest_ps: the end of its last step.
            latest_ps: upper bound on a valid time.

        Raises:
            ProtocolError: it was sent none, or the time is not in these bounds.
        """
        if not self._untaken:
            raise ProtocolError("the worker confirms faults that it was not sent")
        if not earliest_ps <= from_ps <= latest_ps:
            raise ProtocolError(
                f"the worker confirms faults from {from_ps} ps; its last step ended at {earliest_ps} ps"
            )
        rules, add = self._untaken.popleft()
        for rule in rules:
            self._faults.taken(parse_fault(rule), self._worker_id)
        return FaultsSet(rules, from_ps, add)


def told_to(worker_id: str, faults: Iterable[Fault]) -> list[str]:
    """Return the rules among `faults` that a worker follows by itself."""
    followed = (SLOW_WORKER, FREEZE_WORKER)
    return [fault.text for fault in faults if fault.kind in followed and fault.concerns(worker_id)]


def _first(faults: Sequence[Fault]) -> str:
    return quoted(faults[0].text) if faults else ""
