"""Figures of adapters, from the events of their loads, evictions and losses."""

from lorrery.scheduler.core.adapters.loads import AdapterLog, AdapterOptions
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.facts import Facts
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.subscribers.history import MAX_NAMES, OTHERS, AdapterTally
from lorrery.vocabulary.adapters import AdapterFigures, summed
from tests.scheduler.core.test_adapters import A, B, residency


def logged(held: Residency) -> tuple[AdapterTally, AdapterLog]:
    log = held.log = AdapterLog()
    return AdapterTally(), log


def test_loads_evictions_thrash_and_stays_of_each_adapter() -> None:
    held = residency(AdapterOptions(max_loras=1), fails=(0,))
    tally, log = logged(held)
    held.require(A, 0)  # fails until 100, is in host memory from 200 on, and has a place from 1,000 on
    held.advance(1_000)
    held.settle(1_000)
    held.require(B, 1_500)  # fails until 1,700, is in host memory from 1,900 on, and has a place from 2,000 on
    held.advance(2_000)
    held.settle(2_000)
    held.require(A, 2_600)  # from the host: fails until 2,610, has come at 2,620, and has a place from 3,000 on
    held.advance(3_000)
    held.settle(3_000)
    Facts([tally]).publish(log.take(), 0)
    assert tally.read([log], 5_000) == {
        "a": AdapterFigures(4, 2, 2, 1, host_load_ps=20, disk_load_ps=200, resident_ps=500 + 2_000),
        "b": AdapterFigures(2, 1, 0, 1, host_load_ps=0, disk_load_ps=400, resident_ps=600),
    }
    assert tally.read([], 5_000)["a"].resident_ps == 500  # without the present stay


def test_stays_end_with_their_worker_and_are_no_evictions() -> None:
    replica = build_replica(ReplicaSettings("fcfs", 1000, 100), load_ps=lambda adapter, tier: 10)
    tally, log = logged(replica.adapters)
    replica.adapters.require(A, 0)
    replica.adapters.advance(100)
    replica.lose(500)
    Facts([tally]).publish(log.take(), 0)
    assert tally.read([log], 10_000) == {"a": AdapterFigures(num_loads=1, disk_load_ps=10, resident_ps=490)}


def test_versions_of_an_adapter_count_together_and_later_ones_of_too_many_too() -> None:
    tally, log = AdapterTally(), AdapterLog()
    for version in (0, 1):
        log.load_ended(Adapter("a", 1, version=version), "disk", 10, 10, failed=False)
    for number in range(MAX_NAMES + 5):
        log.load_ended(Adapter(str(number), 1), "disk", 10, 10, failed=False)
    Facts([tally]).publish(log.take(), 0)
    figures = tally.read([log], 20)
    assert figures["a"] == AdapterFigures(num_loads=2, disk_load_ps=20, resident_ps=20)
    assert len(figures) == MAX_NAMES + 1
    assert figures[OTHERS] == AdapterFigures(num_loads=6, disk_load_ps=60, resident_ps=60)


def test_figures_of_schedulers_add_up_less_those_of_an_earlier_time() -> None:
    before = {"a": AdapterFigures(num_loads=1), "b": AdapterFigures(num_loads=2)}
    one, other = {**before, "a": AdapterFigures(num_loads=3)}, {"c": AdapterFigures(resident_ps=5)}
    assert summed([one, other], [before]) == {"a": AdapterFigures(num_loads=2), "c": AdapterFigures(resident_ps=5)}
