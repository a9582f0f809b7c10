"""What a queue must be able to do, and what those share that keep one list in order of arrival."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeGuard

from lorrery.scheduler.core.admission import AdmissionPass, Blocked
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


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


@mypyc_attr(allow_interpreted_subclasses=True)
class ListedQueue:
    """A queue, but for `admit`, that keeps one list in order of arrival.

    `admit` may keep the pass's refusal in `_blocked`; a `holds_for` of one's own can say with it when to ask again
    (`steps_until_admissible`). Without one it is asked at every step.

    Args:
        strict: a cancelled sequence is only marked, as in S-LoRA; when it goes is the queue's own matter.
    """

    arrivals_read_state = False

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._waiting = WaitingList()
        self._blocked: tuple[Sequence, Blocked] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def front(self, length: int) -> list[Sequence]:
        """Return who arrived first, so many at most: the same list while they stay, which is not to be changed."""
        return self._waiting.front(length)

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Let a sequence wait at the end; one that was queued before at its place by first arrival."""
        self._waiting.append(sequence)

    def cancel(self, handle: int) -> Sequence | None:
        """Remove and return a waiting sequence; in strict mode only mark and return it, the first time."""
        return self._waiting.mark(handle) if self.strict else self._waiting.pop(handle)

    def clear(self) -> list[Sequence]:
        """Remove and return all that wait, in order."""
        return self._waiting.clear()

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return 1: what `admit` answers, and what changes it, only the class that defines it knows."""
        return 1

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return None: time alone changes nothing."""
        return None

    def at_rest(self) -> bool:
        """Tell whether nobody waits but cancelled ones, which only strict mode keeps."""
        if not self.strict:
            return not len(self._waiting)
        return all(sequence.aborted for sequence in self._waiting)

    def arrivals_matter(self) -> bool:
        """Tell that an arrival could enter: it may come before those that were refused."""
        return True

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return who would be next in queue order if only the prompt limit counted."""
        return prompts_within(self, max_prompt_tokens)

    def decoded(self, running: Running, num_steps: int) -> None:
        """Nothing depends on what the running sequences do."""


def is_asked_every_step(queue: Queue) -> bool:
    """Tell whether a replica has to ask this queue before every step, since it does not say how long an answer holds.

    `holds_for` speaks for the class that defines it and for what that inherits. A class that derives from it and
    changes any other part of the protocol has to define `holds_for` again; what it inherited may be wrong by then.
    """
    for cls in type(queue).__mro__:
        if "holds_for" in vars(cls):
            return False
        if any(name in vars(cls) for name in _PARTS):
            return True
    return True


def goes_by_arrival(queue: Queue) -> TypeGuard[ListedQueue]:
    """Tell whether the order of a queue is that of its list, so that its `front` is what comes first of it."""
    return isinstance(queue, ListedQueue) and type(queue).__iter__ is ListedQueue.__iter__


def hears_of_steps(queue: Queue) -> bool:
    """Tell whether a queue does anything when it is told of steps (`decoded`)."""
    return getattr(type(queue), "decoded", None) is not ListedQueue.decoded


_PARTS = frozenset(name for name in vars(Queue) if not name.startswith("_")) | {"__len__", "__iter__"}
"""What the protocol asks for."""


def steps_until_admissible(
    blocked: tuple[Sequence, Blocked] | None, running: Running, memory: Memory, limit: int
) -> int:
    """Return after how many decode steps a refused sequence may be admissible: only what memory refused can change."""
    if blocked is None or blocked[1] is not Blocked.MEMORY:
        return limit
    return memory.steps_until_fits(running, blocked[0], limit)


def prompts_within(sequences: Iterable[Sequence], max_prompt_tokens: int) -> list[Sequence]:
    """Return the first sequences, cancelled ones left out, whose inputs have at most so many tokens together."""
    within: list[Sequence] = []
    prompt_tokens = 0
    for sequence in sequences:
        if sequence.aborted:
            continue
        prompt_tokens += sequence.input_tokens
        if prompt_tokens > max_prompt_tokens:
            break
        within.append(sequence)
    return within
