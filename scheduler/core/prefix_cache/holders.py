"""Which of many workers hold which prefix: one tree over the contents of all their block caches (`blocks`).

The tree's edges are runs of blocks, as in `extents`, and each has the workers with all of its blocks, as the bits of an
integer. A worker with a run has all runs above it, so along a prompt the set of holders only shrinks, and one walk
gives each worker's share of it.

    root of an adapter
      +-- blocks 0 .. 343       workers 0, 3, 7
            +-- blocks 343 .. 512     worker 3
            +-- blocks 343 .. 700     workers 0, 7

A cache reports changes as they happen. Each of its extents ends where one of the tree's runs ends, and refers to it, so
removals need no search. A run without workers is removed, and the root with the last run below it; a run in which no
extent ends any more is merged with the one below, if that has the same workers.

The tree shows what the caches have now. A driver that commits steps late has caches that are behind: they may have less
soon (blocks evicted for decoding sequences), or more (`WorkerTable.note_chunking`); so the worker chosen by the tree is
brought up to date, and looked up again.

Cost: additions as much as in the cache itself, removals a step up for each run. Memory: the blocks' content once more
for all workers together, and some 300 bytes per run. When a worker attaches or leaves, the tree is rebuilt from all
caches, in O(extents): some tenths of a second for 512 full caches.
"""

from lorrery.scheduler.core.prefix_cache.base import content_of
from lorrery.scheduler.core.prefix_cache.extents import Extent, Place, Root, num_common, place_of
from lorrery.scheduler.core.sequence import Sequence

Way = list[tuple[int, int]]
"""Along a prompt: leading tokens, and the workers that have them, as bits; ascending, with ever fewer workers."""


class Run(Extent):
    """Consecutive blocks, and the workers that have all of them.

    Attributes:
        workers: their numbers, as bits.
        num_ends: number of cache extents that end where it does.
    """

    __slots__ = ("num_ends", "workers")

    def __init__(self, root: Root, parent: Extent, start: int, end: int, key: bytes, label: bytes) -> None:
        super().__init__(root, parent, start, end, key, label)
        self.workers = 0
        self.num_ends = 0


class PrefixHolders:
    """The tree of the workers of one list, by number.

    Args:
        block_size: tokens in a block, of all caches.
        min_computed_tokens: tokens of an input that are computed even if all are cached; at least 1.
    """

    def __init__(self, block_size: int, min_computed_tokens: int) -> None:
        self.block_size = block_size
        self.min_computed_tokens = min_computed_tokens
        self._roots: dict[Place, Root] = {}

    # --- what caches say --------------------------------------------------------------------------------------------

    def root_like(self, theirs: Root) -> Root:
        """Return the counterpart of a cache's root."""
        root = self._roots.get(theirs.place)
        if root is None:
            root = Root(theirs.adapter, theirs.cache_salt, self.block_size, theirs.unit_tokens, theirs.unit_bytes)
            self._roots[root.place] = root
        return root

    def came(self, number: int, above: Extent, data: bytes, base: int, end: int) -> Run:
        """Note that a worker has new blocks after the end of a run, as one extent; return the run in which it ends.

        Args:
            number: of the worker.
            above: a run that the worker has, or the root.
            data: content of the blocks.
            base: offset of `data` in the content of the whole prompt, in bytes.
            end: number after the last block.
        """
        root = above if isinstance(above, Root) else above.root
        assert root is not None
        bit, run = 1 << number, above
        while run.end < end:
            key = data[root.first_byte(run.end) - base : root.end_byte(run.end + 1) - base]
            child = run.children.get(key)
            if child is None:
                label = data[root.first_byte(run.end) - base : root.end_byte(end) - base]
                below = Run(root, run, run.end, end, key, label)
                run.children[key] = below
            else:
                assert isinstance(child, Run)
                at = num_common(root, child, data, end, base)
                below = child if at == child.end else _split(root, child, at)
            below.workers |= bit
            run = below
        assert isinstance(run, Run)
        run.num_ends += 1
        return run

    def cut(self, run: Run, at: int) -> Run:
        """Return the run, this or above it, that ends at block `at`, where an extent now ends; split one if needed."""
        above = _up_to(run, at)
        above.num_ends += 1
        return above

    def joined(self, run: Run) -> None:
        """Note that an extent no longer ends with this run."""
        run.num_ends -= 1
        _tidy(run)

    def went(self, number: int, run: Run, end: int, *, is_left: bool) -> Run | None:
        """Note that a worker has lost the blocks of an extent from `end` on.

        Args:
            number: of the worker.
            run: in which the extent ended.
            end: where it ends now.
            is_left: whether any of it is left.

        Returns:
            The run in which the extent ends now; None: it is gone.
        """
        run.num_ends -= 1
        bit, lower = ~(1 << number), run
        above: Extent = run
        while above.start >= end and isinstance(above, Run):
            lower = above
            parent = above.parent
            assert parent is not None
            above.workers &= bit
            if above.workers:
                _tidy(above)
            else:
                del parent.children[above.key]
            above = parent
        if above.end > end:
            assert isinstance(above, Run)
            lower = above
            root = above.root
            assert root is not None
            above = _split(root, lower, end)
            lower.workers &= bit
            if lower.workers:
                _tidy(lower)
            else:
                del above.children[lower.key]
        if is_left:
            assert isinstance(above, Run)
            above.num_ends += 1
            return above
        if isinstance(above, Run):
            _tidy(above)
        elif isinstance(above, Root) and not above.children:
            del self._roots[above.place]
        return None

    # --- looking ----------------------------------------------------------------------------------------------------

    def along(self, sequence: Sequence) -> Way:
        """Return, along a sequence's input, the leading tokens that need no computation and who holds them."""
        way: Way = []
        content = content_of(sequence)
        root = self._roots.get(place_of(sequence, content))
        most = min(sequence.input_tokens - self.min_computed_tokens, content.num_tokens) // self.block_size
        if root is None:
            return way
        run: Extent = root
        while run.end < most:
            child = run.children.get(root.key_of(content.data, run.end))
            if child is None:
                break
            assert isinstance(child, Run)
            end = num_common(root, child, content.data, most)
            way.append((end * self.block_size, child.workers))
            if end < child.end:
                break
            run = child
        return way


def _split(root: Root, run: Run, at: int) -> Run:
    """Split a run before a block; return the new one, with the upper blocks. The old one keeps its identity."""
    parent = run.parent
    assert parent is not None
    first, label = root.first_byte(run.start), run.label
    above = Run(root, parent, run.start, at, run.key, label[: root.end_byte(at) - first])
    above.workers = run.workers
    parent.children[run.key] = above
    run.parent, run.start = above, at
    run.label = label = label[root.first_byte(at) - first :]
    run.key = label[: root.end_byte(at + 1) - root.first_byte(at)]
    above.children[run.key] = run
    return above


def _up_to(run: Run, at: int) -> Run:
    """Return the run, this one or above it, that ends at block `at`, made by a split if needed."""
    above: Extent = run
    while above.start >= at:
        assert above.parent is not None
        above = above.parent
    assert isinstance(above, Run)
    if above.end == at:
        return above
    assert above.root is not None
    return _split(above.root, above, at)


def _tidy(run: Run) -> None:
    """Merge a run with its only child, if no extent ends in it and the same workers have both."""
    if run.num_ends or len(run.children) != 1:
        return
    below = next(iter(run.children.values()))
    assert isinstance(below, Run)
    if below.workers != run.workers:
        return
    root, parent = run.root, run.parent
    assert root is not None
    assert parent is not None
    first = root.first_byte(run.start)
    below.label = run.label[: root.first_byte(run.end) - first] + below.label
    below.parent, below.start, below.key = parent, run.start, run.key
    parent.children[run.key] = below
