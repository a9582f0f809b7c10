"""Where a request's time goes, by hand; that it adds up whatever happens: `test_replica`, `test_cluster`, the fuzz."""

from collections.abc import Callable

import pytest

from lorrery.scheduler.core.adapters.loads import AdapterOptions, LoadFault
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Phases, Sequence, split
from lorrery.validation.policy.drive import Device, Log, World, jump, step_by_step

A, B = Adapter("a", 1), Adapter("b", 1)
LOAD_PS = {"a": 10_000, "b": 25_000}


def replica(*, blocking: bool = False, max_loras: int | None = None, seats: int = 4, failing: int = 0) -> Replica:
    return Replica(
        Fifo(),
        Continuous(BatchLimits(seats, 100)),
        PeakMemory(1000),
        adapters=Residency(
            AdapterOptions(max_loras=max_loras, blocking=blocking),
            load_ps=lambda adapter, tier: LOAD_PS[adapter.adapter_id],
            load_faults=lambda adapter, attempt, at_ps: LoadFault(attempt < failing),
        ),
        options=ReplicaOptions(max_overtakes=4),
    )


def told(sequence: Sequence, end_ps: int) -> Phases:
    phases = sequence.phases(end_ps)
    assert sum(phases) == end_ps - sequence.arrived_ps
    return phases


@pytest.mark.parametrize(
    ("admitted_ps", "first_token_ps", "end_ps", "loads_ps", "phases"),
    [
        (300, 700, 1_000, (0, 0), Phases(200, 0, 400, 300)),
        (300, 700, 1_000, (150, 100), Phases(50, 250, 300, 300)),
        (300, 700, 600, (0, 0), Phases(200, 0, 300, 0)),  # its client left in the step of its first token
        (300, 700, 250, (0, 0), Phases(150, 0, 0, 0)),  # before the boundary at which it was admitted
        (300, 700, 250, (180, 90), Phases(0, 150, 0, 0)),
        (300, 700, 90, (10, 10), Phases(0, 0, 0, 0)),  # before its arrival, by another clock
        (80, 700, 1_000, (0, 0), Phases(0, 0, 600, 300)),
        (300, 280, 1_000, (0, 50), Phases(200, 0, 0, 700)),
    ],
)
def test_a_request_that_arrived_at_100_is_split_at_its_admission_and_its_first_token(
    admitted_ps: int, first_token_ps: int, end_ps: int, loads_ps: tuple[int, int], phases: Phases
) -> None:
    assert split(100, admitted_ps, first_token_ps, end_ps, *loads_ps) == phases


def test_waiting_for_nothing_but_the_adapter_is_adapter_load() -> None:
    one = Sequence(1, 10, 3, arrived_ps=100, adapter=A)
    log = jump(replica(), World([(100, one, 3)]))
    end_ps = 100 + 10_000 + 1_070 + 1_070 + 1_077
    assert log[-1][:3] == ("finished", end_ps, 1)
    assert told(one, end_ps) == Phases(0, 10_000, 1_070, 2_147)


@pytest.mark.parametrize("drive", [jump, step_by_step])
def test_what_lies_before_the_look_and_after_the_load_is_queue(drive: Callable[[Replica, World], Log]) -> None:
    running, one = Sequence(1, 10, 50), Sequence(2, 10, 1, arrived_ps=100, adapter=A)
    log = drive(replica(), World([(0, running, 50), (100, one, 1)]))
    admitted_ps = next(entry[1] for entry in log if entry[0] == "admitted" and entry[2] == 2)
    assert admitted_ps > 11_070  # the load ends within a step
    assert told(one, admitted_ps + 1_070) == Phases(970 + admitted_ps - 11_070, 10_000, 1_070, 0)


def test_a_load_that_fails_and_begins_anew_is_one_wait() -> None:
    one = Sequence(1, 10, 1, adapter=A)
    log = jump(replica(failing=2), World([(0, one, 1)]))
    assert told(one, log[-1][1]) == Phases(0, 30_000, 1_070, 0)


def test_whoever_lacks_a_seat_too_is_queued() -> None:
    running, one = Sequence(1, 10, 5), Sequence(2, 10, 1, adapter=A)
    log = jump(replica(seats=1), World([(0, running, 5), (0, one, 1)]))
    free_ps = next(entry[1] for entry in log if entry[0] == "finished")
    assert told(one, log[-1][1]) == Phases(free_ps, 10_000, 1_070, 0)


def test_the_wait_for_an_adapters_place_is_adapter_load() -> None:
    running, one = Sequence(1, 10, 5, adapter=A), Sequence(2, 10, 1, adapter=B)
    log = jump(replica(max_loras=1), World([(0, running, 5), (0, one, 1)]))
    assert told(one, log[-1][1]) == Phases(0, log[-1][1] - 1_070, 1_070, 0)


def test_a_prefill_that_waits_for_loads_counts_each_sequence_its_own() -> None:
    first, second, third = Sequence(1, 10, 1, adapter=A), Sequence(2, 10, 1, adapter=B), Sequence(3, 10, 1)
    log = jump(replica(blocking=True), World([(0, first, 1), (0, second, 1), (0, third, 1)]))
    end_ps = 25_000 + 1_210
    assert log[-1][1] == end_ps
    assert told(first, end_ps) == Phases(0, 10_000, end_ps - 10_000, 0)
    assert told(second, end_ps) == Phases(0, 25_000, 1_210, 0)
    assert told(third, end_ps) == Phases(0, 0, end_ps, 0)


def test_a_lost_worker_ends_the_wait_for_its_load_and_another_begins_its_own() -> None:
    one = Sequence(1, 10, 1, adapter=A)
    lost, other = replica(), replica()
    lost.submit(one, 0)
    lost.plan(500)
    lost.lose(4_500)
    other.submit(one, 6_000)
    other.plan(6_000)
    assert told(one, 7_000) == Phases(500 + 1_500, 4_000 + 1_000, 0, 0)
    plan = other.plan(16_000)
    assert isinstance(plan, Plan)
    other.commit(plan, Device({1: 1}).run(plan, 16_000, 1, None))
    assert told(one, 17_070) == Phases(2_000, 14_000, 1_070, 0)


def test_a_prefill_that_is_lost_while_it_waits_for_its_adapter_has_waited_until_then() -> None:
    one = Sequence(1, 10, 2, adapter=A)
    lost, other = replica(blocking=True), replica(blocking=True)
    lost.submit(one, 0)
    lost.plan(500)
    lost.lose(4_500)
    assert told(one, 4_600) == Phases(500, 4_000, 100, 0)
    other.submit(one, 5_000)
    plan = other.plan(5_000)
    assert isinstance(plan, Plan)
    other.commit(plan, Device({1: 2}).run(plan, 5_000, 1, None))
    assert told(one, 20_000) == Phases(500, 14_000, 500 + 1_070, 20_000 - 16_070)


def test_a_sequence_that_moves_leaves_its_load_behind() -> None:
    one = Sequence(1, 10, 1, adapter=A)
    donor, taker = replica(), replica()
    donor.submit(one, 0)
    donor.plan(0)
    donor.recall(1, "taker", 3_000)
    donor.plan(3_000)
    taker.submit(one, 4_000)
    assert told(one, 20_000) == Phases(17_000, 3_000, 0, 0)


def test_a_worker_that_drains_gives_back_who_waits_for_a_load() -> None:
    one = Sequence(1, 10, 1, adapter=A)
    drained = replica()
    drained.submit(one, 0)
    drained.plan(0)
    drained.withdraw_waiting(3_000)
    assert told(one, 20_000) == Phases(17_000, 3_000, 0, 0)


def test_a_request_that_brings_tokens_decodes_from_its_admission() -> None:
    one = Sequence(1, 10, 5, adapter=A, produced_tokens=2)
    log = jump(replica(), World([(0, one, 5)]))
    end_ps = log[-1][1]
    assert told(one, end_ps) == Phases(0, 10_000, 0, end_ps - 10_000)


def test_a_preemption_after_the_first_token_is_decode() -> None:
    one = Sequence(1, 10, 5, arrived_ps=100)
    one.first_admitted_ps, one.admitted_ps, one.first_token_ps = 200, 200, 300
    one.requeue(2, 400)
    lacking = replica()
    one.adapter = A
    lacking.submit(one, 400)
    lacking.plan(400)
    assert told(one, 5_000) == Phases(100, 0, 100, 4_700)


def test_a_client_that_goes_within_a_step_has_had_no_more_than_its_time() -> None:
    one = Sequence(1, 10, 5, adapter=A)
    waiting = replica(blocking=True)
    waiting.submit(one, 0)
    plan = waiting.plan(1_000)
    assert isinstance(plan, Plan)
    waiting.commit(plan, Device({1: 5}).run(plan, 1_000, 1, None))
    assert told(one, 4_000) == Phases(1_000, 3_000, 0, 0)
    assert told(one, 500) == Phases(500, 0, 0, 0)
