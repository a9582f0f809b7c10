"""One attached worker: its replica, the sequences it has, and what a policy's error does to them.

A driver plans, runs and commits here. An error of the queue or the way to batch ends sequences, never the driver: the
sequence that the policy was given, if that is known, otherwise all in the queue; if it raises again with none of them,
all of the worker.
"""

from collections.abc import Iterable
from functools import partial
from typing import Final

from lorrery.scheduler.core.acceptance import Backlog
from lorrery.scheduler.core.admission import CHECK_IT
from lorrery.scheduler.core.checked.base import SequenceError, error_text, original
from lorrery.scheduler.core.facts import (
    Admitted,
    Cancelled,
    Dropped,
    Event,
    Failed,
    Finished,
    Preempted,
    Raised,
    Recalled,
)
from lorrery.scheduler.core.placements.candidate import ReplicaCandidate
from lorrery.scheduler.core.placements.forecast import Forecast, OutputShare
from lorrery.scheduler.core.placements.worker_table import WorkerTable
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.refusals import DropReason
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.steptime import Pace

_ENDS = (Finished, Cancelled, Dropped, Failed)

LOST: Final = f"the queue has lost requests: they neither run nor wait, or its len() leaves them out; {CHECK_IT}"
HAS_ENDED: Final = f"the queue still has requests that have ended; {CHECK_IT}"
DROPPED_UNKNOWN: Final = f"`admit` dropped a request that it does not have; {CHECK_IT}"


class Tally:
    """Number of sequences that the workers of a cluster have, in total.

    The number of waiting ones is counted on demand, at workers where it may have changed since the last count.

    Attributes:
        num: sequences, waiting and running.
    """

    __slots__ = ("_num_waiting", "_touched", "num")

    def __init__(self) -> None:
        self.num = 0
        self._num_waiting = 0
        self._touched: list[Member] = []

    def touch(self, member: "Member") -> None:
        """Note that the number of waiting sequences at a worker may have changed; once until the next count."""
        self._touched.append(member)

    def part(self, member: "Member") -> None:
        """Remove a worker, which gets a tally of its own."""
        self.num -= len(member.sequences)
        self._num_waiting -= member.counted_waiting
        if member.is_touched:
            self._touched.remove(member)
        member.counted_waiting, member.is_touched, member.tally = 0, False, Tally()

    def num_waiting(self) -> int:
        """Return the number of waiting sequences. Cost: O(touched workers)."""
        for member in self._touched:
            num_waiting = member.replica.num_waiting
            self._num_waiting += num_waiting - member.counted_waiting
            member.counted_waiting, member.is_touched = num_waiting, False
        self._touched.clear()
        return self._num_waiting


class Member:
    """An attached worker.

    Args:
        name: its id.
        replica: its batch and queue.
        pool_tokens: size of its KV pool, which bounds the length of a request; default: no bound.
        pace: step times that it announced; None: it announced none.

    Attributes:
        forecast: learns from its step times; None: none is kept.
        backlog: gets the events of its decisions; None: none is kept.
        candidate: its figures, for placements.
        sequences: submitted and not ended, by handle.
        moving: destination worker by handle, for sequences that are to move.
        tally: counts the sequences of all workers that share it.
        counted_waiting: number of waiting sequences at the tally's last count.
        is_touched: whether the tally has to count this worker again.
        blocked: set of workers to be in while a waiting sequence, if any, could not start when tried; None: in none.
        row: in the table that it reports to.
        withdrawn: handles of cancelled sequences, until they end.
        changed: whether a decision changed the waiting or running sequences; reset by the driver.
        draining: whether it takes nothing new.
    """

    __slots__ = (
        "_is_chunking",
        "_is_new",
        "_table",
        "_version",
        "backlog",
        "blocked",
        "candidate",
        "changed",
        "counted_waiting",
        "draining",
        "forecast",
        "is_touched",
        "moving",
        "name",
        "pace",
        "pool_tokens",
        "replica",
        "row",
        "sequences",
        "tally",
        "withdrawn",
    )

    def __init__(self, name: str, replica: Replica, pool_tokens: int = NEVER, pace: Pace | None = None) -> None:
        self.name = name
        self.pace = pace
        self.replica = replica
        self.pool_tokens = pool_tokens
        self.candidate = ReplicaCandidate(name, replica)
        self.sequences: dict[int, Sequence] = {}
        self.tally = Tally()
        self.counted_waiting = 0
        self.is_touched = False
        self.moving: dict[int, str] = {}
        self.withdrawn: set[int] = set()
        self.forecast: Forecast | None = None
        self.backlog: Backlog | None = None
        self.draining = False
        self.changed = False
        self._is_new = False  # something has come that affects the next decision
        self._version = replica.running.version
        self.blocked: set[Member] | None = None
        self._table: WorkerTable | None = None
        self.row = -1
        self._is_chunking = False

    def enter_table(self, table: WorkerTable | None, row: int) -> None:
        """Report changes to a row of a table from now on; None: to nothing."""
        cache = self.candidate.block_cache
        if cache is not None:
            cache.tell(None, -1)  # until prefixes are looked up
        self._table, self.row = table, row
        if table is not None:
            table.note_chunking(row, self._is_chunking)
        self.candidate.table = table
        self.replica.adapters.tell(None if table is None else partial(table.note_adapter, row))

    def note_counts(self) -> None:
        """Report the waiting and running counts; called after whatever may have changed them."""
        table, blocked = self._table, self.blocked
        if not self.is_touched:
            self.is_touched = True
            self.tally.touch(self)
        if table is not None:
            table.touch(self.row)
        if blocked is not None:
            if self.replica.is_blocked:
                blocked.add(self)
            else:
                blocked.discard(self)

    def predict(self, outputs: OutputShare) -> None:
        """Keep a forecast from now on; the worker is still empty."""
        self.candidate.forecast = self.forecast = Forecast(self.pace, outputs)

    def submit(self, sequence: Sequence, at_ps: int) -> bool:
        """Hand in a sequence; return whether it may change the plan that runs."""
        replica = self.replica
        self.sequences[sequence.handle] = sequence
        sequence.worker = self.name
        self.tally.num += 1
        if self.forecast is not None:
            self.forecast.waits(sequence.handle, sequence.input_tokens)
        try:
            matters = replica.arrival_matters(sequence.adapter, again=sequence.arrived_ps < at_ps)
        except Exception:
            matters = True  # so the policy is called soon, in a decision
        replica.submit(sequence, at_ps)
        self.note_counts()
        self._is_new = self._is_new or matters
        return matters

    def cancel(self, handle: int, at_ps: int) -> None:
        """Withdraw a sequence that it has."""
        self.withdrawn.add(handle)
        self.replica.cancel(handle, at_ps)

    def recall(self, handle: int, to: str, at_ps: int) -> None:
        """Give up a waiting sequence for worker `to`."""
        self.moving[handle] = to
        self._is_new = True
        self.replica.recall(handle, to, at_ps)

    def retire(self, adapter_key: str, at_ps: int) -> bool:
        """Release an adapter that no new request will name; return whether that is new and the adapter may be here.

        Nothing happens if the worker keeps such adapters until their place is needed.

        If it comes later, with a request that had it before, it has to be retired then.
        """
        adapters = self.replica.adapters
        may_be_here = bool(self.sequences) or adapters.holds(adapter_key)
        if adapters.options.keep_unloaded or adapters.is_retired(adapter_key) or not may_be_here:
            return False
        self.replica.retire(adapter_key, at_ps)
        return True

    def load(self, adapter: Adapter, at_ps: int) -> bool:
        """Load an adapter on an operator's request; return whether this worker loads adapters and takes requests."""
        if self.draining or self.replica.options.no_lora:
            return False
        self.replica.load(adapter, at_ps)
        return True

    def plan(self, at_ps: int) -> Plan | Idle:
        """Decide what runs from this boundary on."""
        try:
            decision = self.replica.plan(at_ps)
        except Exception as error:
            decision = self._plan_despite(error, at_ps)
        if decision.events:
            self._forget_ended(decision)
        if isinstance(decision, Plan):
            self._is_chunking = decision.chunk_steps > 1
        else:
            self._is_chunking = False
            if self.sequences:
                self._look_for_lost(decision)
            if not self.sequences and self.replica.has_raised:  # it would raise again, and there is nothing to end
                decision.until_ps = self.replica.next_event_ps
        if self.backlog is not None:
            self.backlog.note(decision.events)
        forecast = self.forecast
        if forecast is not None:
            for event in decision.events:
                if isinstance(event, Admitted):
                    forecast.stops_waiting(event.sequence.handle)
                elif isinstance(event, Preempted):
                    forecast.waits(event.sequence.handle, event.sequence.input_tokens)
        if self._table is not None:
            self._table.note_chunking(self.row, self._is_chunking)
        version = self.replica.running.version
        if forecast is not None and version != self._version:
            forecast.batch_changed()
        if version != self._version or self._is_new:
            self.changed = True
            self._version, self._is_new = version, False
        self.note_counts()
        return decision

    def _forget_ended(self, decision: Plan | Idle) -> None:
        """Forget sequences that a decision has ended; events of sequences the worker does not have are an error."""
        strangers: list[Event] = []
        for event in decision.events:
            if isinstance(event, (Cancelled, Finished, Dropped, Failed)):
                if event.sequence.handle in self.sequences:
                    self._forget(event.sequence.handle)
                else:
                    strangers.append(event)
        if strangers:
            told = [event for event in decision.events if event not in strangers]
            decision.events = [*told, *self._end((), ValueError(_why_unknown(strangers)))]

    def _look_for_lost(self, decision: Idle) -> None:
        """End sequences that the queue has lost: nothing waits, nothing runs, and they have not ended."""
        replica = self.replica
        if replica.running.num or replica.num_waiting:
            return
        recalled = {event.sequence.handle for event in decision.events if isinstance(event, Recalled)}
        lost = [sequence for handle, sequence in self.sequences.items() if handle not in recalled]
        if not lost:
            return
        replica.clear_waiting(())  # a wrong len() may hide sequences that would run later
        for sequence in lost:
            self._forget(sequence.handle)
        decision.events = [*decision.events, *self._end(lost, ValueError(LOST))]

    def _forget(self, handle: int) -> None:
        del self.sequences[handle]
        self.tally.num -= 1
        if self.forecast is not None:
            self.forecast.stops_waiting(handle)
            if self._table is not None:
                self._table.touch(self.row)
        if self.withdrawn:
            self.withdrawn.discard(handle)
        if self.moving:
            self.moving.pop(handle, None)

    def let_go(self, recalled: Recalled) -> bool:
        """Remove a recalled sequence; return whether it has been cancelled meanwhile."""
        handle = recalled.sequence.handle
        was_withdrawn = handle in self.withdrawn
        self._forget(handle)
        return was_withdrawn

    def commit(self, plan: Plan, ran: Ran, *, goes_on: bool = False) -> list[Event]:
        """Advance by the steps that ran; `goes_on` as in `Replica.commit`."""
        if self.forecast is not None:
            self.forecast.ran(self.replica.running, plan, ran)
        events = self.replica.commit(plan, ran, goes_on=goes_on)
        for event in events:
            if isinstance(event, Finished):
                self._forget(event.sequence.handle)
                if self.forecast is not None:
                    self.forecast.outputs.ended(event.output_tokens, event.sequence.max_new_tokens)
        if events or ran.finished:  # otherwise only token counts have changed
            self.note_counts()
        return events

    def lose(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Return the unfinished sequences, in order of arrival; the member is not used afterwards.

        Unless the worker was draining, the loss counts against the sequences in its batch.
        """
        if not self.draining:
            for sequence in self.sequences.values():
                if self.replica.running.get(sequence.handle) is not None:
                    sequence.num_losses += 1
        try:
            unfinished, events = self.replica.lose(at_ps)
        except Exception as error:
            unfinished, events = [], self._end(self.sequences.values(), error)
        self.tally.part(self)
        self.sequences.clear()
        return unfinished, events

    def withdraw_waiting(self, at_ps: int) -> tuple[list[Sequence], list[Event]]:
        """Return the waiting sequences, in order of arrival, and keep the running ones."""
        try:
            waiting, events = self.replica.withdraw_waiting(at_ps)
        except Exception as error:
            waiting, events = [], self._end(self.replica.clear_waiting(self.sequences.values()), error)
        for sequence in waiting:
            self._forget(sequence.handle)
        for event in events:
            if isinstance(event, _ENDS):
                self._forget(event.sequence.handle)
        self.note_counts()
        return waiting, events

    # --- policies that raise ----------------------------------------------------------------------------------------

    def _plan_despite(self, error: Exception, at_ps: int) -> Plan | Idle:
        replica, failed = self.replica, set[int]()
        raised_alone = False
        while True:
            if isinstance(error, SequenceError):
                cause: Exception = error.error
                failing = [error.sequence]
            else:
                cause = error
                left = [sequence for handle, sequence in self.sequences.items() if handle not in failed]
                failing = replica.clear_waiting(left)
                if not failing and raised_alone:
                    failing = [sequence for sequence in left if replica.running.get(sequence.handle) is not None]
                    if not failing:
                        return replica.idle()
                raised_alone = not failing
            replica.give_up(failing, self._describe(cause), cause)
            failed.update(sequence.handle for sequence in failing)
            try:
                return replica.plan(at_ps)
            except Exception as again:
                error = again

    def _end(self, sequences: Iterable[Sequence], error: Exception) -> list[Event]:
        message = self._describe(error)
        return [Raised(message, error), *(Failed(one, message, self._produced(one)) for one in sequences)]

    def _produced(self, sequence: Sequence) -> int:
        replica = self.replica
        runs = replica.running.get(sequence.handle) is not None
        return sequence.produced_tokens + (replica.output_tokens(sequence) if runs else 0)

    def _describe(self, error: Exception) -> str:
        queue, batching = class_name(self.replica.queue), class_name(self.replica.batching)
        return f"policy {queue} under {batching} raised {error_text(error)}"


def _why_unknown(events: list[Event]) -> str:
    """Return the error of a queue whose events concern requests that its worker does not have."""
    if all(isinstance(event, Dropped) and event.reason is DropReason.SERVICE_LEVEL for event in events):
        return DROPPED_UNKNOWN
    return HAS_ENDED


def class_name(policy: object) -> str:
    """Return the name by which settings name the class of a policy."""
    its = type(original(policy))
    return f"{its.__module__}:{its.__qualname__}"
