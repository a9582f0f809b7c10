"""The part of an engine before its scheduler: HTTP, chat template and tokeniser, on one thread of each API server.

An event loop takes turns between all requests that it has. So a request that finds it idle is ready after its own work,
and those that come meanwhile are ready together, once the work of all of them is done:

    work = request_ps + prompt tokens * token_ps        ready = end of the batch before + sum of the batch's work

Requests go to the API servers in turn.
"""

from dataclasses import dataclass, field

from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.units import NEVER
from lorrery.worker.device.deployment import NO_FRONT_END, FrontEndCost

__all__ = ["NO_FRONT_END", "FrontEnd", "FrontEndCost"]


@dataclass(slots=True)
class _Server:
    """One thread: the batch that it works on until `end_ps`, and what has come since it began."""

    end_ps: int = NEVER
    batch: list[Sequence] = field(default_factory=list)
    next_batch: list[Sequence] = field(default_factory=list)
    next_work_ps: int = 0


class FrontEnd:
    """The requests of one worker that have not reached its scheduler yet.

    Args:
        cost: of its work.

    Attributes:
        num: of these requests.
        next_ps: when the next of them are ready; `NEVER`: there are none.
    """

    __slots__ = ("_cost", "_servers", "_turn", "next_ps", "num")

    def __init__(self, cost: FrontEndCost) -> None:
        self._cost = cost
        self._servers = [_Server() for _ in range(cost.servers)]
        self._turn = 0
        self.num = 0
        self.next_ps: int = NEVER

    def take(self, sequence: Sequence, at_ps: int) -> None:
        """Begin, or wait, to work on a request that comes now; `ready` has been called for this time."""
        server = self._servers[self._turn]
        self._turn = (self._turn + 1) % len(self._servers)
        work_ps = self._cost.work_ps(sequence.prompt_tokens)
        if server.batch:
            server.next_batch.append(sequence)
            server.next_work_ps += work_ps
        else:
            server.batch, server.end_ps = [sequence], at_ps + work_ps
            self.next_ps = min(self.next_ps, server.end_ps)
        self.num += 1

    def ready(self, until_ps: int) -> list[tuple[int, Sequence]]:
        """Remove and return the requests that are ready by a time, in order of the times at which they are."""
        found: list[tuple[int, Sequence]] = []
        for server in self._servers:
            while server.end_ps <= until_ps:
                found += [(server.end_ps, sequence) for sequence in server.batch]
                server.batch, server.next_batch = server.next_batch, []
                server.end_ps = server.end_ps + server.next_work_ps if server.batch else NEVER
                server.next_work_ps = 0
        if len(self._servers) > 1:
            found.sort(key=lambda one: one[0])
        self.num -= len(found)
        self.next_ps = min(server.end_ps for server in self._servers)
        return found

    def sequences(self) -> list[Sequence]:
        """Return all requests, those that are ready first."""
        return [one for server in self._servers for one in (*server.batch, *server.next_batch)]

    def clear(self) -> None:
        """Forget all requests."""
        self._servers = [_Server() for _ in self._servers]
        self.num, self.next_ps = 0, NEVER
