"""Adapters of the first waiting sequences, and how many of them need no further check.

While the front of the queue stays the same, a residency has to load the same adapters ahead at every decision, and most
of them are already on the GPU or loading.
"""

from collections.abc import Iterable

from lorrery.scheduler.core.sequence import Adapter


class Ahead:
    """Adapters that will be needed next, in order of need.

    Attributes:
        adapters: distinct, in order.
        by_key: the same adapters, by key.
        num_there: length of the prefix of `adapters` that was on the GPU or loading at the last check.
        as_of: by which the residency tells whether `num_there` still holds.
    """

    __slots__ = ("adapters", "as_of", "by_key", "num_there")

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self.by_key = {adapter.key: adapter for adapter in adapters}
        self.adapters = list(self.by_key.values())
        self.num_there, self.as_of = 0, -1
