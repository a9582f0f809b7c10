"""A policy that raises ends sequences, never its worker: the one it was given, else its queue, else all it has."""

from collections.abc import Callable

import pytest

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.batching import CheckedBatching
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import Placed, Refused
from lorrery.scheduler.core.facts import Failed, Finished, Raised
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.plan import Idle, Plan, Ran
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import NEVER
from tests.scheduler.core.faulty_queue import Faulty, failed, joins, member, submit


def test_the_sequence_that_the_queue_could_not_take_fails_alone() -> None:
    queue = Faulty()
    worker = member(queue)
    queue.raises_in = "append"
    submit(worker, 1, 2, 3)
    plan = worker.plan(0)
    assert failed(plan) == [2]
    assert joins(plan) == [1, 3]
    assert set(worker.sequences) == {1, 3}
    assert len(queue) == 0


def test_all_in_the_queue_fail_and_the_batch_goes_on() -> None:
    queue = Faulty()
    worker = member(queue)
    submit(worker, 1)
    prefill = worker.plan(0)
    assert isinstance(prefill, Plan)
    worker.commit(prefill, Ran(1, 10))
    submit(worker, 5, 6, at_ps=10)
    worker.submit(Sequence(7, 20, 5, 99), 99)  # not seen yet at the next boundary
    queue.raises_in = "admit"
    plan = worker.plan(20)
    assert failed(plan) == [5, 6]
    assert isinstance(plan, Plan)
    assert plan.decode
    queue.raises_in = ""
    assert joins(worker.plan(99)) == [7]


def test_a_message_names_the_policy_and_one_event_stands_for_all_who_fail() -> None:
    queue = Faulty()
    worker = member(queue)
    queue.raises_in = "admit"
    submit(worker, 1, 2, 3)
    decision = worker.plan(0)
    raised = [event for event in decision.events if isinstance(event, Raised)]
    assert [str(event.error) for event in raised] == ["in admit"]
    assert raised[0].message.endswith("raised ZeroDivisionError: in admit")
    assert f"policy {Faulty.__module__}:Faulty under " in raised[0].message
    assert {event.message for event in decision.events if isinstance(event, Failed)} == {raised[0].message}
    assert failed(decision) == [1, 2, 3]
    assert isinstance(decision, Idle)
    assert worker.sequences == {}


@pytest.mark.parametrize("blocks", [False, True])
def test_what_a_broken_off_walk_had_pinned_is_given_back(blocks: bool) -> None:
    queue = Faulty()
    worker = member(queue, blocks=blocks)
    submit(worker, 1)
    queue.raises_in = "admit"
    assert failed(worker.plan(0)) == [1]
    queue.raises_in = ""
    replica = worker.replica
    assert not replica.num_waiting
    assert not replica.num_running
    assert not replica.kv_tokens
    submit(worker, 2, at_ps=5)
    plan = worker.plan(5)
    assert joins(plan) == [2]
    assert isinstance(plan, Plan)
    worker.commit(plan, Ran(1, 10, [(2, FinishReason.LENGTH)]))
    assert worker.sequences == {}
    use = replica.memory.block_use(replica.running)
    assert use is None or use.used == 0


@pytest.mark.parametrize(
    "method", ["append", "admit", "at_rest", "holds_for", "wakes_at_ps", "arrivals_matter", "decoded", "clear"]
)
@pytest.mark.parametrize("also_clear", [False, True])
def test_wherever_a_policy_raises_for_ever_every_sequence_ends_and_no_plan_hangs(method: str, also_clear: bool) -> None:
    queue = Faulty()
    worker = member(queue)
    queue.raises_in = method
    if also_clear:
        clear: Callable[[], list[Sequence]] = queue.clear

        def raising() -> list[Sequence]:
            clear()
            raise ZeroDivisionError("in clear")

        queue.clear = raising  # type: ignore[method-assign]
    ended: list[int] = []
    at_ps, on_device, handles = 0, set[int](), [2, 3, 4, 5]
    for _ in range(60):
        if handles:
            submit(worker, handles.pop(0), at_ps=at_ps)
        decision = worker.plan(at_ps)
        ended += [event.sequence.handle for event in decision.events if isinstance(event, Failed)]
        left = {sequence.handle for sequence in decision.leaves}
        assert left <= on_device
        on_device -= left
        at_ps += 10
        if isinstance(decision, Plan):
            on_device |= {sequence.handle for sequence in decision.joins}
            ends = [
                (sequence.handle, FinishReason.LENGTH)
                for sequence in worker.replica.running
                if decision.decode and sequence.output_tokens_at(worker.replica.running.decode_step) == 4
            ]
            on_device -= {handle for handle, _ in ends}
            events = worker.commit(decision, Ran(1, at_ps, ends))
            ended += [event.sequence.handle for event in events if isinstance(event, Finished)]
    assert sorted(ended) == [2, 3, 4, 5]
    assert worker.sequences == {}
    assert not worker.replica.num_running


def test_a_worker_that_goes_while_its_queue_raises_gives_back_nothing_and_fails_all() -> None:
    queue = Faulty()
    worker = member(queue)
    submit(worker, 1, 2, 3)
    worker.plan(0)
    queue.raises_in = "clear"
    unfinished, events = worker.lose(5)
    assert unfinished == []
    assert {event.sequence.handle for event in events if isinstance(event, Failed)} == {1, 2, 3}
    assert worker.sequences == {}


class NoLimits:
    """Continuous batching that raises when it is asked for its limits, and with `chooses` false in a decision too."""

    def __init__(self, *, chooses: bool) -> None:
        self._continuous = Continuous(BatchLimits(2, 100))
        self._chooses = chooses

    @property
    def limits(self) -> BatchLimits:
        raise ZeroDivisionError("in limits")

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        return self._continuous.choose(context, at_ps) if self._chooses else self.limits  # type: ignore[return-value]

    def advanced(self, num_decode_steps: int) -> None:
        self._continuous.advanced(num_decode_steps)

    def emptied(self, at_ps: int) -> None:
        self._continuous.emptied(at_ps)

    def arrivals_matter(self, context: BatchContext) -> bool:
        return self._continuous.arrivals_matter(context)


class Narrowing(NoLimits):
    """Continuous batching whose limits are an attribute, which it may change."""

    limits = BatchLimits(2, 100)


def test_a_worker_whose_limits_have_changed_does_not_speak_for_others() -> None:
    settings = ReplicaSettings("fcfs", 400, 80)
    ways = [Narrowing(chooses=True), Narrowing(chooses=True)]
    core = ClusterCore(LeastLoaded())
    for number, way in enumerate(ways):
        core.attach(
            Member(f"w{number}", build_replica(settings, make_batching=lambda _, way=way: CheckedBatching(way)), NEVER),
            0,
        )
    ways[1].limits = BatchLimits(2, 10)
    for handle in range(4):
        (event,) = core.submit(Sequence(handle, 50, 5), 0)
        assert isinstance(event, Placed)
        assert event.member.name == "w0"
    ways[0].limits = BatchLimits(2, 10)
    (event,) = core.submit(Sequence(4, 50, 5), 0)
    assert isinstance(event, Refused)


def test_a_worker_whose_limits_raise_has_no_seat_for_requests_that_move() -> None:
    replica = build_replica(
        ReplicaSettings("fcfs", 400, 80), make_batching=lambda _: CheckedBatching(NoLimits(chooses=True))
    )
    assert not replica.headroom().has(Sequence(1, 5, 5))
    with pytest.raises(ZeroDivisionError, match="in limits"):
        replica.plan(0)


@pytest.mark.parametrize("chooses", [True, False])
def test_limits_that_raise_take_nobody_along_at_the_door(chooses: bool) -> None:
    settings = ReplicaSettings("fcfs", 400, 80)
    worker = Member(
        "w", build_replica(settings, make_batching=lambda _: CheckedBatching(NoLimits(chooses=chooses))), NEVER
    )
    core = ClusterCore(LeastLoaded())
    core.attach(worker, 0)
    (event,) = core.submit(Sequence(1, 5, 5), 0)
    assert isinstance(event, Placed)
    decision = worker.plan(0)
    if chooses:
        assert isinstance(decision, Plan)
    else:
        assert [event.sequence.handle for event in decision.events if isinstance(event, Failed)] == [1]
        assert not worker.sequences


class Uncountable(Fifo):
    """First come first served; cannot say how many wait while one of 13 tokens does."""

    def __len__(self) -> int:
        if any(sequence.prompt_tokens == 13 for sequence in self):
            raise ZeroDivisionError("in __len__")
        return super().__len__()


def test_a_queue_that_cannot_say_how_many_wait_ends_who_waits_and_nothing_raises_in_the_driver() -> None:
    settings = ReplicaSettings("fcfs", 200, 80, max_num_seqs=1, max_num_batched_tokens=100)
    core = ClusterCore(LeastLoaded())
    for name in ("w0", "w1"):
        core.attach(Member(name, build_replica(settings, make_queue=lambda _settings: CheckedQueue(Uncountable()))), 0)
    first = core.members["w0"]
    first.submit(Sequence(0, 5, 5), 0)
    first.plan(0)
    first.submit(Sequence(1, 13, 5), 1)
    first.plan(1)  # it waits for the only seat
    assert core.num_waiting == 0
    assert core.balance(2) == []
    assert isinstance(core.submit(Sequence(2, 5, 5), 3)[0], Placed)
    events = first.plan(4).events
    assert [event.sequence.handle for event in events if isinstance(event, Failed)] == [1]
    (raised,) = (event for event in events if isinstance(event, Raised))
    assert raised.message.endswith("ZeroDivisionError: in __len__")
    assert set(first.sequences) == {0}
