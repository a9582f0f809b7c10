"""Which worker serves a new sequence.

Least loaded with adapter affinity: the worker with the fewest sequences (waiting and running; ties: fewest KV tokens,
then the order of attaching), unless one where the sequence's adapter is already in use is not much fuller. Adapters
take memory on each worker that runs them, so keeping the requests of one adapter together leaves more of it for
sequences; the bound keeps a popular adapter from filling one worker while others idle.
"""

from collections.abc import Iterable
from typing import Protocol

from scheduler.core.replica import Replica
from scheduler.core.sequence import Sequence

AFFINITY_MAX_EXTRA_SEQUENCES = 4
AFFINITY_MAX_LOAD_RATIO = 1.25


class Placement(Protocol):
    """Chooses a replica. Never mutates."""

    def __call__(self, sequence: Sequence, replicas: Iterable[Replica]) -> Replica | None:
        """Return where it goes, or None if there is no replica."""
        ...


def least_loaded_with_affinity(sequence: Sequence, replicas: Iterable[Replica]) -> Replica | None:
    """Choose the least loaded replica, or one that has the adapter in use and is not much fuller."""
    ranked = sorted(replicas, key=lambda replica: (load(replica), replica.kv_tokens))
    if not ranked:
        return None
    least = load(ranked[0])
    if sequence.adapter is not None:
        most = max(least + AFFINITY_MAX_EXTRA_SEQUENCES, least * AFFINITY_MAX_LOAD_RATIO)
        for replica in ranked:
            if load(replica) <= most and sequence.adapter.adapter_id in replica.resident_adapters:
                return replica
    return ranked[0]


def load(replica: Replica) -> int:
    """Return how many sequences a replica has, waiting and running."""
    return replica.num_waiting + replica.num_running
