"""Adapters of those who come next, and how many of them need no look any more.

While nobody comes to the front of the queue or leaves it, a residency is asked again and again to load the same ones
ahead, and most of them are there.
"""

from collections.abc import Iterable

from lorrery.scheduler.core.sequence import Adapter


class Ahead:
    """Adapters that will be needed next, the first of them first.

    Attributes:
        adapters: different ones.
        by_key: the same.
        num_there: so many of the first were on the GPU or under way when they were last looked at.
        as_of: tells the residency whether they still are.
    """

    __slots__ = ("adapters", "as_of", "by_key", "num_there")

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self.by_key = {adapter.key: adapter for adapter in adapters}
        self.adapters = list(self.by_key.values())
        self.num_there, self.as_of = 0, -1
