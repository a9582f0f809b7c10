"""Which adapters the sequences of a batch use, and of those on the GPU that nobody uses who was used least recently.

The batch says who uses what (`pin`, `unpin`), the residency who is on the GPU (`came`, `went`) and who is asked for
there (`asked_for`). Those that make room next are known at any time then, without a look at the others.

Invariants: `_asked` has each adapter on the GPU with the number of its last asking; `_unused` are the numbers of those
that have no pin, ascending, and `_unused_keys` who they are. Cost: O(log n), and a move of some words.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.machine_ints import bisect_left

if TYPE_CHECKING:
    from mypy_extensions import i64


class AdapterUse:
    """See the module.

    Attributes:
        pins: sequences of each adapter that any of them has, by key.
        slots: pool slots that these adapters take.
        names: by key, of those whose key is not their name.
    """

    __slots__ = ("_asked", "_num_askings", "_unused", "_unused_keys", "names", "pins", "slots")

    def __init__(self) -> None:
        self.pins: dict[str, int] = {}
        self.slots = 0
        self.names: dict[str, str] = {}
        self._num_askings = 0
        self._asked: dict[str, int] = {}
        self._unused: list[i64] = []
        self._unused_keys: list[str] = []

    # --- the batch --------------------------------------------------------------------------------------------------

    def pin(self, adapter: Adapter) -> None:
        """Count a sequence that comes with an adapter."""
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
        """Forget a sequence that was counted."""
        key = adapter.key
        pins = self.pins[key] - 1
        if pins:
            self.pins[key] = pins
            return
        del self.pins[key]
        self.slots -= adapter.slots
        if adapter.version:
            del self.names[key]
        asking = self._asked.get(key)
        if asking is not None:
            place = bisect_left(self._unused, asking)
            self._unused.insert(place, asking)
            self._unused_keys.insert(place, key)

    # --- the GPU ----------------------------------------------------------------------------------------------------

    def came(self, key: str) -> None:
        """Note an adapter that is on the GPU from now on."""
        self._num_askings += 1
        self._asked[key] = self._num_askings
        if key not in self.pins:
            self._unused.append(self._num_askings)
            self._unused_keys.append(key)

    def asked_for(self, key: str) -> None:
        """Note that an adapter on the GPU is asked for once more."""
        if key not in self.pins:
            self._take_out(self._asked[key])
        self.came(key)

    def went(self, key: str) -> None:
        """Note an adapter that has left the GPU."""
        asking = self._asked.pop(key)
        if key not in self.pins:
            self._take_out(asking)

    def _take_out(self, asking: int) -> None:
        place = bisect_left(self._unused, asking)
        del self._unused[place], self._unused_keys[place]

    def unused(self, stay: Collection[str]) -> list[str]:
        """Return who is on the GPU without a pin, least recently asked for first, without those that are to stay."""
        return [key for key in self._unused_keys if key not in stay]

    def first_unused(self, stay: dict[str, Adapter]) -> str | None:
        """Return the first of these."""
        for key in self._unused_keys:
            if key not in stay:
                return key
        return None
