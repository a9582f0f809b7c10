"""All requests and workers of one scheduler: who comes in, where each goes, what is queued again, when a wait is over.

    events = cluster.submit(sequence, at)      cancel(sequence, at)      expire(at)
    events = cluster.attach(Member(name, replica, pool_tokens), at)
    gave_back, events = cluster.drain(member, at)      lose(member, at)
    events = cluster.place_again(at)
    moves = cluster.balance(at)
    events = cluster.take_recalled(recalled, member, at)

A driver hands in what happens, in order of time, and carries the events out: live it sends messages, simulated it moves
the clock. It calls `expire` at `until_ps`, and plans, runs and commits for each member by itself (`member.plan`,
`member.commit`). A request that no event tells of waits for a worker: for one that is large enough, if others are
attached; or for a place among its API key's (`core/quotas.py`). What ten thousand of them wait for may happen at once,
so no call tells of more than `placing.SLICE`; while `is_placing`, the driver calls `place_again`, at its leisure.

Once it has `changed` who waits or runs on a member, and everything of that moment is known, the driver calls `balance`,
if the cluster `balances`. What moves leaves its worker at that one's next boundary: a `Recalled` event among those of a
decision, which the driver hands to `take_recalled`.

No clock here: every time comes in as an argument, in device picoseconds.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.backlog import Backlog
from lorrery.scheduler.core.balance import Balance, Move
from lorrery.scheduler.core.cluster_events import ClusterEvent, GaveBack, Placed, Refused, Withdrawn
from lorrery.scheduler.core.door import LETS_ALL_IN, ClusterRules, Door
from lorrery.scheduler.core.forecast import OutputShare
from lorrery.scheduler.core.member import Member, Tally
from lorrery.scheduler.core.placing import SLICE, Placing
from lorrery.scheduler.core.plan import Cancelled, Recalled
from lorrery.scheduler.core.protocols.placement import Placement
from lorrery.scheduler.core.quotas import Quota, Quotas
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.units import NEVER


class ClusterCore:
    """The state of one scheduler. Times never go back from one call to the next.

    Args:
        placement: chooses among workers; asked only where several are attached, also if one alone can hold a sequence.
        rules: of the door and the wait.
        adapters: those that are known at first.
        notes_figures: whether `Placed` says what the placement read.
        bring_up_to_date: called with workers and the time before the placement looks at them; by a driver whose
            replicas lag behind its clock.
        catch_up: called likewise before what waits is balanced; by such a driver, to commit the steps that have ended.

    Attributes:
        adapters: those that requests may name now, by id.
        members: attached workers by name, in order of attaching.
        draining: whether nothing new comes in.
        balances: whether what waits may move, by the placement.
        num_moved: requests that have moved to another worker while they waited.
    """

    def __init__(
        self,
        placement: Placement,
        rules: ClusterRules = LETS_ALL_IN,
        adapters: Iterable[Adapter] = (),
        *,
        notes_figures: bool = False,
        bring_up_to_date: Callable[[Many[Member], int], None] | None = None,
        catch_up: Callable[[Member, int], None] = lambda member, at_ps: None,
    ) -> None:
        self.rules = rules
        self.adapters = {adapter.adapter_id: adapter for adapter in adapters}
        self._listed = dict(self.adapters)
        self.members: dict[str, Member] = {}
        self.draining = False
        self.balances = bool(getattr(placement, "moves_waiting", False))
        self.num_moved = 0
        self._outputs = OutputShare() if getattr(placement, "predicts", False) else None
        self._catch_up = catch_up
        self._max_waiting = rules.max_waiting_requests
        self._placing = Placing(placement, rules, notes_figures=notes_figures, bring_up_to_date=bring_up_to_date)
        self._room = self._placing.room
        self._placed = Tally()
        self._balance = Balance()
        self._door = Door(rules)
        self._quotas = Quotas()
        self._backlog = Backlog(rules)

    @property
    def until_ps(self) -> int | None:
        """When the first wait for a worker is over, or a deadline passes; None: neither will."""
        until_ps, deadline_ps = self._room.until_ps, self._backlog.until_ps
        if until_ps is None or deadline_ps is None:
            return deadline_ps if until_ps is None else until_ps
        return min(until_ps, deadline_ps)

    @property
    def keeps_backlog(self) -> bool:
        """Whether rules need to know who waits: then the driver tells of each `ended`, and minds `until_ps`."""
        return self._backlog.is_kept

    @property
    def is_placing(self) -> bool:
        """Whether there is more for `place_again` to do."""
        return self._room.has_untried

    @property
    def num_unplaced(self) -> int:
        """Requests that wait for a worker."""
        return len(self._room)

    @property
    def num_held(self) -> int:
        """Requests that wait for a place among their key's."""
        return self._quotas.num_held

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for a batch, for a worker, or for a place among their key's."""
        return len(self._room) + self._quotas.num_held + self._placed.num_waiting()

    @property
    def num_open(self) -> int:
        """Requests that have come in and not ended."""
        return len(self._room) + self._quotas.num_held + self._placed.num

    def unplaced(self) -> list[Sequence]:
        """Return the requests that no worker has: those that wait for one, and those held for their key."""
        return [*self._room.waiting(), *self._quotas.held()]

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        sequence: Sequence,
        at_ps: int,
        *,
        adapter_id: str = "",
        resumed: bool = False,
        pinned: Adapter | None = None,
        quota: Quota | None = None,
    ) -> list[ClusterEvent]:
        """Take in a request, or refuse it.

        Args:
            sequence: new to this scheduler.
            at_ps: now.
            adapter_id: the adapter that it names, which it is given; empty: what it has is right.
            resumed: it has been let in before, by a scheduler that is gone, and does not count against a full queue.
                It has no deadline. If it has produced tokens, no limit is checked again.
            pinned: the adapter that a resumed request began with, if that was loaded at run time; it keeps it, whatever
                the name stands for now.
            quota: what its API key may use. A driver that gives any calls `ended` for each sequence that ends, as with
                `keeps_backlog`.
        """
        drain_rate = self._backlog.drain_rate
        if drain_rate.is_measuring and not self.num_waiting:
            drain_rate.emptied()
        if adapter_id:
            if resumed:
                sequence.adapter = pinned or self._listed.get(adapter_id)
            sequence.adapter = sequence.adapter or self.adapters.get(adapter_id)
            if sequence.adapter is None:
                return [Refused(sequence, refusals.unknown_adapter(adapter_id))]
        if sequence.deadline_ps is not None and (resumed or not self.rules.deadline_admission):
            sequence.deadline_ps = None
        if not sequence.produced_tokens:
            refusal = self._refuse(sequence, resumed, at_ps)
            if refusal is not None:
                return [Refused(sequence, refusal)]
        if quota is not None:
            sequence.weight = quota.weight
        if quota is not None and quota.limits:
            charge = not resumed and not sequence.produced_tokens
            refusal = self._quotas.refuse(sequence, quota, at_ps) if charge else None
            if refusal is not None:
                return [Refused(sequence, refusal)]
            if not self._quotas.take(sequence, quota, at_ps, charge=charge):
                self._enter(sequence)
                return []
        placing = self._placing
        if len(placing.ready) == 1:  # as `place` would, without the way there: a simulation does this for each request
            member = placing.ready[0]
            if member.replica.never_fits_reason(sequence) is None:
                self._enter(sequence)
                return [Placed(sequence, member, member.submit(sequence, at_ps))]
        event = placing.place(sequence, at_ps)
        if event is None:
            if placing.ready and not resumed and not sequence.produced_tokens:
                event = Refused(sequence, refusals.never_fits(sequence, placing.why_not_first(sequence) or ""))
            else:
                placing.wait(sequence, at_ps)
                self._enter(sequence)
                return []
        if isinstance(event, Refused):
            self._quotas.end(sequence, 0, at_ps)
        else:
            self._enter(sequence)
        return [event]

    def cancel(self, sequence: Sequence, at_ps: int) -> list[ClusterEvent]:
        """Withdraw a request; one that is not known is ignored, since it may just have ended."""
        handle = sequence.handle
        waiting = self._room.take(handle)
        if waiting is not None:
            return [Cancelled(waiting)]
        held = self._quotas.withdraw(handle)
        if held is not None:
            return [Cancelled(held)]
        member = self.members.get(sequence.worker)
        if member is None or handle not in member.sequences or handle in member.withdrawn:
            return []
        member.cancel(handle, at_ps)
        return [Withdrawn(sequence, member)]

    def expire(self, at_ps: int) -> list[ClusterEvent]:
        """Refuse those whose deadline has passed, and who have waited for a worker for long enough.

        Nobody is refused for want of a worker before all have been tried. Who waits at a worker is withdrawn from it.
        """
        expired = self._backlog.expired(at_ps, SLICE)
        if not expired:
            return self._placing.expire(at_ps)
        events: list[ClusterEvent] = []
        for sequence in expired:
            refusal = refusals.waited_too_long(at_ps - sequence.arrived_ps, self._backlog.drain_rate.retry_ps(at_ps))
            for event in self.cancel(sequence, at_ps):
                if isinstance(event, Withdrawn):
                    events.append(Withdrawn(sequence, event.member, refusal))
                else:
                    events.append(Refused(sequence, refusal))
        return events

    def ended(self, sequence: Sequence, output_tokens: int, at_ps: int) -> bool:
        """Note an end, which frees a place; return whether `release` may place another of its key's.

        Args:
            sequence: let in, and ended, in whatever way.
            output_tokens: all that it has produced.
            at_ps: now.
        """
        self._backlog.ended(sequence, at_ps, others_wait=self.num_waiting > 0)
        self._quotas.end(sequence, output_tokens, at_ps)
        return self._quotas.any_to_release

    def release(self, at_ps: int) -> list[ClusterEvent]:
        """Place those for which there is room among their key's now; `place_again` goes on with it."""
        return self._placing.take_back(self._quotas.release(), at_ps)

    def _refuse(self, sequence: Sequence, resumed: bool, at_ps: int) -> Refusal | None:
        refusal = refusals.draining() if self.draining else self._door.refuse(sequence, let_in_before=resumed)
        if refusal is None and self._max_waiting < NEVER and not resumed and self.num_open >= self._max_waiting:
            num_waiting = self.num_waiting
            if num_waiting >= self._max_waiting:
                rate = self._backlog.drain_rate
                return refusals.queue_full(num_waiting, self._max_waiting, rate.retry_ps(at_ps), rate.step_ps(at_ps))
        if refusal is None and self._backlog.is_kept and not resumed:
            refusal = self._backlog.refuse(sequence, at_ps)
        return refusal

    def _enter(self, sequence: Sequence) -> None:
        if self._backlog.is_kept:
            self._backlog.enter(sequence)

    # --- placing ----------------------------------------------------------------------------------------------------

    def place_again(self, at_ps: int) -> list[ClusterEvent]:
        """Place what has come back from workers, or waits while one attaches: the next `placing.SLICE`."""
        return self._placing.place_again(at_ps)

    # --- balance ----------------------------------------------------------------------------------------------------

    @property
    def may_move(self) -> bool:
        """Whether `balance` might find something to move; a quick look."""
        return self.balances and len(self._placing.ready) > 1 and self._balance.someone_is_blocked

    def balance(self, at_ps: int) -> list[Move]:
        """Recall what would start earlier on another worker; see `core.balance`."""
        if not self.may_move:
            return []
        found = self._balance.moves(lambda member: self._catch_up(member, at_ps))
        for move in found:
            move.donor.recall(move.sequence.handle, move.taker.name, at_ps)
        return found

    def take_recalled(self, recalled: Recalled, donor: Member, at_ps: int) -> list[ClusterEvent]:
        """Give a sequence that has left its worker for another to that, or wherever it fits if that is gone."""
        sequence = recalled.sequence
        if donor.let_go(recalled):
            return [Cancelled(sequence)]
        taker = self.members.get(recalled.to)
        if taker is None or taker.draining or taker.replica.never_fits_reason(sequence) is not None:
            return self._placing.take_back([sequence], at_ps)
        self.num_moved += 1
        why = f"moved from {donor.name}, where it could not start"
        return [Placed(sequence, taker, taker.submit(sequence, at_ps), why, moved_from=donor.name)]

    # --- workers ----------------------------------------------------------------------------------------------------

    def attach(self, member: Member, at_ps: int) -> list[ClusterEvent]:
        """Take in a worker, which has nothing and a name that no other has, and give it what waits for one."""
        assert member.name not in self.members, f"worker {member.name} is attached already"
        self.members[member.name] = member
        member.tally = self._placed
        if self._outputs is not None:
            member.predict(self._outputs)
        member.backlog = self._backlog if self._backlog.is_kept else None
        if self.balances and not member.draining:
            self._balance.attach(member)
        self._placing.attach(member, at_ps)
        self._workers_changed()
        return self._placing.place_all(at_ps)

    def drain(self, member: Member, at_ps: int) -> tuple[GaveBack, list[ClusterEvent]]:
        """Give a worker nothing new; what waits in its queue goes elsewhere, what runs stays."""
        member.draining = True
        self._balance.detach(member)
        self._workers_changed()
        sequences, events = member.withdraw_waiting(at_ps)
        return GaveBack(member, sequences, events), self._placing.take_back(sequences, at_ps)

    def lose(self, member: Member, at_ps: int, boundary_ps: int = 0) -> tuple[GaveBack, list[ClusterEvent]]:
        """Forget a worker that is gone, and queue again what it had, but for what may have brought it down.

        Args:
            member: attached.
            at_ps: now.
            boundary_ps: the end of its last step, which its clock may have put later than now.
        """
        del self.members[member.name]
        self._balance.detach(member)
        self._workers_changed()
        sequences, events = member.lose(max(at_ps, boundary_ps))
        for sequence in sequences:
            self._enter(sequence)
        most = self.rules.max_worker_losses
        moving = [sequence for sequence in sequences if sequence.num_losses < most]
        given_up: list[ClusterEvent] = []
        if len(moving) < len(sequences):
            given_up = [
                Refused(sequence, refusals.given_up(sequence.num_losses, most))
                for sequence in sequences
                if sequence.num_losses >= most
            ]
        return GaveBack(member, sequences, events), given_up + self._placing.take_back(moving, at_ps)

    def expect_no_worker(self, at_ps: int) -> None:
        """Let waits for a worker be over, those that begin later too until one attaches all the same."""
        self._placing.expect_no_worker(at_ps)

    def _workers_changed(self) -> None:
        self._placing.set_ready([member for member in self.members.values() if not member.draining])
        self._door.set_pools([member.pool_tokens for member in self.members.values()])

    # --- adapters ---------------------------------------------------------------------------------------------------

    def load_adapter(self, adapter: Adapter) -> Adapter | None:
        """Let new requests that name an adapter have this one. Those that came in before keep what they have.

        Returns:
            The one that they had until now, of which the driver tells each member (`retire`); None: there was none.
        """
        before = self.adapters.get(adapter.adapter_id)
        self.adapters[adapter.adapter_id] = adapter
        return None if before is None or before.key == adapter.key else before

    def unload_adapter(self, adapter_id: str) -> Adapter | None:
        """Forget an adapter, and return it, if it is known, likewise. Requests that have it keep it."""
        return self.adapters.pop(adapter_id, None)

    def is_out_of_use(self, adapter: Adapter) -> bool:
        """Tell whether no new request can get this adapter, since its name is unknown or stands for another version.

        A worker that gets a request which has one is to `retire` it, too: it may not have been there when the name
        changed.
        """
        current = self.adapters.get(adapter.adapter_id)
        return current is None or current.key != adapter.key
