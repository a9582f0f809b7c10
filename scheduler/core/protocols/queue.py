"""What a queue must be able to do."""

from collections.abc import Iterator
from typing import Protocol

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Queue(Protocol):
    """Decides in which order waiting sequences are tried, and where the trying ends.

    `admit` is the only method that takes sequences out by decision; it is called at step boundaries only, and not while
    the batch has its full count.
    """

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences in queue order."""
        ...

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait; one that was queued before keeps its place by first arrival."""
        ...

    def cancel(self, handle: int) -> Sequence | None:
        """Return a cancelled sequence; remove it, or mark it to be swept (strict). None: no such sequence waits."""
        ...

    def clear(self) -> list[Sequence]:
        """Remove and return all that wait, in order."""
        ...

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try waiting sequences in the pass, and take those out that it admitted.

        Returns:
            Sequences that were dropped instead (service level); usually none.
        """
        ...

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return for how many decode steps `admit` would go on to admit nobody, at least 1, at most `limit`.

        Asked right after `admit` admitted nobody. `limit` is so small that no running sequence ends within it. A queue
        that cannot tell returns 1; so must one whose failed or empty try changes its state. It speaks for the class
        that defines it and for what that inherits, see `is_asked_every_step`.
        """
        ...

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return the first time after `at_ps` from which time alone changes what `admit` does (a deadline).

        In whole picoseconds; None: it never does. Not asked while the queue is empty.
        """
        ...

    def at_rest(self) -> bool:
        """Tell whether a try would find nobody and change nothing, whatever the limits; so until the next `append`.

        Adapters are not loaded ahead for those who wait nevertheless.
        """
        ...

    def arrivals_matter(self) -> bool:
        """Tell whether one more arrival could change what `admit` has just answered; True where `at_rest`."""
        ...

    @property
    def arrivals_read_state(self) -> bool:
        """Whether `append` reads what changes with every step, so that an arrival has to end the segment."""
        ...

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return who would be next if only the prompt limit counted (S-LoRA's prefetch)."""
        ...

    def decoded(self, running: Running, num_steps: int) -> None:
        """Take note that every running sequence decoded so many tokens; called before any of them leaves."""
        ...
