"""SGLang's places for adapters: a fixed number, of which the base model takes one too.

`AdapterDrain` keeps requests whose adapter finds no place from waiting for ever.

Each batch has the adapters of its own sequences in place before it runs, and waits for those that are not. So a prefill
may evict an adapter with which others decode; the next decode step loads it again. Least recently used goes first, the
base model last, a pinned adapter never; adapters of one batch count as used in order of their keys.

A load on request brings an adapter into host memory alone.

Faults concern loads from disk alone. There an adapter is read before any batch needs it; here when the first sequence
that has it is tried (`is_readable`), and one whose load goes wrong waits in the queue.

sgl-project/sglang (0.5.23), srt/lora/lora_manager.py (`validate_lora_batch`, `fetch_new_loras`), mem_pool.py
(`prepare_lora_batch`) and eviction_policy.py. There the keys are random ids; here they are names.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Final, TypeAlias

from lorrery.scheduler.core.adapters.loads import WELL, AdapterOptions, LoadFaults, LoadTime
from lorrery.scheduler.core.adapters.residency import Residency
from lorrery.scheduler.core.overlap import NOTHING, Unseen
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Adapter, Sequence


class AdapterSlots(Residency):
    """The adapters of one worker.

    Args:
        options: the rules; loads are blocking. `max_loras` is the number of places; None: unlimited.
        load_ps: how long a load takes.
        load_faults: which loads fail or are slow.
        pinned: keys of adapters that keep their place once they have one; places for all of them are kept free.

    Attributes:
        has_base: whether the base model has a place.
        last_loads: what the last `place` brought in, in order: key, and key of what was evicted for it. A None key is
            the base model; no second key: the place was free.
    """

    def __init__(
        self,
        options: AdapterOptions,
        load_ps: LoadTime = lambda adapter, tier: 0,
        load_faults: LoadFaults = lambda adapter, attempt, at_ps: WELL,
        pinned: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(replace(options, blocking=True), load_ps, load_faults)
        self.pinned = pinned
        self.has_base = True
        self.last_loads: list[tuple[str | None, ...]] = []
        self._in_place: dict[str, None] = {}
        """Adapters with a place, least recently used first."""
        self._readable: set[str] = set()
        """Adapters without one whose load from disk will go well."""

    def fit(self, keys: Collection[str | None]) -> bool:
        """Return whether the adapters of one batch can have places at once; None is the base model."""
        most = self.options.max_loras
        if most is None:
            return True
        if len(keys) > most:
            return False
        if not self.pinned:
            return True
        num_unpinned = sum([key not in self.pinned for key in keys])
        return num_unpinned <= most - len(self.pinned)

    def is_readable(self, adapter: Adapter, at_ps: int) -> bool:
        """Return whether a batch may have an adapter; if a fault concerns its load from disk, run that aside first."""
        key = adapter.key
        if key in self._in_place or key in self.host or key in self._readable:
            return True
        if key not in self.aside:
            fault = self._load_faults(adapter, self._attempts.get(key, 0), at_ps)
            if fault == WELL:
                self._readable.add(key)
                return True
            self._start(self.aside, adapter, fault, at_ps)
            self.advance(at_ps)  # a load that takes no time
        return key in self.host

    def load(self, adapter: Adapter, at_ps: int) -> None:
        """Load an adapter into host memory on request, unless it is there or on its way."""
        if adapter.key in self.host:
            self.requested[adapter.key] = adapter
        else:
            super().load(adapter, at_ps)

    def place(self, batch: Mapping[str, Adapter], at_ps: int, *, with_base: bool) -> tuple[Adapter, ...]:
        """Begin the loads that a batch needs; return the adapters that it has to wait for.

        Doing it again for the same batch changes nothing.

        Args:
            batch: its adapters by key.
            at_ps: now.
            with_base: whether a sequence of it has no adapter.
        """
        self.last_loads.clear()
        in_place, keys = self._in_place, sorted(batch)
        missing = [key for key in keys if key not in in_place]
        for key in keys:  # those without a place yet are the most recently used ones, too
            in_place.pop(key, None)
            in_place[key] = None
        num_free = len(missing)
        if self.options.max_loras is not None:
            num_free = self.options.max_loras - (len(in_place) - len(missing)) - self.has_base
        if with_base and not self.has_base:
            self._make_free(None, batch, num_free, at_ps)
            self.has_base = True
            num_free -= 1
        waits_for: list[Adapter] = []
        for key in missing:
            self._make_free(key, batch, num_free, at_ps)
            num_free -= 1
            self._readable.discard(key)
            self._take_place(batch[key], at_ps)
            waits_for.append(batch[key])
        return tuple(waits_for)

    def _make_free(self, key: str | None, batch: Mapping[str, Adapter], num_free: int, at_ps: int) -> None:
        """Evict something for a key, unless a place is free."""
        if num_free > 0:
            self.last_loads.append((key,))
            return
        for other in self._in_place:
            if other not in batch and other not in self.pinned:
                self._evict(other, at_ps)
                self.last_loads.append((key, other))
                return
        self.has_base = False
        self.last_loads.append((key, None))

    def _make_place(self, adapter: Adapter, at_ps: int, admitted: Many[Sequence] = ()) -> bool:
        """Refuse: places are for the batch that runs next."""
        return False

    def _evict(self, name: str, at_ps: int) -> None:
        super()._evict(name, at_ps)
        self._in_place.pop(name, None)

    def clear(self, at_ps: int) -> None:
        """Forget all adapters that the worker held; see `Residency`."""
        super().clear(at_ps)
        self._in_place.clear()
        self._readable.clear()
        self.has_base = True


TOLERANCE: Final = 1.2
Joined: TypeAlias = tuple[int, int]
"""When a sequence joined the queue, in picoseconds, and a count that orders those of one time."""


def key_of(sequence: Sequence) -> str | None:
    """Return the key of a sequence's adapter; None: the base model."""
    return None if sequence.adapter is None else sequence.adapter.key


class AdapterDrain:
    """SGLang's bound against the starvation of adapters: others drain to make room.

    Requests whose adapter finds no place are passed over, so they could wait for ever. With a threshold, an adapter
    *starves* when one of its requests has waited for longer and the batch has as many adapters as places. For each that
    starves, the longest wait first, one of the batch's adapters drains: the one that is done first, by the most tokens
    that one of its sequences may still produce. A draining adapter admits only what ends within 1.2 times that, until
    none of its sequences runs.

    The base model (None) drains and is admitted like an adapter, but nothing drains for it. sgl-project/sglang
    (0.5.23), srt/lora/lora_drainer.py; ties between adapters that drain are broken by key, there by chance.

    Cost: O(waiting + running) for each pass.

    Args:
        threshold_ps: wait after which an adapter starves.
        num_places: adapters that a batch may have, the base model included.

    Attributes:
        draining: by draining adapter, the one that it drains for.
    """

    def __init__(self, threshold_ps: int, num_places: int) -> None:
        self._threshold_ps = threshold_ps
        self._num_places = num_places
        self.draining: dict[str | None, str] = {}
        self._left: dict[str | None, int] = {}

    def update(
        self, waiting: Iterable[tuple[Sequence, Joined]], running: Running, at_ps: int, unseen: Unseen = NOTHING
    ) -> None:
        """Choose anew at the beginning of a pass.

        Args:
            waiting: sequences, each with when it joined the queue.
            running: the batch; only decoding sequences count.
            at_ps: now.
            unseen: output that the pass does not know of.
        """
        left: dict[str | None, int] = {}
        for sequence in running:
            key = key_of(sequence)
            left[key] = max(left.get(key, 0), sequence.finish_step - running.decode_step + unseen.of(sequence))
        self._left = left
        if len(left) >= self._num_places:
            self._begin(waiting, at_ps)
        for key in [key for key in self.draining if key not in left]:
            del self.draining[key]

    def _begin(self, waiting: Iterable[tuple[Sequence, Joined]], at_ps: int) -> None:
        first_joined: dict[str | None, Joined] = {}
        starves_before = (at_ps - self._threshold_ps, -1)
        for sequence, joined in waiting:
            key = key_of(sequence)
            if joined < first_joined.get(key, starves_before):
                first_joined[key] = joined
        served = set(self.draining.values())
        starving = sorted([(joined, key) for key, joined in first_joined.items() if key not in served], key=_joined)
        able = [key for key in self._left if key not in self.draining]
        for _, key in starving:
            if not able:
                break
            first = min(able, key=lambda one: (self._left[one], one is not None, one or ""))
            able.remove(first)
            if key is not None:
                self.draining[first] = key

    def admits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may enter as far as its adapter does not drain."""
        key = key_of(sequence)
        if key not in self.draining:
            return True
        return sequence.max_new_tokens <= self._left.get(key, 0) * TOLERANCE


def _joined(one: tuple[Joined, str | None]) -> Joined:
    return one[0]
