"""A cancel's cause says whether its request has finished, and with how many tokens, wherever it is by then."""

import pytest

from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.facts import Cancelled, Event, Finished
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.scheduler.subscribers.record import describe_events
from lorrery.vocabulary.endings import MEANINGS, CancelCause, FinishReason
from tests.scheduler.core.clusters import S, cluster, only

UNFINISHED = [cause for cause in MEANINGS if cause.finish is None]


def member_of(core: ClusterCore) -> Member:
    (member,) = core.members.values()
    return member


def run(member: Member, at_ps: int, num_steps: int, finished: tuple[tuple[int, FinishReason], ...] = ()) -> list[Event]:
    """Plan, and run so many steps of a second each; return the events of both."""
    plan = member.plan(at_ps)
    assert isinstance(plan, Plan)
    return [*plan.events, *member.commit(plan, Ran(num_steps, at_ps + num_steps * S, finished))]


def begun() -> tuple[ClusterCore, Sequence]:
    """Return a cluster with a request that has 4 tokens after 4 seconds."""
    core, sequence = cluster(200), Sequence(1, 5, 20)
    core.submit(sequence, 0)
    run(member_of(core), 0, 1)
    run(member_of(core), S, 3)
    return core, sequence


def ends(events: list[Event]) -> list[tuple[str, int, int]]:
    return [(one.reason.word, one.output_tokens, one.at_ps) for one in events if isinstance(one, Finished)]


def test_every_cause_has_a_meaning() -> None:
    assert set(MEANINGS) == set(CancelCause)
    assert [cause for cause in MEANINGS if cause.finish is not None] == [CancelCause.STOP_TEXT]


def test_an_output_that_its_router_cut_has_finished_with_the_tokens_that_are_kept() -> None:
    core, sequence = begun()
    core.cancel(sequence, 4 * S - 5, CancelCause.STOP_TEXT, 2)
    events = member_of(core).plan(4 * S).events
    assert ends(list(events)) == [("stop", 2, 4 * S - 5)]
    assert describe_events(events)["finished"] == [[1, "stop", 2]]
    assert not any(isinstance(event, Cancelled) for event in events)
    assert not member_of(core).replica.num_running
    assert core.num_open == 0


@pytest.mark.parametrize("cause", UNFINISHED)
def test_every_other_cancel_leaves_it_unfinished(cause: CancelCause) -> None:
    core, sequence = begun()
    core.cancel(sequence, 4 * S, cause, 2)
    events = member_of(core).plan(4 * S).events
    assert [type(event) for event in events] == [Cancelled]


def test_a_cut_goes_before_an_end_at_a_later_boundary_and_not_before_one_at_an_earlier() -> None:
    core, sequence = begun()
    core.cancel(sequence, 4 * S + 1, CancelCause.STOP_TEXT, 3)
    plan = member_of(core).plan(4 * S)
    assert isinstance(plan, Plan)
    assert ends(member_of(core).commit(plan, Ran(1, 5 * S, ((1, FinishReason.EOS),)))) == [("stop", 3, 4 * S + 1)]

    core, sequence = begun()
    plan = member_of(core).plan(4 * S)
    assert isinstance(plan, Plan)
    core.cancel(sequence, 5 * S + 1, CancelCause.STOP_TEXT, 3)  # the step's report comes later
    assert ends(member_of(core).commit(plan, Ran(1, 5 * S, ((1, FinishReason.EOS),)))) == [("eos", 5, 5 * S)]


def test_one_that_no_worker_has_finishes_at_once() -> None:
    core, sequence = cluster(), Sequence(1, 5, 20, produced_tokens=4)
    core.submit(sequence, 0, resumed=True)
    finished = only(core.cancel(sequence, 3, CancelCause.STOP_TEXT, 2))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.output_tokens, finished.at_ps) == (FinishReason.STOP, 2, 3)


def test_a_cut_that_its_worker_has_not_seen_when_it_is_lost_still_counts() -> None:
    core, sequence = begun()
    core.cancel(sequence, 4 * S, CancelCause.STOP_TEXT, 2)
    gave_back, placed = core.lose(member_of(core), 4 * S)
    assert ends(gave_back.events) == [("stop", 2, 4 * S)]
    assert not placed
    assert not gave_back.sequences


def test_a_cut_in_strict_mode_stops_where_s_lora_aborts() -> None:
    settings = ReplicaSettings("req_queue", 200, 80, strict=True, batch_max_tokens=100, running_max_req_size=4)
    member = Member("w", build_replica(settings))
    sequence = Sequence(1, 5, 20)
    core = cluster()
    core.attach(member, 0)
    core.submit(sequence, 0)
    run(member, 0, 1)
    core.cancel(sequence, S, CancelCause.STOP_TEXT, 1)
    assert ends(run(member, S, 1)) == [("stop", 1, S)]


def skipping(handle: int) -> Sequence:
    sequence = Sequence(handle, 40, 4, prompt_token_ids=list(range(40)))
    sequence.skips_prefix_cache = True
    return sequence


CACHES = {
    "blocks": ReplicaSettings("fcfs", 400, 80, max_num_seqs=4, max_num_batched_tokens=100, prefix_cache="blocks"),
    "paged": ReplicaSettings(
        "fcfs", 400, 80, max_num_seqs=4, max_num_batched_tokens=100, prefix_cache="blocks", memory="paged", block_size=4
    ),
}


@pytest.mark.parametrize("settings", CACHES.values(), ids=CACHES.keys())
def test_a_request_that_skips_the_prefix_cache_computes_every_position_and_counts_no_look_up(
    settings: ReplicaSettings,
) -> None:
    replica = build_replica(settings)
    chunks: list[tuple[int, int]] = []
    queried: list[int] = []
    one_after_another: list[Sequence] = [Sequence(1, 40, 4, prompt_token_ids=list(range(40))), skipping(2)]
    one_after_another.append(Sequence(3, 40, 4, prompt_token_ids=list(range(40))))
    for number, sequence in enumerate(one_after_another):
        at_ps = number * S
        replica.submit(sequence, at_ps)
        plan = replica.plan(at_ps)
        assert isinstance(plan, Plan)
        chunks += [(chunk.new_tokens, chunk.past_tokens) for chunk in plan.prefills]
        queried += [event.queried_tokens for event in plan.events if hasattr(event, "queried_tokens")]
        replica.commit(plan, Ran(1, at_ps + 1, ((sequence.handle, FinishReason.EOS),)))
    assert chunks[:2] == [(40, 0), (40, 0)]
    assert chunks[2][1] > 0
    assert queried == [40, 0, 40]
    assert [one.first_cached_tokens > 0 for one in one_after_another] == [False, False, True]


def test_a_preempted_request_counts_its_look_up_once() -> None:
    replica = preempting()
    for handle in range(1, 5):
        replica.submit(Sequence(handle, 16, 40, prompt_token_ids=[handle] * 16), 0)
    queried = hits = preemptions = at_ps = 0
    for _ in range(400):
        plan = replica.plan(at_ps)
        for event in plan.events:
            if hasattr(event, "queried_tokens") and event.queried_tokens:
                queried += event.queried_tokens
                hits += event.sequence.cached_tokens
            preemptions += type(event).__name__ == "Preempted"
        if not isinstance(plan, Plan):
            break
        at_ps += S
        ended = tuple(
            (one.handle, FinishReason.LENGTH)
            for one in [*replica.running]
            if plan.decode and one.produced_tokens + replica.output_tokens(one) + 1 >= one.max_new_tokens
        )
        replica.commit(plan, Ran(1, at_ps, ended))
    assert preemptions > 0
    assert (queried, hits) == (4 * 16, 0)


def preempting() -> Replica:
    return build_replica(
        ReplicaSettings(
            "fcfs",
            128,
            80,
            batching="vllm",
            memory="on_demand",
            max_num_seqs=4,
            max_num_batched_tokens=100,
            prefix_cache="blocks",
            block_size=4,
        )
    )
