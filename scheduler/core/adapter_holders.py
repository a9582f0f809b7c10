"""Which of many workers have an adapter on their GPU, by adapter.

Each worker's residency reports when an adapter arrives or leaves (`Residency.tell`). Cost: an operation on an integer
with one bit per worker.
"""


class AdapterHolders:
    """The workers of one list, by number."""

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}

    def came(self, number: int, adapter_key: str) -> None:
        """Record that an adapter is now on a worker's GPU."""
        self._holders[adapter_key] = self._holders.get(adapter_key, 0) | 1 << number

    def went(self, number: int, adapter_key: str) -> None:
        """Record that an adapter has left a worker's GPU."""
        left = self._holders[adapter_key] & ~(1 << number)
        if left:
            self._holders[adapter_key] = left
        else:
            del self._holders[adapter_key]

    def of(self, adapter_key: str) -> int:
        """Return the workers that have an adapter, as bits by number."""
        return self._holders.get(adapter_key, 0)
