"""SGLang's radix cache: a prefix cache whose look-ups at admission leave traces, and that evicts leaf by leaf, whole.

The tree of `BlockCache` with the nodes of sgl-project/sglang (0.5.23, srt/mem_cache/unified_radix_cache.py and
unified_cache/unified_tree_core.py); a block is a page of `page_size` tokens, which is 1 by default.

* A node is what was inserted at once. It is split where an input leaves it, at a look-up for admission too, and where
  a prompt ends that has output after it; it is never merged, extended or trimmed.
* Each such look-up and each insert makes the nodes on its way the most recently used ones, the last of them last.
* A prompt is inserted when its prefill ends, a chunk when the next step is decided, output when its sequence ends. A
  preempted sequence leaves nothing (`withhold`): its pages are needed at once.
* The least recently used leaf goes as a whole, then the next, until enough is free: more may be freed than was needed.

What anyone else looks up (`match`, `reusable`) changes nothing, as everywhere; a pass calls `touch` for the rest.

Cost: as `BlockCache`; a heap of leaves with entries that may be out of date makes an eviction O(log n).
"""

from heapq import heapify, heappop, heappush

from lorrery.scheduler.core.prefix_cache import extents
from lorrery.scheduler.core.prefix_cache.base import content_of
from lorrery.scheduler.core.prefix_cache.blocks import BlockCache
from lorrery.scheduler.core.prefix_cache.extents import Extent, Root, Use, place_of
from lorrery.scheduler.core.sequence import Content, Sequence


class RadixCache(BlockCache):
    """The cached pages of one worker.

    Args:
        page_size: tokens in a page.
        min_computed_tokens: tokens of an input that are computed even if all are cached.
    """

    def __init__(self, page_size: int = 1, *, min_computed_tokens: int = 1) -> None:
        super().__init__(page_size, min_computed_tokens=min_computed_tokens)
        self._time = 0
        self._used_at: dict[Extent, int] = {}
        """By node: a count of uses at its last one; no two are equal."""
        self._leaves: list[tuple[int, Extent]] = []
        """A heap of unpinned leaves by last use. An entry whose count is not the node's last is out of date."""
        self._published: dict[int, int] = {}
        """Tokens that a sequence of the batch has inserted, by handle."""
        self._withheld: set[int] = set()

    # --- looking, with traces ---------------------------------------------------------------------------------------

    def touch(self, sequence: Sequence, *, whole: bool = False) -> int:
        """Look up a waiting sequence's input as SGLang does, which counts as a use; return the tokens found.

        Args:
            sequence: whose input to look up.
            whole: whether the last `min_computed_tokens` count too.
        """
        if sequence.skips_prefix_cache:
            return 0
        content = content_of(sequence)
        root = self._roots.get(place_of(sequence, content))
        if root is None:
            return 0
        tokens = sequence.input_tokens if whole else max(0, sequence.input_tokens - self.min_computed_tokens)
        way: list[Extent] = []
        end = self._walk(root, content.data, min(tokens, content.num_tokens) // self.block_size, way)
        for extent in way:
            self._use(extent)
        return end * self.block_size

    def num_unpinned_found(self, sequence: Sequence) -> int:
        """Return how many unpinned pages a waiting sequence would pin if it entered."""
        if sequence.skips_prefix_cache:
            return 0
        found = self._find(sequence)
        return sum([min(one.end, found.num_blocks) - one.start for one in found.extents if not one.pins])

    def _walk(self, root: Root, data: bytes, num_blocks: int, way: list[Extent]) -> int:
        """Follow a content as far as the tree has it, splitting where it leaves a node; return the end in pages."""
        children, end = root.children, 0
        while end < num_blocks:
            child = children.get(root.key_of(data, end))
            if child is None:
                break
            end = extents.num_common(root, child, data, num_blocks)
            if end < child.end:
                child = self._split(child, end)
            way.append(child)
            children = child.children
        return end

    def _use(self, extent: Extent) -> None:
        self._time += 1
        self._used_at[extent] = self._time
        if not extent.pins and not extent.children:
            self._is_leaf(extent)

    def _is_leaf(self, extent: Extent) -> None:
        """Note that an extent may be evicted."""
        if len(self._leaves) > 2 * len(self._used_at) + 64:
            self._leaves = [entry for entry in self._leaves if self._may_go(*entry)]
            heapify(self._leaves)
        heappush(self._leaves, (self._used_at[extent], extent))

    def _may_go(self, used_at: int, extent: Extent) -> bool:
        return self._used_at.get(extent) == used_at and not extent.pins and not extent.children

    def _split(self, extent: Extent, at: int) -> Extent:
        """Split a node before a page; the lower part, which keeps its identity, counts as used after the upper one."""
        above = super()._split(extent, at)
        self._use(above)
        self._use(extent)
        return above

    # --- coming and going -------------------------------------------------------------------------------------------

    def acquire(self, sequence: Sequence) -> None:
        """Pin the first `cached_tokens` of a sequence that enters the batch."""
        super().acquire(sequence)
        self._published[sequence.handle] = sequence.cached_tokens

    def commit(self, sequence: Sequence) -> None:
        """Insert a prompt that is computed; a part of one waits for `publish`."""
        if sequence.computed_tokens >= sequence.input_tokens:
            self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Insert and pin the full pages of what has been computed of a sequence's input, unless nothing is new."""
        computed_tokens = sequence.computed_tokens
        if computed_tokens <= self._published[sequence.handle]:
            return
        self._published[sequence.handle] = computed_tokens
        use = self._uses[sequence.handle]
        last = self._insert(use.root, use.content, computed_tokens, sequence.prompt_tokens)
        self._pin(last, use.last)
        use.last = last

    def shows_alone(self, sequence: Sequence) -> bool:
        """Return False: each chunk is a node of its own."""
        return False

    def withhold(self, sequence: Sequence) -> None:
        """Insert nothing of a running sequence when it is released (a preemption)."""
        self._withheld.add(sequence.handle)

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Insert the full pages of what a sequence has computed, unless they are withheld, and unpin its pages."""
        use = self._uses.pop(sequence.handle)
        del self._published[sequence.handle]
        if sequence.handle in self._withheld:
            self._withheld.remove(sequence.handle)
        else:
            self._insert(use.root, *use.computed(output_tokens), sequence.prompt_tokens)
        self._let_go(use)
        use.root.num_uses -= 1
        self._drop_if_unused(use.root)

    def _insert(self, root: Root, content: Content, num_tokens: int, prompt_tokens: int) -> Extent:
        """Insert the full pages of the first tokens of a content; return the node in which they end."""
        num_blocks = min(num_tokens, content.num_tokens) // self.block_size
        last = self._insert_blocks(root, content, num_blocks)
        prompt_blocks = prompt_tokens // self.block_size
        if 0 < prompt_blocks < num_blocks:  # split there, so that output may go without its prompt
            self._insert_blocks(root, content, prompt_blocks)
        return last

    def _insert_blocks(self, root: Root, content: Content, num_blocks: int) -> Extent:
        extent: Extent = root
        while extent.end < num_blocks:
            child, end = self._child_for(extent, root, content, num_blocks)
            if child is None:
                child = self._new_child(extent, root, content, num_blocks)
                extents.trim_label(root, child)
                self._unpinned[child] = None
                self.num_unpinned += num_blocks - end
                self._use(child)
            else:
                self._use(child)
                if end < child.end:
                    child = self._split(child, end)
            extent = child
        return extent

    def _unpin(self, use: Use, extent: Extent, child: Extent | None) -> Extent | None:
        """Unpin a node of a path; none are merged."""
        extent.pins -= 1
        if not extent.pins:
            self.num_pinned -= extent.end - extent.start
            self.num_unpinned += extent.end - extent.start
            self._unpinned[extent] = None
            if not extent.children:
                self._is_leaf(extent)
        return None

    # --- giving up --------------------------------------------------------------------------------------------------

    def shrink(self, spare_tokens: int) -> None:
        """Evict unpinned leaves, each as a whole, least recently used first, until the rest is at most that large."""
        most = max(0, spare_tokens) // self.block_size
        while self.num_unpinned > most:
            used_at, extent = heappop(self._leaves)
            if not self._may_go(used_at, extent):
                continue
            parent, num_blocks = extent.parent, extent.end - extent.start
            assert parent is not None, "a root is no leaf"
            del self._unpinned[extent], self._used_at[extent]
            self.num_unpinned -= num_blocks
            self.num_evictions += num_blocks
            self._remove(extent, num_blocks)
            if parent.parent is not None and not parent.pins and not parent.children:
                self._is_leaf(parent)

    def lose(self) -> None:
        """Forget every page; the worker is gone."""
        super().lose()
        self._used_at.clear()
        self._leaves.clear()
        self._published.clear()
        self._withheld.clear()
