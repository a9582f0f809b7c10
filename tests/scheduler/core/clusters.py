"""Small clusters, and what they tell."""

from lorrery.scheduler.core.acceptance import ClusterRules
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.cluster_facts import ClusterEvent, Placed
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.placements.by_load import LeastLoaded
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence

S = 10**12
RULES = ClusterRules(max_req_input_len=50, max_req_total_len=80, max_waiting_requests=3, worker_wait_seconds=10)
ADAPTER = Adapter("a", 4)


def replica(pool: int = 200) -> Replica:
    return build_replica(ReplicaSettings("fcfs", pool, 80, max_num_seqs=2, max_num_batched_tokens=100))


def cluster(*pools: int, rules: ClusterRules = RULES) -> ClusterCore:
    core = ClusterCore(LeastLoaded(), rules, [ADAPTER])
    for number, pool in enumerate(pools):
        core.attach(Member(f"w{number}", replica(pool), pool), 0)
    return core


def only(events: list[ClusterEvent]) -> ClusterEvent:
    (event,) = events
    return event


def placed(events: list[ClusterEvent]) -> list[tuple[int, str]]:
    assert all(isinstance(event, Placed) for event in events)
    return [(event.sequence.handle, event.member.name) for event in events if isinstance(event, Placed)]


def had(core: ClusterCore, handle: int) -> Sequence:
    """Return a sequence that has not ended."""
    of_workers = [sequence for member in core.members.values() for sequence in member.sequences.values()]
    return next(sequence for sequence in (*core.unplaced(), *of_workers) if sequence.handle == handle)
