"""Clients of a simulation: the load generator's open and closed loops, and the turns of sessions.

In an open loop a session's first turn arrives at its scheduled time, in a closed loop as soon as a client is free; each
later turn arrives one think time after the previous answer ended. A session ends at its first failed turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lorrery.loadgen.workload.request import WorkloadRequest, sessions
from lorrery.simulator.loop.build import RequestBuilder, Said
from lorrery.simulator.loop.engine import Simulation
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.vocabulary.units import LAST_SECONDS, NEVER, picoseconds


@dataclass(slots=True)
class _OpenSession:
    """A session whose request `sent` runs, with its earlier turns and the turns that remain."""

    sent: WorkloadRequest
    rest: Iterator[WorkloadRequest]
    num_rest: int
    said: list[Said]


@dataclass(slots=True)
class Clients:
    """Plays a workload against a simulation.

    Attributes:
        num_unsent: turns that were never sent because an earlier turn of their session failed.
    """

    simulation: Simulation
    builder: RequestBuilder
    num_unsent: int = 0
    _open: dict[int, _OpenSession] = field(default_factory=dict)

    def open_loop(self, workload: Sequence[WorkloadRequest]) -> Iterator[SimulatedRequest]:
        """Send each session at its time from now; yield requests as they end."""
        start_ps = self.simulation.now_ps

        def alone() -> Iterator[tuple[int, SimulatedRequest]]:
            for request in workload:
                at_ps = start_ps + picoseconds(request.at_seconds)
                yield at_ps, self.builder.build(request, at_ps)

        def first_turns() -> Iterator[tuple[int, SimulatedRequest]]:
            for turns in sessions(workload):
                at_ps = start_ps + picoseconds(turns[0].at_seconds)
                yield at_ps, self._begin(turns, at_ps)

        if any(request.turn is not None for request in workload):
            return self.simulation.run(first_turns(), follow=self._next_turn)
        return self.simulation.run(alone())

    def closed_loop(
        self, workload: Iterable[WorkloadRequest], num_clients: int, duration_seconds: float | None = None
    ) -> Iterator[SimulatedRequest]:
        """Run `num_clients` clients that send one session after another for a duration; yield requests as they end."""
        simulation, waiting = self.simulation, sessions(workload)
        end_ps = NEVER
        if duration_seconds is not None:
            end_ps = simulation.now_ps + _picoseconds(duration_seconds)

        def begin_next(now_ps: int) -> tuple[int, SimulatedRequest] | None:
            if now_ps >= end_ps or (turns := next(waiting, None)) is None:
                return None
            return now_ps, self._begin(turns, now_ps)

        def follow(ended: SimulatedRequest, now_ps: int) -> tuple[int, SimulatedRequest] | None:
            following = self._next_turn(ended, now_ps, end_ps)
            return begin_next(now_ps) if following is None else following

        first = [sent for _ in range(num_clients) if (sent := begin_next(simulation.now_ps)) is not None]
        return simulation.run(first, follow=follow)

    def _begin(self, turns: list[WorkloadRequest], at_ps: int) -> SimulatedRequest:
        if len(turns) > 1:
            self._open[turns[0].index] = _OpenSession(turns[0], iter(turns[1:]), len(turns) - 1, [])
        return self.builder.build(turns[0], at_ps)

    def _next_turn(
        self, ended: SimulatedRequest, now_ps: int, end_ps: int = NEVER
    ) -> tuple[int, SimulatedRequest] | None:
        session = self._open.pop(ended.handle, None)
        if session is None or (request := next(session.rest, None)) is None:
            return None
        if ended.outcome != "finished":
            self.num_unsent += session.num_rest
            return None
        assert request.turn is not None
        at_ps = now_ps + _picoseconds(request.turn.think_seconds)
        if at_ps >= end_ps:
            return None
        session.said.append((session.sent, self.builder.said(ended)))
        session.sent, session.num_rest = request, session.num_rest - 1
        self._open[request.index] = session
        return at_ps, self.builder.build(request, at_ps, session.said)


def _picoseconds(seconds: float) -> int:
    """Convert a duration, capped just beyond the longest simulation so that no product overflows."""
    return picoseconds(min(seconds, LAST_SECONDS + 1))
