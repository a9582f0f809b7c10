"""The tree that `BlockCache` keeps: a root for each adapter, in each version, and salt, and a node per block below."""

from collections.abc import Iterator

from lorrery.scheduler.core.prefix_cache.changes import BlockNotes
from lorrery.scheduler.core.sequence import Adapter


class Node:
    """A block of tokens in its place; `pins` sequences of the batch use it.

    `hash` names it while changes are noted.
    """

    __slots__ = ("children", "hash", "key", "parent", "pins")

    def __init__(self, parent: "Node | None", key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.hash = 0


class Root(Node):
    """The blocks of an adapter and a salt hang under it; itself it is none."""

    __slots__ = ("adapter", "cache_salt")

    def __init__(self, adapter: Adapter | None, cache_salt: str) -> None:
        super().__init__(None, b"")
        self.adapter = adapter
        self.cache_salt = cache_salt


def below(root: Root) -> Iterator[Node]:
    """Yield the blocks below a root: each after the one that it follows, a chain without branches in one go."""
    nodes: list[Node] = [root]
    while nodes:
        node = nodes.pop()
        if node is not root:
            yield node
        nodes += node.children.values()


def note_stored(notes: BlockNotes, node: Node, root: Root) -> None:
    """Note that a block, which has its hash, can be found."""
    parent = node.parent
    assert parent is not None, "a root is no block"
    above = parent.hash if parent is not root else None
    notes.stored(root.adapter, root.cache_salt, above, node.hash, node.key)
