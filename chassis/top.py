"""The N names with most traffic, and `other`: a label that stays bounded whatever clients may call things.

What happens is attributed when it happens, to the name if it is shown then, otherwise to `other`. So every counter only
grows: none is taken back when its name is shown no longer, whose series ends, nor when it is shown at last.

Who has most traffic is counted in little memory, however many names pass (J. Misra and D. Gries, "Finding repeated
elements", 1982, thinned in batches): names in view are counted exactly, of the others the `_CANDIDATES` most frequent
or so. All counts are halved now and then, so that old traffic is forgotten. A name takes another's place once it has
more than twice its traffic: names of like traffic would otherwise change places all the time.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

OTHER = "other"
MAX_CHARACTERS = 200
"""Of a name that is shown; what is longer, or not printable, is of no use in a dashboard and counts as `other`."""

_CANDIDATES = 4
"""Candidates kept for each name in view, at least; twice as many before they are thinned."""
_HALVE_AFTER = 500
"""Requests for each name in view after which counts are halved."""
_LEAD = 4
"""Requests by which a candidate must be ahead of twice another's traffic; matters while there is little."""

T = TypeVar("T")


class _Shown(Generic[T]):
    __slots__ = ("label", "record", "traffic")

    def __init__(self, label: str, record: T, traffic: int) -> None:
        self.label, self.record, self.traffic = label, record, traffic


class TopNames(Generic[T]):
    """A record for each of the names with most traffic, one for all others, one for what has no name.

    For the event loop's thread only, but for `shown` and `label`.

    Args:
        most: names in view.
        make: makes a record, in which the caller counts.
        nameless: how the empty name is shown; it always is.
    """

    def __init__(self, most: int, make: Callable[[], T], nameless: str) -> None:
        self.other = make()
        self._most, self._make = most, make
        self._nameless = _Shown(nameless, make(), 0)
        self._reserved = {OTHER, nameless}
        self._shown: dict[str, _Shown[T]] = {}
        self._candidates: dict[str, int] = {}
        self._past: dict[str, T] = {}
        self._max_candidates = max(100, _CANDIDATES * most)
        self._bar = 0  # no candidate with less takes anybody's place
        self._num_left = self._halve_after = _HALVE_AFTER * most  # requests until counts are halved

    def count(self, name: str) -> T:
        """Count one request of a name as traffic; return the record that what it does belongs to now."""
        shown = self._shown.get(name)
        if shown is None:
            return self._count_hidden(name)
        shown.traffic += 1
        self._num_left -= 1
        if self._num_left <= 0:
            self._halve()
        return shown.record

    def foresee(self, names: Iterable[str]) -> None:
        """Show names before their first request while there is room: a rate does not see what a series begins with."""
        for name in names:
            if len(self._shown) >= self._most:
                return
            if name and name not in self._shown and len(name) <= MAX_CHARACTERS and name.isprintable():
                self._show(name, self._candidates.get(name, 0))

    def of(self, name: str) -> T:
        """Return the record that what happens to a name belongs to now; that counts as no traffic."""
        shown = self._shown.get(name)
        if shown is not None:
            return shown.record
        return self.other if name else self._nameless.record

    def label(self, name: str) -> str:
        """Return how what concerns a name is shown now."""
        shown = self._shown.get(name)
        if shown is not None:
            return shown.label
        return OTHER if name else self._nameless.label

    def shown(self) -> list[tuple[str, T]]:
        """Return (label, record) of all that is shown: what has no name, the names, `other`."""
        return [(one.label, one.record) for one in (self._nameless, *list(self._shown.values()))] + [
            (OTHER, self.other)
        ]

    def _count_hidden(self, name: str) -> T:
        if not name:
            return self._nameless.record
        if len(name) > MAX_CHARACTERS or not name.isprintable():
            return self.other
        traffic = self._candidates.get(name, 0) + 1
        if len(self._shown) < self._most:
            return self._show(name, traffic)
        if traffic > self._bar:
            least = min(self._shown, key=lambda other: self._shown[other].traffic)
            self._bar = 2 * self._shown[least].traffic + _LEAD
            if traffic > self._bar:
                self._hide(least)
                return self._show(name, traffic)
        self._candidates[name] = traffic
        if len(self._candidates) > 2 * self._max_candidates:
            self._thin()
        self._num_left -= 1
        if self._num_left <= 0:
            self._halve()
        return self.other

    def _show(self, name: str, traffic: int) -> T:
        self._candidates.pop(name, None)
        record = self._past.pop(name) if name in self._past else self._make()
        label = f"'{name}'" if name in self._reserved or name[0] == "'" else name
        # A new dictionary, so that a reader in another thread never sees one that changes.
        self._shown = {**self._shown, name: _Shown(label, record, traffic)}
        return record

    def _hide(self, name: str) -> None:
        hidden = self._shown[name]
        self._shown = {other: shown for other, shown in self._shown.items() if other != name}
        self._candidates[name] = hidden.traffic
        self._past[name] = hidden.record  # should it come back, its counters go on
        if len(self._past) > self._most:
            del self._past[next(iter(self._past))]

    def _thin(self) -> None:
        least = sorted(self._candidates.values(), reverse=True)[self._max_candidates]
        self._candidates = {name: traffic - least for name, traffic in self._candidates.items() if traffic > least}

    def _halve(self) -> None:
        self._num_left, self._bar = self._halve_after, 0
        for shown in self._shown.values():
            shown.traffic //= 2
        self._candidates = {name: traffic // 2 for name, traffic in self._candidates.items() if traffic > 1}
