"""Which of many workers hold which prefix: one tree of all that their block caches have (`blocks`).

The tree's edges are runs of blocks, as in `extents`, and each knows who has all of its blocks, as the bits of an
integer. Whoever has a run has all above it, so along a prompt the holders only become fewer, and one walk says of each
worker how much of it is there.

    root of an adapter
      +-- blocks 0 .. 343       workers 0, 3, 7
            +-- blocks 343 .. 512     worker 3
            +-- blocks 343 .. 700     workers 0, 7

A cache says what comes and goes as it happens. Each of its extents has its end where one of the tree's runs ends, and
refers to it, so what goes is found without a search. A run that nobody has goes, and with the last below it the root; a
run in which no extent ends any more becomes one again with the one below, if the same workers have that.

What is said here is what the caches show now. A driver that commits steps late has caches that are behind: they may
show less soon (blocks given up for what decodes), or more (`ManyWorkers.in_pieces`); so who is chosen by it is brought
up to date, and asked.

Cost: for what comes as much as in the cache itself, for what goes a step up for each run. Memory: the blocks' content
once more for all workers together, and some 300 bytes for each run. When a worker comes or goes the tree is made anew
from all caches, in O(extents): some tenths of a second where 512 caches are full.
"""

from lorrery.scheduler.core.prefix_cache.extents import Extent, Root, num_common
from lorrery.scheduler.core.sequence import Content

Way = list[tuple[int, int]]
"""Along a prompt: so many leading tokens, and who has them, as bits; ascending, ever fewer workers."""


class Run(Extent):
    """Blocks in their place, and who has all of them.

    Attributes:
        workers: their numbers are the bits that are set.
        num_ends: how many extents of caches end where it does.
    """

    __slots__ = ("num_ends", "workers")

    def __init__(self, root: Root, parent: Extent, start: int, end: int, key: bytes, label: bytes) -> None:
        super().__init__(root, parent, start, end, key, label, True)
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
        self._roots: dict[tuple[str | None, int], Root] = {}

    # --- what caches say --------------------------------------------------------------------------------------------

    def root_like(self, theirs: Root) -> Root:
        """Return the root that stands for one of a cache's."""
        root = self._roots.get(theirs.place)
        if root is None:
            root = Root(theirs.adapter, self.block_size, theirs.unit_tokens, theirs.unit_bytes)
            self._roots[root.place] = root
        return root

    def came(self, number: int, above: Extent, data: bytes, base: int, end: int) -> Run:
        """Note that a worker has blocks from the end of a run on, in a new extent; return the run in which it ends.

        Args:
            number: of the worker.
            above: a run that it has, or the root.
            data: content of the blocks.
            base: where it begins in the content of the whole prompt, in bytes.
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
        """Return the run above this one, or the part of it, that ends at a block, where an extent ends now too."""
        above = _up_to(run, at)
        above.num_ends += 1
        return above

    def joined(self, run: Run) -> None:
        """Note that an extent that ended with this run goes on."""
        run.num_ends -= 1
        _tidy(run)

    def went(self, number: int, run: Run, end: int, *, is_left: bool) -> Run | None:
        """Note that a worker has lost the blocks of an extent from `end` on.

        Args:
            number: of the worker.
            run: in which the extent ended.
            end: where it ends now.
            is_left: whether there is anything of it left.

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

    def along(self, adapter_key: str | None, content: Content, input_tokens: int) -> Way:
        """Return how many leading tokens of an input which workers have, that need no computation."""
        way: Way = []
        root = self._roots.get((adapter_key, content.unit_tokens))
        most = min(input_tokens - self.min_computed_tokens, content.num_tokens) // self.block_size
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
    """Cut a run before a block; return the new one, which has the blocks above. The old one keeps its identity."""
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
    """Return the run that ends at a block above, made by a cut if need be."""
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
    """Make a run one with the only one below, if no extent ends in it and the same workers have both."""
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
