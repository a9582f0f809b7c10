"""Which adapters the sequences of a batch use, and the unused ones on the GPU in order of last use.

The batch reports use (`pin`, `unpin`), the residency what is on the GPU (`came`, `went`) and what is required there
(`asked_for`). So the next adapter to evict is known at any time without a scan. An adapter is used until its last
sequence leaves, in host memory too, as in vLLM, whose caches count the adapters of every step as used.

Invariants: `_asked` has each adapter on the GPU with the number of its last use; `_unused` has those numbers of the
unpinned ones, ascending, and `_unused_keys` their keys. Cost: O(log n), and a move of a few words.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.machine_ints import bisect_left

if TYPE_CHECKING:
    from mypy_extensions import i64
from typing import Final, TypeAlias


class AdapterUse:
    """See the module.

    Attributes:
        pins: number of sequences by adapter key, of adapters with at least one.
        slots: pool slots that these adapters take.
        names: adapter id by key, where the two differ.
        host: adapters cached in host memory, least recently used first; belongs to the residency.
    """

    __slots__ = ("_asked", "_num_askings", "_unused", "_unused_keys", "host", "names", "pins", "slots")

    def __init__(self) -> None:
        self.pins: dict[str, int] = {}
        self.slots = 0
        self.names: dict[str, str] = {}
        self.host: dict[str, Adapter] = {}
        self._num_askings = 0
        self._asked: dict[str, int] = {}
        self._unused: list[i64] = []
        self._unused_keys: list[str] = []

    # --- the batch --------------------------------------------------------------------------------------------------

    def pin(self, adapter: Adapter) -> None:
        """Count a sequence that enters with an adapter."""
        key = adapter.key
        pins = self.pins.get(key, 0)
        self.pins[key] = pins + 1
        if not pins:
            self.slots += adapter.slots
            if adapter.version:
                self.names[key] = adapter.adapter_id
            asking = self._asked.get(key)
            if asking is not None:
                self._take_out(asking)

    def unpin(self, adapter: Adapter) -> None:
        """Uncount a sequence that leaves."""
        key = adapter.key
        pins = self.pins[key] - 1
        if pins:
            self.pins[key] = pins
            return
        del self.pins[key]
        self.slots -= adapter.slots
        if adapter.version:
            del self.names[key]
        if key in self._asked:
            self.came(key)
        host = self.host
        if key in host:
            host[key] = host.pop(key)

    # --- the GPU ----------------------------------------------------------------------------------------------------

    def came(self, key: str) -> None:
        """Record that an adapter is now on the GPU."""
        self._num_askings += 1
        self._asked[key] = self._num_askings
        if key not in self.pins:
            self._unused.append(self._num_askings)
            self._unused_keys.append(key)

    def asked_for(self, key: str) -> None:
        """Record that an adapter on the GPU is required once more."""
        if key not in self.pins:
            self._take_out(self._asked[key])
        self.came(key)

    def went(self, key: str) -> None:
        """Record that an adapter has left the GPU."""
        asking = self._asked.pop(key)
        if key not in self.pins:
            self._take_out(asking)

    def _take_out(self, asking: int) -> None:
        place = bisect_left(self._unused, asking)
        del self._unused[place], self._unused_keys[place]

    def unused(self, stay: Collection[str]) -> list[str]:
        """Return the unpinned adapters on the GPU, least recently required first, without those in `stay`."""
        return [key for key in self._unused_keys if key not in stay]

    def first_unused(self, stay: dict[str, Adapter]) -> str | None:
        """Return the first of `unused(stay)`; None: there is none."""
        for key in self._unused_keys:
            if key not in stay:
                return key
        return None


TOLERANCE: Final = 1.2
Joined: TypeAlias = tuple[int, int]
"""When a sequence joined the queue, in picoseconds, and a count that orders those of one time."""
