"""SGLang's queues, `fcfs` and `lpm`: a preempted sequence joins the queue again, at its end.

Every 32nd pass makes the cached prefixes of the first 128 waiting sequences the most recently used ones, the head's
last, so that what is waited for is not evicted first. sgl-project/sglang (0.5.23), srt/managers/schedule_policy.py
(`SchedulePolicy`).

They run under `core.budgeted_admission` only: other passes have no such look-ups.
"""

from collections.abc import Collection, Iterable, Iterator
from heapq import merge
from itertools import dropwhile, islice
from typing import Final

from lorrery.scheduler.core.adapters.slots import key_of
from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.budgeted_admission import BudgetedPass
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.prefix_cache.base import content_of
from lorrery.scheduler.core.prefix_cache.extents import Place, place_of
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.queues.base import ListedQueue
from lorrery.scheduler.core.running import Joined, Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr

MOST_MATCHED: Final = 128
"""Waiting sequences whose prefixes are looked up in one pass."""
REFRESH_PASSES: Final = 32
"""Passes from one refresh of waiting prefixes to the next."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Rejoining(ListedQueue):
    """Waiting sequences in the order in which they last joined."""

    def __init__(self) -> None:
        super().__init__()
        self._sequences: dict[int, Sequence] = {}
        self._of_adapter: dict[str | None, dict[int, Sequence]] = {}
        """The same by adapter, those of one in the order in which they joined."""
        self._joined: dict[int, Joined] = {}
        self._num_joined = 0
        self._num_passes = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def append(self, sequence: Sequence, at_ps: int) -> None:
        """Add a sequence at the end."""
        self._num_joined += 1
        joined_ps = at_ps if sequence.num_requeues else sequence.arrived_ps
        self._joined[sequence.handle] = (joined_ps, self._num_joined)
        self._sequences[sequence.handle] = sequence
        self._of_adapter.setdefault(key_of(sequence), {})[sequence.handle] = sequence

    def with_joined(self) -> Iterable[tuple[Sequence, Joined]]:
        """Return the sequences, each with when it joined."""
        return [(one, self._joined[one.handle]) for one in self._sequences.values()]

    def cancel(self, handle: int) -> Sequence | None:
        """Remove and return a waiting sequence."""
        sequence = self._sequences.get(handle)
        if sequence is not None:
            self._remove(sequence)
        return sequence

    def _remove(self, sequence: Sequence) -> None:
        handle, key = sequence.handle, key_of(sequence)
        alike = self._of_adapter[key]
        del self._sequences[handle], self._joined[handle], alike[handle]
        if not alike:
            del self._of_adapter[key]

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences, in order."""
        sequences = list(self._sequences.values())
        self._sequences.clear()
        self._of_adapter.clear()
        self._joined.clear()
        return sequences

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        """Try from the head until the pass is over.

        Cost: one test more than sequences enter or are passed over; those whose adapter has no place once all places
        are taken are not visited.
        """
        assert isinstance(admission, BudgetedPass), "see the module"
        cache = admission.memory.cache
        if cache is not None:
            self._prepare(admission, cache)
        for sequence in self._candidates(admission):
            if admission.is_over:
                break
            if not admission.admit(sequence) and not admission.pass_over():
                break
        for sequence in admission.admitted:
            self._remove(sequence)
        return []

    def _candidates(self, admission: BudgetedPass) -> Iterator[Sequence]:
        """Yield the sequences in order, without those that would be passed over once all places are taken."""
        for sequence in self._sequences.values():
            keys = admission.only_adapters
            if keys is not None:
                yield from self._from(sequence, keys)
                return
            yield sequence

    def _from(self, sequence: Sequence, keys: Collection[str | None]) -> Iterator[Sequence]:
        """Yield the sequences with these adapters in order, from this one, or the first one behind it, on."""
        first = self._place_of(sequence)
        alike = [self._of_adapter[key].values() for key in keys if key in self._of_adapter]
        return dropwhile(lambda one: self._place_of(one) < first, merge(*alike, key=self._place_of))

    def _place_of(self, sequence: Sequence) -> int:
        return self._joined[sequence.handle][1]

    def count_passes(self, num_passes: int) -> None:
        """Count passes that have been skipped, since they would have admitted nothing."""
        self._num_passes += num_passes

    def passes_alike(self) -> int | None:
        """Return how many passes, from the last one on, change nothing if they admit nothing; None: all of them."""
        return REFRESH_PASSES - (self._num_passes - 1) % REFRESH_PASSES

    def _prepare(self, admission: BudgetedPass, cache: RadixCache) -> None:
        """Look up what the order or the cache needs."""
        self._refresh(cache)

    def _refresh(self, cache: RadixCache) -> None:
        if self._num_passes % REFRESH_PASSES == 0:
            for sequence in reversed(list(islice(self._sequences.values(), MOST_MATCHED))):
                cache.touch(sequence, whole=True)
        self._num_passes += 1

    def holds_for(self, running: Running, memory: Memory, limit: int) -> int:
        """Return 1: a pass counts."""
        return 1

    def at_rest(self) -> bool:
        """Return whether nothing waits."""
        return not self._sequences


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestPrefix(Rejoining):
    """Longest prefix match first: SGLang's `lpm`.

    A pass sorts the queue by the cached tokens of each input, and leaves it so; ties keep their order. A sequence with
    few cached tokens that shares its beginning with one before it in the queue goes behind all others, since after the
    other's prefill it finds that beginning in the cache. With more than 128 waiting, a pass is first come first served
    (srt/managers/schedule_policy.py: `_compute_prefix_matches`, `_sort_by_longest_prefix`).

    Cost: a look-up for each waiting sequence, and a sort.
    """

    def _candidates(self, admission: BudgetedPass) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def passes_alike(self) -> int | None:
        """Return 1: each pass looks up every prefix, and may find another order."""
        return 1

    def _prepare(self, admission: BudgetedPass, cache: RadixCache) -> None:
        if len(self._sequences) > MOST_MATCHED:
            self._refresh(cache)
            return
        rules = admission.memory.rules
        beginnings: set[tuple[Place, bytes]] = set()
        ranked: list[tuple[int, Sequence]] = []
        for sequence in self._sequences.values():
            cached_tokens = cache.touch(sequence, whole=True)
            behind = False
            if cached_tokens <= rules.in_batch_check_threshold:
                beginning = _beginning(sequence, rules.in_batch_deprioritize_threshold)
                behind = beginning in beginnings
                if beginning is not None:
                    beginnings.add(beginning)
            usable_tokens = max(0, min(cached_tokens, sequence.input_tokens - cache.min_computed_tokens))
            ranked.append((1 if behind else -usable_tokens, sequence))
        ranked.sort(key=_rank)
        self._sequences = {sequence.handle: sequence for _, sequence in ranked}


def _beginning(sequence: Sequence, num_tokens: int) -> tuple[Place, bytes] | None:
    """Return the first tokens of an input; equal for two that share them in a cache. None: it is shorter."""
    content = content_of(sequence)
    if min(sequence.input_tokens, content.num_tokens) < num_tokens:
        return None
    num_units = -(-num_tokens // content.unit_tokens)
    return place_of(sequence, content), content.data[: num_units * content.unit_bytes]


def _rank(one: tuple[int, Sequence]) -> int:
    return one[0]
