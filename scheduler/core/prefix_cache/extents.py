"""The tree that `BlockCache` keeps: a radix tree whose edges are runs of blocks; and a sequence's part of it.

Prompts are long and rarely branch. A node for each block of 16 tokens makes a prompt of 16,000 tokens cost a thousand
nodes to find, to pin, to unpin and to evict. Here an *extent* is a run of consecutive blocks of one path with the same
pins and the same time of last use. So the cost of a sequence depends on how often its path branches off from others,
and comparing is a `memcmp`.

    root
     +-- blocks 0 .. 311                 a shared beginning; 3 pins
          +-- blocks 312 .. 990          one prompt's own; 1 pin
          +-- blocks 312 .. 342          another's; 2 pins
               +-- blocks 343 .. 700     a prompt with the same beginning that goes on; 1 pin

* An extent starts where its parent ends. Its children differ in their first block, which is their key.
* Where a sequence's path ends, an extent ends: it is split there when a part of it is pinned or unpinned.
* Pins never grow on the way down, where no block has copies.
* Unpinned blocks are trimmed from an extent's end, or it goes whole; the rest keeps its place in every order.
* Extents that one sequence unpins together, one the only child of the other, are merged again.
* If copies are kept (`ScheduledBlockCache`), several sequences may each have computed the same blocks. `pins` are then
  those of the first copy, which look-ups find; `copies` are the others. Of an extent's blocks, all have the same ones.

Cost: a look-up takes a dictionary look-up and a comparison for each extent on the way, and O(log n) comparisons of
halves where it branches off from the last one; a split copies the extent's label. Memory: the label, which has the
blocks' content (`content`), and some 300 bytes per extent; there are at most two extents for each sequence that left
blocks.
"""

from collections.abc import Iterator

from lorrery.scheduler.core.prefix_cache.base import content_of, with_output
from lorrery.scheduler.core.sequence import Adapter, Content, Sequence

Place = tuple[str | None, str, int]
"""What inputs have in common that may share blocks: adapter key, salt, and tokens per unit of the content."""


class Copy:
    """A further copy of an extent's blocks, computed by a sequence that did not find them.

    Attributes:
        extent: whose blocks these are.
        owner: the sequence's use of the tree (`uses.Use`), which holds this copy for as long as it runs.
        pins: sequences that use it: its owner, and those that found it while it was the first copy.
    """

    __slots__ = ("extent", "owner", "pins")

    def __init__(self, extent: "Extent", owner: object, pins: int) -> None:
        self.extent = extent
        self.owner = owner
        self.pins = pins


class Extent:
    """A run of blocks in its place; `pins` sequences of the batch use all of them.

    Attributes:
        root: of its tree.
        parent: ends where this one starts; None: this is a root.
        start: number of its first block, counted from the root.
        end: number after its last block.
        key: content of its first block.
        label: content of its blocks; bytes beyond them have no meaning.
        children: by key.
        pins: sequences that use it.
        copies: the other copies, in order of computation; None: there are none.
        growing: uses of decoding sequences whose path ends here, if output is to be found as it fills blocks.
        hashes: of its blocks, while changes are noted.
        changed_at: version of the tree in which its blocks last changed; of a root: in which it was dropped.
        run: the run of the tree of all workers (`holders`) in which it ends, if there is such a tree.
    """

    __slots__ = (
        "changed_at", "children", "copies", "end", "growing", "hashes", "key", "label", "parent", "pins", "root", "run",
        "start",
    )  # fmt: skip

    def __init__(
        self,
        root: "Root | None",
        parent: "Extent | None",
        start: int,
        end: int,
        key: bytes,
        label: bytes,
    ) -> None:
        self.root = root
        self.parent = parent
        self.start = start
        self.end = end
        self.key = key
        self.label = label
        self.children: dict[bytes, Extent] = {}
        self.pins = 0
        self.copies: list[Copy] | None = None
        self.growing: dict[object, None] | None = None
        self.hashes: list[int] = []
        self.changed_at = 0
        self.run: Extent | None = None


class Root(Extent):
    """The root of the extents of one adapter, one salt and one kind of content; it has no blocks itself.

    If a unit stands for more than a block (the id of a run of tokens), a block has the unit that it lies in; if blocks
    are larger, a block has all the units that it touches: two blocks in one place are equal if these are.

    Attributes:
        adapter: None: the base model.
        cache_salt: of the prompts (`Sequence.cache_salt`).
        block_size: tokens in a block.
        unit_tokens: tokens per unit of the content.
        unit_bytes: bytes per unit of the content.
        key_bytes: bytes of a first block's key.
        place: its key among the roots of its tree.
        name: see `root_name`.
        num_uses: sequences of the batch that begin here.
    """

    __slots__ = (
        "adapter",
        "block_size",
        "cache_salt",
        "key_bytes",
        "name",
        "num_uses",
        "place",
        "unit_bytes",
        "unit_tokens",
    )

    def __init__(
        self, adapter: Adapter | None, cache_salt: str, block_size: int, unit_tokens: int, unit_bytes: int
    ) -> None:
        super().__init__(None, None, 0, 0, b"", b"")
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.block_size = block_size
        self.unit_tokens = unit_tokens
        self.unit_bytes = unit_bytes
        self.key_bytes = self.end_byte(1)
        self.place: Place = (None if adapter is None else adapter.key, cache_salt, unit_tokens)
        self.name = root_name(*self.place[:2])
        self.num_uses = 0

    def first_byte(self, block: int) -> int:
        """Return the byte offset in a content at which the first unit of this block begins."""
        return block * self.block_size // self.unit_tokens * self.unit_bytes

    def end_byte(self, block: int) -> int:
        """Return the byte offset in a content at which the last unit before this block ends."""
        return (block * self.block_size + self.unit_tokens - 1) // self.unit_tokens * self.unit_bytes

    def key_of(self, data: bytes, block: int) -> bytes:
        """Return the key by which a block of a content is looked up."""
        return data[self.first_byte(block) : self.end_byte(block + 1)]


def place_of(sequence: Sequence, content: Content) -> Place:
    """Return the key of the root of a sequence's blocks; `content` is that of its input."""
    adapter = sequence.adapter
    return None if adapter is None else adapter.key, sequence.cache_salt, content.unit_tokens


def root_name(adapter_key: str | None, cache_salt: str) -> str | None:
    """Return a name for what inputs that share a salt and an adapter have in common; None: neither."""
    return f"{adapter_key or ''}\0{cache_salt}" if cache_salt else adapter_key


def num_common(root: Root, extent: Extent, data: bytes, most: int, base: int = 0) -> int:
    """Return the block at which the path of a content leaves an extent: at most its end, and `most`.

    The content has `most` blocks, and agrees with the extent in all before it and in its first block; `data` is the
    content from byte `base` on, of a block no later than the extent's first.
    """
    label, first = extent.label, root.first_byte(extent.start) - base
    most = min(most, extent.end)
    if data.startswith(label, first):
        return most
    end = root.end_byte(most) - base
    if data[first:end] == label[: end - first]:
        return most
    # They differ first somewhere between the units `equal` and `unequal`, counted from the extent's first.
    equal, unequal, size = 0, (end - first) // root.unit_bytes, root.unit_bytes
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if label[equal * size : middle * size] == data[first + equal * size : first + middle * size]:
            equal = middle
        else:
            unequal = middle
    return ((first + base) // size + equal) * root.unit_tokens // root.block_size


def follow(root: Root, content: Content, way: list[Extent]) -> int:
    """Follow a content below a root as far as its leading blocks are there; return how many, and append to `way`."""
    # Every arrival looks up at every worker, so `Root` and `num_common` are inlined here.
    size, unit_tokens, unit_bytes = root.block_size, content.unit_tokens, content.unit_bytes
    data, most = content.data, content.num_tokens // size
    children, end = root.children, 0
    while end < most:
        first = end * size // unit_tokens * unit_bytes
        extent = children.get(data[first : ((end + 1) * size + unit_tokens - 1) // unit_tokens * unit_bytes])
        if extent is None:
            break
        way.append(extent)
        if data.startswith(extent.label, first) and extent.end <= most:
            end = extent.end
            children = extent.children
        else:
            end = num_common(root, extent, data, most)
            if end < extent.end:
                break
            children = extent.children
    return end


def split(root: Root, extent: Extent, at: int) -> Extent:
    """Split an extent before a block; return the new one, with the upper blocks. The old one keeps its identity."""
    parent = extent.parent
    assert parent is not None
    assert extent.start < at < extent.end
    first, label = root.first_byte(extent.start), extent.label
    above = Extent(root, parent, extent.start, at, extent.key, label[: root.end_byte(at) - first])
    above.pins = extent.pins
    if extent.copies is not None:
        above.copies = [Copy(above, copy.owner, copy.pins) for copy in extent.copies]
    parent.children[extent.key] = above  # in the place of the old one
    extent.parent, extent.start = above, at
    extent.label = label = label[root.first_byte(at) - first :]
    extent.key = label[: root.end_byte(at + 1) - root.first_byte(at)]
    above.children[extent.key] = extent
    if extent.hashes:
        num_above = at - above.start
        above.hashes, extent.hashes = extent.hashes[:num_above], extent.hashes[num_above:]
    return above


def merge(root: Root, above: Extent, extent: Extent) -> None:
    """Prepend the blocks of an extent's parent to its own; it is the only child, and keeps its identity."""
    parent = above.parent
    assert parent is not None
    assert len(above.children) == 1
    first = root.first_byte(above.start)
    extent.label = above.label[: root.first_byte(above.end) - first] + extent.label
    extent.parent, extent.start, extent.key = parent, above.start, above.key
    parent.children[extent.key] = extent  # in the place of the other
    if extent.hashes:
        extent.hashes = above.hashes + extent.hashes


def trim_label(root: Root, extent: Extent) -> None:
    """Remove the bytes of the label beyond the extent's blocks."""
    num_bytes = root.end_byte(extent.end) - root.first_byte(extent.start)
    if num_bytes < len(extent.label):
        extent.label = extent.label[:num_bytes]


def grow(root: Root, extent: Extent, content: Content, num_blocks: int) -> None:
    """Extend an extent without children along a content up to this block."""
    first, old_end = root.first_byte(extent.start), root.first_byte(extent.end)
    new_end = root.end_byte(num_blocks)
    if extent.label[old_end - first : new_end - first] != content.data[old_end:new_end]:
        # The rest of the content is included: a prompt that grows by chunks is copied once.
        extent.label = extent.label[: old_end - first] + content.data[old_end:]
    extent.end = num_blocks


def below(root: Root) -> Iterator[Extent]:
    """Yield the extents below a root: each after its parent, a chain without branches in one go."""
    extents: list[Extent] = list(root.children.values())
    while extents:
        extent = extents.pop()
        yield extent
        extents += extent.children.values()


def block_key(extent: Extent, block: int) -> bytes:
    """Return the tokens of a block, counted from the root."""
    root = extent.root
    assert root is not None
    assert root.unit_tokens == 1, "of a run that is known by its id nobody knows the tokens"
    first = root.first_byte(extent.start)
    return extent.label[root.first_byte(block) - first : root.end_byte(block + 1) - first]


def path_tokens(extent: Extent) -> tuple[int, ...]:
    """Return all tokens from the root to an extent's end; of runs known by an id, numbers that stand for them."""
    root = extent.root
    assert root is not None
    parts: list[tuple[int, ...]] = []
    each, part = root.unit_tokens, extent
    while part.parent is not None:
        units = memoryview(part.label).cast("I" if each == 1 else "Q")
        first = root.first_byte(part.start) // root.unit_bytes
        tokens = range(part.start * root.block_size, part.end * root.block_size)
        parts.append(tuple([units[token // each - first] * each + token % each for token in tokens]))
        part = part.parent
    return tuple([token for tokens in reversed(parts) for token in tokens])


def block_paths(extent: Extent) -> list[tuple[str | None, tuple[int, ...], int]]:
    """List the blocks of an extent: the name of its root, all tokens from there to its end, and its pins."""
    root = extent.root
    assert root is not None
    tokens = path_tokens(extent)
    blocks = range(extent.start + 1, extent.end + 1)
    return [(root.name, tokens[: block * root.block_size], extent.pins) for block in blocks]


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
