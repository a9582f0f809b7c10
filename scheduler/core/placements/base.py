"""What a placement rule sees and answers."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from lorrery.scheduler.core.many_workers import ManyWorkers
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.worker.device.pace import Pace


class Candidate(Protocol):
    """A worker that could take the sequence: figures of the present, read when they are asked for."""

    @property
    def name(self) -> str:
        """The worker's id; the same for as long as it is attached."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences in its queue."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences in its batch, those in prefill included."""
        ...

    @property
    def load(self) -> int:
        """Sequences it has, waiting and running."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens that the sequences of its batch hold."""
        ...

    def has_adapter(self, adapter: Adapter) -> bool:
        """Tell whether an adapter is on its GPU in this version, usable now."""
        ...

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of the sequence's input its prefix cache holds. Cost: one look-up."""
        ...

    @property
    def is_blocked(self) -> bool:
        """Whether those that wait, if any do, could not start when they were tried."""
        ...

    def load_ps(self, adapter: Adapter) -> int:
        """Return how long the load of an adapter takes there, by itself: 0 if it is there, half if it is under way."""
        ...

    @property
    def pace(self) -> Pace:
        """What its steps take, as announced; see `core.forecast` for this and what follows."""
        ...

    @property
    def slowdown(self) -> int:
        """What its last steps took, in thousandths of what its pace says."""
        ...

    @property
    def usual_slowdown(self) -> int:
        """The same for all its steps."""
        ...

    @property
    def prompt_share(self) -> int:
        """Share of its last steps' time in which running sequences waited for prompts, in thousandths."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Input tokens of the sequences in its queue."""
        ...

    @property
    def output_ratio(self) -> int:
        """How much of what they may produce requests do produce lately, in thousandths; the same of all workers."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """What a placement that scores workers makes of one of them.

    Attributes:
        name: the worker's.
        total: the sum of weight x term.
        load: of the worker then.
        terms: by name, each from 0 to 1.
    """

    name: str
    total: float
    load: int
    terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker chosen, and why: for the decision log.

    Attributes:
        candidate: chosen.
        why: in words.
        scores: of all workers that were looked at, by a placement that scores them.
    """

    candidate: Candidate
    why: str
    scores: tuple[Score, ...] = ()


class Placement(Protocol):
    """Chooses a worker, by the candidates' figures, what it chose before, and the generator that it was made with.

    With an attribute `moves_waiting` that is true, what it has placed may move to another worker while it waits, if it
    would start there first (`core.balance`). Candidates keep the figures from `pace` on only for a placement with an
    attribute `predicts` that is true; for others they are those of a worker without steps.
    """

    def place(self, sequence: Sequence, candidates: Many[Candidate]) -> Choice:
        """Choose one of the candidates, of which there is at least one, in order of attaching.

        It may only look at what it is handed, and changes nothing but its own state.
        """
        ...


def kept_of(candidates: Many[Candidate]) -> ManyWorkers | None:
    """Return what is kept of these workers, up to date, if they are all of many; None: look at each of them."""
    many = getattr(candidates[0], "many", None)  # a replica's candidate has it, no other kind
    if not isinstance(many, ManyWorkers) or many.candidates is not candidates:
        return None
    many.refresh()
    return many


def least_loaded(candidates: Many[Candidate]) -> Candidate:
    """Return the candidate with the fewest sequences; ties: fewest KV tokens, then the first to attach.

    Cost: a logarithm for the sequence of all workers as `Placement.place` gets it, if they are many
    (`core.many_workers`); O(candidates) for any other.
    """
    if len(candidates) == 1:
        return candidates[0]
    many = kept_of(candidates)
    if many is not None:
        return many.least()
    return least_of(candidates, [candidate.load for candidate in candidates])


def least_of(candidates: Many[Candidate], loads: Many[int]) -> Candidate:
    """Return the same, given the loads."""
    least = min(loads)
    tied = [candidate for candidate, load in zip(candidates, loads, strict=True) if load == least]
    return min(tied, key=lambda candidate: candidate.kv_tokens) if len(tied) > 1 else tied[0]


def load_bound(candidates: Many[Candidate], factor: float, extra: int = 1) -> int:
    """Return the load that a preferred worker may have at most before it takes another sequence.

    It is the mean load, the new sequence included, times `factor`, and at least `extra` above the least.
    """
    return bound_of([candidate.load for candidate in candidates], factor, extra)


def bound_of(loads: Many[int], factor: float, extra: int = 1) -> int:
    """Return the same, given the loads."""
    return bound_given(sum(loads), min(loads), len(loads), factor, extra)


def bound_given(total: int, least: int, num: int, factor: float, extra: int = 1) -> int:
    """Return the same, given the sum of so many loads, and the least of them."""
    return max(ceil(factor * (total + 1) / num) - 1, least + extra)
