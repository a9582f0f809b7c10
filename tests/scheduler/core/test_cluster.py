"""Who comes in, where a request goes, what is queued again and when a wait is over, as tables."""

from dataclasses import replace
from typing import Any

import pytest

from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Placed, Refused, Withdrawn
from lorrery.scheduler.core.facts import Cancelled
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.base import Candidate, Choice
from lorrery.scheduler.core.placements.by_load import LeastLoaded, RoundRobin
from lorrery.scheduler.core.placing import SLICE
from lorrery.scheduler.core.refusals import RefusalReason
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from tests.scheduler.core.clusters import ADAPTER, RULES, S, cluster, had, only, placed, replica


@pytest.mark.parametrize(
    ("sequence", "adapter_id", "reason", "words"),
    [
        (Sequence(1, 0, 5), "", RefusalReason.INVALID, "prompt has 0 tokens"),
        (Sequence(1, 5, 0), "", RefusalReason.INVALID, "max_new_tokens is 0"),
        (Sequence(1, 51, 5), "", RefusalReason.NEVER_FITS, "max_req_input_len is 50"),
        (Sequence(1, 50, 31), "", RefusalReason.NEVER_FITS, "max_req_total_len:80"),
        (Sequence(1, 30, 30), "", RefusalReason.NEVER_FITS, "max_total_token_num:60"),
        (Sequence(1, 5, 5), "b", RefusalReason.UNKNOWN_ADAPTER, "adapter_id 'b' is not known; see ListAdapters"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(
    sequence: Sequence, adapter_id: str, reason: RefusalReason, words: str
) -> None:
    core = cluster(40, 60)  # the largest pool counts
    event = only(core.submit(sequence, 0, adapter_id=adapter_id))
    assert isinstance(event, Refused)
    assert event.refusal.reason is reason
    assert words in event.refusal.message
    assert core.num_open == 0


def test_the_last_of_each_limit_comes_in() -> None:
    core = cluster(81, rules=replace(RULES, max_waiting_requests=9))
    for handle, (prompt, budget) in enumerate([(50, 30), (1, 79), (50, 1)]):
        assert placed(core.submit(Sequence(handle, prompt, budget), 0)) == [(handle, "w0")]


def test_the_pool_of_the_settings_goes_before_the_workers_own() -> None:
    core = cluster(1000, rules=replace(RULES, max_total_token_num=40))
    event = only(core.submit(Sequence(1, 30, 10), 0))
    assert isinstance(event, Refused)
    assert "max_total_token_num:40" in event.refusal.message


def test_a_request_has_the_adapter_that_it_names_also_when_that_is_unloaded_afterwards() -> None:
    core = cluster(200)
    sequence = Sequence(1, 5, 5)
    core.submit(sequence, 0, adapter_id="a")
    core.unload_adapter("a")
    core.unload_adapter("a")
    assert sequence.adapter == ADAPTER
    assert isinstance(only(core.submit(Sequence(2, 5, 5), 0, adapter_id="a")), Refused)
    core.load_adapter(Adapter("a", 8, version=7))
    again = Sequence(3, 5, 5)
    core.submit(again, 0, adapter_id="a")
    assert again.adapter == Adapter("a", 8, version=7)


def test_a_resumed_request_keeps_the_adapter_that_it_began_with_whatever_the_name_stands_for_now() -> None:
    core = cluster(200, rules=replace(RULES, max_waiting_requests=9))
    first, second = Adapter("b", 2, version=5), Adapter("b", 16, version=6)
    core.load_adapter(second)

    def adapter_of(handle: int, adapter_id: str, **how: Any) -> Adapter | None:
        sequence = Sequence(handle, 5, 5)
        assert isinstance(only(core.submit(sequence, 0, adapter_id=adapter_id, **how)), Placed)
        return sequence.adapter

    assert adapter_of(1, "b", resumed=True, pinned=first) == first
    assert adapter_of(2, "b", pinned=first) == second  # a new one has what the name stands for
    assert adapter_of(3, "b", resumed=True) == second  # its router did not know yet what it had been given
    core.unload_adapter("b")
    assert adapter_of(4, "b", resumed=True, pinned=first) == first
    core.unload_adapter("a")
    core.load_adapter(Adapter("a", 16, version=7))
    assert adapter_of(5, "a", resumed=True) == ADAPTER  # as the settings list it
    assert adapter_of(6, "a") == Adapter("a", 16, version=7)
    assert isinstance(only(core.submit(Sequence(7, 5, 5), 0, adapter_id="b", resumed=True)), Refused)
    assert core.is_out_of_use(first)
    assert core.is_out_of_use(ADAPTER)
    assert not core.is_out_of_use(Adapter("a", 16, version=7))


def test_a_full_queue_and_a_drain_refuse_new_requests_but_none_that_has_been_let_in_before() -> None:
    core = cluster()
    assert all(core.submit(Sequence(handle, 5, 5), 0) == [] for handle in (1, 2, 3))
    full = only(core.submit(Sequence(4, 5, 5), 0))
    assert isinstance(full, Refused)
    assert (full.refusal.reason, full.refusal.message) == (
        RefusalReason.QUEUE_FULL,
        "3 requests wait; max_waiting_requests is 3; try later",
    )
    assert core.submit(Sequence(5, 5, 5), 0, resumed=True) == []
    core.draining = True
    refused = only(core.submit(Sequence(6, 5, 5), 0, resumed=True))
    assert isinstance(refused, Refused)
    assert refused.refusal.reason is RefusalReason.DRAINING
    assert core.submit(Sequence(7, 5, 5, produced_tokens=2), 0) == []  # its limits were checked elsewhere
    assert core.num_waiting == 5


def test_requests_in_a_batch_do_not_count_as_waiting() -> None:
    core = cluster(200)
    for handle in (1, 2):
        core.submit(Sequence(handle, 5, 5), 0)
    core.members["w0"].plan(0)
    for handle in (3, 4, 5):
        assert placed(core.submit(Sequence(handle, 5, 5), 0)) == [(handle, "w0")]
    assert isinstance(only(core.submit(Sequence(6, 5, 5), 0)), Refused)


def test_where_no_worker_is_to_come_nobody_waits_for_one() -> None:
    core = cluster()
    core.submit(Sequence(1, 5, 5), 0)
    core.expect_no_worker(1 * S)
    core.submit(Sequence(2, 5, 5), 2 * S)
    assert core.until_ps == 1 * S
    for event in core.expire(2 * S):
        assert isinstance(event, Refused)
        assert (event.refusal.reason, event.refusal.message) == (
            RefusalReason.NO_WORKER,
            "the last worker has ended, and none is to come",
        )
    assert core.num_open == 0
    core.submit(Sequence(3, 5, 5), 2 * S)
    member = Member("w", replica())
    assert placed(core.attach(member, 2 * S)) == [(3, "w")]  # one has come all the same
    core.lose(member, 3 * S)
    assert core.until_ps == 13 * S
    core.attach(Member("w", replica()), 4 * S)
    core.expect_no_worker(5 * S)  # while its last one is still attached
    core.lose(core.members["w"], 6 * S)
    assert core.until_ps == 6 * S


def test_a_worker_that_comes_although_none_was_to_come_lets_waits_begin_anew() -> None:
    core = cluster()
    core.submit(Sequence(1, 45, 30), 0)
    core.expect_no_worker(1 * S)
    assert core.attach(Member("w", replica(60)), 2 * S) == []  # it cannot hold that one
    assert core.until_ps == 12 * S
    assert core.expire(12 * S - 1) == []
    over = only(core.expire(12 * S))
    assert isinstance(over, Refused)
    assert over.refusal.message.startswith("no worker that can take it has attached for 10 s (worker_wait_seconds): ")


def test_a_wait_for_a_worker_ends_when_it_is_over_and_begins_anew_after_each_loss() -> None:
    core = cluster()
    core.submit(Sequence(1, 5, 5), 0)
    core.submit(Sequence(2, 5, 5), 4 * S)
    assert core.until_ps == 10 * S
    assert core.expire(10 * S - 1) == []
    over = only(core.expire(10 * S))
    assert isinstance(over, Refused)
    assert (over.sequence.handle, over.refusal.reason) == (1, RefusalReason.NO_WORKER)
    assert over.refusal.message == "no worker has attached for 10 s (worker_wait_seconds)"
    member = Member("w", replica())
    events = core.attach(member, 12 * S)
    assert placed(events) == [(2, "w")]
    assert core.until_ps is None
    gave_back, events = core.lose(member, 13 * S)
    assert [sequence.handle for sequence in gave_back.sequences] == [2]
    assert events == []
    assert core.until_ps == 23 * S
    assert core.expire(14 * S) == []


def test_device_time_is_waited_in_wall_seconds() -> None:
    core = cluster(rules=replace(RULES, time_scale=4.0))
    core.submit(Sequence(1, 5, 5), 0)
    assert core.until_ps == 10 * S // 4


def test_a_cancel_of_one_that_waits_for_a_worker_ends_it_at_once_and_of_another_is_passed_on() -> None:
    core = cluster()
    first, second = Sequence(1, 5, 5), Sequence(2, 5, 5)
    core.submit(first, 0)
    cancelled = only(core.cancel(first, 1))
    assert isinstance(cancelled, Cancelled)
    assert core.until_ps is None
    assert core.cancel(first, 2) == []
    member = Member("w", replica())
    core.attach(member, 3)
    core.submit(second, 3)
    withdrawn = only(core.cancel(second, 4))
    assert isinstance(withdrawn, Withdrawn)
    assert withdrawn.member is member
    assert core.cancel(second, 4) == []
    assert [type(event) for event in member.plan(4).events] == [Cancelled]
    assert core.num_open == 0
    assert core.cancel(second, 5) == []


def test_a_worker_that_drains_gets_nothing_new_and_gives_back_what_waits() -> None:
    core = cluster(200, 200)
    first = core.members["w0"]
    for handle in range(8):
        core.submit(Sequence(handle, 5, 5), 0, resumed=True)
    running = {sequence.handle for sequence in first.plan(0).joins}  # type: ignore[union-attr]
    gave_back, events = core.drain(first, 1)
    assert running
    assert [sequence.handle for sequence in gave_back.sequences] == [h for h in range(0, 8, 2) if h not in running]
    assert placed(events) == [(sequence.handle, "w1") for sequence in gave_back.sequences]
    assert placed(core.submit(Sequence(9, 5, 5), 1, resumed=True)) == [(9, "w1")]
    assert set(first.sequences) == running


def test_a_request_that_only_one_of_several_workers_can_hold_is_told_to_the_placement() -> None:
    core = ClusterCore(RoundRobin())
    for name, pool in (("small", 40), ("large", 200), ("other", 200)):
        core.attach(Member(name, replica(pool)), 0)
    core.lose(core.members["other"], 0)
    wide = core.submit(Sequence(1, 50, 20), 0)
    assert placed(wide) == [(1, "large")]
    assert placed(core.submit(Sequence(2, 5, 5), 0)) == [(2, "large")]  # the first had the first turn
    assert placed(core.submit(Sequence(3, 5, 5), 0)) == [(3, "small")]


def test_one_that_no_attached_worker_can_ever_hold_is_refused_at_once_if_it_is_new() -> None:
    core = cluster(40, rules=ClusterRules(worker_wait_seconds=10, max_total_token_num=200))
    refused = only(core.submit(Sequence(1, 50, 20), 0))
    assert isinstance(refused, Refused)
    assert refused.refusal.reason is RefusalReason.NEVER_FITS
    assert refused.refusal.message.startswith("no attached worker can ever take it: ")
    assert core.num_open == 0


def test_one_that_waits_goes_on_waiting_while_only_workers_attach_that_are_too_small() -> None:
    core = cluster()
    core.submit(Sequence(1, 50, 20), 0)
    core.submit(Sequence(2, 5, 5), 1)
    assert placed(core.attach(Member("small", replica(40), 40), 2)) == [(2, "small")]
    assert core.until_ps == 10 * S  # since it came
    assert placed(core.attach(Member("large", replica(200), 200), 3)) == [(1, "large")]
    assert core.until_ps is None


@pytest.mark.parametrize("drains", [False, True])
def test_losing_the_only_worker_large_enough_lets_its_sequences_wait_as_if_none_were_attached(drains: bool) -> None:
    core = cluster(40, 200)
    for handle in (1, 2):
        assert placed(core.submit(Sequence(handle, 50, 20), handle)) == [(handle, "w1")]
    large = core.members["w1"]
    gave_back, events = (core.drain if drains else core.lose)(large, 5 * S)
    assert [sequence.handle for sequence in gave_back.sequences] == [1, 2]
    assert (events, core.num_unplaced, core.until_ps) == ([], 2, 15 * S)
    assert isinstance(only(core.cancel(had(core, 2), 6 * S)), Cancelled)
    over = only(core.expire(15 * S))
    assert isinstance(over, Refused)
    assert (over.sequence.handle, over.refusal.reason) == (1, RefusalReason.NO_WORKER)
    start = "no worker that can take it has attached for 10 s (worker_wait_seconds): "
    assert over.refusal.message.startswith(start)


def test_one_that_was_let_in_before_waits_for_a_worker_that_is_large_enough() -> None:
    core = cluster(40)
    assert core.submit(Sequence(1, 50, 20), 0, resumed=True) == []
    assert core.submit(Sequence(2, 50, 20, produced_tokens=3), 0, resumed=True) == []
    assert isinstance(only(core.submit(Sequence(3, 51, 20), 0, resumed=True)), Refused)  # over max_req_input_len
    assert placed(core.attach(Member("large", replica(200), 200), 1)) == [(1, "large"), (2, "large")]


def test_many_that_come_back_are_placed_a_slice_at_a_time_and_may_end_meanwhile() -> None:
    core = cluster(2_000, 2_000, rules=ClusterRules(worker_wait_seconds=10))
    for handle in range(3 * SLICE):
        core.submit(Sequence(handle, 5, 5), 0)
    gave_back, events = core.lose(core.members["w0"], 1)
    assert len(gave_back.sequences) > SLICE
    assert len(events) == SLICE
    assert core.is_placing
    assert core.num_open == 3 * SLICE
    last = gave_back.sequences[-1]
    assert isinstance(only(core.cancel(last, 2)), Cancelled)
    again = core.expire(100 * S)  # late; but they wait for nobody
    assert placed(again) == [(sequence.handle, "w1") for sequence in gave_back.sequences[SLICE:-1]]
    assert not core.is_placing
    assert core.place_again(3) == core.expire(100 * S) == []
    assert core.num_open == 3 * SLICE - 1


def test_when_the_last_worker_goes_meanwhile_the_rest_waits_for_another() -> None:
    core = cluster(2_000, rules=ClusterRules(worker_wait_seconds=10))
    for handle in range(2 * SLICE):
        core.submit(Sequence(handle, 5, 5), 0)
    core.lose(core.members["w0"], 1)
    assert not core.is_placing
    assert core.num_unplaced == 2 * SLICE
    member = Member("w1", replica(2_000))
    first = core.attach(member, 2)
    assert (len(first), core.is_placing) == (SLICE, True)
    core.lose(member, 3)
    assert (core.num_unplaced, core.is_placing) == (2 * SLICE, False)
    assert placed(core.attach(Member("w2", replica(2_000)), 4)) == [(h, "w2") for h in range(SLICE, 2 * SLICE)]
    assert placed(core.place_again(5)) == [(h, "w2") for h in range(SLICE)]  # whose wait began last


def test_what_a_placement_read_is_noted_for_each_candidate() -> None:
    core = ClusterCore(LeastLoaded(), notes_figures=True)
    for name in ("w0", "w1"):
        core.attach(Member(name, replica()), 0)
    core.submit(Sequence(1, 5, 5), 0)
    event = only(core.submit(Sequence(2, 5, 5, adapter=ADAPTER), 0))
    assert isinstance(event, Placed)
    assert event.figures == {"w0": {"load": 1, "has_adapter a": 0}, "w1": {"load": 0, "has_adapter a": 0}}


def test_a_placement_that_raises_refuses_its_request_and_no_other() -> None:
    class Broken:
        def place(self, sequence: Sequence, candidates: list[Candidate]) -> Choice:
            if sequence.handle == 1:
                raise ZeroDivisionError("no such luck")
            return Choice(candidates[-1], "the last")

    core = ClusterCore(Broken())
    for name in ("w0", "w1"):
        core.attach(Member(name, replica()), 0)
    refused = only(core.submit(Sequence(1, 5, 5), 0))
    assert isinstance(refused, Refused)
    assert refused.refusal.reason is RefusalReason.INTERNAL
    assert "Broken raised ZeroDivisionError: no such luck" in refused.refusal.message
    assert isinstance(refused.error, ZeroDivisionError)
    assert placed(core.submit(Sequence(2, 5, 5), 0)) == [(2, "w1")]
    assert core.num_open == 1


def test_first_admission_counts_once() -> None:
    core = cluster(200, 200)
    sequence = Sequence(1, 5, 5)
    core.submit(sequence, 0)
    member = core.members["w0"]
    plan = member.plan(7)
    assert [(event.first, event.sequence) for event in plan.events] == [(True, sequence)]  # type: ignore[union-attr]
    core.lose(member, 9)
    again = core.members["w1"].plan(11)
    assert [event.first for event in again.events] == [False]  # type: ignore[union-attr]
    assert (sequence.first_admitted_ps, sequence.admitted_ps, sequence.num_requeues) == (7, 11, 1)


def test_a_sequence_on_which_worker_after_worker_was_lost_is_given_up_and_not_moved_on() -> None:
    core = cluster(rules=replace(RULES, max_worker_losses=2))
    one_at_a_time = ReplicaSettings("fcfs", 200, 80, max_num_seqs=1, max_num_batched_tokens=100)
    suspect, waiting = Sequence(1, 50, 5), Sequence(2, 50, 5)
    for sequence in (suspect, waiting):
        core.submit(sequence, 0)
    for number in range(2):
        core.attach(Member(f"w{number}", build_replica(one_at_a_time)), number)
        member = core.members[f"w{number}"]
        member.plan(number)
        assert member.replica.running.get(2) is None
        gave_back, events = core.lose(member, number)
        assert gave_back.sequences == [suspect, waiting]
    refused = only(events)
    assert isinstance(refused, Refused)
    assert (refused.sequence, refused.refusal.reason) == (suspect, RefusalReason.WORKERS_LOST)
    assert "2 workers were lost while they ran this request; max_worker_losses is 2" in refused.refusal.message
    assert refused.refusal.facts == {"field": "max_worker_losses", "value": 2, "limit": 2}
    assert (core.num_open, core.num_unplaced) == (1, 1)  # the one that never ran waits for a worker


def test_a_worker_that_leaves_as_announced_counts_against_nobody() -> None:
    core = cluster(rules=replace(RULES, max_worker_losses=1))
    core.submit(Sequence(1, 5, 5), 0)
    member = Member("w", replica())
    core.attach(member, 0)
    member.plan(0)
    core.drain(member, 1)
    gave_back, events = core.lose(member, 2)
    assert [sequence.handle for sequence in gave_back.sequences] == [1]
    assert (events, core.num_unplaced) == ([], 1)
