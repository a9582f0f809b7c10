"""Sequences without a worker: those that none can take now, and those about to be placed.

When a worker attaches, or sequences come back from one, waiting sequences are tried in order. There may be ten thousand
of them, so a caller tries as many at a time as it likes; meanwhile they can be cancelled, and others can arrive.
"""

from collections import OrderedDict, deque

from lorrery.scheduler.core.sequence import Sequence


class WaitingRoom:
    """Sequences in the order in which their waits end, which is the order of arrival here."""

    __slots__ = ("_untried", "_waits")

    def __init__(self) -> None:
        self._waits: OrderedDict[int, tuple[int, Sequence]] = OrderedDict()  # by handle: (end of the wait, sequence)
        self._untried: deque[int] = deque()  # handles; may include some that have left

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def until_ps(self) -> int | None:
        """When the first wait is over; None: nothing waits."""
        for until_ps, _ in self._waits.values():
            return until_ps
        return None

    @property
    def has_untried(self) -> bool:
        """Whether a sequence is still to be tried."""
        untried = self._untried
        while untried and untried[0] not in self._waits:
            untried.popleft()
        return len(untried) > 0

    def waiting(self) -> list[Sequence]:
        """Return all sequences, in order."""
        return [sequence for _, sequence in self._waits.values()]

    def put(self, sequence: Sequence, until_ps: int) -> None:
        """Add a sequence that waits until `until_ps`, which is no earlier than that of the last one added."""
        self._waits[sequence.handle] = until_ps, sequence

    def put_untried(self, sequence: Sequence, until_ps: int) -> None:
        """Add a sequence that is to be tried."""
        self.put(sequence, until_ps)
        self._untried.append(sequence.handle)

    def wait_until(self, until_ps: int) -> None:
        """Let all current waits end at this time, which may be now."""
        for handle, (_, sequence) in self._waits.items():
            self._waits[handle] = until_ps, sequence

    def try_all(self) -> None:
        """Mark all to be tried, after a worker attached."""
        self._untried = deque(self._waits)

    def try_none(self) -> None:
        """Mark none to be tried, while there is no worker."""
        self._untried.clear()

    def next_untried(self) -> Sequence | None:
        """Return the next sequence to be tried, and count it as tried; it stays here."""
        return self._waits[self._untried.popleft()][1] if self.has_untried else None

    def take(self, handle: int) -> Sequence | None:
        """Remove and return a sequence; None: it does not wait here."""
        wait = self._waits.pop(handle, None)
        return None if wait is None else wait[1]

    def take_over(self, at_ps: int, most: int) -> list[Sequence]:
        """Remove and return the first sequences whose waits are over, at most `most`."""
        over: list[Sequence] = []
        while len(over) < most and (until_ps := self.until_ps) is not None and until_ps <= at_ps:
            over.append(self._waits.popitem(last=False)[1][1])
        return over
