"""Longest prefix match first: SGLang's `lpm`.

A pass sorts the queue by the cached tokens of each input, and leaves it so; ties keep their order. A sequence with few
cached tokens that shares its beginning with one before it in the queue goes behind all others, since after the other's
prefill it finds that beginning in the cache. With more than 128 waiting, a pass is first come first served.

sgl-project/sglang (0.5.23), srt/managers/schedule_policy.py (`_compute_prefix_matches`, `_sort_by_longest_prefix`).

Cost: a look-up for each waiting sequence, and a sort.
"""

from collections.abc import Iterator

from lorrery.scheduler.core.budgeted_admission import BudgetedPass
from lorrery.scheduler.core.prefix_cache.content import content_of
from lorrery.scheduler.core.prefix_cache.extents import Place, place_of
from lorrery.scheduler.core.prefix_cache.radix import RadixCache
from lorrery.scheduler.core.queues.rejoining import MOST_MATCHED, Rejoining
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class LongestPrefix(Rejoining):
    """Waiting sequences, those with the longest cached prefix first; without a prefix cache as `Rejoining`."""

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
