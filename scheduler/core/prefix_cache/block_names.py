"""Hashes by which other processes know the blocks of extents, and the notes about them.

A cache whose changes are noted keeps, for each extent, the hashes of its blocks in order (`Extent.hashes`).
"""

from collections.abc import Iterable

from lorrery.scheduler.core.prefix_cache import extents
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlockNotes, block_hash, root_hash
from lorrery.scheduler.core.prefix_cache.extents import Extent, Root


def name_tree(root: Root) -> None:
    """Compute the hash of every block below a root."""
    root.hashes = [root_hash(root.name)]
    for extent in extents.below(root):
        extent.hashes = []
        name_blocks(extent, extent.start)


def name_blocks(extent: Extent, first: int) -> None:
    """Compute the hashes of an extent's blocks from `first` on; those before it have theirs."""
    assert extent.parent is not None
    above = extent.hashes[-1] if extent.hashes else extent.parent.hashes[-1]
    for block in range(first, extent.end):
        above = block_hash(above, extents.block_key(extent, block))
        extent.hashes.append(above)


def note_stored(notes: BlockNotes, extent: Extent, first: int) -> None:
    """Note that an extent's blocks from `first` on can be found."""
    parent, root = extent.parent, extent.root
    assert parent is not None
    assert root is not None
    for block in range(first, extent.end):
        number = block - extent.start
        above: int | None = extent.hashes[number - 1] if number else parent.hashes[-1]
        if not block:
            above = None  # a root is no block
        notes.stored(root.adapter, root.cache_salt, above, extent.hashes[number], extents.block_key(extent, block))


def stored_below(roots: Iterable[Root]) -> list[BlockChange]:
    """Return all blocks that can be found, each copy, as if they had just been stored."""
    notes = BlockNotes()
    for root in roots:
        for extent in extents.below(root):
            for _ in range(1 + len(extent.copies or ())):
                note_stored(notes, extent, extent.start)
    return notes.take()


def forget_last(notes: BlockNotes, extent: Extent, num_blocks: int) -> None:
    """Note that the last blocks of an extent are gone, and remove their hashes."""
    for number in range(1, num_blocks + 1):
        notes.removed(extent.hashes[-number])
    del extent.hashes[len(extent.hashes) - num_blocks :]
