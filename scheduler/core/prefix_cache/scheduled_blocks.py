"""A prefix cache whose blocks can be found from the moment they are scheduled: the rules of vLLM 0.32.

Recorded (docs/engines.md). The tree is that of `BlockCache`; what differs:

* A step writes a layer's KV before any sequence reads it, so blocks are visible as soon as they are scheduled, to the
  sequences that the same plan admits too. So is output, as it fills blocks. It is published when a look-up or another
  sequence's blocks come to where it would go on, and when its sequence leaves; while changes are noted, with the step
  that fills the block (`schedule_output`). Both give the same tree: a step schedules its sequences in order of
  admission, so of those that fill equal blocks, the first is the one that is ahead, or that entered first.
* A block that was not found is computed, and kept, even if an equal one is there by then (the last block of a prompt
  that is cached whole; a conversation whose earlier turn still runs). Look-ups find the copy that was there first; each
  copy is evicted in its own turn.
"""

from lorrery.scheduler.core.prefix_cache import changes, extents
from lorrery.scheduler.core.prefix_cache.base import with_output
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache, is_alone
from lorrery.scheduler.core.prefix_cache.extents import Copy, Extent, Found, Root, Use
from lorrery.scheduler.core.sequence import Content, Sequence

_NOT_COMPUTED = 1
"""Newest tokens of a decoding sequence that the next step computes; those before them are committed."""


class ScheduledBlockCache(BlockCache):
    """The cached blocks of one worker.

    Args:
        block_size: tokens in a block.
        min_computed_tokens: tokens of an input that are computed even if all are cached.
    """

    def __init__(self, block_size: int = 16, *, min_computed_tokens: int = 1) -> None:
        super().__init__(block_size, min_computed_tokens=min_computed_tokens)
        self.share_within_plan = True

    # --- looking ----------------------------------------------------------------------------------------------------

    def steps_unchanged(self, sequence: Sequence, limit: int) -> int:
        """Return the steps until one of those that decode along a waiting sequence's way fills its next block."""
        found, running = self._find(sequence), self.running
        extent: Extent | None = found.last
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
        """Look up a sequence's input, where the last look-up for it ended first."""
        found = self._found
        if found is not None and found.is_for(sequence) and found.last is not None:
            self._publish_output(found.last, self.unseen_tokens)
        return super()._find(sequence)

    def _follow(self, root: Root, content: Content, way: list[Extent]) -> int:
        """Look up a content, and publish the output that goes on along this way."""
        end = super()._follow(root, content, way)
        while self._publish_output(way[-1] if way else root, self.unseen_tokens):
            way.clear()
            end = super()._follow(root, content, way)
        return end

    # --- coming and going -------------------------------------------------------------------------------------------

    def schedule(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` of an input, which the next step computes."""
        use = self._uses[sequence.handle]
        running = self.running
        enters = running is None or sequence.handle not in running.prefilling
        self._publish(use, use.content, num_tokens, self.unseen_tokens, None if enters else sequence.entered)

    def schedule_output(self, sequence: Sequence) -> None:
        """Let others find the block that a decoding sequence fills in the next step, if it fills one."""
        use, running = self._uses[sequence.handle], self.running
        assert running is not None
        num_tokens = sequence.input_tokens + sequence.output_tokens_at(running.decode_step) - self.unseen_tokens
        if use.grows and num_tokens // self.block_size > use.last.end:
            self._publish_output_of(use, num_tokens, self.unseen_tokens)

    def end_output(self, sequence: Sequence, output_tokens: int) -> None:
        """Let others find all blocks of a sequence that has ended, and keeps them for now."""
        use = self._uses[sequence.handle]
        self._show(use, *use.computed(output_tokens))

    def commit(self, sequence: Sequence) -> None:
        """Note that a step has computed the first `computed_tokens` of a sequence's input; after the last it grows."""
        super().commit(sequence)
        if sequence.computed_tokens >= sequence.input_tokens:
            use = self._uses[sequence.handle]
            use.grows = True
            _grow_from(use.last, use)

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin the blocks of a sequence that leaves the batch; its full blocks stay, as most recently used."""
        self._end_growth(sequence)
        super().release(sequence, output_tokens)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a sequence whose output so far has become part of its input, and which keeps its blocks."""
        self._end_growth(sequence)
        super().resume(sequence)

    def stand_still(self, sequence: Sequence) -> None:
        """Note that a decoding sequence gets no further token; its last block is found once it is released."""
        self._end_growth(sequence)

    def _end_growth(self, sequence: Sequence) -> None:
        use = self._uses[sequence.handle]
        if use.grows:
            use.grows = False
            _grow_no_more(use)

    def _show(self, use: Use, content: Content, num_tokens: int) -> None:
        """Pin the full blocks among the first tokens of a content; create missing ones."""
        self._publish(use, content, num_tokens, _NOT_COMPUTED, None)

    def _publish(self, use: Use, content: Content, num_tokens: int, unseen_tokens: int, before: int | None) -> None:
        """Do the same after the output that goes on at the end of that path, but for this many newest tokens.

        `before`: of sequences that entered later, that also leaves out the token of this step; None: of none.
        """
        num_blocks = min(num_tokens, content.num_tokens) // self.block_size
        if use.last.end >= num_blocks:
            return
        if use.grows:
            _grow_no_more(use)
        self._publish_output(use.last, unseen_tokens, before)
        if self._notes is not None:
            self._notes.cut()  # vLLM tells of each sequence's blocks by themselves
        if is_alone(use.last):
            self._extend(use, content, num_blocks)
        else:
            self._add_blocks(use, content, num_blocks, unseen_tokens, before)
        if use.grows:
            _grow_from(use.last, use)

    def _add_blocks(self, use: Use, content: Content, num_blocks: int, unseen_tokens: int, before: int | None) -> None:
        """Add blocks up to `num_blocks`, each that is there already in a further copy."""
        extent = use.last
        while extent.end < num_blocks:
            self._publish_output(extent, unseen_tokens, before)
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
                if self._notes is not None:
                    changes.note_stored(self._notes, extent, extent.start)
            size = extent.end - extent.start
            self.num_pins += size
            self.num_pinned += size
        use.last = extent

    # --- output -----------------------------------------------------------------------------------------------------

    def _publish_output(self, last: Extent, unseen_tokens: int, before: int | None = None) -> bool:
        """Publish output that goes on along a path or beyond its end; return whether the tree has changed.

        The one that is ahead of another has filled each block first; equal ones fill theirs in order of admission.
        `before` as in `_publish`.
        """
        uses: list[tuple[int, int, Use]] = []
        at: Extent | None = last
        while at is not None:
            if at.growing:
                self._find_grown(at, unseen_tokens, before, uses)
            at = at.parent
        if not uses:
            return False
        uses.sort(key=_by_progress)
        version = self._version
        for _, _, use in uses:
            use.grows = False
            _grow_no_more(use)
        for num_tokens, _, use in uses:
            self._publish_output_of(use, -num_tokens, unseen_tokens)
            use.grows = True
            _grow_from(use.last, use)
        return self._version != version

    def _publish_output_of(self, use: Use, num_tokens: int, unseen_tokens: int) -> None:
        """Publish a sequence's blocks among its first tokens, some of which are output."""
        sequence, produced = use.sequence, use.sequence.produced_tokens
        content = with_output(use.content, sequence, produced, produced + num_tokens - sequence.input_tokens)
        self._publish(use, content, num_tokens, unseen_tokens, sequence.entered)

    def _find_grown(
        self, extent: Extent, unseen_tokens: int, before: int | None, uses: list[tuple[int, int, Use]]
    ) -> None:
        """Append the uses that end in an extent, and whose output has filled blocks since."""
        running = self.running
        assert running is not None
        assert extent.growing is not None
        for use in extent.growing:
            assert isinstance(use, Use)
            sequence = use.sequence
            num_tokens = sequence.input_tokens + sequence.output_tokens_at(running.decode_step) - unseen_tokens
            num_tokens -= before is not None and sequence.entered > before
            if num_tokens // self.block_size > extent.end:
                uses.append((-num_tokens, sequence.entered, use))

    # --- copies -----------------------------------------------------------------------------------------------------

    def _unpin(self, use: Use, extent: Extent, child: Extent | None) -> Extent | None:
        """Unpin the copy of an extent that a sequence of its path uses: its own, or else the first, which it found."""
        copies = extent.copies
        if copies is None:
            return super()._unpin(use, extent, child)
        which: Extent | Copy = extent
        for copy in copies:
            if copy.owner is use:
                copy.owner = None
                which = copy
                break
        which.pins -= 1
        if not which.pins:
            self.num_pinned -= extent.end - extent.start
            self.num_unpinned += extent.end - extent.start
            self._unpinned[which] = None
        return None

    def _split(self, extent: Extent, at: int) -> Extent:
        """Split an extent before a block; return the upper part. Further copies keep their turns."""
        above = super()._split(extent, at)
        if extent.copies is not None:
            for copy, upper in zip(extent.copies, above.copies or (), strict=True):
                if not copy.pins:
                    self._put_after(copy, upper)
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

    def _evict(self, first: Extent | Copy, most: int) -> int:
        """Evict the last blocks of an unpinned copy, at most this many; return how many. Other copies remain."""
        extent = first.extent if isinstance(first, Copy) else first
        copies = extent.copies
        if copies is None:
            return super()._evict(extent, most)
        num_blocks = min(most, extent.end - extent.start)
        if num_blocks < extent.end - extent.start:
            self._split_in_place(extent, extent.end - num_blocks)  # the old extent, and copy, are the lower part
        if self._notes is not None:
            for block_hash in reversed(extent.hashes):
                self._notes.removed(block_hash)
        if isinstance(first, Copy):
            copies.remove(first)
            del self._unpinned[first]
        else:  # the next copy becomes the first
            copy = copies.pop(0)
            extent.pins = copy.pins
            if copy.pins:
                del self._unpinned[extent]
            else:
                self._put_after(copy, extent)
                del self._unpinned[copy]
        if not copies:
            extent.copies = None
        return num_blocks

    # --- inspection -------------------------------------------------------------------------------------------------

    def paths(self) -> list[tuple[str | None, tuple[int, ...], int]]:
        """List every block, as `BlockCache.paths`; output is published first."""
        grown = True
        while grown:
            grown = False
            for root in self._roots.values():
                for extent in [root, *extents.below(root)]:
                    grown = self._publish_output(extent, self.unseen_tokens) or grown
        return super().paths()


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
