"""The N names with most traffic, and `other`: a bounded label, whatever names clients send.

Events are attributed when they happen, to the name if it is in view, otherwise to `other`. So every counter only grows:
nothing is moved when a name drops out of view, which ends its series, or comes into view.

Traffic is counted in bounded memory, however many names occur (J. Misra and D. Gries, "Finding repeated elements",
1982, thinned in batches): exactly for names in view, and for about the `_CANDIDATES` most frequent of the others. All
counts are halved now and then, so that old traffic is forgotten. A name replaces another once it has more than twice
its traffic; otherwise names with similar traffic would keep replacing each other.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

OTHER = "other"
MAX_CHARACTERS = 200
"""Upper bound on a name in view; a longer or unprintable name is useless in a dashboard and counts as `other`."""

_CANDIDATES = 4
"""Minimum number of candidates kept per name in view; twice as many before they are thinned."""
_HALVE_AFTER = 500
"""Requests per name in view after which counts are halved."""
_LEAD = 4
"""Requests by which a candidate must exceed twice another's traffic; matters while there is little traffic."""

T = TypeVar("T")


class _Shown(Generic[T]):
    __slots__ = ("label", "record", "traffic")

    def __init__(self, label: str, record: T, traffic: int) -> None:
        self.label, self.record, self.traffic = label, record, traffic


class TopNames(Generic[T]):
    """A record for each name in view, one for all others, one for the empty name.

    Use it in the event loop's thread only, except for `shown` and `label`.

    Args:
        most: number of names in view.
        make: creates a record, in which the caller counts.
        nameless: label of the empty name, which is always in view.
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
        self._bar = 0  # candidates with no more traffic than this replace no name
        self._num_left = self._halve_after = _HALVE_AFTER * most  # requests until counts are halved

    def count(self, name: str) -> T:
        """Count one request of a name as traffic; return the record for its events."""
        shown = self._shown.get(name)
        if shown is None:
            return self._count_hidden(name)
        shown.traffic += 1
        self._num_left -= 1
        if self._num_left <= 0:
            self._halve()
        return shown.record

    def foresee(self, names: Iterable[str]) -> None:
        """Bring names into view before their first request while there is room: rates ignore a series' first value."""
        for name in names:
            if len(self._shown) >= self._most:
                return
            if name and name not in self._shown and len(name) <= MAX_CHARACTERS and name.isprintable():
                self._show(name, self._candidates.get(name, 0))

    def of(self, name: str) -> T:
        """Return the record for a name's events now, without counting traffic."""
        shown = self._shown.get(name)
        if shown is not None:
            return shown.record
        return self.other if name else self._nameless.record

    def label(self, name: str) -> str:
        """Return the label for a name now."""
        shown = self._shown.get(name)
        if shown is not None:
            return shown.label
        return OTHER if name else self._nameless.label

    def shown(self) -> list[tuple[str, T]]:
        """Return (label, record) of everything in view: the empty name, the names, `other`."""
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
        # A new dict, so that a reader in another thread never sees a dict that changes.
        self._shown = {**self._shown, name: _Shown(label, record, traffic)}
        return record

    def _hide(self, name: str) -> None:
        hidden = self._shown[name]
        self._shown = {other: shown for other, shown in self._shown.items() if other != name}
        self._candidates[name] = hidden.traffic
        self._past[name] = hidden.record  # its counters continue if it comes back
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
