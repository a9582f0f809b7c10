"""A dict of bounded size that drops its oldest entries, for keys that are sent by others."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The entries that were put last.

    Args:
        max_entries: upper bound on the entries; the oldest is dropped first.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def put(self, key: K, value: V) -> None:
        """Add an entry, or make it the newest."""
        self._entries.pop(key, None)
        self._entries[key] = value
        while len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value; None: absent."""
        return self._entries.pop(key, None)
