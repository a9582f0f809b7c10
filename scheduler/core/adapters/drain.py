"""SGLang's bound against the starvation of adapters: others drain to make room.

Requests whose adapter finds no place are passed over, so they could wait for ever. With a threshold, an adapter
*starves* when one of its requests has waited for longer and the batch has as many adapters as places. For each that
starves, the longest wait first, one of the batch's adapters drains: the one that is done first, by the most tokens that
one of its sequences may still produce. A draining adapter admits only what ends within 1.2 times that, until none of
its sequences runs.

The base model (None) drains and is admitted like an adapter, but nothing drains for it. sgl-project/sglang (0.5.23),
srt/lora/lora_drainer.py; ties between adapters that drain are broken by key, there by chance.

Cost: O(waiting + running) for each pass.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

from lorrery.scheduler.core.overlap import NOTHING, Unseen
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

TOLERANCE: Final = 1.2
Joined: TypeAlias = tuple[int, int]
"""When a sequence joined the queue, in picoseconds, and a count that orders those of one time."""


def key_of(sequence: Sequence) -> str | None:
    """Return the key of a sequence's adapter; None: the base model."""
    return None if sequence.adapter is None else sequence.adapter.key


class AdapterDrain:
    """See the module.

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
