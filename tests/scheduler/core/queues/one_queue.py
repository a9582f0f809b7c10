"""A replica with one queue, what arrives there, and what enters its batch."""

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.batching.whole_prompts import Continuous
from lorrery.scheduler.core.facts import Admitted
from lorrery.scheduler.core.memory.peak import PeakMemory
from lorrery.scheduler.core.planner import ReplicaOptions
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.queues.pets import Profile
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import World

A, B, C = (Adapter(name, 1) for name in "abc")


def replica_of(queue: Queue, *, pool: int = 200, places: int = 4, strict: bool = False) -> Replica:
    return Replica(
        queue,
        Continuous(BatchLimits(places, pool)),
        PeakMemory(pool, exact=True),
        options=ReplicaOptions(strict=strict),
    )


def request(handle: int, adapter: Adapter | None = A, *, prompt: int = 5, output: int = 4, at_ps: int = 0) -> Sequence:
    return Sequence(handle, prompt, output, at_ps, adapter)


def world(sequences: list[Sequence]) -> World:
    return World([(sequence.arrived_ps, sequence, sequence.max_new_tokens) for sequence in sequences])


def admitted(log: list[tuple[object, ...]]) -> list[object]:
    return [entry[2] for entry in log if entry[0] == "admitted"]


def try_once(replica: Replica, at_ps: int = 0) -> list[int]:
    decision = replica.plan(at_ps)
    return [event.sequence.handle for event in decision.events if isinstance(event, Admitted)]


class LengthProfile(Profile):
    def prefill(self, num_sequences: int, tokens: int) -> int:
        return 1 + num_sequences * tokens

    def adapter(self, rank: int, num_sequences: int, tokens: int) -> int:
        return rank * (1 + num_sequences * tokens)
