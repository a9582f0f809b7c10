"""What a placement rule sees and returns."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import ceil

from lorrery.scheduler.core.placements.candidate import Candidate
from lorrery.scheduler.core.placements.worker_table import FEW, WorkerTable

__all__ = [
    "Candidate",
    "Choice",
    "Score",
    "bound_given",
    "bound_of",
    "least_loaded",
    "least_of",
    "load_bound",
    "table_of",
]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one worker under a placement that scores workers.

    Attributes:
        name: the worker's.
        total: the sum of weight x term.
        load: the worker's at that time.
        terms: by name, each from 0 to 1.
    """

    name: str
    total: float
    load: int
    terms: dict[str, float]


class Choice:
    """The worker chosen, and why: for the decision log.

    Args:
        candidate: chosen.
        why: the reason, as text.
        scores: of all workers that were considered, if the placement scores them.

    Attributes:
        candidate: as given.
        why: as given.
        scores: as given.
    """

    __slots__ = ("candidate", "scores", "why")

    def __init__(self, candidate: Candidate, why: str, scores: tuple[Score, ...] = ()) -> None:
        self.candidate = candidate
        self.why = why
        self.scores = scores


def table_of(candidates: Many[Candidate]) -> WorkerTable | None:
    """Return the figures of these workers as columns, if they are many and all of them; None: read each of them."""
    if len(candidates) <= FEW:
        return None
    table = getattr(candidates[0], "table", None)  # only a replica's candidate has it
    if not isinstance(table, WorkerTable) or table.candidates is not candidates:
        return None
    table.refresh()
    return table


def least_loaded(candidates: Many[Candidate]) -> Candidate:
    """Return the candidate with the fewest sequences; ties: fewest KV tokens, then the first to attach.

    Cost: a few operations on columns for the sequence of all workers as `Placement.place` gets it, if they are many
    (`core.placements.worker_table`); for any other, a look at each.
    """
    if len(candidates) == 1:
        return candidates[0]
    table = table_of(candidates)
    if table is not None:
        return table.least_loaded()
    return least_of(candidates, [candidate.load for candidate in candidates])


def least_of(candidates: Many[Candidate], loads: list[int]) -> Candidate:
    """Return `least_loaded`, given the loads."""
    least = min(loads)
    chosen, fewest_tokens = candidates[loads.index(least)], -1
    if loads.count(least) > 1:
        for number, load in enumerate(loads):
            if load == least:
                candidate = candidates[number]
                tokens = candidate.kv_tokens
                if fewest_tokens < 0 or tokens < fewest_tokens:
                    chosen, fewest_tokens = candidate, tokens
    return chosen


def load_bound(candidates: Many[Candidate], factor: float, extra: int = 1) -> int:
    """Return the load up to which a preferred worker takes another sequence.

    It is the mean load, the new sequence included, times `factor`, and at least `extra` above the least.
    """
    return bound_of([candidate.load for candidate in candidates], factor, extra)


def bound_of(loads: list[int], factor: float, extra: int = 1) -> int:
    """Return `load_bound`, given the loads."""
    return bound_given(sum(loads), min(loads), len(loads), factor, extra)


def bound_given(total: int, least: int, num: int, factor: float, extra: int = 1) -> int:
    """Return `load_bound`, given the sum of the `num` loads, and the least of them."""
    return max(ceil(factor * (total + 1) / num) - 1, least + extra)
