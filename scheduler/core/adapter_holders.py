"""Which of many workers have an adapter on their GPU, by adapter.

A worker's adapters say so when one comes or goes (`Residency.tell`). Cost: an operation on an integer with a bit for
each worker.
"""


class AdapterHolders:
    """The workers of one list, by number."""

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}

    def came(self, number: int, adapter_key: str) -> None:
        """Note that an adapter is on a worker's GPU from now on."""
        self._holders[adapter_key] = self._holders.get(adapter_key, 0) | 1 << number

    def went(self, number: int, adapter_key: str) -> None:
        """Note that an adapter is there no longer."""
        left = self._holders[adapter_key] & ~(1 << number)
        if left:
            self._holders[adapter_key] = left
        else:
            del self._holders[adapter_key]

    def of(self, adapter_key: str) -> int:
        """Return who has an adapter: the bits that are set are their numbers."""
        return self._holders.get(adapter_key, 0)
