"""A sequence's part of the tree: the blocks that it pins, and those that a look-up has found for it."""

from lorrery.scheduler.core.prefix_cache.content import content_of, with_output
from lorrery.scheduler.core.prefix_cache.extents import Extent, Root
from lorrery.scheduler.core.sequence import Content, Sequence


class Use:
    """The blocks that a sequence of the batch pins: from the root to the end of `last`.

    `content` is that of its whole input, as far as it is known. `grows`: whether it decodes, and its output is to be
    found as it fills blocks.
    """

    __slots__ = ("content", "grows", "last", "root", "sequence")

    def __init__(self, root: Root, content: Content, sequence: Sequence) -> None:
        self.root = root
        self.last: Extent = root
        self.content = content
        self.sequence = sequence
        self.grows = False

    def computed(self, output_tokens: int) -> tuple[Content, int]:
        """Return the content of the sequence, and how many of its tokens are computed if it has produced this many.

        The newest token is not.
        """
        sequence = self.sequence
        tokens = sequence.computed_tokens + max(0, output_tokens - 1)
        if tokens <= sequence.input_tokens:
            return self.content, tokens
        produced = sequence.produced_tokens
        return with_output(self.content, sequence, produced, produced + output_tokens - 1), tokens


class Found:
    """The last look-up: its key, and the extents found, the last one perhaps in part.

    `root` is None if the sequence's adapter has none; `end` is the block before which its content leaves the tree, of
    which it may use `num_blocks`. It holds until one of the extents changes, or a block follows the last one.
    """

    __slots__ = ("end", "extents", "input_tokens", "num_blocks", "root", "sequence", "version")

    def __init__(
        self,
        sequence: Sequence,
        input_tokens: int,
        version: int,
        root: Root | None,
        end: int,
        num_blocks: int,
        extents: list[Extent],
    ) -> None:
        self.sequence = sequence
        self.input_tokens = input_tokens
        self.version = version
        self.root = root
        self.end = end
        self.num_blocks = num_blocks
        self.extents = extents

    def is_for(self, sequence: Sequence) -> bool:
        """Return whether that was a look-up of this sequence's input as it is now."""
        return self.sequence is sequence and self.input_tokens == sequence.input_tokens

    @property
    def last(self) -> Extent | None:
        """Where the look-up ended; None: the sequence's adapter has no root."""
        return self.extents[-1] if self.extents else self.root

    def still_holds(self) -> bool:
        """Return whether a look-up would find the same, though the tree has changed. Cost: O(extents found)."""
        root, version = self.root, self.version
        if root is None or root.changed_at > version:
            return False
        last: Extent = root
        for extent in self.extents:
            if extent.changed_at > version:
                return False
            last = extent
        if last.end != self.end or not last.children:
            return True
        content = content_of(self.sequence)
        at_end = content.num_tokens // root.block_size <= self.end
        return at_end or root.key_of(content.data, self.end) not in last.children
