"""What a replay compared, and the first difference that it found."""

from dataclasses import dataclass, field

from lorrery.scheduler.core.record import Record


@dataclass(slots=True)
class Replayed:
    """What a replay compared, and what it found.

    Attributes:
        differences: (line of the journal, what is different); empty if the runs are equal.
        num_placed: times that a request went to a worker.
        num_derived: those among them that follow from what the placement read, and its errors that do.
        num_late: inputs that took effect late, whose boundaries were given.
        num_gaps: times that a worker stood still between two steps, which were given.
    """

    num_requests: int = 0
    num_workers: int = 0
    num_lost: int = 0
    num_cancels: int = 0
    num_placed: int = 0
    num_derived: int = 0
    num_plans: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_late: int = 0
    num_gaps: int = 0
    differences: list[tuple[int, str]] = field(default_factory=list)


class DifferenceError(Exception):
    """The simulation arrives at something else.

    Args:
        line: of the journal.
        whats: what is different.
    """

    def __init__(self, line: int, *whats: str) -> None:
        super().__init__(line, *whats)
        self.line = line
        self.whats = whats


def compare(line: int, what: str, simulated: Record, live: Record) -> None:
    """Compare what the simulation arrives at with what a line of the journal says.

    Raises:
        DifferenceError: they differ.
    """
    keys = [key for key in {**simulated, **live} if simulated.get(key) != live.get(key)]
    if keys:
        raise DifferenceError(
            line, *(f"{what}: {key} is {simulated.get(key)} simulated, {live.get(key)} live" for key in keys)
        )
