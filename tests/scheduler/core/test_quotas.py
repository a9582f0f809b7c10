"""What keys may use: as tables, and under any order of events with a book kept beside it."""

from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import ClusterEvent, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import Cancelled, Dropped, Event, Failed, Finished
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.quotas import MAX_IDLE_KEYS, MINUTE_PS, Quota, Quotas
from lorrery.scheduler.core.refusals import RefusalReason
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.drive import Device
from lorrery.vocabulary.endings import CancelCause
from tests.scheduler.core.clusters import had
from tests.scheduler.core.test_cluster import S, replica

RULES = ClusterRules(worker_wait_seconds=10**6)


def cluster() -> ClusterCore:
    core = ClusterCore(LeastLoaded(), RULES)
    core.attach(Member("w0", replica(), 200), 0)
    return core


def submit(core: ClusterCore, handle: int, quota: Quota, at_ps: int = 0, prompt: int = 5, output: int = 5) -> str:
    """Submit a request; return `placed`, `held`, or the field of the quota that it is over."""
    events = core.submit(Sequence(handle, prompt, output, at_ps), at_ps, quota=quota)
    if not events:
        return "held"
    if isinstance(events[0], Refused):
        assert events[0].refusal.reason is RefusalReason.QUOTA_EXCEEDED
        return str(events[0].refusal.facts["field"])
    return "placed"


def refusal_wait_ps(core: ClusterCore, quota: Quota, at_ps: int, output: int = 5) -> int | None:
    (event,) = core.submit(Sequence(99, 5, output, at_ps), at_ps, quota=quota)
    assert isinstance(event, Refused)
    return event.refusal.retry_ps


def test_requests_per_minute_fill_evenly_and_the_refusal_says_when_there_is_one_again() -> None:
    core, quota = cluster(), Quota("k", requests_per_minute=2)
    assert [submit(core, handle, quota) for handle in (1, 2, 3)] == ["placed", "placed", "requests_per_minute"]
    assert refusal_wait_ps(core, quota, 0) == 30 * S
    assert refusal_wait_ps(core, quota, 20 * S) == 10 * S
    assert refusal_wait_ps(core, quota, 30 * S - 1) == 1
    assert submit(core, 4, quota, 30 * S) == "placed"
    assert submit(core, 5, quota, 30 * S) == "requests_per_minute"
    assert [submit(core, handle, quota, 600 * S) for handle in (6, 7, 8)] == ["placed"] * 2 + ["requests_per_minute"]


def test_tokens_per_minute_charge_what_may_come_and_give_back_what_did_not() -> None:
    core, quota = cluster(), Quota("k", tokens_per_minute=30)
    sequence = Sequence(1, 5, 20)
    core.submit(sequence, 0, quota=quota)
    assert submit(core, 2, quota, output=5) == "tokens_per_minute"
    assert refusal_wait_ps(core, quota, 0) == 10 * S  # 5 of 30 a minute are lacking
    core.ended(sequence, 2, 0)
    assert submit(core, 3, quota, output=18) == "placed"  # 30 - (5 + 2) are left
    assert submit(core, 4, quota, prompt=1, output=1) == "tokens_per_minute"


def test_keys_are_counted_apart_and_none_at_all_is_not_counted() -> None:
    core = cluster()
    assert submit(core, 1, Quota("a", requests_per_minute=1)) == "placed"
    assert submit(core, 2, Quota("a", requests_per_minute=1)) == "requests_per_minute"
    assert submit(core, 3, Quota("b", requests_per_minute=1)) == "placed"
    assert submit(core, 4, Quota("c")) == "placed"
    assert core.submit(Sequence(5, 5, 5), 0)


def test_an_output_that_was_refused_together_with_another_gives_everything_back() -> None:
    core, quota = cluster(), Quota("k", requests_per_minute=1, tokens_per_minute=25)
    sequence = Sequence(1, 5, 20)
    core.submit(sequence, 0, quota=quota)
    assert submit(core, 2, quota, output=20) == "requests_per_minute"
    core.cancel(sequence, 0, CancelCause.REFUSED_TOGETHER)
    core.ended(sequence, 0, 0)
    assert submit(core, 3, quota, output=20) == "placed"


def test_what_is_only_counted_has_no_place_and_is_not_given_back() -> None:
    core, quota = cluster(), Quota("k", requests_per_minute=2, tokens_per_minute=30)
    assert core.charge(20, quota, 0) is None
    refusal = core.charge(20, quota, 0)
    assert refusal is not None
    assert refusal.retry_ps == 20 * S
    assert (core.num_open, submit(core, 1, quota, output=5)) == (0, "placed")
    assert core.charge(0, quota, 0) is not None  # two requests


def test_a_refused_request_is_not_counted() -> None:
    core, quota = cluster(), Quota("k", requests_per_minute=1, tokens_per_minute=20)
    assert submit(core, 1, quota, output=16) == "tokens_per_minute"
    assert isinstance(core.submit(Sequence(2, 0, 5), 0, quota=quota)[0], Refused)  # for another reason
    assert submit(core, 3, quota, output=15) == "placed"


def test_over_max_running_requests_wait_and_over_max_waiting_they_are_refused() -> None:
    core, quota = cluster(), Quota("k", max_running=1, max_waiting=2)
    first = Sequence(1, 5, 5)
    core.submit(first, 0, quota=quota)
    core.members["w0"].plan(0)  # so that it runs
    assert [submit(core, handle, quota) for handle in (2, 3, 4)] == ["held", "held", "max_waiting"]
    assert (core.num_waiting, core.num_open) == (2, 3)
    assert core.release(0) == []
    core.ended(first, 5, S)
    (event,) = core.release(S)
    assert isinstance(event, Placed)
    assert event.sequence.handle == 2
    assert core.release(S) == []


def test_one_that_is_held_can_be_cancelled() -> None:
    core, quota = cluster(), Quota("k", max_running=1)
    assert [submit(core, handle, quota) for handle in (1, 2, 3)] == ["placed", "held", "held"]
    (event,) = core.cancel(had(core, 2), 0)
    assert isinstance(event, Cancelled)
    core.ended(event.sequence, 0, 0)
    assert core.num_waiting == 2  # one in the worker's queue, one held
    assert core.cancel(event.sequence, 0) == []


def test_one_that_comes_again_has_its_place_and_is_not_charged() -> None:
    core, quota = cluster(), Quota("k", requests_per_minute=1, max_running=1, max_waiting=1)
    assert submit(core, 1, quota) == "placed"
    again = Sequence(2, 5, 5, produced_tokens=2)
    assert isinstance(core.submit(again, 0, quota=quota, resumed=True)[0], Placed)
    assert isinstance(core.submit(Sequence(3, 5, 5), 0, quota=quota, resumed=True)[0], Placed)


def test_a_quota_that_changes_holds_from_the_next_request_on() -> None:
    core = cluster()
    assert submit(core, 1, Quota("k", max_running=1)) == "placed"
    assert submit(core, 2, Quota("k", max_running=1)) == "held"
    assert submit(core, 3, Quota("k", max_running=3)) == "placed"
    assert [event.sequence.handle for event in core.release(0)] == [2]
    assert submit(core, 4, Quota("k", requests_per_minute=1)) == "placed"
    assert submit(core, 5, Quota("k", requests_per_minute=1)) == "requests_per_minute"
    assert submit(core, 6, Quota("k", requests_per_minute=60), S) == "requests_per_minute"  # until now it filled slowly
    assert submit(core, 7, Quota("k", requests_per_minute=60), 2 * S) == "placed"


def test_keys_that_are_gone_are_forgotten() -> None:
    quotas = Quotas()
    open_one = Sequence(0, 5, 5)
    quotas.take(open_one, Quota("open", max_running=1), 0, charge=True)
    for number in range(MAX_IDLE_KEYS + 5):
        quotas.refuse(Sequence(1, 5, 5), Quota(f"k{number}", requests_per_minute=1), 0)
    assert len(quotas._by_key) <= MAX_IDLE_KEYS
    assert quotas.take(Sequence(2, 5, 5), Quota("open", max_running=1), 0, charge=True) is False


QUOTAS = [
    None,
    Quota("fast", requests_per_minute=30),
    Quota("tokens", tokens_per_minute=60, max_waiting=3),
    Quota("narrow", max_running=2, max_waiting=2),
    Quota("all", 20, 100, 1, 1),
]


class QuotaMachine(RuleBasedStateMachine):
    """A cluster, and a book of what each key has used, with exact fractions of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.core = ClusterCore(LeastLoaded(), RULES)
        self.devices: dict[str, Device] = {}
        self.lengths: dict[int, int] = {}
        self.quota_of: dict[int, Quota | None] = {}
        self.sequences: dict[int, Sequence] = {}
        self.held: set[int] = set()
        self.levels: dict[tuple[str, str], tuple[Fraction, int]] = {}
        self.at_ps = 0
        self.num_workers = 0
        self.attach()

    def level(self, key: str, what: str, per_minute: int) -> Fraction:
        level, at_ps = self.levels.get((key, what), (Fraction(per_minute), self.at_ps))
        return min(Fraction(per_minute), level + Fraction(per_minute * (self.at_ps - at_ps), MINUTE_PS))

    def use(self, quota: Quota, what: str, per_minute: int, amount: int) -> None:
        if per_minute:
            level = min(Fraction(per_minute), self.level(quota.key, what, per_minute) - amount)
            self.levels[quota.key, what] = level, self.at_ps

    @rule(prompt=st.integers(1, 9), budget=st.integers(1, 9), short=st.integers(0, 8), quota=st.sampled_from(QUOTAS))
    def submit(self, prompt: int, budget: int, short: int, quota: Quota | None) -> None:
        handle = len(self.lengths)
        self.lengths[handle] = max(1, budget - short)
        sequence = Sequence(handle, prompt, budget, self.at_ps)
        expected = self.expected(quota, prompt + budget)
        events = self.core.submit(sequence, self.at_ps, quota=quota)
        if events and isinstance(events[0], Refused):
            assert expected == events[0].refusal.facts["field"]
            return
        assert expected == ""
        self.quota_of[handle], self.sequences[handle] = quota, sequence
        if quota is not None:
            self.use(quota, "requests", quota.requests_per_minute, 1)
            self.use(quota, "tokens", quota.tokens_per_minute, prompt + budget)
        if not events and self.core.members:
            assert quota is not None
            assert quota.max_running
            self.held.add(handle)

    def expected(self, quota: Quota | None, tokens: int) -> str:
        """Return the field that refuses a request; empty: none."""
        if quota is None:
            return ""
        waiting = [one for one in self.of(quota) if self.sequences[one].admitted_ps is None]
        if quota.max_waiting and len(waiting) >= quota.max_waiting:
            return "max_waiting"
        for what, amount in (("requests", 1), ("tokens", tokens)):
            per_minute = getattr(quota, f"{what}_per_minute")
            if per_minute and self.level(quota.key, what, per_minute) < amount:
                return f"{what}_per_minute"
        return ""

    def of(self, quota: Quota) -> list[int]:
        return [handle for handle, one in self.quota_of.items() if one is quota]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.sequences)))
        self.take(self.core.cancel(self.sequences[handle], self.at_ps))

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.at_ps += seconds * S

    @precondition(lambda self: self.num_workers < 3)
    @rule()
    def attach(self) -> None:
        name = f"w{self.num_workers}"
        self.num_workers += 1
        self.devices[name] = Device(self.lengths)
        self.take(self.core.attach(Member(name, replica(), 200), self.at_ps))

    @precondition(lambda self: len(self.core.members) > 1)
    @rule()
    def lose(self) -> None:
        member = next(iter(self.core.members.values()))
        gave_back, events = self.core.lose(member, self.at_ps)
        self.note(gave_back.events)
        self.take(events)

    @rule()
    def release(self) -> None:
        events = self.core.release(self.at_ps)
        for event in events:
            self.held.remove(event.sequence.handle)
        self.take(events)

    @rule()
    def step(self) -> None:
        for member in list(self.core.members.values()):
            device = self.devices[member.name]
            decision = member.plan(self.at_ps)
            self.note(decision.events)
            device.forget(decision.leaves)
            if isinstance(decision, Plan):
                ran = device.run(decision, self.at_ps, 1, decision.until_ps, chunks=True)
                self.at_ps = ran.end_ps
                self.note(member.commit(decision, ran))

    def take(self, events: list[ClusterEvent]) -> None:
        for event in events:
            assert not isinstance(event, Refused)
            if isinstance(event, Cancelled):
                self.held.discard(event.sequence.handle)
                self.end(event.sequence, 0)
            else:
                assert isinstance(event, Placed | Withdrawn)

    def note(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed | Dropped)
            if isinstance(event, Finished):
                self.end(event.sequence, event.output_tokens)
            elif isinstance(event, Cancelled):
                self.end(event.sequence, event.sequence.produced_tokens)

    def end(self, sequence: Sequence, output_tokens: int) -> None:
        quota = self.quota_of.pop(sequence.handle)
        del self.sequences[sequence.handle]
        self.core.ended(sequence, output_tokens, self.at_ps)
        if quota is not None:
            unused = sequence.max_new_tokens - output_tokens
            self.use(quota, "tokens", quota.tokens_per_minute, -unused)

    @invariant()
    def nobody_has_more_than_it_may(self) -> None:
        on_workers = {handle for member in self.core.members.values() for handle in member.sequences}
        for quota in QUOTAS:
            if quota is not None and quota.max_running:
                mine = set(self.of(quota))
                assert len(mine & on_workers) <= quota.max_running
                assert mine - on_workers == mine & self.held
        assert self.core.num_open == len(self.sequences)

    def teardown(self) -> None:
        for _ in range(2_000):
            if not self.sequences:
                break
            self.step()
            self.release()
        assert not self.core.num_open
        assert not self.held


def test_any_order_of_events_keeps_every_key_within_its_quotas_and_holds_nobody_for_good() -> None:
    run_state_machine_as_test(QuotaMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None))
