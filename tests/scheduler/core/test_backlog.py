"""What waits is bounded for each tenant, who cannot start in time is refused at once, and who has not is not run."""

from dataclasses import replace
from itertools import count

import pytest

from lorrery.scheduler.core.acceptance import ENOUGH_INTERVALS, SHORTEST_PS, ClusterRules
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import ClusterEvent, Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import Cancelled, Finished, Preempted
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.quotas import Quota
from lorrery.scheduler.core.refusals import Refusal, RefusalReason
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.validation.policy.drive import Device
from tests.scheduler.core.clusters import had

S = 10**12
RULES = ClusterRules(max_waiting_requests_per_tenant=2)
DEADLINES = ClusterRules(deadline_admission=True, worker_wait_seconds=100)


def cluster(rules: ClusterRules, num_workers: int = 1, memory: str = "peak") -> ClusterCore:
    core = ClusterCore(LeastLoaded(), rules)
    settings = ReplicaSettings(
        "fcfs", 96, 90, max_num_seqs=2, max_num_batched_tokens=100, memory=memory, block_size=4, watermark=0.0
    )
    for number in range(num_workers):
        core.attach(Member(f"w{number}", build_replica(settings)), 0)
    return core


def sequence(handle: int, tenant: str = "", *, at_ps: int = 0, deadline_ps: int | None = None) -> Sequence:
    made = Sequence(handle, 5, 5, at_ps, tenant_id=tenant)
    made.deadline_ps = deadline_ps
    return made


def refusal(events: list[ClusterEvent]) -> Refusal:
    (event,) = events
    assert isinstance(event, Refused)
    return event.refusal


def is_placed(events: list[ClusterEvent]) -> bool:
    return [type(event) for event in events] == [Placed]


def test_a_tenant_that_fills_its_part_of_the_queue_leaves_the_others_theirs() -> None:
    core = cluster(RULES)
    for handle in range(2):
        assert is_placed(core.submit(sequence(handle, "loud"), 0))
    refused = refusal(core.submit(sequence(2, "loud"), 0))
    assert refused.reason is RefusalReason.QUEUE_FULL
    assert refused.message == ("2 requests of tenant 'loud' wait; max_waiting_requests_per_tenant is 2; try later")
    assert refused.facts == {"field": "max_waiting_requests_per_tenant", "value": 2, "limit": 2}
    for tenant in ("quiet", ""):
        assert is_placed(core.submit(sequence(10 + len(tenant), tenant), 0))
    core.members["w0"].plan(0)  # admits the first two
    assert is_placed(core.submit(sequence(3, "loud"), 1))


def test_a_tenant_has_its_place_back_whatever_happened_to_who_waited() -> None:
    core = cluster(RULES, num_workers=0)
    sequences = [sequence(handle, "t") for handle in range(9)]
    for first, second in zip(sequences[:3], sequences[3:6], strict=True):
        for one in (first, second):
            assert core.submit(one, 0) == []
        assert refusal(core.submit(sequences[8], 0)).reason is RefusalReason.QUEUE_FULL
        for one in (first, second):
            assert [type(event) for event in core.cancel(one, 1)] == [Cancelled]
            core.ended(one, 0, 1)
    assert core.submit(sequences[6], 2, resumed=True) == []
    assert core.submit(sequences[7], 2) == []
    assert refusal(core.submit(sequences[8], 2)).reason is RefusalReason.QUEUE_FULL
    assert core.submit(sequences[8], 2, resumed=True) == []  # it was let in before


def test_who_lost_its_worker_or_its_place_in_the_batch_waits_again() -> None:
    core = cluster(replace(RULES, max_waiting_requests_per_tenant=1))
    one = sequence(1, "t")
    core.submit(one, 0)
    core.members["w0"].plan(0)
    core.lose(core.members["w0"], 1)
    assert refusal(core.submit(sequence(2, "t"), 2)).reason is RefusalReason.QUEUE_FULL

    core = cluster(replace(RULES, max_waiting_requests_per_tenant=1), memory="paged")
    for handle in (1, 2):
        core.submit(Sequence(handle, 40, 40, tenant_id=f"t{handle}"), 0)
    member, device, at_ps = core.members["w0"], Device({1: 40, 2: 40}), 0
    for _ in range(40):
        decision = member.plan(at_ps)
        if any(isinstance(event, Preempted) for event in decision.events):
            break
        assert isinstance(decision, Plan)
        ran = device.run(decision, at_ps, 1, None, chunks=True)
        at_ps = ran.end_ps
        member.commit(decision, ran)
    assert refusal(core.submit(sequence(3, "t2"), at_ps)).reason is RefusalReason.QUEUE_FULL


def busy_cluster(rules: ClusterRules, between_ps: int = S) -> tuple[ClusterCore, int]:
    """Return a cluster that has no worker, with six that wait, of which one has ended every `between_ps`; and now."""
    core = cluster(rules, num_workers=0)
    num_ends = ENOUGH_INTERVALS + 2
    sequences = [sequence(handle, "first") for handle in range(num_ends + 6)]
    for one in sequences:
        assert core.submit(one, 0) == []
    for number, one in enumerate(sequences[:num_ends], start=1):
        core.cancel(one, number * between_ps)
        core.ended(one, 0, number * between_ps)
    return core, num_ends * between_ps


def test_who_cannot_start_before_its_deadline_is_refused_at_once() -> None:
    core, now_ps = busy_cluster(DEADLINES)
    assert core.submit(sequence(100, at_ps=now_ps, deadline_ps=now_ps + 7 * S), now_ps) == []  # six wait before it
    refused = refusal(core.submit(sequence(101, at_ps=now_ps, deadline_ps=now_ps + 7 * S), now_ps))
    assert refused.reason is RefusalReason.SLO_UNATTAINABLE
    assert refused.message == (
        "the request would start in about 7 s, and must within 7 s; try later, or allow more time"
    )
    assert refused.retry_ps == S
    assert refusal(core.submit(sequence(102, at_ps=now_ps, deadline_ps=now_ps + 3 * S), now_ps)).retry_ps == 4 * S
    assert core.submit(sequence(103, at_ps=now_ps), now_ps) == []  # it can wait for ever
    late = sequence(104, at_ps=now_ps, deadline_ps=now_ps + 1)
    assert core.submit(late, now_ps, resumed=True) == []  # it was let in before
    assert late.deadline_ps is None


def test_a_service_level_is_a_deadline_for_all() -> None:
    core, now_ps = busy_cluster(replace(DEADLINES, start_within_seconds=50.0))
    for handle in range(44):
        assert core.submit(sequence(100 + handle, at_ps=now_ps), now_ps) == []
    refused = refusal(core.submit(sequence(200, at_ps=now_ps), now_ps))
    assert "would start in about 50 s, and must within 50 s" in refused.message
    assert refusal(core.submit(sequence(201, at_ps=now_ps, deadline_ps=now_ps + 9 * S), now_ps)).facts["limit"] == "9"


def test_nobody_is_refused_for_a_deadline_where_the_rule_is_off_or_too_little_is_known() -> None:
    core, now_ps = busy_cluster(replace(DEADLINES, deadline_admission=False, max_waiting_requests_per_tenant=99))
    assert core.submit(sequence(100, at_ps=now_ps, deadline_ps=now_ps + 1), now_ps) == []
    assert core.until_ps == 100 * S  # the wait for a worker
    core = cluster(DEADLINES)
    for handle in range(50):
        assert is_placed(core.submit(sequence(handle, deadline_ps=1), 0))


def test_who_still_waits_at_its_deadline_is_never_run() -> None:
    core = cluster(DEADLINES)
    for handle in range(2):
        core.submit(sequence(handle, deadline_ps=2 * S), 0)
    member = core.members["w0"]
    assert isinstance(member.plan(0), Plan)  # the two are in the batch, and may take their time
    for handle in (2, 3, 4):
        core.submit(sequence(handle, deadline_ps=handle * S), 0)
    assert core.until_ps == 2 * S
    assert core.expire(2 * S - 1) == []
    core.cancel(had(core, 4), S)
    events = core.expire(5 * S)
    assert [(type(event), event.sequence.handle) for event in events] == [(Withdrawn, 2), (Withdrawn, 3)]
    (first, _) = events
    assert isinstance(first, Withdrawn)
    assert first.refusal is not None
    assert first.refusal.reason is RefusalReason.SLO_UNATTAINABLE
    assert first.refusal.message.startswith("the request has waited for 5 s, and its deadline has passed")
    assert core.until_ps is None
    cancelled = [event.sequence.handle for event in member.plan(5 * S).events if isinstance(event, Cancelled)]
    assert sorted(cancelled) == [2, 3, 4]
    assert core.expire(9 * S) == []


def test_a_deadline_passes_wherever_one_waits() -> None:
    core = cluster(DEADLINES, num_workers=0)
    core.submit(sequence(1, deadline_ps=S), 0)
    assert refusal(core.expire(S)).reason is RefusalReason.SLO_UNATTAINABLE
    assert core.num_unplaced == 0
    core = cluster(DEADLINES)
    quota = Quota("key", max_running=1)
    core.submit(sequence(1, deadline_ps=S), 0, quota=quota)
    held = sequence(2, deadline_ps=S)
    assert core.submit(held, 0, quota=quota) == []
    core.members["w0"].plan(0)
    assert refusal(core.expire(S)).reason is RefusalReason.SLO_UNATTAINABLE
    core.ended(held, 0, S)
    assert (core.num_held, core.num_waiting, core.until_ps) == (0, 0, None)


def test_an_end_that_came_of_a_deadline_says_nothing_of_how_fast_the_queue_drains() -> None:
    core, now_ps = busy_cluster(DEADLINES)
    late = [sequence(100 + number, at_ps=now_ps, deadline_ps=now_ps + 50 * S) for number in range(20)]
    for one in late:
        core.submit(one, now_ps)
    for event in [*core.expire(now_ps + 50 * S), *core.expire(now_ps + 50 * S)]:
        core.ended(event.sequence, 0, now_ps + 50 * S)
    assert core.num_open == 6
    refused = refusal(core.submit(sequence(300, at_ps=now_ps, deadline_ps=now_ps + 60 * S), now_ps + 50 * S))
    assert "would start in about 39.3 s" in refused.message  # nothing has ended for 50 s


def run_dry(core: ClusterCore, at_ps: int) -> int:
    """Run worker w0 until it has nothing, and return when that is."""
    member, device = core.members["w0"], Device(dict.fromkeys(core.members["w0"].sequences, 5))
    while member.sequences:
        decision = member.plan(at_ps)
        assert isinstance(decision, Plan)
        ran = device.run(decision, at_ps, 1, None, chunks=True)
        at_ps = ran.end_ps
        for event in member.commit(decision, ran):
            if isinstance(event, Finished):
                core.ended(event.sequence, event.output_tokens, at_ps)
    return at_ps


def test_finished_ones_count_as_drained_and_light_load_is_not_measured() -> None:
    core, at_ps = cluster(DEADLINES), 0
    for handle in range(40):  # one at a time, one every ten seconds
        core.submit(sequence(handle, at_ps=at_ps), at_ps)
        at_ps = run_dry(core, at_ps) + 10 * S
    burst = [sequence(100 + number, at_ps=at_ps, deadline_ps=at_ps + S) for number in range(20)]
    assert all(is_placed(core.submit(one, at_ps)) for one in burst)


@pytest.mark.parametrize("rules", [ClusterRules(), DEADLINES, RULES])
def test_a_full_queue_tells_how_fast_it_drains_not_how_fast_requests_came_before(rules: ClusterRules) -> None:
    core, at_ps, handle = cluster(replace(rules, max_waiting_requests=20)), 0, count()
    for num_at_once in (1, 3, 1, 5, 2):  # with idle times between, when the last of some waits or none does
        for _ in range(num_at_once):
            core.submit(sequence(next(handle), f"t{next(handle)}", at_ps=at_ps), at_ps)
        at_ps = run_dry(core, at_ps) + 9 * S
    for _ in range(22):
        core.submit(sequence(next(handle), f"t{next(handle)}", at_ps=at_ps), at_ps)
    refused = refusal(core.submit(sequence(next(handle), "last", at_ps=at_ps), at_ps))
    assert refused.reason is RefusalReason.QUEUE_FULL
    assert refused.retry_ps == SHORTEST_PS  # steps here take next to no time
