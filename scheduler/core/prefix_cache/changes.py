"""Changes of a prefix cache's blocks, for a reader that keeps a copy of its contents elsewhere.

A block is named by a hash of 64 bits that covers its tokens, all the blocks above it, the prompt's salt and the adapter
in its version:

    hash(root)  = blake2b-64(adapter key, empty for the base model; with a salt, NUL and the salt follow)
    hash(block) = blake2b-64(hash of its parent, its tokens as 32-bit numbers)

so equal blocks have equal names on every worker and after every restart, and those of two adapters or salts never do.
The cache itself compares tokens and needs no hash; none is computed unless changes are noted. A cache whose changes are
noted keeps, for each extent, the hashes of its blocks in order (`Extent.hashes`).
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from lorrery.scheduler.core.prefix_cache import extents
from lorrery.scheduler.core.prefix_cache.extents import Extent, Root
from lorrery.scheduler.core.sequence import Adapter
from lorrery.vocabulary import u32

HASH_BYTES = 8


class BlocksStored:
    """Blocks can be found from now on, each following the one before.

    Attributes:
        adapter: used to compute them; None: the base model.
        cache_salt: of the prompt.
        parent_hash: of the block that the first one follows; None: it begins a prompt.
        hashes: of the blocks.
        keys: the tokens of each, as the bytes of an `array("I")`.
    """

    __slots__ = ("adapter", "cache_salt", "hashes", "keys", "parent_hash")

    def __init__(self, adapter: Adapter | None, cache_salt: str, parent_hash: int | None) -> None:
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.parent_hash = parent_hash
        self.hashes: list[int] = []
        self.keys: list[bytes] = []


class BlocksRemoved:
    """Blocks cannot be found any more; a block is removed before the one that it follows.

    Attributes:
        hashes: of the blocks.
    """

    __slots__ = ("hashes",)

    def __init__(self) -> None:
        self.hashes: list[int] = []


BlockChange = BlocksStored | BlocksRemoved


class BlockNotes:
    """Changes in order; adjacent ones of one kind are merged."""

    def __init__(self) -> None:
        self._changes: list[BlockChange] = []
        self._stored: BlocksStored | None = None
        self._removed: BlocksRemoved | None = None

    def stored(
        self, adapter: Adapter | None, cache_salt: str, parent_hash: int | None, block_hash: int, key: bytes
    ) -> None:
        """Note a block that can be found from now on."""
        stored = self._stored
        if stored is None or stored.hashes[-1] != parent_hash:
            stored = self._stored = BlocksStored(adapter, cache_salt, parent_hash)
            self._removed = None
            self._changes.append(stored)
        stored.hashes.append(block_hash)
        stored.keys.append(key)

    def cut(self) -> None:
        """Merge nothing that follows with what is there."""
        self._stored = self._removed = None

    def removed(self, block_hash: int) -> None:
        """Note a block that is gone."""
        removed = self._removed
        if removed is None:
            removed = self._removed = BlocksRemoved()
            self._stored = None
            self._changes.append(removed)
        removed.hashes.append(block_hash)

    def take(self) -> list[BlockChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        self._stored = self._removed = None
        return changes


def root_hash(name: str | None) -> int:
    """Return the hash that the first blocks below a root follow; `name` as in `extents.root_name`."""
    return _hash((name or "").encode())


def block_hash(parent_hash: int, key: bytes) -> int:
    """Return the hash of a block; `key` has its tokens as the bytes of an `array("I")`."""
    return _hash(parent_hash.to_bytes(HASH_BYTES, "little") + u32.pack(array("I", key)))


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "little")


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
