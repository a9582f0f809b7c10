"""What could enter a worker's batch now, as far as can be known without trying."""

from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.memory.base import Trial
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence


class Headroom:
    """A worker's free seats, memory and places for adapters, less those of sequences counted in.

    Args:
        running: the batch.
        seats: number of sequences that may enter it.
        trial: memory test.
        adapters: adapters on the GPU; None: they are not used.
    """

    __slots__ = ("_adapter_keys", "_adapters", "_seats", "_trial")

    def __init__(self, running: Running, seats: int, trial: Trial, adapters: Residency | None) -> None:
        self._seats = seats
        self._trial = trial
        self._adapters = adapters
        self._adapter_keys: set[str] = set(running.adapter_keys)

    def has(self, sequence: Sequence) -> bool:
        """Return whether this sequence could enter too, possibly after a load of its adapter."""
        if self._seats < 1 or not self._trial.test(sequence).fits:
            return False
        adapters, adapter = self._adapters, sequence.adapter
        return adapter is None or adapters is None or adapters.has_place(adapter, self._adapter_keys)

    def take(self, sequence: Sequence) -> None:
        """Count a sequence in."""
        self._seats -= 1
        self._trial.take(sequence)
        if sequence.adapter is not None:
            self._adapter_keys.add(sequence.adapter.key)
