"""A queue that raises where it is told to, and a worker with two seats that has such a one."""

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.checked.queue import CheckedQueue
from lorrery.scheduler.core.facts import Failed
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.plan import Idle, Plan
from lorrery.scheduler.core.queues.fifo import Fifo
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
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
    return Member("w", build_replica(settings, make_queue=lambda _: CheckedQueue(queue)), NEVER)


def submit(worker: Member, *handles: int, at_ps: int = 0) -> None:
    for handle in handles:
        worker.submit(Sequence(handle, 20, 5, at_ps, prompt_token_ids=list(range(20))), at_ps)


def failed(decision: Plan | Idle) -> list[int]:
    return [event.sequence.handle for event in decision.events if isinstance(event, Failed)]


def joins(decision: Plan | Idle) -> list[int]:
    return [sequence.handle for sequence in decision.joins] if isinstance(decision, Plan) else []
