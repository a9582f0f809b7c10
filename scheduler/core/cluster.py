"""All requests and workers of one scheduler: acceptance, placement, re-queueing of lost work, and the end of waits.

    events = cluster.submit(sequence, at)      cancel(sequence, at)      expire(at)
    events = cluster.attach(Member(name, replica, pool_tokens), at)
    gave_back, events = cluster.drain(member, at)      lose(member, at)
    events = cluster.place_again(at)
    moves = cluster.balance(at)
    events = cluster.take_recalled(recalled, member, at)

A driver hands in what happens, in order of time, and carries the events out: live it sends messages, simulated it moves
the clock. It calls `expire` at `until_ps`, and plans, runs and commits for each member by itself (`member.plan`,
`member.commit`). A request without an event waits: for a worker that is large enough, while others are attached, or for
a slot of its API key (`core/quotas.py`). Ten thousand waits may end at once, so one call returns events of at most
`placing.SLICE` requests; while `is_placing`, the driver calls `place_again` whenever it has time.

When waiting or running sequences of a member have `changed`, and all events of that moment are handed in, the driver
calls `balance`, if the cluster `balances`. A sequence that moves leaves its worker at that worker's next boundary, as a
`Recalled` event of a decision, which the driver hands to `take_recalled`.

No clock here: every time comes in as an argument, in device picoseconds.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import replace

from lorrery.scheduler.core import refusals
from lorrery.scheduler.core.acceptance import NO_RULES, Backlog, ClusterRules, LengthCheck
from lorrery.scheduler.core.cluster_facts import ClusterEvent, GaveBack, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import Recalled, withdrawn
from lorrery.scheduler.core.member import Member, Tally
from lorrery.scheduler.core.placements.balance import Balance, Move
from lorrery.scheduler.core.placements.forecast import OutputShare
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.placing import SLICE, Placing
from lorrery.scheduler.core.quotas import Quota, Quotas
from lorrery.scheduler.core.refusals import Refusal
from lorrery.scheduler.core.sequence import Adapter, Sequence, Withdrawal
from lorrery.vocabulary.endings import CancelCause
from lorrery.vocabulary.units import NEVER


class ClusterCore:
    """The state of one scheduler. Times never go back from one call to the next.

    Args:
        placement: chooses among workers; called only if several are attached, even if just one can hold a sequence.
        rules: which requests are accepted, and how long they may wait.
        adapters: known at the start.
        notes_figures: whether `Placed` carries the figures that the placement read.
        bring_up_to_date: called with workers and the time before the placement reads them; for a driver whose replicas
            lag behind its clock.
        catch_up: called for a member before `balance` reads it; for such a driver, to commit the steps that have ended.

    Attributes:
        adapters: adapters that requests may name now, by id.
        members: attached workers by name, in order of attaching.
        draining: whether new requests are refused.
        balances: whether waiting requests may move to another worker; the placement says so.
        num_moved: requests that have moved to another worker while waiting.
    """

    def __init__(
        self,
        placement: Placement,
        rules: ClusterRules = NO_RULES,
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
        self._lengths = LengthCheck(rules)
        self._quotas = Quotas()
        self._backlog = Backlog(rules)

    @property
    def until_ps(self) -> int | None:
        """Time of the next expired wait for a worker or missed deadline; None: no such time."""
        until_ps, deadline_ps = self._room.until_ps, self._backlog.until_ps
        if until_ps is None or deadline_ps is None:
            return deadline_ps if until_ps is None else until_ps
        return min(until_ps, deadline_ps)

    @property
    def keeps_backlog(self) -> bool:
        """Whether the rules need the set of waiting requests: the driver then calls `ended`, and minds `until_ps`."""
        return self._backlog.is_kept

    @property
    def is_placing(self) -> bool:
        """Whether `place_again` has more to do."""
        return self._room.has_untried

    @property
    def num_unplaced(self) -> int:
        """Requests that wait for a worker."""
        return len(self._room)

    @property
    def num_held(self) -> int:
        """Requests that wait for a slot of their API key."""
        return self._quotas.num_held

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch, for a worker, or for a slot of their API key."""
        return len(self._room) + self._quotas.num_held + self._placed.num_waiting()

    @property
    def num_open(self) -> int:
        """Requests that have been accepted and have not ended."""
        return len(self._room) + self._quotas.num_held + self._placed.num

    def unplaced(self) -> list[Sequence]:
        """Return the requests that no worker has: waiting for one, or held for a slot of their API key."""
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
        """Accept a request, or refuse it.

        Args:
            sequence: new to this scheduler.
            at_ps: now.
            adapter_id: the adapter that the request names, resolved here; empty: `sequence.adapter` is already right.
            resumed: a scheduler that is gone had accepted it: it does not count against a full queue and has no
                deadline. If it has produced tokens, no limit is checked again.
            pinned: the adapter that a resumed request began with, if that was loaded at run time; the request keeps it,
                even if the name now stands for another version.
            quota: what its API key may use. A driver that passes one calls `ended` for each sequence that ends, as with
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
                return [Refused(sequence, refusals.unknown_adapter(adapter_id), on_arrival=True)]
        if sequence.deadline_ps is not None and (resumed or not self.rules.deadline_admission):
            sequence.deadline_ps = None
        if not sequence.produced_tokens:
            refusal = self._refuse(sequence, resumed, at_ps)
            if refusal is not None:
                return [Refused(sequence, refusal, on_arrival=True)]
        if quota is not None:
            sequence.weight = quota.weight
        if quota is not None and quota.limits:
            charge = not resumed and not sequence.produced_tokens
            refusal = self._quotas.refuse(sequence, quota, at_ps) if charge else None
            if refusal is not None:
                return [Refused(sequence, refusal, on_arrival=True)]
            if not self._quotas.take(sequence, quota, at_ps, charge=charge):
                self._enter(sequence)
                return []
        placing = self._placing
        if len(placing.ready) == 1:  # the same as `place` in fewer calls: a simulation does this for each request
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
            event = replace(event, on_arrival=True)
            self._quotas.end(sequence, 0, at_ps)
        else:
            self._enter(sequence)
        return [event]

    def charge(self, tokens: int, quota: Quota, at_ps: int) -> Refusal | None:
        """Count something that needs no worker against a key's rates; see `Quotas.charge`."""
        return self._quotas.charge(tokens, quota, at_ps)

    def cancel(
        self,
        sequence: Sequence,
        at_ps: int,
        cause: CancelCause = CancelCause.CLIENT_LEFT,
        kept_tokens: int | None = None,
    ) -> list[ClusterEvent]:
        """Withdraw a request; an unknown one is ignored, since it may just have ended.

        Args:
            sequence: the request.
            at_ps: now.
            cause: why; it decides whether the request has finished.
            kept_tokens: output that its client has, or would have; None: all.
        """
        handle = sequence.handle
        unplaced = self._room.take(handle) or self._quotas.withdraw(handle)
        if unplaced is not None:
            sequence.withdrawal = Withdrawal(cause, at_ps, kept_tokens)
            return [withdrawn(unplaced, unplaced.produced_tokens)]
        member = self.members.get(sequence.worker)
        if member is None or handle not in member.sequences or handle in member.withdrawn:
            return []
        sequence.withdrawal = Withdrawal(cause, at_ps, kept_tokens)
        member.cancel(handle, at_ps)
        return [Withdrawn(sequence, member)]

    def expire(self, at_ps: int) -> list[ClusterEvent]:
        """Refuse requests whose deadline has passed, or whose wait for a worker is over.

        No wait for a worker ends before every waiting request has been tried. A request that waits at a worker is
        withdrawn from it.
        """
        expired = self._backlog.expired(at_ps, SLICE)
        if not expired:
            return self._placing.expire(at_ps)
        events: list[ClusterEvent] = []
        for sequence in expired:
            refusal = refusals.waited_too_long(at_ps - sequence.arrived_ps, self._backlog.drain_rate.retry_ps(at_ps))
            for event in self.cancel(sequence, at_ps, CancelCause.DEADLINE):
                if isinstance(event, Withdrawn):
                    assert sequence.withdrawal is not None
                    sequence.withdrawal.by_scheduler = True
                    events.append(Withdrawn(sequence, event.member, refusal))
                else:
                    events.append(Refused(sequence, refusal))
        return events

    def ended(self, sequence: Sequence, output_tokens: int, at_ps: int) -> bool:
        """Note the end of a request; return whether `release` may now place another one of its API key.

        Args:
            sequence: accepted, and ended in whatever way.
            output_tokens: all that it produced.
            at_ps: now.
        """
        self._backlog.ended(sequence, at_ps, others_wait=self.num_waiting > 0)
        self._quotas.end(sequence, output_tokens, at_ps)
        return self._quotas.any_to_release

    def release(self, at_ps: int) -> list[ClusterEvent]:
        """Place held requests whose API key has a free slot; `place_again` continues with the rest."""
        return self._placing.take_back(self._quotas.release(), at_ps)

    def _refuse(self, sequence: Sequence, resumed: bool, at_ps: int) -> Refusal | None:
        refusal = refusals.draining() if self.draining else self._lengths.refuse(sequence, accepted_before=resumed)
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
        """Place sequences that came back from workers or that wait while one attaches: the next `placing.SLICE`."""
        return self._placing.place_again(at_ps)

    # --- balance ----------------------------------------------------------------------------------------------------

    @property
    def may_move(self) -> bool:
        """Whether `balance` might find something to move; cheap."""
        return self.balances and len(self._placing.ready) > 1 and self._balance.someone_is_blocked

    def balance(self, at_ps: int) -> list[Move]:
        """Recall waiting sequences that would start earlier on another worker; see `core.placements.balance`."""
        if not self.may_move:
            return []
        placing = self._placing
        found = self._balance.moves(
            placing.ready, placing.current_table(), lambda member: self._catch_up(member, at_ps)
        )
        for move in found:
            move.donor.recall(move.sequence.handle, move.taker.name, at_ps)
        return found

    def take_recalled(self, recalled: Recalled, donor: Member, at_ps: int) -> list[ClusterEvent]:
        """Give a sequence that has left its worker to the one it was recalled for; if that is gone, place it anew."""
        sequence = recalled.sequence
        if donor.let_go(recalled):
            return [withdrawn(sequence, sequence.produced_tokens)]
        taker = self.members.get(recalled.to)
        if taker is None or taker.draining or taker.replica.never_fits_reason(sequence) is not None:
            return self._placing.take_back([sequence], at_ps)
        self.num_moved += 1
        why = f"moved from {donor.name}, where it could not start"
        return [Placed(sequence, taker, taker.submit(sequence, at_ps), why, moved_from=donor.name)]

    # --- workers ----------------------------------------------------------------------------------------------------

    def attach(self, member: Member, at_ps: int) -> list[ClusterEvent]:
        """Add an empty worker with a name of its own, and place the sequences that wait for one."""
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
        """Give a worker no new sequences; its waiting ones go elsewhere, its running ones stay."""
        member.draining = True
        self._balance.detach(member)
        self._workers_changed()
        sequences, events = member.withdraw_waiting(at_ps)
        return GaveBack(member, False, sequences, events), self._placing.take_back(sequences, at_ps)

    def lose(self, member: Member, at_ps: int, boundary_ps: int = 0) -> tuple[GaveBack, list[ClusterEvent]]:
        """Remove a worker that is gone, and queue its sequences again, except those that may have brought it down.

        Args:
            member: attached.
            at_ps: now.
            boundary_ps: the end of its last step, which its clock may have put later than now.
        """
        del self.members[member.name]
        self._balance.detach(member)
        self._placing.detach(member)
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
        return GaveBack(member, True, sequences, events), given_up + self._placing.take_back(moving, at_ps)

    def expect_no_worker(self, at_ps: int) -> None:
        """End all waits for a worker, and those that begin before the next one attaches."""
        self._placing.expect_no_worker(at_ps)

    def _workers_changed(self) -> None:
        self._placing.set_ready([member for member in self.members.values() if not member.draining])
        self._lengths.set_pools([member.pool_tokens for member in self.members.values()])

    # --- adapters ---------------------------------------------------------------------------------------------------

    def load_adapter(self, adapter: Adapter) -> Adapter | None:
        """Give this adapter to new requests that name it. Earlier requests keep the one they have.

        Returns:
            The replaced adapter, which the driver lets each member `retire`; None: nothing was replaced.
        """
        before = self.adapters.get(adapter.adapter_id)
        self.adapters[adapter.adapter_id] = adapter
        return None if before is None or before.key == adapter.key else before

    def unload_adapter(self, adapter_id: str) -> Adapter | None:
        """Remove an adapter and return it, if it is known, to be retired likewise. Requests that have it keep it."""
        return self.adapters.pop(adapter_id, None)

    def is_out_of_use(self, adapter: Adapter) -> bool:
        """Return whether no new request can get this adapter: its name is unknown or stands for another version.

        If a worker gets a request that has one, the driver lets it `retire` the adapter: the worker may have attached
        after the name changed.
        """
        current = self.adapters.get(adapter.adapter_id)
        return current is None or current.key != adapter.key
