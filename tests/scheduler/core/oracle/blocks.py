"""The oracle of the prefix cache: a node for each block, as `BlockCache` was before it kept runs of blocks.

vLLM's automatic prefix caching (docs/design/prefix_caching.md), kept as a tree as in SGLang's RadixAttention (Zheng et
al., 2024): a node is one full block of tokens after all the blocks above it. Each adapter, in each version, has its own
root, so two never share, whatever their tokens. Blocks are compared by their tokens themselves, so there is no hash
that could collide.

* A sequence that enters pins the blocks it finds. What a step has computed of its prompt becomes visible, and pinned,
  when that step is committed. Output becomes visible when the sequence leaves or is preempted: few ever ask for it
  before, and between two decode steps nothing changes.
* Two sequences that one plan admits both compute what they have in common; then the second's copies are given back and
  it uses the first's. (With `share_within_plan`: `oracle.pool`.)
* What nobody pins is kept until its place is needed, and goes leaf by leaf, the least recently used first.

Whoever pins a block pins all above it, and whoever lets go does so from the leaf up. So the order in which blocks were
let go is the order in which they may be evicted, and a leaf always comes before its parent: no search, no heap.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from lorrery.scheduler.core.prefix_cache.base import SharedBlocks
from lorrery.scheduler.core.prefix_cache.changes import BlockChange, BlockNotes, block_hash, root_hash
from lorrery.scheduler.core.prefix_cache.extents import root_name
from lorrery.scheduler.core.sequence import Sequence
from tests.scheduler.core.oracle.tree import Node, Root, below, note_stored

_TOKEN_BYTES = array("I").itemsize


@dataclass(slots=True)
class _Use:
    """What a sequence of the batch pins.

    Attributes:
        nodes: from the root down.
        input_bytes: the tokens of its whole input; shorter where they are not known.
    """

    nodes: list[Node]
    input_bytes: bytes


@dataclass(slots=True)
class _Found:
    """The last look-up: whose, when, and what."""

    sequence: Sequence
    input_tokens: int
    version: int
    input_bytes: bytes
    nodes: list[Node]


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
        self._roots: dict[str | None, Root] = {}
        self._uses: dict[int, _Use] = {}
        self._unpinned: OrderedDict[Node, None] = OrderedDict()
        """Least recently used first; children before their parents."""
        self._version = 0
        """Counts the changes of the tree."""
        self._found: _Found | None = None
        self._notes: BlockNotes | None = None

    # --- looking ----------------------------------------------------------------------------------------------------

    def match(self, token_ids: Tokens[int], name: str | None) -> int:
        """Count the leading tokens that are cached, whole blocks; mutates nothing."""
        return len(self._walk(name, _as_bytes(token_ids))) * self.block_size

    def reusable(self, sequence: Sequence) -> int:
        """Count the leading input tokens of a waiting sequence that it could take over, whole blocks."""
        return len(self._find(sequence).nodes) * self.block_size

    def num_shareable(self, sequence: Sequence) -> int:
        """Count the blocks that a waiting sequence would find, and that others pin already."""
        num = 0
        for node in self._find(sequence).nodes:
            if not node.pins:
                break
            num += 1
        return num

    def _find(self, sequence: Sequence) -> _Found:
        """Look up a sequence's input, or remember: a blocked head of line is asked for again and again."""
        found = self._found
        again = found is not None and found.sequence is sequence and found.input_tokens == sequence.input_tokens
        if found is not None and again and found.version == self._version:
            return found
        data = found.input_bytes if found is not None and again else self._bytes(sequence, sequence.produced_tokens)
        nodes = self._walk(_name(sequence), data)
        del nodes[max(0, sequence.input_tokens - self.min_computed_tokens) // self.block_size :]
        self._found = _Found(sequence, sequence.input_tokens, self._version, data, nodes)
        return self._found

    def _walk(self, name: str | None, data: bytes) -> list[Node]:
        """Return the nodes of the leading blocks of these tokens, as far as there are any."""
        nodes: list[Node] = []
        node: Node | None = self._roots.get(name)
        if node is not None:
            for key in self._keys(data, 0):
                node = node.children.get(key)
                if node is None:
                    break
                nodes.append(node)
        return nodes

    def _keys(self, data: bytes, first: int) -> Iterator[bytes]:
        """Yield the full blocks of these tokens, from the `first` on."""
        size = self.block_size * _TOKEN_BYTES
        for start in range(first * size, len(data) - size + 1, size):
            yield data[start : start + size]

    def _bytes(self, sequence: Sequence, num_outputs: int) -> bytes:
        """Return the prompt and the first outputs of a sequence, as far as their tokens are known."""
        prompt = _as_bytes(sequence.prompt_token_ids)
        if not num_outputs or len(sequence.prompt_token_ids) < sequence.prompt_tokens:
            return prompt
        return prompt + _as_bytes(sequence.output_token_ids[:num_outputs])

    # --- coming and going -------------------------------------------------------------------------------------------

    def acquire(self, sequence: Sequence) -> None:
        """Pin the first `cached_tokens` of a sequence that enters the batch."""
        found = self._find(sequence)
        use = _Use([], found.input_bytes)
        self._uses[sequence.handle] = use
        for node in found.nodes[: sequence.cached_tokens // self.block_size]:
            self._pin(use, node)

    def commit(self, sequence: Sequence) -> None:
        """Let others see the full blocks among the first `computed_tokens` of a sequence's input."""
        use = self._uses[sequence.handle]
        self._show(sequence, use, sequence.computed_tokens)

    def shows_alone(self, sequence: Sequence) -> bool:
        """Return false: it takes one step at a time."""
        return False

    def release(self, sequence: Sequence, output_tokens: int) -> None:
        """Unpin what a sequence used that leaves the batch; its full blocks stay, its last used."""
        use = self._uses.pop(sequence.handle)
        cached_tokens = sequence.computed_tokens + max(0, output_tokens - 1)
        data = use.input_bytes
        if cached_tokens > sequence.input_tokens:
            data = self._bytes(sequence, sequence.produced_tokens + output_tokens - 1)
        path = list(use.nodes)
        for key in self._keys(data[: cached_tokens * _TOKEN_BYTES], len(path)):
            path.append(self._child(path[-1] if path else self._root(sequence), key, self._root(sequence)))
        for node in use.nodes:
            self._unpin(node)
        for node in reversed(path):
            if not node.pins:
                self._unpinned[node] = None
                self._unpinned.move_to_end(node)
        self.num_unpinned = len(self._unpinned)

    def _show(self, sequence: Sequence, use: _Use, num_tokens: int) -> None:
        """Pin the full blocks among the first tokens of its input; make those that are not there."""
        parent = use.nodes[-1] if use.nodes else self._root(sequence)
        for key in self._keys(use.input_bytes[: num_tokens * _TOKEN_BYTES], len(use.nodes)):
            parent = self._child(parent, key, self._root(sequence))
            self._pin(use, parent)

    def _root(self, sequence: Sequence) -> Node:
        name = _name(sequence)
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Root(sequence.adapter, sequence.cache_salt)
            if self._notes is not None:
                root.hash = root_hash(name)
        return root

    def _child(self, parent: Node, key: bytes, root: Root) -> Node:
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = Node(parent, key)
            self._version += 1
            if self._notes is not None:
                child.hash = block_hash(parent.hash, key)
                note_stored(self._notes, child, root)
        return child

    def _pin(self, use: _Use, node: Node) -> None:
        use.nodes.append(node)
        if not node.pins:
            self.num_pinned += 1
            self._unpinned.pop(node, None)
            self.num_unpinned = len(self._unpinned)
        node.pins += 1
        self.num_pins += 1

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        self.num_pins -= 1
        self.num_pinned -= not node.pins

    # --- giving up --------------------------------------------------------------------------------------------------

    def shrink(self, spare_tokens: int) -> None:
        """Evict unpinned leaves, the least recently used first, until what is left takes at most so many tokens."""
        num_spare = max(0, spare_tokens) // self.block_size
        while len(self._unpinned) > num_spare:
            node, _ = self._unpinned.popitem(last=False)
            self._remove(node)
            self.num_evictions += 1
        self.num_unpinned = len(self._unpinned)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None, "a root is no block"
        assert not node.children, "a block is evicted before the blocks that follow it"
        del node.parent.children[node.key]
        self._version += 1
        if self._notes is not None:
            self._notes.removed(node.hash)

    def lose(self) -> None:
        """Forget every block; the worker is gone."""
        self._roots.clear()
        self._uses.clear()
        self._unpinned.clear()
        self.num_pins = self.num_pinned = self.num_unpinned = 0
        self._version += 1
        self._found = None
        if self._notes is not None:
            self._notes = BlockNotes()

    # --- copies elsewhere -------------------------------------------------------------------------------------------

    def note_changes(self, on: bool = True) -> None:
        """Note from now on what happens to blocks, for `take_changes`, or stop that. Takes a look at every block."""
        if on and self._notes is None:
            self._notes = BlockNotes()
            for name, root in self._roots.items():
                root.hash = root_hash(name)
                for node in below(root):
                    assert node.parent is not None
                    node.hash = block_hash(node.parent.hash, node.key)
        elif not on:
            self._notes = None

    def take_changes(self) -> list[BlockChange]:
        """Return what has happened to blocks since the last call, in order; nothing unless it is noted."""
        return [] if self._notes is None else self._notes.take()

    def contents(self) -> list[BlockChange]:
        """Return all blocks that can be found, as if they had just been stored. Changes must be noted."""
        assert self._notes is not None, "nothing has a hash before note_changes"
        notes = BlockNotes()
        for root in self._roots.values():
            for node in below(root):
                note_stored(notes, node, root)
        return notes.take()

    # --- inspection -------------------------------------------------------------------------------------------------

    def paths(self) -> list[tuple[str | None, tuple[int, ...], int]]:
        """List every block: its adapter, all tokens from the root to its end, and its pins.

        Those that somebody pins come first, in order of tokens; then the others, in the order in which they would go.
        """
        pinned: list[tuple[str | None, tuple[int, ...], int]] = []
        tokens_of: dict[Node, tuple[str | None, tuple[int, ...]]] = {}
        for name, root in self._roots.items():
            tokens_of[root] = (name, ())
            nodes: list[Node] = [root]
            while nodes:
                node = nodes.pop()
                for child in node.children.values():
                    tokens = (*tokens_of[node][1], *array("I", child.key))
                    tokens_of[child] = (name, tokens)
                    if child.pins:
                        pinned.append((name, tokens, child.pins))
                    nodes.append(child)
        pinned.sort(key=lambda path: (path[0] or "", path[1]))
        return pinned + [(*tokens_of[node], 0) for node in self._unpinned]


def _as_bytes(token_ids: Tokens[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _name(sequence: Sequence) -> str | None:
    return root_name(None if sequence.adapter is None else sequence.adapter.key, sequence.cache_salt)
