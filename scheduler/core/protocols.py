"""Protocols of plug-ins: a queue, and a way to batch (docs/plug-ins.md); `placements.table` has that of placements.

Not compiled, since no class outside could derive from a compiled one.
"""

from collections.abc import Iterator
from typing import Protocol

from lorrery.scheduler.core.admission import AdmissionPass, BatchLimits
from lorrery.scheduler.core.batching.base import BatchContext, Step, Wait
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Queue(Protocol):
    """Decides in which order waiting sequences are tried, and where a pass ends.

    `admit` is the only method that removes sequences by its own decision; it is called at step boundaries only, and not
    while the batch has its full count.
    """

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences in queue order."""
        ...

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Add a sequence; one that was queued before keeps its place by first arrival."""
        ...

    def cancel(self, handle: int) -> Sequence | None:
        """Return a cancelled sequence; remove it, or mark it to be swept (strict). None: no such sequence waits."""
        ...

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences, in order."""
        ...

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try waiting sequences in the pass, and remove those that it admitted.

        Returns:
            Sequences that were dropped instead (service level); usually none.
        """
        ...

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return for how many decode steps `admit` would still admit nothing, at least 1, at most `limit`.

        Called right after `admit` admitted nothing. `limit` is small enough that no running sequence ends within it. A
        queue that cannot tell returns 1; so must one whose failed or empty try changes its state. The method counts for
        the class that defines it and for what that inherits, see `is_asked_every_step`.
        """
        ...

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return the first time after `at_ps` from which time alone changes what `admit` does (a deadline).

        In whole picoseconds; None: it never does. Not called while the queue is empty.
        """
        ...

    def at_rest(self) -> bool:
        """Return whether a try would admit nothing and change nothing, whatever the limits, until the next `append`.

        Adapters are then not loaded ahead for sequences that still wait.
        """
        ...

    def arrivals_matter(self) -> bool:
        """Return whether one more arrival could change the result of the last `admit`; True if `at_rest`."""
        ...

    @property
    def arrivals_read_state(self) -> bool:
        """Whether `append` reads state that changes with every step, so that an arrival has to end the segment."""
        ...

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return the sequences that would be next if only the prompt limit counted (S-LoRA's prefetch)."""
        ...

    def decoded(self, running: Running, num_steps: int) -> None:
        """Note that every running sequence decoded `num_steps` tokens; called before any of them leaves."""
        ...


class Batching(Protocol):
    """Chooses the next step. Its own state changes in `choose`, `advanced` and `emptied` only."""

    @property
    def limits(self) -> BatchLimits:
        """Limits of one admission pass into an empty batch."""
        ...

    def choose(self, context: BatchContext, at_ps: int) -> Step | Wait:
        """Choose the next step. `Step.max_steps` says for how long the choice would be the same without events."""
        ...

    def advanced(self, num_decode_steps: int) -> None:
        """Note that this many decode steps of the last choice are done."""
        ...

    def emptied(self, at_ps: int) -> None:
        """Note that the batch became empty at this boundary."""
        ...

    def arrivals_matter(self, context: BatchContext) -> bool:
        """Return whether an arrival may change the last choice before it has run out."""
        ...
