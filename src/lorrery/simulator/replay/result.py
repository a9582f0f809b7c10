"""Results of a replay: what it compared, and the first difference."""

from dataclasses import dataclass, field

from lorrery.scheduler.subscribers.history import AdapterTally
from lorrery.scheduler.subscribers.record import Record


@dataclass(slots=True)
class Replayed:
    """Counts of what a replay compared, and its differences.

    Attributes:
        tally: figures of adapters, without the stays on workers that had not left.
        differences: (line of the journal, description); empty if the runs are equal.
        num_placed: times that a request went to a worker.
        num_derived: placements derived from the recorded figures, and placement errors derived from them.
        num_late: inputs that took effect late, at boundaries from the journal.
        num_gaps: gaps between steps of a worker, taken from the journal.
    """

    tally: AdapterTally = field(default_factory=AdapterTally)
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
    """The simulation differs from the journal.

    Args:
        line: of the journal.
        whats: descriptions of the differences.
    """

    def __init__(self, line: int, *whats: str) -> None:
        super().__init__(line, *whats)
        self.line = line
        self.whats = whats


def compare(line: int, what: str, simulated: Record, live: Record) -> None:
    """Compare simulated values with those of a line of the journal.

    Raises:
        DifferenceError: they differ.
    """
    keys = [key for key in {**simulated, **live} if simulated.get(key) != live.get(key)]
    if keys:
        raise DifferenceError(
            line, *(f"{what}: {key} is {simulated.get(key)} simulated, {live.get(key)} live" for key in keys)
        )
