"""A copy of a prefix cache, kept up from its changes alone."""

from array import array
from collections import Counter
from collections.abc import Iterable

from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlocksStored
from lorrery.scheduler.core.prefix_cache.extents import below, path_tokens, root_name

Prefix = tuple[str | None, tuple[int, ...]]


class CacheCopy:
    """Knows blocks by their hashes: of each the name of its root, and all tokens from the beginning of the prompt."""

    def __init__(self) -> None:
        self.blocks: dict[int, Prefix] = {}
        self.num_copies: Counter[int] = Counter()

    def apply(self, changes: Iterable[BlockChange]) -> None:
        for change in changes:
            if not isinstance(change, BlocksStored):
                for block_hash in change.hashes:
                    self.num_copies[block_hash] -= 1
                    if not self.num_copies[block_hash]:
                        del self.blocks[block_hash]
                continue
            name = root_name(None if change.adapter is None else change.adapter.key, change.cache_salt)
            path: tuple[int, ...] = ()
            if change.parent_hash is not None:
                parent_name, path = self.blocks[change.parent_hash]
                assert parent_name == name
            for block_hash, key in zip(change.hashes, change.keys, strict=True):
                path = (*path, *array("I", key))
                assert self.blocks.setdefault(block_hash, (name, path)) == (name, path)
                self.num_copies[block_hash] += 1

    def paths(self) -> set[Prefix]:
        found = set(self.blocks.values())
        assert len(found) == len(self.blocks), "two hashes for one block"
        return found


def to_be_found(cache: BlockCache) -> set[Prefix]:
    """What the tree itself has."""
    found: set[Prefix] = set()
    for root in cache._roots.values():
        for extent in below(root):
            tokens = path_tokens(extent)
            ends = range(extent.start + 1, extent.end + 1)
            found.update((root.name, tokens[: end * cache.block_size]) for end in ends)
    return found
