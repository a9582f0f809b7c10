"""Common parts of queues that keep one list in order of arrival."""

from collections.abc import Iterable, Iterator
from typing import TypeGuard

from lorrery.scheduler.core.admission import Blocked
from lorrery.scheduler.core.checked.base import original
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.memory.paged import PagedMemory
from lorrery.scheduler.core.protocols import Queue
from lorrery.scheduler.core.queues.waiting import WaitingList
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class ListedQueue:
    """All of a queue except `admit`, with one list in order of arrival.

    `admit` may keep the pass's refusal in `_blocked`; from it, an overriding `holds_for` can say when to try again
    (`steps_until_admissible`). Without such a method the queue is called at every step.

    Args:
        strict: a cancelled sequence is only marked, as in S-LoRA; the queue decides when it is removed.
    """

    arrivals_read_state = False

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._waiting = WaitingList()
        self._blocked: tuple[Sequence, Blocked] | None = None

    def __len__(self) -> int:
        return len(self._waiting.by_handle)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def front(self, length: int) -> list[Sequence]:
        """Return the `length` earliest arrivals, or all: the same list object while they stay; read-only."""
        return self._waiting.front(length)

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Add a sequence at the end; one that was queued before at its place by first arrival."""
        self._waiting.append(sequence)

    def cancel(self, handle: int) -> Sequence | None:
        """Remove and return a waiting sequence; in strict mode only mark and return it, the first time."""
        return self._waiting.mark(handle) if self.strict else self._waiting.pop(handle)

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences, in order."""
        return self._waiting.clear()

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return 1: only the class that defines `admit` knows its result and what changes it."""
        return 1

    def wakes_at_ps(self, at_ps: int) -> int | None:
        """Return None: time alone changes nothing."""
        return None

    def at_rest(self) -> bool:
        """Return whether nothing waits but cancelled sequences, which only strict mode keeps."""
        if not self.strict:
            return not self._waiting.by_handle
        return all(sequence.aborted for sequence in self._waiting)

    def arrivals_matter(self) -> bool:
        """Return True: an arrival could enter; its place may be ahead of refused sequences."""
        return True

    def look_ahead(self, max_prompt_tokens: int) -> list[Sequence]:
        """Return the sequences that would be next in queue order if only the prompt limit counted."""
        return prompts_within(self, max_prompt_tokens)

    def decoded(self, running: Running, num_steps: int) -> None:
        """Ignore steps: nothing depends on the running sequences."""


def is_asked_every_step(queue: Queue) -> bool:
    """Return whether a replica has to call this queue before every step, as it does not say how long a result holds.

    `holds_for` counts for the class that defines it and for what that inherits. A class that derives from it and
    overrides any other part of the protocol has to define `holds_for` again, as the inherited one may be wrong.
    """
    for cls in type(original(queue)).__mro__:
        if "holds_for" in vars(cls):
            return False
        if any(name in vars(cls) for name in _PARTS):
            return True
    return True


def goes_by_arrival(queue: object) -> TypeGuard[ListedQueue]:
    """Return whether a queue's order is that of its list, so that its `front` gives the first of it."""
    return isinstance(queue, ListedQueue) and type(queue).__iter__ is ListedQueue.__iter__


def hears_of_steps(queue: Queue) -> bool:
    """Return whether a queue implements `decoded`."""
    return getattr(type(original(queue)), "decoded", None) is not ListedQueue.decoded


_PARTS = frozenset(name for name in vars(Queue) if not name.startswith("_")) | {"__len__", "__iter__"}
"""Methods of the protocol."""


def steps_until_admissible(
    blocked: tuple[Sequence, Blocked] | None, running: Running, memory: Memory, limit: int
) -> int:
    """Return after how many decode steps a refused sequence may be admissible; time changes only memory refusals.

    With a pool of blocks also whether a prompt is within the limit, since more of it may be cached.
    """
    if blocked is None or not (
        blocked[1] is Blocked.MEMORY or (blocked[1] is Blocked.PROMPT and isinstance(memory, PagedMemory))
    ):
        return limit
    return memory.steps_until_fits(running, blocked[0], limit)


def prompts_within(sequences: Iterable[Sequence], max_prompt_tokens: int) -> list[Sequence]:
    """Return the first sequences, without cancelled ones, whose inputs together have at most `max_prompt_tokens`."""
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
