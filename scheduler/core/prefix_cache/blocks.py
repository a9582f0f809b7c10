"""A prefix cache of KV blocks that grows and shrinks with what a worker computes.

vLLM's automatic prefix caching (docs/design/prefix_caching.md), kept as a radix tree as in SGLang's RadixAttention
(Zheng et al., 2024): below a root, each full block of tokens follows all the blocks above it. Each adapter, in each
version, has its own root, so two never share, whatever their tokens. The tree's edges are runs of blocks (`extents`);
what is said here of blocks is true of each block of a run.

* A sequence that enters pins the blocks it finds. What a step has computed of its prompt becomes visible, and pinned,
  when that step is committed. Output becomes visible when the sequence leaves or is preempted: few would look for it
  earlier, and between two decode steps nothing changes.
* Two sequences that one plan admits both compute what they have in common; then the second's copies are freed and it
  uses the first's.
* Unpinned blocks are kept until their place is needed, and are evicted leaf by leaf, least recently used first.

With `share_within_plan` the rules are those of vLLM 0.32 (recorded, see docs/engines.md):

* Blocks are visible from the moment they are scheduled, since a step writes a layer's KV before any sequence reads it:
  to the sequences that the same plan admits too. So is output, as it fills blocks. It is published when a look-up or
  another sequence's blocks come to where it would go on, and when its sequence leaves.
* A block that was not found is computed, and kept, even if an equal one is there by then (the last block of a prompt
  that is cached whole; a conversation whose earlier turn still runs). Look-ups find the copy that was there first; each
  copy is evicted in its own turn.

A sequence that pins a block pins all above it, and unpins from the leaf up. So the order in which blocks were unpinned
is the order in which they may be evicted, and a leaf always comes before its parent: no search, no heap.
"""

from collections import OrderedDict
from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.prefix_cache import block_names, extents
from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlockNotes
from lorrery.scheduler.core.prefix_cache.content import content_of, of_tokens, with_output
from lorrery.scheduler.core.prefix_cache.extents import Copy, Extent, Root
from lorrery.scheduler.core.prefix_cache.holders import PrefixHolders, Run
from lorrery.scheduler.core.prefix_cache.uses import Found, Use
from lorrery.scheduler.core.sequence import Content, Sequence


class BlockCache(SharedBlocks):
    """The cached blocks of one worker.

    Args:
        block_size: tokens in a block.
        share_within_plan: whether blocks are visible from the moment they are scheduled, and kept in copies.
        min_computed_tokens: tokens of an input that are computed even if all are cached.
    """

    def __init__(self, block_size: int = 16, *, share_within_plan: bool = False, min_computed_tokens: int = 1) -> None:
        super().__init__(share_within_plan=share_within_plan)
        self._unseen = 1  # at this moment; the newest token is not computed before the next step is scheduled
        self.block_size = block_size
        self.min_computed_tokens = min_computed_tokens
        self._roots: dict[tuple[str | None, int], Root] = {}
        """By adapter, and by tokens per unit of the content."""
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

    def match(self, token_ids: Tokens[int], adapter_key: str | None) -> int:
        """Count the leading tokens that are cached, whole blocks; mutates nothing."""
        content = of_tokens(token_ids)
        root = self._roots.get((adapter_key, content.unit_tokens))
        return 0 if root is None else self._follow(root, content, []) * self.block_size

    def reusable(self, sequence: Sequence) -> int:
        """Count the leading input tokens of a waiting sequence that it could take over, whole blocks."""
        found = self._found
        if found is None or found.sequence is not sequence:
            # Every arrival looks up at every worker; few have its prompt's first block, and nothing is kept for others.
            content, adapter = content_of(sequence), sequence.adapter
            root = self._roots.get((None if adapter is None else adapter.key, content.unit_tokens))
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
            elif not self.share_within_plan:  # nothing below it is pinned either
                break
        return num

    def steps_unchanged(self, sequence: Sequence, limit: int) -> int:
        """Return the steps until one of those that decode along a waiting sequence's way fills its next block."""
        if not self.share_within_plan:
            return limit
        found, running = self._find(sequence), self.running
        extent: Extent | None = found.extents[-1] if found.extents else found.root
        if running is None or found.end > found.num_blocks:
            return limit
        while extent is not None:
            for use in extent.growing or ():
                assert isinstance(use, Use)
                growing = use.sequence
                tokens = growing.input_tokens + growing.output_tokens_at(running.decode_step) - self.unseen_tokens
                limit = min(limit, self.block_size - tokens % self.block_size)
            extent = extent.parent
        return limit

    def _find(self, sequence: Sequence) -> Found:
        """Look up a sequence's input; the last result is kept: a blocked head of line is looked up again and again."""
        found, input_tokens, version = self._found, sequence.input_tokens, self._version
        if found is not None and found.sequence is sequence and found.input_tokens == input_tokens:
            last: Extent | None = found.extents[-1] if found.extents else found.root
            if last is not None and self.share_within_plan and self._publish_scheduled(last):
                version = self._version
            if found.version == version:
                return found
            if found.still_holds():
                found.version = version
                return found
        content = content_of(sequence)
        root = self._roots.get((adapter_key_of(sequence), content.unit_tokens))
        way: list[Extent] = []
        end = 0 if root is None else self._follow(root, content, way)
        version = self._version
        most = max(0, input_tokens - self.min_computed_tokens) // self.block_size
        self._found = found = Found(sequence, input_tokens, version, root, end, min(end, most), way)
        return found

    def _follow(self, root: Root, content: Content, way: list[Extent]) -> int:
        """As `extents.follow`, and publish the output that goes on along this way."""
        end = extents.follow(root, content, way)
        while self.share_within_plan and self._publish_scheduled(way[-1] if way else root):
            way.clear()
            end = extents.follow(root, content, way)
        return end

    def _publish_scheduled(self, last: Extent) -> bool:
        """As `_publish_output`, with the tokens that the step computes that runs or comes next."""
        self._unseen = self.unseen_tokens
        changed = self._publish_output(last)
        self._unseen = 1
        return changed

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

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` of an input, which the next step computes."""
        if self.share_within_plan:
            use = self._uses[sequence.handle]
            self._unseen = self.unseen_tokens
            self._show(use, use.content, num_tokens)
            self._unseen = 1

    def commit(self, sequence: Sequence) -> None:
        """Make visible the full blocks among the first `computed_tokens` of a sequence's input."""
        use = self._uses[sequence.handle]
        self._show(use, use.content, sequence.computed_tokens)
        if self.share_within_plan and sequence.computed_tokens >= sequence.input_tokens:
            use.grows = True
            _grow_from(use.last, use)

    def shows_alone(self, sequence: Sequence) -> bool:
        """Return whether a sequence's next blocks extend its own extent, and their order is not noted.

        No other path ends in that extent or goes on below it, so evictions meanwhile happen elsewhere, and its new
        blocks are pinned at once: neither affects the other.
        """
        extent = self._uses[sequence.handle].last
        alone = extent.pins == 1 and not extent.children and not extent.copies
        return alone and self._notes is None

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin the blocks of a sequence that leaves the batch; its full blocks stay, as most recently used."""
        use = self._uses.pop(sequence.handle)
        content = use.content
        cached_tokens = sequence.computed_tokens + max(0, output_tokens - 1)
        if cached_tokens > sequence.input_tokens:
            produced = sequence.produced_tokens
            content = with_output(content, sequence, produced, produced + output_tokens - 1)
        if use.grows:
            use.grows = False
            _grow_no_more(use)
        self._show(use, content, cached_tokens)
        self._let_go(use)
        use.root.num_uses -= 1
        self._drop_if_unused(use.root)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a sequence whose output so far has become part of its input, and which keeps its blocks."""
        use = self._uses[sequence.handle]
        if use.grows:
            use.grows = False
            _grow_no_more(use)
        use.content = content_of(sequence)
        self._show(use, use.content, sequence.computed_tokens)

    def _let_go(self, use: Use) -> None:
        """Unpin a path from its end up; blocks without pins become the most recently used."""
        root, unpinned = use.root, self._unpinned
        extent = use.last
        child: Extent | None = None
        while (above := extent.parent) is not None:
            num_blocks = extent.end - extent.start
            self.num_pins -= num_blocks
            if extent.copies is not None:
                self._let_go_of_copy(extent, use)
                child, extent = None, above
                continue
            extent.pins -= 1
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
            extent = above

    def _let_go_of_copy(self, extent: Extent, use: Use) -> None:
        """Unpin the copy of an extent that a sequence uses: its own, or else the first, which it has found."""
        num_blocks = extent.end - extent.start
        copies = extent.copies
        assert copies is not None
        for copy in copies:
            if copy.owner is use:
                copy.owner = None
                copy.pins -= 1
                if not copy.pins:
                    self.num_pinned -= num_blocks
                    self.num_unpinned += num_blocks
                    self._unpinned[copy] = None
                return
        extent.pins -= 1
        if not extent.pins:
            self.num_pinned -= num_blocks
            self.num_unpinned += num_blocks
            self._unpinned[extent] = None

    def _publish_output(self, last: Extent) -> bool:
        """Publish output that goes on along a path or beyond its end; return whether the tree has changed.

        The one that is ahead of another has filled each block first; equal ones fill theirs in order of admission.
        """
        uses: list[tuple[int, int, Use]] = []
        at: Extent | None = last
        while at is not None:
            if at.growing:
                self._find_grown(at, uses)
            at = at.parent
        if not uses:
            return False
        uses.sort(key=_by_progress)
        before = self._version
        for _, _, use in uses:
            use.grows = False
            _grow_no_more(use)
        for num_tokens, _, use in uses:
            sequence = use.sequence
            num_new = -num_tokens - sequence.input_tokens
            content = with_output(use.content, sequence, sequence.produced_tokens, sequence.produced_tokens + num_new)
            self._show(use, content, -num_tokens)
            use.grows = True
            _grow_from(use.last, use)
        return self._version != before

    def _find_grown(self, extent: Extent, uses: list[tuple[int, int, Use]]) -> None:
        """Append the uses that end in an extent, and whose output has filled blocks since."""
        running = self.running
        assert running is not None
        assert extent.growing is not None
        for use in extent.growing:
            assert isinstance(use, Use)
            sequence = use.sequence
            num_tokens = sequence.input_tokens + sequence.output_tokens_at(running.decode_step) - self._unseen
            if num_tokens // self.block_size > extent.end:
                uses.append((-num_tokens, sequence.entered, use))

    def _show(self, use: Use, content: Content, num_tokens: int) -> None:
        """Pin the full blocks among the first tokens of a content; create missing ones."""
        num_blocks = min(num_tokens, content.num_tokens) // self.block_size
        above = extent = use.last
        if extent.end >= num_blocks:
            return
        if use.grows:
            _grow_no_more(use)
        if self.share_within_plan:
            self._publish_output(extent)
        if extent.pins == 1 and not extent.children and extent.copies is None:
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
        elif self.share_within_plan:
            self._show_own(use, content, num_blocks)
        else:
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
        if use.grows:
            _grow_from(use.last, use)

    def _show_own(self, use: Use, content: Content, num_blocks: int) -> None:
        """As `_show`, where each block that is there already gets a further copy."""
        extent = use.last
        while extent.end < num_blocks:
            self._publish_output(extent)
            child, end = self._child_for(extent, use.root, content, num_blocks)
            if child is None:
                extent = self._new_child(extent, use.root, content, num_blocks)
                extent.pins = 1
            else:
                if end < child.end:
                    child = self._split_in_place(child, end)
                extent = child
                if extent.copies is None:
                    extent.copies = []
                extent.copies.append(Copy(extent, use, 1))
            size = extent.end - extent.start
            self.num_pins += size
            self.num_pinned += size
        use.last = extent

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
        """Split an extent before a block; return the upper part. If it is unpinned, the caller pins it next.

        The old extent is the lower part, with the uses that end there; further copies keep their turns.
        """
        assert extent.root is not None
        above = extents.split(extent.root, extent, at)
        if self._holders is not None:
            above.run = self._holders.cut(_run(extent), at)
        if not above.pins:
            self._unpinned[above] = None
        if extent.copies is not None:
            for copy, upper in zip(extent.copies, above.copies or (), strict=True):
                if not copy.pins:
                    self._put_after(copy, upper)
        self._version += 1
        extent.changed_at = self._version
        return above

    def _split_in_place(self, extent: Extent, at: int) -> Extent:
        """As `_split`, but the upper part, if unpinned, is the next to be evicted after the other."""
        above = self._split(extent, at)
        if not above.pins:
            self._put_after(extent, above)
        return above

    def _put_after(self, one: Extent | Copy, other: Extent | Copy) -> None:
        """Make another copy the next to be evicted after this one. Cost: O(unpinned extents); rare."""
        unpinned = self._unpinned
        keys = list(unpinned)
        unpinned[other] = None
        unpinned.move_to_end(other)
        for key in keys[keys.index(one) + 1 :]:
            if key is not other:
                unpinned.move_to_end(key)

    def _made(self, extent: Extent, first: int) -> None:
        """Note that an extent has new blocks, from `first` on."""
        self._version += 1
        extent.changed_at = self._version
        if self._notes is not None:
            assert extent.parent is not None
            block_names.name_blocks(extent, first)
            block_names.note_stored(self._notes, extent, first)

    # --- giving up --------------------------------------------------------------------------------------------------

    def shrink(self, spare_tokens: int) -> None:
        """Evict unpinned leaves, least recently used first, until the rest takes at most this many tokens."""
        excess = self.num_unpinned - max(0, spare_tokens) // self.block_size
        while excess > 0:
            first = next(iter(self._unpinned))
            extent = first.extent if isinstance(first, Copy) else first
            num_blocks = min(excess, extent.end - extent.start)
            excess -= num_blocks
            if extent.copies is not None:
                self._remove_copy(first, extent, num_blocks)
            else:
                if num_blocks == extent.end - extent.start:
                    del self._unpinned[extent]
                self._remove(extent, num_blocks)
            self.num_unpinned -= num_blocks
            self.num_evictions += num_blocks

    def _remove_copy(self, which: Extent | Copy, extent: Extent, num_blocks: int) -> None:
        """Remove the last blocks of an unpinned copy, or all of it; other copies of them remain."""
        if num_blocks < extent.end - extent.start:
            self._split_in_place(extent, extent.end - num_blocks)  # the old extent, and copy, are the lower part
        copies = extent.copies
        assert copies is not None
        if isinstance(which, Copy):
            copies.remove(which)
        else:  # the next copy becomes the first
            copy = copies.pop(0)
            extent.pins = copy.pins
            if not copy.pins:
                self._put_after(copy, extent)
                del self._unpinned[copy]
            else:
                del self._unpinned[extent]
        if isinstance(which, Copy):
            del self._unpinned[which]
        if not copies:
            extent.copies = None

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
        Output is published first.
        """
        grown = True
        while grown:
            grown = False
            for root in self._roots.values():
                for extent in [root, *extents.below(root)]:
                    grown = self._publish_scheduled(extent) or grown
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


def _grow_from(extent: Extent, use: Use) -> None:
    """Note that a decoding sequence's output goes on after this extent."""
    if extent.growing is None:
        extent.growing = {}
    extent.growing[use] = None


def _grow_no_more(use: Use) -> None:
    """Take back `_grow_from`."""
    growing = use.last.growing
    assert growing is not None
    del growing[use]


def _by_progress(entry: tuple[int, int, Use]) -> tuple[int, int]:
    return entry[:2]


def _run(extent: Extent) -> Run:
    assert isinstance(extent.run, Run)
    return extent.run


def adapter_key_of(sequence: Sequence) -> str | None:
    """Return the key of the adapter of a sequence; None: the base model."""
    return sequence.adapter.key if sequence.adapter is not None else None
