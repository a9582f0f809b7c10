"""How many adapters `cluster` runs at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.queues.few_adapters import Cluster
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter
from lorrery.validation.policy.drive import step_by_step
from tests.scheduler.core.queues.one_queue import A, B, C, admitted, replica_of, request, try_once, world


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from([A, B, C, None]), min_size=1, max_size=30), most=st.integers(1, 2))
def test_cluster_never_runs_more_adapters_than_it_may(names: list[Adapter | None], most: int) -> None:
    def check(replica: Replica) -> None:
        assert len(replica.running.adapter_keys) <= most

    sequences = [request(index, adapter, output=1 + index % 7) for index, adapter in enumerate(names)]
    log = step_by_step(replica_of(Cluster(most)), world(sequences), check)
    assert sorted(admitted(log)) == [sequence.handle for sequence in sequences]


def test_strict_cluster_runs_any_number_of_adapters() -> None:
    replica = replica_of(Cluster(1, strict=True), strict=True)
    for handle, adapter in enumerate((A, B, C)):
        replica.submit(request(handle, adapter), 0)
    assert try_once(replica) == [0, 1, 2]


@pytest.mark.parametrize(("polluted", "entered"), [(False, [1]), (True, [])])
def test_a_refused_candidate_counts_on_in_strict_clusters_second_pass(polluted: bool, entered: list[int]) -> None:
    memory = PeakMemory(60, keep_refused=polluted)
    replica = Replica(
        Cluster(1, strict=True), Continuous(BatchLimits(9, 60)), memory, options=ReplicaOptions(strict=True)
    )
    replica.submit(request(0, A), 0)
    assert try_once(replica) == [0]
    replica.submit(request(1, None, prompt=4, output=2), 1)  # would fit
    replica.submit(request(2, A, prompt=50), 1)  # goes first, since its adapter runs, and does not
    assert try_once(replica, 1) == entered
