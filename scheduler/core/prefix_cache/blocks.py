"""A prefix cache of KV blocks that grows and shrinks with what a worker computes.

vLLM's automatic prefix caching (docs/design/prefix_caching.md), kept as a radix tree as in SGLang's RadixAttention
(Zheng et al., 2024): below a root, each full block of tokens follows all the blocks above it. Each adapter, in each
version, has its own root, so two never share, whatever their tokens. The tree's edges are runs of blocks (`extents`);
what is said here of blocks is true of each block of a run.

* A sequence that enters pins the blocks it finds. What a step has computed of its prompt becomes visible, and pinned,
  when that step is committed. Output becomes visible when the sequence leaves or is preempted: few would look for it
  earlier, and between two decode steps nothing changes.
* Two sequences that one plan admits both compute what they have in common; then the second's copies are freed and it
  uses the first's. With `share_within_plan` the second finds the first's blocks at once, as vLLM allows, since a step
  writes a layer's KV before any sequence reads it.
* Unpinned blocks are kept until their place is needed, and are evicted leaf by leaf, least recently used first.

A sequence that pins a block pins all above it, and unpins from the leaf up. So the order in which blocks were unpinned
is the order in which they may be evicted, and a leaf always comes before its parent: no search, no heap.
"""

from collections import OrderedDict
from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.prefix_cache import block_names, extents
from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlockNotes
from lorrery.scheduler.core.prefix_cache.content import content_of, of_tokens, with_output
from lorrery.scheduler.core.prefix_cache.extents import Extent, Root
from lorrery.scheduler.core.prefix_cache.holders import PrefixHolders, Run
from lorrery.scheduler.core.prefix_cache.uses import Found, Use
from lorrery.scheduler.core.sequence import Content, Sequence


class BlockCache(SharedBlocks):
    """The cached blocks of one worker.

    Args:
        block_size: tokens in a block.
        share_within_plan: whether a sequence may use blocks that another one computes in the same step.
        min_computed_tokens: tokens of an input that are computed even if all are cached.
    """

    def __init__(self, block_size: int = 16, *, share_within_plan: bool = False, min_computed_tokens: int = 1) -> None:
        super().__init__(share_within_plan=share_within_plan)
        self.block_size = block_size
        self.min_computed_tokens = min_computed_tokens
        self._roots: dict[tuple[str | None, int], Root] = {}
        """By adapter, and by tokens per unit of the content."""
        self._uses: dict[int, Use] = {}
        self._unpinned: OrderedDict[Extent, None] = OrderedDict()
        """Least recently used first; children before their parents."""
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

    def match(self, token_ids: Tokens[int], adapter_key: str | None) -> int:
        """Count the leading tokens that are cached, whole blocks; mutates nothing."""
        content = of_tokens(token_ids)
        root = self._roots.get((adapter_key, content.unit_tokens))
        return 0 if root is None else extents.follow(root, content, []) * self.block_size

    def reusable(self, sequence: Sequence) -> int:
        """Count the leading input tokens of a waiting sequence that it could take over, whole blocks."""
        found = self._found
        if found is None or found.sequence is not sequence:
            # Every arrival looks up at every worker; few have its prompt's first block, and nothing is kept for others.
            content, adapter = content_of(sequence), sequence.adapter
            root = self._roots.get((None if adapter is None else adapter.key, content.unit_tokens))
            if root is None or content.data[: root.key_bytes] not in root.children:
                return 0
        return self._find(sequence).num_blocks * self.block_size

    def num_shareable(self, sequence: Sequence) -> int:
        """Count the blocks that a waiting sequence would find and that others already pin."""
        found = self._find(sequence)
        num = 0
        for extent in found.extents:
            if not extent.pins:
                break
            num = extent.end
        return min(num, found.num_blocks)

    def _find(self, sequence: Sequence) -> Found:
        """Look up a sequence's input; the last result is kept: a blocked head of line is looked up again and again."""
        found, input_tokens, version = self._found, sequence.input_tokens, self._version
        if found is not None and found.sequence is sequence and found.input_tokens == input_tokens:
            if found.version == version:
                return found
            if found.still_holds():
                found.version = version
                return found
        content = content_of(sequence)
        root = self._roots.get((adapter_key_of(sequence), content.unit_tokens))
        way: list[Extent] = []
        end = 0 if root is None else extents.follow(root, content, way)
        most = max(0, input_tokens - self.min_computed_tokens) // self.block_size
        self._found = found = Found(sequence, input_tokens, version, root, end, min(end, most), way)
        return found

    # --- coming and going -------------------------------------------------------------------------------------------

    def acquire(self, sequence: Sequence) -> None:
        """Pin the first `cached_tokens` of a sequence that enters the batch."""
        found = self._find(sequence)
        use = self._uses[sequence.handle] = Use(self._root(sequence), content_of(sequence))
        use.root.num_uses += 1
        num_blocks = min(found.num_blocks, sequence.cached_tokens // self.block_size)
        for extent in found.extents:
            if extent.start < num_blocks:
                use.last = extent if extent.end <= num_blocks else self._split(extent, num_blocks)
        self._pin(use.last, use.root)
        if self.share_within_plan:
            self._show(use, use.content, sequence.input_tokens, computed=False)

    def commit(self, sequence: Sequence) -> None:
        """Make visible the full blocks among the first `computed_tokens` of a sequence's input."""
        use = self._uses[sequence.handle]
        if self.share_within_plan:
            self._take_back(use, sequence.computed_tokens // self.block_size)
            block_names.mark_computed(self._notes, use.last)
        self._show(use, use.content, sequence.computed_tokens, computed=True)

    def shows_alone(self, sequence: Sequence) -> bool:
        """Return whether a sequence's next blocks extend its own extent, and their order is not noted.

        No other path ends in that extent or goes on below it, so evictions meanwhile happen elsewhere, and its new
        blocks are pinned at once: neither affects the other.
        """
        extent = self._uses[sequence.handle].last
        alone = extent.pins == 1 and extent.computed and not extent.children
        return alone and self._notes is None and not self.share_within_plan

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin the blocks of a sequence that leaves the batch; its full blocks stay, as most recently used."""
        use = self._uses.pop(sequence.handle)
        content = use.content
        cached_tokens = sequence.computed_tokens + max(0, output_tokens - 1)
        if cached_tokens > sequence.input_tokens:
            produced = sequence.produced_tokens
            content = with_output(content, sequence, produced, produced + output_tokens - 1)
        if self.share_within_plan:  # if cancelled before its first step ended, it has computed nothing
            self._take_back(use, sequence.computed_tokens // self.block_size)
            block_names.mark_computed(self._notes, use.last)
        self._show(use, content, cached_tokens, computed=True)
        self._let_go(use)
        use.root.num_uses -= 1
        self._drop_if_unused(use.root)

    def _let_go(self, use: Use) -> None:
        """Unpin a path from its end up; blocks without pins become the most recently used."""
        root, unpinned = use.root, self._unpinned
        extent, child = use.last, None
        while extent.parent is not None:
            num_blocks = extent.end - extent.start
            extent.pins -= 1
            self.num_pins -= num_blocks
            if not extent.pins:
                self.num_pinned -= num_blocks
                self.num_unpinned += num_blocks
                if child is not None and len(extent.children) == 1:
                    extents.merge(root, extent, child)
                    if self._holders is not None:
                        self._holders.joined(_run(extent))
                    self._version += 1
                    extent.changed_at = self._version  # who found the child found it too
                else:
                    extents.trim_label(root, extent)
                    unpinned[extent] = None
                    child = extent
            extent = extent.parent

    def _take_back(self, use: Use, num_blocks: int) -> None:
        """Hide blocks again that were published before their step, and not reached by it (a long prompt's chunk).

        No other sequence has found them meanwhile: one whose prompt does not fit into a step is the last that enters
        with it. A sequence that was in prefill before may have computed the same in this very step; then they stay.
        """
        while use.last.end > num_blocks:
            extent = use.last
            if extent.start < num_blocks:
                if extent.pins == 1 and not extent.computed:
                    size = extent.end - num_blocks
                    self.num_pins -= size
                    self.num_pinned -= size
                    self._remove(extent, size)
                    break
                self._split(extent, num_blocks)
            assert extent.parent is not None, "a root has no blocks"
            use.last = extent.parent
            size = extent.end - extent.start
            extent.pins -= 1
            self.num_pins -= size
            if extent.pins:
                continue
            self.num_pinned -= size
            if extent.computed:
                self.num_unpinned += size
                self._unpinned[extent] = None
            else:
                self._remove(extent, size)

    def _show(self, use: Use, content: Content, num_tokens: int, *, computed: bool) -> None:
        """Pin the full blocks among the first tokens of a content; create missing ones."""
        num_blocks = min(num_tokens, content.num_tokens) // self.block_size
        above = extent = use.last
        if extent.end >= num_blocks:
            return
        if extent.pins == 1 and not extent.children and extent.computed == computed:
            # No other path ends here.
            size, old_end = num_blocks - extent.end, extent.end
            extents.grow(use.root, extent, content, num_blocks)
            if (holders := self._holders) is not None:
                ended = _run(extent)
                extent.run = holders.came(self._number, ended, content.data, 0, num_blocks)
                holders.joined(ended)
            self.num_pinned += size
            self.num_pins += size
            self._made(extent, old_end)
            return
        root, data = use.root, content.data
        while extent.end < num_blocks:
            end = extent.end
            key = root.key_of(data, end)
            child = extent.children.get(key)
            if child is None:
                child = Extent(root, extent, end, num_blocks, key, data[root.first_byte(end) :], computed)
                extent.children[key] = child
                self._add(child, data)
            else:
                end = extents.num_common(root, child, data, num_blocks)
                if end < child.end:
                    child = self._split(child, end)
                if computed:
                    block_names.mark_computed(self._notes, child)
            extent = child
        self._pin(extent, above)
        use.last = extent

    def _add(self, extent: Extent, data: bytes) -> None:
        """Count a new extent, which `data` has led to from its root, as unpinned."""
        root, above = extent.root, extent.parent
        assert root is not None
        assert above is not None
        self._unpinned[extent] = None
        self.num_unpinned += extent.end - extent.start
        if (holders := self._holders) is not None:
            run = above.run if above.parent is not None else holders.root_like(root)
            assert run is not None
            extent.run = holders.came(self._number, run, data, 0, extent.end)
        self._made(extent, extent.start)

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
        root = self._roots.get((adapter_key_of(sequence), content.unit_tokens))
        if root is None:
            root = Root(sequence.adapter, self.block_size, content.unit_tokens, content.unit_bytes)
            self._roots[root.place] = root
            if self._notes is not None:
                block_names.name_tree(root)
        return root

    def _drop_if_unused(self, root: Root) -> None:
        """Forget a root without children: many adapters, in each of their versions, may come and go."""
        if not root.children and not root.num_uses:
            del self._roots[root.place]
            self._version += 1
            root.changed_at = self._version

    def _split(self, extent: Extent, at: int) -> Extent:
        """Split an extent before a block; return the upper part. If it is unpinned, the caller pins it next."""
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
            block_names.name_blocks(extent, first)
            if extent.computed:
                block_names.note_stored(self._notes, extent, first)

    # --- giving up --------------------------------------------------------------------------------------------------

    def shrink(self, spare_tokens: int) -> None:
        """Evict unpinned leaves, least recently used first, until the rest takes at most this many tokens."""
        excess = self.num_unpinned - max(0, spare_tokens) // self.block_size
        while excess > 0:
            extent = next(iter(self._unpinned))
            num_blocks = min(excess, extent.end - extent.start)
            excess -= num_blocks
            if num_blocks == extent.end - extent.start:
                del self._unpinned[extent]
            self._remove(extent, num_blocks)
            self.num_unpinned -= num_blocks
            self.num_evictions += num_blocks

    def _remove(self, extent: Extent, num_blocks: int) -> None:
        """Remove the last blocks of a leaf, or all of it."""
        assert extent.parent is not None, "a root has no blocks"
        assert not extent.children, "a block is evicted before the blocks that follow it"
        self._version += 1
        extent.changed_at = self._version
        if self._notes is not None:
            block_names.forget_last(self._notes, extent, num_blocks)
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

    def note_changes(self, on: bool = True) -> None:
        """Note changes of blocks from now on, for `take_changes`, or stop that. Visits every block."""
        if on and self._notes is None:
            self._notes = BlockNotes()
            for root in self._roots.values():
                block_names.name_tree(root)
        elif not on:
            self._notes = None

    def take_changes(self) -> list[BlockChange]:
        """Return the changes of blocks since the last call, in order; empty unless they are noted."""
        return [] if self._notes is None else self._notes.take()

    def contents(self) -> list[BlockChange]:
        """Return all blocks that can be found, as if they had just been stored. Changes must be noted."""
        assert self._notes is not None, "nothing has a hash before note_changes"
        return block_names.stored_below(self._roots.values())

    # --- inspection -------------------------------------------------------------------------------------------------

    def paths(self) -> list[tuple[str | None, tuple[int, ...], int]]:
        """List every block: its adapter, all tokens from the root to its end, and its pins.

        Pinned ones come first, in order of tokens; then the others, in the order in which they would be evicted.
        """
        pinned: list[tuple[str | None, tuple[int, ...], int]] = []
        for root in self._roots.values():
            for extent in extents.below(root):
                if extent.pins:
                    pinned += extents.block_paths(extent)
        pinned.sort(key=lambda path: (path[0] or "", path[1]))
        return pinned + [path for extent in self._unpinned for path in reversed(extents.block_paths(extent))]


def _run(extent: Extent) -> Run:
    assert isinstance(extent.run, Run)
    return extent.run


def adapter_key_of(sequence: Sequence) -> str | None:
    """Return the key of a sequence's adapter; None: the base model."""
    return sequence.adapter.key if sequence.adapter is not None else None
