"""What the next step may be, and who chooses it."""

from dataclasses import dataclass
from typing import Protocol

from scheduler.core.queues.base import Queue
from scheduler.core.running import Running
from scheduler.core.sequence import Adapter, Sequence


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill these new sequences, in this order, while the running ones stall."""

    admitted: list[Sequence]


@dataclass(frozen=True, slots=True)
class Decode:
    """Let every running sequence decode, for at most `max_steps` steps; meanwhile load `prefetch`."""

    max_steps: int
    prefetch: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing runs. Ask again at `until_ps`; None: when something arrives."""

    until_ps: int | None = None


Choice = Prefill | Decode | Wait


class Batching(Protocol):
    """Chooses the next step. Its state changes in `choose` (admission) and `advanced` (steps done) only."""

    @property
    def queue(self) -> Queue:
        """Who waits."""
        ...

    def choose(self, running: Running, at_ps: int) -> Choice:
        """Decide at a boundary. `Decode.max_steps` says how long the same answer would hold without events."""
        ...

    def advanced(self, num_decode_steps: int) -> None:
        """Take note that so many decode steps of the last choice are done."""
        ...

    def emptied(self, at_ps: int) -> None:
        """Take note that the batch became empty at this boundary."""
        ...

    def heeds_arrivals(self, running: Running) -> bool:
        """Tell whether an arrival may change the last choice before it is through."""
        ...
