"""A policy that raises ends sequences, never its worker: the one it was given, else its queue, else all it has."""

from collections.abc import Callable

import pytest

from lorrery.chassis.version import core_is_compiled
from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.batching.continuous import Continuous
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_events import Placed, Refused
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.placements.least_loaded import LeastLoaded
from lorrery.scheduler.core.plan import Dropped, Failed, Finished, Idle, Plan, Raised, Ran
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import NEVER


class Faulty(Fifo):
    """First come first served; raises in the method that it is told to, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.raises_in = ""

    def _maybe(self, method: str) -> None:
        if self.raises_in == method:
            raise ZeroDivisionError(f"in {method}")

    def append(self, sequence: Sequence, at_ps: int) -> None:
        super().append(sequence, at_ps)
        if self.raises_in == "append" and sequence.handle == 2:
            raise ZeroDivisionError("in append")

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        dropped = super().admit(admission, running, at_ps)
        self._maybe("admit")
        return dropped

    def at_rest(self) -> bool:
        if self.raises_in == "at_rest":
            raise ZeroDivisionError("in at_rest")
        return super().at_rest()

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        self._maybe("holds_for")
        return super().holds_for(running, memory, limit)

    def wakes_at_ps(self, at_ps: int) -> int | None:
        self._maybe("wakes_at_ps")
        return super().wakes_at_ps(at_ps)

    def arrivals_matter(self) -> bool:
        self._maybe("arrivals_matter")
        return super().arrivals_matter()

    def decoded(self, running: Running, num_steps: int) -> None:
        self._maybe("decoded")
        super().decoded(running, num_steps)

    def clear(self) -> list[Sequence]:
        self._maybe("clear")
        return super().clear()


class Keeps(Faulty):
    """Tries all that wait, and takes nobody out whom the pass has admitted; tries each as often as it is told to."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in list(self):
            for _ in range(self.times):
                admission.admit(sequence)
        return []


def member(queue: Faulty, *, blocks: bool = False) -> Member:
    settings = ReplicaSettings(
        "fcfs",
        400,
        80,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        memory="paged" if blocks else "peak",
        prefix_cache="blocks" if blocks else "none",
    )
    return Member("w", build_replica(settings, make_queue=lambda _: queue), NEVER)


def submit(worker: Member, *handles: int, at_ps: int = 0) -> None:
    for handle in handles:
        worker.submit(Sequence(handle, 20, 5, at_ps, prompt_token_ids=list(range(20))), at_ps)


def failed(decision: Plan | Idle) -> list[int]:
    return [event.sequence.handle for event in decision.events if isinstance(event, Failed)]


def joins(decision: Plan | Idle) -> list[int]:
    return [sequence.handle for sequence in decision.joins] if isinstance(decision, Plan) else []


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


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("max_new_tokens", [1, 5])  # the first has ended when it is tried again, or it runs
def test_a_queue_that_keeps_whom_it_has_admitted_has_raised_and_the_batch_goes_on(
    blocks: bool, max_new_tokens: int
) -> None:
    queue = Keeps()
    worker = member(queue, blocks=blocks)
    worker.submit(Sequence(1, 20, max_new_tokens, 0, prompt_token_ids=list(range(20))), 0)
    prefill = worker.plan(0)
    assert isinstance(prefill, Plan)
    ended = ((1, FinishReason.LENGTH),)
    worker.commit(prefill, Ran(1, 10, ended if max_new_tokens == 1 else ()))
    submit(worker, 2, at_ps=10)
    decision = worker.plan(20)
    assert failed(decision) == [2]
    (raised,) = (event for event in decision.events if isinstance(event, Raised))
    assert f"policy {__name__}:Keeps under " in raised.message
    assert "`admit` left a request in the queue that it admitted; check it: `lorrery validate policy`" in raised.message
    assert "2" not in raised.message.partition("raised")[2]  # the same for every request: it is logged once
    if max_new_tokens > 1:
        assert isinstance(decision, Plan)
        worker.commit(decision, Ran(4, 50, ended))
    assert not worker.sequences
    assert not len(worker.replica.running)
    assert len(queue) == 0


class Drops(Faulty):
    """Drops all that wait, and takes them out only if it is told to; or tries them first, or drops something else."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.num_passes = 0

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        self.num_passes += 1
        found = list(self)
        if self.wrong == "keeps and tries" and self.num_passes > 1:
            for sequence in found:
                admission.admit(sequence)
            return self.clear()
        if self.wrong == "admits too":
            for sequence in found:
                admission.admit(sequence)
            return self.clear()
        if self.wrong == "handles":
            return [sequence.handle for sequence in self.clear()]  # type: ignore[misc]
        return found if self.wrong.startswith("keeps") else 2 * self.clear()


@pytest.mark.parametrize("blocks", [False, True])
def test_a_dropped_request_ends_once_though_its_queue_keeps_it(blocks: bool) -> None:
    queue = Drops("keeps")
    worker = member(queue, blocks=blocks)
    submit(worker, 1, 2)
    worker.cancel(1, 30)  # on its way when the queue drops it
    assert [(type(event), event.sequence.handle) for event in worker.plan(0).events] == [(Dropped, 1), (Dropped, 2)]
    assert not worker.sequences
    later = [event for at_ps in (10, 20, 30) for event in worker.plan(at_ps).events]
    assert all(isinstance(event, Raised) for event in later)
    assert worker.withdraw_waiting(40) == ([], [])
    assert worker.lose(50) == ([], [])


@pytest.mark.parametrize("leave", ["cancel", "withdraw", "lose"])
def test_a_dropped_request_that_is_still_in_the_queue_is_nobodys_any_more(leave: str) -> None:
    worker = member(Drops("keeps"))
    submit(worker, 1, 2)
    worker.cancel(1, 30)
    worker.recall(2, "other", 30)
    assert len(worker.plan(0).events) == 2
    worker.replica.queue.admit = lambda *_: []  # type: ignore[method-assign]
    if leave == "cancel":
        assert not worker.plan(30).events
    assert (worker.withdraw_waiting(40) if leave == "withdraw" else worker.lose(40)) == ([], [])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("keeps and tries", "`admit` left a request in the queue that it dropped; check it: `lorrery validate policy`"),
        ("twice", "`admit` left a request in the queue that it dropped; check it: `lorrery validate policy`"),
        ("admits too", "`admit` dropped a request that it admitted; check it: `lorrery validate policy`"),
        ("handles", "raised TypeError" if core_is_compiled() else "raised AttributeError"),
    ],
)
@pytest.mark.parametrize("blocks", [False, True])
def test_a_queue_that_drops_what_it_cannot_drop_has_raised(wrong: str, message: str, blocks: bool) -> None:
    worker = member(Drops(wrong), blocks=blocks)
    submit(worker, 1, 2)
    decisions = [worker.plan(0)]
    if wrong == "keeps and tries":
        submit(worker, 3, at_ps=10)
        decisions.append(worker.plan(10))
    raised = [event for decision in decisions for event in decision.events if isinstance(event, Raised)]
    assert f"policy {__name__}:Drops under " in raised[0].message
    assert message in raised[0].message
    assert failed(decisions[-1]) == ([3] if wrong == "keeps and tries" else [1, 2])
    assert not worker.sequences
    assert not len(worker.replica.running)
    use = worker.replica.memory.block_use(worker.replica.running)
    assert use is None or use.used == 0


@pytest.mark.parametrize("blocks", [False, True])
def test_a_queue_that_tries_a_request_again_in_the_pass_that_admitted_it_has_raised(blocks: bool) -> None:
    worker = member(Keeps(times=2), blocks=blocks)
    submit(worker, 1)
    assert failed(worker.plan(0)) == [1]
    assert not worker.sequences
    assert not len(worker.replica.running)
    use = worker.replica.memory.block_use(worker.replica.running)
    assert use is None or use.used == 0


def test_a_message_names_the_policy_and_one_event_stands_for_all_who_fail() -> None:
    queue = Faulty()
    worker = member(queue)
    queue.raises_in = "admit"
    submit(worker, 1, 2, 3)
    decision = worker.plan(0)
    raised = [event for event in decision.events if isinstance(event, Raised)]
    assert [str(event.error) for event in raised] == ["in admit"]
    assert raised[0].message.endswith("raised ZeroDivisionError: in admit")
    assert f"policy {__name__}:Faulty under " in raised[0].message
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
        core.attach(Member(f"w{number}", build_replica(settings, make_batching=lambda _, way=way: way), NEVER), 0)
    ways[1].limits = BatchLimits(2, 10)
    for handle in range(4):
        (event,) = core.submit(Sequence(handle, 50, 5), 0)
        assert isinstance(event, Placed)
        assert event.member.name == "w0"
    ways[0].limits = BatchLimits(2, 10)
    (event,) = core.submit(Sequence(4, 50, 5), 0)
    assert isinstance(event, Refused)


@pytest.mark.parametrize("chooses", [True, False])
def test_limits_that_raise_take_nobody_along_at_the_door(chooses: bool) -> None:
    settings = ReplicaSettings("fcfs", 400, 80)
    worker = Member("w", build_replica(settings, make_batching=lambda _: NoLimits(chooses=chooses)), NEVER)
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
        core.attach(Member(name, build_replica(settings, make_queue=lambda _settings: Uncountable())), 0)
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
