"""What the next step may be, and what a way to batch knows when it chooses one."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from lorrery.scheduler.core.admission import BatchLimits
from lorrery.scheduler.core.checked.base import original
from lorrery.scheduler.core.plan import Chunk
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(acyclic=True, free_list_len=1)
@dataclass(slots=True, init=False)
class Step:
    """Something to run.

    Attributes:
        chunks: prompt chunks to compute, in the first step.
        decode: whether every sequence past its prompt gets a token in each step.
        max_steps: number of steps for which this choice holds without events; 1 with chunks.
        chunk_steps: see `Plan`; number of steps without events that continue the one chunk's prompt.
        prefetch: adapters to load meanwhile.
        hold: whether sequences that end stay in the batch until all have ended (static batching).
        loads: adapters whose load the way to batch has begun, and that the first step waits for.
    """

    chunks: Many[Chunk]
    decode: bool
    max_steps: int
    chunk_steps: int
    prefetch: tuple[Adapter, ...]
    hold: bool
    loads: tuple[Adapter, ...]

    def __init__(
        self,
        chunks: Many[Chunk] = (),
        *,
        decode: bool = False,
        max_steps: int = 1,
        chunk_steps: int = 1,
        prefetch: tuple[Adapter, ...] = (),
        hold: bool = False,
        loads: tuple[Adapter, ...] = (),
    ) -> None:
        self.chunks = chunks
        self.decode = decode
        self.max_steps = max_steps
        self.chunk_steps = chunk_steps
        self.prefetch = prefetch
        self.hold = hold
        self.loads = loads


@dataclass(slots=True, init=False)
class Wait:
    """Nothing runs.

    Args:
        until_ps: when to choose again, in whole picoseconds; None: when something arrives. If nothing waits and nothing
            runs, an arrival is awaited in any case.

    Raises:
        TypeError: a time that is no whole number.
    """

    until_ps: int | None

    def __init__(self, until_ps: SupportsIndex | None = None) -> None:
        try:
            self.until_ps = None if until_ps is None else index(until_ps)
        except TypeError:
            raise TypeError(f"Wait({until_ps!r}): until_ps must be whole picoseconds, or None") from None


@mypyc_attr(allow_interpreted_subclasses=True)
class BatchContext:
    """What a way to batch sees of its replica, and what it may do there.

    A base class and not a protocol, so that compiled code calls its methods without a lookup: any other context (a
    test's, a wrapper) derives from it. Not abstract by `abc`: mypyc gives the instances of such a class weak references
    that outlive them.

    Attributes:
        running: sequences in the batch.
        admitted: those of them that were admitted and are not yet in a plan.
    """

    running: Running
    admitted: list[Sequence]

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        raise NotImplementedError

    def admit(self, limits: BatchLimits, at_ps: int, max_prompt_tokens: int | None = None) -> list[Sequence]:
        """Admit waiting sequences within these limits; they are in prefill afterwards.

        Args:
            limits: of the admission pass.
            at_ps: the boundary.
            max_prompt_tokens: replaces that of `limits`, if a step has used up part of it.
        """
        raise NotImplementedError

    # For a way to batch that takes memory as it schedules (`memory.on_demand`), in place of `admit`.

    def admit_chunks(self, limits: BatchLimits, at_ps: int, budget: int, most: int) -> list[Chunk]:
        """Admit waiting sequences; they are in prefill afterwards, and their first chunks have their blocks.

        Args:
            limits: seats, and whether a prompt may be cut.
            at_ps: the boundary.
            budget: tokens left of the step.
            most: most tokens of one prompt.
        """
        raise NotImplementedError

    def cover(self, chunks: Many[Chunk]) -> bool:
        """Take the blocks of these chunks and of every decoding sequence for a step, if there are enough for all."""
        raise NotImplementedError

    def cover_one(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the blocks of a running sequence for a step that computes this many of its tokens, if there are any."""
        raise NotImplementedError

    def covered(self) -> None:
        """End a pass of `cover_one`: every sequence that still decodes has been covered."""
        raise NotImplementedError

    def preempt(self, sequence: Sequence, at_ps: int, scheduled: int) -> None:
        """Put a running sequence back into the queue.

        Args:
            sequence: to preempt.
            at_ps: the boundary.
            scheduled: tokens of this step that it has been covered for.
        """
        raise NotImplementedError

    @property
    def has_ended(self) -> bool:
        """Whether a sequence of the batch has ended without this decision knowing (async scheduling)."""
        raise NotImplementedError

    def step_aside(self, sequence: Sequence) -> None:
        """Leave a decoding sequence out of this step: it keeps its blocks, and has one token to compute in the next."""
        raise NotImplementedError

    def steps_blocked(self, limit: int) -> int:
        """Return for how many decode steps `admit`, which has just admitted nothing, would still admit nothing."""
        raise NotImplementedError

    def has_no_candidates(self) -> bool:
        """Return whether `admit` would admit nothing, and change nothing, until something arrives."""
        raise NotImplementedError

    def arrivals_matter(self) -> bool:
        """Return whether an arrival could change the result of the last `admit`."""
        raise NotImplementedError

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return the sequences that would be admitted next if only the prompt limit counted."""
        raise NotImplementedError


class Stateless:
    """All of a way to batch except `limits` and `choose`, for one whose choice depends on the replica alone."""

    def advanced(self, num_decode_steps: int) -> None:
        """Nothing depends on the number of steps done."""

    def emptied(self, at_ps: int) -> None:
        """Nothing depends on how long the batch has been empty."""

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may matter before the last choice has run out."""
        return context.arrivals_matter()


def decodes_on(batching: object) -> bool:
    """Return whether a way to batch declares, by a true `decodes_on`, what it does while no sequence could enter.

    That is: it has no state, and its limits are constant; with a sequence past its prompt, none in prefill and none
    waiting, its choice is to decode until the first one reaches its length. Then it need not be called, nor notified of
    steps. The attribute holds for the class that defines it: one that redefines any other part has to repeat it.
    """
    for cls in type(original(batching)).__mro__:
        if "decodes_on" in vars(cls):
            return bool(vars(cls)["decodes_on"])
        if not _PARTS.isdisjoint(vars(cls)):
            break
    return False


_PARTS = frozenset({"limits", "choose", "advanced", "emptied"})
"""Parts of a way to batch that `decodes_on` covers."""


def whole(sequences: Iterable[Sequence]) -> list[Chunk]:
    """Return the rest of each sequence's input as one chunk."""
    return [
        Chunk(sequence, sequence.input_tokens - sequence.computed_tokens, sequence.computed_tokens, samples=True)
        for sequence in sequences
    ]
