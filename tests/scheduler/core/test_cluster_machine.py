"""A scheduler under any order of events: every request is in one place, ends once, and waits no longer than it may.

The state machine keeps a book of its own.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import ClusterEvent, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import Cancelled, Dropped, Event, Failed, Finished, Recalled
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.refusals import Refusal, RefusalReason
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.drive import Device
from tests.scheduler.core.clusters import ADAPTER, RULES, S, only, replica


class ClusterMachine(RuleBasedStateMachine):
    """Anything that can happen to a scheduler, in any order."""

    def __init__(self) -> None:
        super().__init__()
        rules = replace(RULES, max_worker_losses=2, max_waiting_requests_per_tenant=2, deadline_admission=True)
        self.core = ClusterCore(LeastLoaded(), rules, [ADAPTER])
        self.at_ps = 0
        self.num_workers = 0
        self.lengths: dict[int, int] = {}
        self.sequences: dict[int, Sequence] = {}
        self.devices: dict[str, Device] = {}
        self.expired_ps = -1  # deadlines up to then have passed
        self.waits: dict[int, int] = {}  # handle -> when its wait is over
        self.at: dict[int, str] = {}  # handle -> its worker
        self.losses: dict[int, int] = {}  # handle -> workers that were lost with it in their batch
        self.moves: dict[int, int] = {}  # handle -> times that a worker in whose batch it was has gone

    @rule(
        prompt=st.integers(1, 60),
        budget=st.integers(1, 20),
        name=st.sampled_from(["", "a", "who"]),
        tenant=st.sampled_from(["", "t"]),
        seconds=st.sampled_from([None, 1, 4]),
    )
    def submit(self, prompt: int, budget: int, name: str, tenant: str, seconds: int | None) -> None:
        handle = len(self.lengths)
        self.lengths[handle] = budget
        sequence = self.sequences[handle] = Sequence(handle, prompt, budget, self.at_ps, tenant_id=tenant)
        sequence.deadline_ps = None if seconds is None else self.at_ps + seconds * S
        num_waiting = sum(one.tenant_id == tenant for one in self.waiting())
        known = {*self.waits, *self.at}
        events = self.core.submit(sequence, self.at_ps, adapter_id=name)
        assert num_waiting < 2 or isinstance(only(events), Refused)
        self.take([event for event in events if not isinstance(event, Refused)], [sequence] * (not events))
        assert {*self.waits, *self.at} - known <= {handle}
        assert name != "who" or handle not in {*self.waits, *self.at}

    @precondition(lambda self: self.waits or self.at)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted({*self.waits, *self.at})))
        self.take(self.core.cancel(self.sequences[handle], self.at_ps), [])

    @precondition(lambda self: len(self.core.members) < 3)
    @rule(pool=st.sampled_from([60, 200]))
    def attach(self, pool: int) -> None:
        name = f"w{self.num_workers}"
        self.num_workers += 1
        self.devices[name] = Device(self.lengths)
        member = Member(name, replica(pool), pool)
        waited = [handle for handle in self.waits if member.replica.never_fits_reason(self.sequences[handle]) is None]
        events = self.core.attach(member, self.at_ps)
        assert [event.sequence.handle for event in events] == waited
        self.take(events, [])

    @precondition(lambda self: self.core.members)
    @rule(data=st.data(), drains=st.booleans())
    def go(self, data: st.DataObject, drains: bool) -> None:
        member = self.core.members[data.draw(st.sampled_from(sorted(self.core.members)))]
        had = {handle for handle, name in self.at.items() if name == member.name}
        ran = {handle for handle in had if member.replica.running.get(handle) is not None}
        for handle in ran if not drains and not member.draining else ():
            self.losses[handle] = self.losses.get(handle, 0) + 1
        gave_back, events = (self.core.drain if drains else self.core.lose)(member, self.at_ps)
        back = {sequence.handle for sequence in gave_back.sequences}
        assert len(back) == len(gave_back.sequences)
        for handle in ran if not drains else ():
            self.moves[handle] = self.moves.get(handle, 0) + 1
        self.note(gave_back.events)
        gone = {event.sequence.handle for event in gave_back.events if isinstance(event, Cancelled | Finished)}
        assert back | gone == ((had - ran) if drains else had)
        for handle in back:
            del self.at[handle]
        self.take(events, gave_back.sequences)

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds: int) -> None:
        self.at_ps += seconds * S
        self.expired_ps = self.at_ps
        while (until_ps := self.core.until_ps) is not None and until_ps <= self.at_ps:
            self.take(self.core.expire(self.at_ps), [])

    @precondition(lambda self: self.core.members)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.run(self.core.members[data.draw(st.sampled_from(sorted(self.core.members)))])

    def run(self, member: Member) -> None:
        device = self.devices[member.name]
        decision = member.plan(self.at_ps)
        self.note([event for event in decision.events if not isinstance(event, Recalled)])
        for event in decision.events:
            if isinstance(event, Recalled):
                assert self.at.pop(event.sequence.handle) == member.name
                self.take(self.core.take_recalled(event, member, self.at_ps), [event.sequence])
        device.forget(decision.leaves)
        if isinstance(decision, Plan):
            ran: Ran = device.run(decision, self.at_ps, 1, decision.until_ps, chunks=True)
            self.at_ps = ran.end_ps
            self.note(member.commit(decision, ran))

    @rule()
    def balance(self) -> None:
        self.at_ps += 1
        for move in self.core.balance(self.at_ps):
            handle = move.sequence.handle
            assert self.at[handle] == move.donor.name
            assert move.donor.replica.running.get(handle) is None
            assert not move.taker.draining
            assert move.taker.replica.never_fits_reason(move.sequence) is None

    def take(self, events: list[ClusterEvent], sequences: list[Sequence]) -> None:
        """Enter events in the book; of these sequences, those that none tells of wait from now on."""
        for event in events:
            handle = event.sequence.handle
            if isinstance(event, Withdrawn):
                assert self.at[handle] == event.member.name
                self.check_deadline(event.sequence, event.refusal)
                continue
            if not isinstance(event, Placed):
                self.core.ended(event.sequence, 0, self.at_ps)
            until_ps = self.waits.pop(handle, None)
            if isinstance(event, Placed):
                assert not event.member.draining
                assert self.losses.get(handle, 0) < 2
                assert self.at.setdefault(handle, event.member.name) == event.member.name
            elif isinstance(event, Refused) and event.refusal.reason is RefusalReason.SLO_UNATTAINABLE:
                self.check_deadline(event.sequence, event.refusal)
            elif isinstance(event, Refused) and event.refusal.reason is RefusalReason.NO_WORKER:
                assert until_ps is not None
                assert until_ps <= self.at_ps
            elif isinstance(event, Refused) and event.refusal.reason is RefusalReason.WORKERS_LOST:
                assert handle not in self.at
                assert self.losses[handle] == 2
            else:
                assert handle not in self.at
        told = {event.sequence.handle for event in events}
        for sequence in sequences:
            if sequence.handle not in told:
                ready = [member for member in self.core.members.values() if not member.draining]
                assert all(member.replica.never_fits_reason(sequence) is not None for member in ready)
                assert self.losses.get(sequence.handle, 0) < 2
                self.waits[sequence.handle] = self.at_ps + 10 * S

    def check_deadline(self, sequence: Sequence, refusal: Refusal | None) -> None:
        if refusal is not None:
            assert sequence.deadline_ps is not None
            assert sequence.deadline_ps <= self.at_ps
            assert sequence.first_admitted_ps is None

    def waiting(self) -> list[Sequence]:
        """Those in no batch."""
        running = {
            handle
            for member in self.core.members.values()
            for handle in member.sequences
            if member.replica.running.get(handle) is not None
        }
        return [self.sequences[handle] for handle in {*self.waits, *self.at} - running]

    def note(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed)
            if isinstance(event, Finished | Cancelled | Dropped):
                del self.at[event.sequence.handle]  # a second end would be a KeyError
                self.core.ended(event.sequence, 0, self.at_ps)
                assert event.sequence.num_requeues == self.moves.get(event.sequence.handle, 0)
            if isinstance(event, Finished):
                assert event.output_tokens == self.lengths[event.sequence.handle]

    @invariant()
    def the_book_is_right(self) -> None:
        assert self.core.num_open == len(self.waits) + len(self.at)
        assert self.core.num_unplaced == len(self.waits)
        waiting = self.waiting()
        assert self.core._backlog.num_waiting == len(waiting) == self.core.num_waiting
        deadlines = [
            one.deadline_ps
            for one in waiting
            if one.deadline_ps is not None and one.first_admitted_ps is None and one.deadline_ps > self.expired_ps
        ]
        assert self.core.until_ps == min([*self.waits.values(), *deadlines], default=None)
        for member in self.core.members.values():
            assert set(member.sequences) == {handle for handle, name in self.at.items() if name == member.name}

    def teardown(self) -> None:
        while self.at:
            for member in list(self.core.members.values()):
                self.run(member)
        if self.waits:
            self.at_ps = max(self.at_ps, *self.waits.values())
            self.wait(0)
        assert not self.core.num_open
        assert not self.core._backlog.num_waiting
        assert not any(member.replica.kv_tokens for member in self.core.members.values())


def test_any_order_of_events_loses_nothing_and_keeps_nobody_waiting_too_long() -> None:
    run_state_machine_as_test(ClusterMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
