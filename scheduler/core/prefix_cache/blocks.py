"""A prefix cache of KV blocks that grows and shrinks with what a worker computes.

vLLM's automatic prefix caching (docs/design/prefix_caching.md), kept as a radix tree as in SGLang's RadixAttention
(Zheng et al., 2024): below a root, each full block of tokens follows all the blocks above it. Each adapter, in each
version, has its own root for each salt, so two never share, whatever their tokens. The tree's edges are runs of blocks
(`extents`); what is said here of blocks is true of each block of a run.

* A sequence that enters pins the blocks it finds. What a step has computed of its prompt becomes visible, and pinned,
  when that step is committed. Output becomes visible when the sequence leaves or is preempted: few would look for it
  earlier, and between two decode steps nothing changes.
* Two sequences that one plan admits both compute what they have in common; then the second's copies are freed and it
  uses the first's.
* Unpinned blocks are kept until their place is needed, and are evicted leaf by leaf, least recently used first.

A sequence that pins a block pins all above it, and unpins from the leaf up. So the order in which blocks were unpinned
is the order in which they may be evicted, and a leaf always comes before its parent: no search, no heap.
"""

from collections import OrderedDict
from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.prefix_cache import changes, extents
from lorrery.scheduler.core.prefix_cache.base import SharedBlocks, content_of, of_tokens
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlockNotes
from lorrery.scheduler.core.prefix_cache.extents import Copy, Extent, Found, Place, Root, Use, place_of
from lorrery.scheduler.core.prefix_cache.holders import PrefixHolders, Run
from lorrery.scheduler.core.sequence import Content, Sequence


class BlockCache(SharedBlocks):
    """The cached blocks of one worker.

    Args:
        block_size: tokens in a block.
        min_computed_tokens: tokens of an input that are computed even if all are cached.
    """

    def __init__(self, block_size: int = 16, *, min_computed_tokens: int = 1) -> None:
        super().__init__()
        self.block_size = block_size
        self.min_computed_tokens = min_computed_tokens
        self._roots: dict[Place, Root] = {}
        self._uses: dict[int, Use] = {}
        self._unpinned: OrderedDict[Extent | Copy, None] = OrderedDict()
        """Least recently used first; children before their parents. An extent stands for its first copy."""
        self._version = 0
        """Counts the changes of the tree."""
        self._found: Found | None = None
        self._notes: BlockNotes | None = None
        self._holders: PrefixHolders | None = None
        self._number = -1  # in `_holders`

    @property
    def num_extents(self) -> int:
        """Number of extents in the tree; counts them."""
        return sum([1 for root in self._roots.values() for _ in extents.below(root)])

    # --- looking ----------------------------------------------------------------------------------------------------

    def match(self, token_ids: Tokens[int], adapter_key: str | None, cache_salt: str = "") -> int:
        """Count the leading tokens that are cached, whole blocks; mutates nothing."""
        content = of_tokens(token_ids)
        root = self._roots.get((adapter_key, cache_salt, content.unit_tokens))
        return 0 if root is None else self._follow(root, content, []) * self.block_size

    def reusable(self, sequence: Sequence) -> int:
        """Count the leading input tokens of a waiting sequence that it could take over, whole blocks."""
        found = self._found
        if found is None or found.sequence is not sequence:
            # Every arrival looks up at every worker; few have its prompt's first block, and nothing is kept for others.
            content = content_of(sequence)
            root = self._roots.get(place_of(sequence, content))
            if root is None or (content.data[: root.key_bytes] not in root.children and not root.growing):
                return 0
        return self._find(sequence).num_blocks * self.block_size

    def num_shareable(self, sequence: Sequence) -> int:
        """Count the blocks that a waiting sequence would find and that others already pin."""
        found = self._find(sequence)
        num, most = 0, found.num_blocks
        for extent in found.extents:
            if extent.start >= most:
                break
            if extent.pins:
                num += min(extent.end, most) - extent.start
        return num

    def _find(self, sequence: Sequence) -> Found:
        """Look up a sequence's input; the last result is kept: a blocked head of line is looked up again and again."""
        found, version = self._found, self._version
        if found is not None and found.is_for(sequence):
            if found.version == version:
                return found
            if found.still_holds():
                found.version = version
                return found
        content = content_of(sequence)
        root = self._roots.get(place_of(sequence, content))
        way: list[Extent] = []
        end = 0 if root is None else self._follow(root, content, way)
        most = max(0, sequence.input_tokens - self.min_computed_tokens) // self.block_size
        self._found = found = Found(sequence, sequence.input_tokens, self._version, root, end, min(end, most), way)
        return found

    def _follow(self, root: Root, content: Content, way: list[Extent]) -> int:
        """Look up a content (`extents.follow`)."""
        return extents.follow(root, content, way)

    # --- coming and going -------------------------------------------------------------------------------------------

    def acquire(self, sequence: Sequence) -> None:
        """Pin the first `cached_tokens` of a sequence that enters the batch."""
        found = self._find(sequence)
        use = self._uses[sequence.handle] = Use(self._root(sequence), content_of(sequence), sequence)
        use.root.num_uses += 1
        num_blocks = min(found.num_blocks, sequence.cached_tokens // self.block_size)
        for extent in found.extents:
            if extent.start < num_blocks:
                use.last = extent if extent.end <= num_blocks else self._split(extent, num_blocks)
        self._pin(use.last, use.root)

    def commit(self, sequence: Sequence) -> None:
        """Make visible the full blocks among the first `computed_tokens` of a sequence's input."""
        use = self._uses[sequence.handle]
        self._show(use, use.content, sequence.computed_tokens)

    def shows_alone(self, sequence: Sequence) -> bool:
        """Return whether a sequence's next blocks extend its own extent, and their order is not noted.

        No other path ends in that extent or goes on below it, so evictions meanwhile happen elsewhere, and its new
        blocks are pinned at once: neither affects the other.
        """
        extent = self._uses[sequence.handle].last
        return is_alone(extent) and self._notes is None

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin the blocks of a sequence that leaves the batch; its full blocks stay, as most recently used."""
        use = self._uses.pop(sequence.handle)
        self._show(use, *use.computed(output_tokens))
        self._let_go(use)
        use.root.num_uses -= 1
        self._drop_if_unused(use.root)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a sequence whose output so far has become part of its input, and which keeps its blocks."""
        use = self._uses[sequence.handle]
        use.content = content_of(sequence)
        self._show(use, use.content, sequence.computed_tokens)

    def _let_go(self, use: Use) -> None:
        """Unpin a path from its end up; blocks without pins become the most recently used."""
        extent = use.last
        child: Extent | None = None
        while (above := extent.parent) is not None:
            self.num_pins -= extent.end - extent.start
            child = self._unpin(use, extent, child)
            extent = above

    def _unpin(self, use: Use, extent: Extent, child: Extent | None) -> Extent | None:
        """Unpin an extent of a path, below which the path has unpinned `child`; return it if it has no pins now.

        The parent then may be merged with it. None: it may not.
        """
        extent.pins -= 1
        if extent.pins:
            return None
        self.num_pinned -= extent.end - extent.start
        self.num_unpinned += extent.end - extent.start
        if child is not None and len(extent.children) == 1:
            extents.merge(use.root, extent, child)
            if self._holders is not None:
                self._holders.joined(_run(extent))
            self._version += 1
            extent.changed_at = self._version  # who found the child found it too
            return child
        extents.trim_label(use.root, extent)
        self._unpinned[extent] = None
        return extent

    def _show(self, use: Use, content: Content, num_tokens: int) -> None:
        """Pin the full blocks among the first tokens of a content; create missing ones."""
        num_blocks = min(num_tokens, content.num_tokens) // self.block_size
        above = extent = use.last
        if extent.end >= num_blocks:
            return
        if is_alone(extent):
            self._extend(use, content, num_blocks)
            return
        while extent.end < num_blocks:
            child, end = self._child_for(extent, use.root, content, num_blocks)
            extent = self._new_child(extent, use.root, content, num_blocks) if child is None else child
            if child is None:
                self._unpinned[extent] = None
                self.num_unpinned += num_blocks - end
            elif end < extent.end:
                extent = self._split(extent, end)
        self._pin(extent, above)
        use.last = extent

    def _extend(self, use: Use, content: Content, num_blocks: int) -> None:
        """Add blocks up to `num_blocks` to the extent in which a path, and no other, ends."""
        extent = use.last
        size, old_end = num_blocks - extent.end, extent.end
        extents.grow(use.root, extent, content, num_blocks)
        if (holders := self._holders) is not None:
            ended = _run(extent)
            extent.run = holders.came(self._number, ended, content.data, 0, num_blocks)
            holders.joined(ended)
        self.num_pinned += size
        self.num_pins += size
        self._made(extent, old_end)

    def _child_for(self, extent: Extent, root: Root, content: Content, num_blocks: int) -> tuple[Extent | None, int]:
        """Return the extent by which a content goes on below another, and the block at which it leaves that again.

        None, and the block at which it leaves the tree: there is no such extent.
        """
        child = extent.children.get(root.key_of(content.data, extent.end))
        if child is None:
            return None, extent.end
        return child, extents.num_common(root, child, content.data, num_blocks)

    def _new_child(self, extent: Extent, root: Root, content: Content, num_blocks: int) -> Extent:
        """Add an extent below another, for the blocks of a content up to `num_blocks`."""
        data, end = content.data, extent.end
        key = root.key_of(data, end)
        child = Extent(root, extent, end, num_blocks, key, data[root.first_byte(end) :])
        extent.children[key] = child
        if (holders := self._holders) is not None:
            above_it = extent.run if extent.parent is not None else holders.root_like(root)
            assert above_it is not None
            child.run = holders.came(self._number, above_it, data, 0, num_blocks)
        self._made(child, end)
        return child

    def _pin(self, extent: Extent, above: Extent) -> None:
        """Pin a path from its end up to `above`, which is already pinned."""
        while extent is not above:
            num_blocks = extent.end - extent.start
            if not extent.pins:
                del self._unpinned[extent]
                self.num_unpinned -= num_blocks
                self.num_pinned += num_blocks
            extent.pins += 1
            self.num_pins += num_blocks
            assert extent.parent is not None
            extent = extent.parent

    def _root(self, sequence: Sequence) -> Root:
        content = content_of(sequence)
        root = self._roots.get(place_of(sequence, content))
        if root is None:
            root = Root(sequence.adapter, sequence.cache_salt, self.block_size, content.unit_tokens, content.unit_bytes)
            self._roots[root.place] = root
            if self._notes is not None:
                changes.name_tree(root)
        return root

    def _drop_if_unused(self, root: Root) -> None:
        """Forget a root without children: many adapters, in each of their versions, may come and go."""
        if not root.children and not root.num_uses:
            del self._roots[root.place]
            self._version += 1
            root.changed_at = self._version

    def _split(self, extent: Extent, at: int) -> Extent:
        """Split an extent before a block; return the upper part. If it is unpinned, the caller pins it next.

        The old extent is the lower part, with the uses that end there.
        """
        assert extent.root is not None
        above = extents.split(extent.root, extent, at)
        if self._holders is not None:
            above.run = self._holders.cut(_run(extent), at)
        if not above.pins:
            self._unpinned[above] = None
        self._version += 1
        extent.changed_at = self._version
        return above

    def _made(self, extent: Extent, first: int) -> None:
        """Note that an extent has new blocks, from `first` on."""
        self._version += 1
        extent.changed_at = self._version
        if self._notes is not None:
            assert extent.parent is not None
            changes.name_blocks(extent, first)
            changes.note_stored(self._notes, extent, first)

    # --- giving up --------------------------------------------------------------------------------------------------

    def shrink(self, spare_tokens: int) -> None:
        """Evict unpinned leaves, least recently used first, until the rest takes at most this many tokens."""
        excess = self.num_unpinned - max(0, spare_tokens) // self.block_size
        while excess > 0:
            num_blocks = self._evict(next(iter(self._unpinned)), excess)
            excess -= num_blocks
            self.num_unpinned -= num_blocks
            self.num_evictions += num_blocks

    def _evict(self, first: Extent | Copy, most: int) -> int:
        """Evict the last blocks of an unpinned leaf, at most this many; return how many."""
        assert isinstance(first, Extent)
        num_blocks = min(most, first.end - first.start)
        if num_blocks == first.end - first.start:
            del self._unpinned[first]
        self._remove(first, num_blocks)
        return num_blocks

    def _remove(self, extent: Extent, num_blocks: int) -> None:
        """Remove the last blocks of a leaf, or all of it."""
        assert extent.parent is not None, "a root has no blocks"
        assert not extent.children, "a block is evicted before the blocks that follow it"
        self._version += 1
        extent.changed_at = self._version
        if self._notes is not None:
            changes.forget_last(self._notes, extent, num_blocks)
        extent.end -= num_blocks
        if (holders := self._holders) is not None:
            extent.run = holders.went(self._number, _run(extent), extent.end, is_left=extent.end > extent.start)
        if extent.end == extent.start:
            del extent.parent.children[extent.key]
            if isinstance(extent.parent, Root):
                self._drop_if_unused(extent.parent)
        elif num_blocks > extent.end - extent.start:
            assert extent.root is not None
            extents.trim_label(extent.root, extent)

    def lose(self) -> None:
        """Forget every block; the worker is gone."""
        self._roots.clear()
        self._uses.clear()
        self._unpinned.clear()
        self.num_pins = self.num_pinned = self.num_unpinned = 0
        self._version += 1
        self._found = None
        self._holders = None
        if self._notes is not None:
            self._notes = BlockNotes()

    # --- copies elsewhere -------------------------------------------------------------------------------------------

    def tell(self, holders: PrefixHolders | None, number: int) -> None:
        """Report what can be found here to `holders` from now on, under this number; None: to nothing."""
        if holders is None and self._holders is None:
            return
        self._holders, self._number = holders, number
        for root in self._roots.values():
            for extent in extents.below(root):
                extent.run = None
                if holders is not None:
                    assert extent.parent is not None
                    above = holders.root_like(root) if extent.parent is root else extent.parent.run
                    assert above is not None
                    extent.run = holders.came(number, above, extent.label, root.first_byte(extent.start), extent.end)

    @property
    def notes_changes(self) -> bool:
        """Whether changes of blocks are noted."""
        return self._notes is not None

    def note_changes(self, on: bool = True) -> None:
        """Note changes of blocks from now on, for `take_changes`, or stop that. Visits every block."""
        if on and self._notes is None:
            self._notes = BlockNotes()
            for root in self._roots.values():
                changes.name_tree(root)
        elif not on:
            self._notes = None

    def take_changes(self) -> list[BlockChange]:
        """Return the changes of blocks since the last call, in order; empty unless they are noted."""
        return [] if self._notes is None else self._notes.take()

    def contents(self) -> list[BlockChange]:
        """Return all blocks that can be found, as if they had just been stored. Changes must be noted."""
        assert self._notes is not None, "nothing has a hash before note_changes"
        return changes.stored_below(self._roots.values())

    # --- inspection -------------------------------------------------------------------------------------------------

    def paths(self) -> list[tuple[str | None, tuple[int, ...], int]]:
        """List every block: the name of its root (`extents.root_name`), all tokens from there to its end, and its pins.

        Pinned ones come first, in order of tokens; then the others, in the order in which they would be evicted.
        """
        pinned: list[tuple[str | None, tuple[int, ...], int]] = []
        for root in self._roots.values():
            for extent in extents.below(root):
                if extent.pins:
                    pinned += extents.block_paths(extent)
                for copy in extent.copies or ():
                    if copy.pins:
                        pinned += [(*path[:2], copy.pins) for path in extents.block_paths(extent)]
        pinned.sort(key=lambda path: (path[0] or "", path[1]))
        unpinned = [one.extent if isinstance(one, Copy) else one for one in self._unpinned]
        return pinned + [(*path[:2], 0) for extent in unpinned for path in reversed(extents.block_paths(extent))]


def is_alone(extent: Extent) -> bool:
    """Return whether one path ends in an extent, and no other goes there or on below it."""
    return extent.pins == 1 and not extent.children and extent.copies is None


def _run(extent: Extent) -> Run:
    assert isinstance(extent.run, Run)
    return extent.run
