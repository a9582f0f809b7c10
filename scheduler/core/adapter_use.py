"""Which adapters the sequences of a batch use, and of those on the GPU that nobody uses who was used least recently.

The batch says who uses what (`pin`, `unpin`), the residency who is on the GPU (`came`, `went`) and who is asked for
there (`asked_for`). Those that make room next are known at any time then, without a look at the others.

Invariants: `_asked` has each adapter on the GPU with the number of its last asking, `_by_asking` the same the other way
round; `_unused` are the numbers of those that have no pin, ascending. Cost: O(log n), and a move of some words.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary.ascending import bisect_left, insort

if TYPE_CHECKING:
    from mypy_extensions import i64


class AdapterUse:
    """See the module.

    Attributes:
        pins: sequences of each adapter that any of them has, by key.
        slots: pool slots that these adapters take.
        names: by key, of those whose key is not their name.
    """

    __slots__ = ("_asked", "_by_asking", "_num_askings", "_unused", "names", "pins", "slots")

    def __init__(self) -> None:
        self.pins: dict[str, int] = {}
        self.slots = 0
        self.names: dict[str, str] = {}
        self._num_askings = 0
        self._asked: dict[str, int] = {}
        self._by_asking: dict[int, str] = {}
        self._unused: list[i64] = []

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
                del self._unused[bisect_left(self._unused, asking)]

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
            insort(self._unused, asking)

    # --- the GPU ----------------------------------------------------------------------------------------------------

    def came(self, key: str) -> None:
        """Note an adapter that is on the GPU from now on."""
        self._number(key)
        if key not in self.pins:
            self._unused.append(self._num_askings)

    def asked_for(self, key: str) -> None:
        """Note that an adapter on the GPU is asked for once more."""
        before = self._asked[key]
        del self._by_asking[before]
        self._number(key)
        if key not in self.pins:
            del self._unused[bisect_left(self._unused, before)]
            self._unused.append(self._num_askings)

    def _number(self, key: str) -> None:
        self._num_askings += 1
        self._asked[key] = self._num_askings
        self._by_asking[self._num_askings] = key

    def went(self, key: str) -> None:
        """Note an adapter that has left the GPU."""
        asking = self._asked.pop(key)
        del self._by_asking[asking]
        if key not in self.pins:
            del self._unused[bisect_left(self._unused, asking)]

    def unused(self, stay: Collection[str]) -> list[str]:
        """Return who is on the GPU without a pin, least recently asked for first, without those that are to stay."""
        by_asking = self._by_asking
        names = [by_asking[asking] for asking in self._unused]
        return [name for name in names if name not in stay] if stay else names

    def first_unused(self, stay: Collection[str]) -> str | None:
        """Return the first of these."""
        for asking in self._unused:
            name = self._by_asking[asking]
            if name not in stay:
                return name
        return None
