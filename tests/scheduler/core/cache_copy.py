"""A copy of a prefix cache, kept up from its changes alone."""

from array import array
from collections.abc import Iterable

from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlocksStored
from lorrery.scheduler.core.prefix_cache.extents import below, path_tokens

Prefix = tuple[str | None, tuple[int, ...]]


class CacheCopy:
    """Knows blocks by their hashes, and of each its adapter and all tokens from the beginning of the prompt."""

    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}

    def apply(self, changes: Iterable[BlockChange]) -> None:
        for change in changes:
            if not isinstance(change, BlocksStored):
                for block_hash in change.hashes:
                    del self.blocks[block_hash]
                continue
            adapter_key = None if change.adapter is None else change.adapter.key
            path: tuple[int, ...] = ()
            if change.parent_hash is not None:
                parent_key, path = self.blocks[change.parent_hash]
                assert parent_key == adapter_key
            for block_hash, key in zip(change.hashes, change.keys, strict=True):
                path = (*path, *array("I", key))
                assert block_hash not in self.blocks, "stored twice"
                self.blocks[block_hash] = (adapter_key, path)

    def paths(self) -> set[Prefix]:
        found = set(self.blocks.values())
        assert len(found) == len(self.blocks), "two hashes for one block"
        return found


def to_be_found(cache: BlockCache) -> set[Prefix]:
    """What the tree itself has."""
    found: set[Prefix] = set()
    for (adapter_key, _), root in cache._roots.items():
        for extent in below(root):
            tokens = path_tokens(extent)
            ends = range(extent.start + 1, extent.end + 1)
            found.update((adapter_key, tokens[: end * cache.block_size]) for end in ends)
    return found
