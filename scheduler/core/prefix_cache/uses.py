"""A sequence's part of the tree: the blocks that it pins, and those that a look-up has found for it."""

from lorrery.scheduler.core.prefix_cache.extents import Extent, Root
from lorrery.scheduler.core.sequence import Content, Sequence


class Use:
    """The blocks that a sequence of the batch pins: from the root to the end of `last`.

    `content` is that of its whole input, as far as it is known.
    """

    __slots__ = ("content", "last", "root")

    def __init__(self, root: Root, content: Content) -> None:
        self.root = root
        self.last: Extent = root
        self.content = content


class Found:
    """The last look-up: its key, and the extents found, the last one perhaps in part."""

    __slots__ = ("extents", "input_tokens", "num_blocks", "sequence", "version")

    def __init__(
        self, sequence: Sequence, input_tokens: int, version: int, num_blocks: int, extents: list[Extent]
    ) -> None:
        self.sequence = sequence
        self.input_tokens = input_tokens
        self.version = version
        self.num_blocks = num_blocks
        self.extents = extents
