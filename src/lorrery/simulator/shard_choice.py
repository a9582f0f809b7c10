"""Chooses a request's scheduler, where there are several, as routers do, each with its own knowledge.

Routers do not communicate. Each scheduler reports its number of open requests ten times a second; a router adds the
requests that it has sent there since, times the number of routers. A report shows the state at the last arrival before
it, so it is never newer than it would be live; later ends, of the router's own requests too, appear in the next report.
Requests go to the routers in turn.
"""

from collections.abc import Sequence

from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.simulator.request import SimulatedRequest
from lorrery.vocabulary import rendezvous
from lorrery.vocabulary.units import PS_PER_SECOND

REPORT_SECONDS = 0.1
"""Wall time between two reports of a scheduler."""


class ShardChoice:
    """Chooses for all routers.

    Args:
        addresses: of the schedulers.
        bound: see `rendezvous.choose_bounded`.
        num_routers: at least 1.
        time_scale: wall seconds in a device second.

    Attributes:
        cores: of the schedulers; to be set before the first choice.
    """

    def __init__(self, addresses: Sequence[str], bound: float, num_routers: int, time_scale: float) -> None:
        self.cores: Sequence[ClusterCore] = ()
        self._addresses, self._bound = addresses, bound
        self._report_ps = round(REPORT_SECONDS / time_scale * PS_PER_SECOND)
        self._report = -1  # number of the last one
        self._said = [0] * len(addresses)
        self._seen = [0] * len(addresses)  # at the last arrival
        self._sent = [[0] * len(addresses) for _ in range(num_routers)]  # since the last report
        self._router = -1

    def choose(self, request: SimulatedRequest) -> int:
        """Return the index of the scheduler for a request that has just arrived."""
        sent = self._hear(request.arrived_ps)
        key = request.adapter.adapter_id if request.adapter is not None else str(request.handle)
        sizes = [len(core.members) for core in self.cores]
        there = [index for index, size in enumerate(sizes) if size] or list(range(len(sizes)))
        chosen = there[
            rendezvous.choose_bounded(
                key,
                [self._addresses[index] for index in there],
                [self._said[index] + len(self._sent) * sent[index] for index in there],
                [max(1, sizes[index]) for index in there],
                self._bound,
            )
        ]
        sent[chosen] += 1
        self._seen[chosen] += 1
        return chosen

    def _hear(self, at_ps: int) -> list[int]:
        """Apply a report due since the last arrival; return the counts sent by the router whose turn it is."""
        report = at_ps // self._report_ps
        if report != self._report:
            self._report, self._said = report, self._seen
            for sent in self._sent:
                sent[:] = [0] * len(sent)
        self._seen = [core.num_open for core in self.cores]
        self._router = (self._router + 1) % len(self._sent)
        return self._sent[self._router]
